"""Programs compiled by XLA, and running them on tensors and JAX arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.experimental.serialize_executable import deserialize_and_load, serialize
from jax.sharding import SingleDeviceSharding

from torch_ltc.backends.xla.data import JaxData, array_of, copied, held_spec, inverse_of, jax_device, order_of
from torch_ltc.backends.xla.lowering import Lowering, has_rule
from torch_ltc.backends.xla.promotion import all_bits, jax_dtype
from torch_ltc.config import foreign_variable
from torch_ltc.errors import CompileError
from torch_ltc.lowering.backend_data import BackendData, BackendDevice
from torch_ltc.lowering.serialize import dump_data, load_data
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import Spec

__all__ = ["Executable", "has_rule", "version_text"]

# XLA would keep half-precision values of a fused computation in float32; PyTorch rounds after each call.
_OPTIONS: dict[str, bool | str] = {"xla_allow_excess_precision": False}
Held = torch.Tensor | BackendData


class Executable:
    """A compiled program. Called with a tensor or handle per input, then a tensor without dimensions per number.

    A call that fails raises and has changed none of its inputs.
    """

    def __init__(self, program: Program, loaded: tuple[Any, str] | None = None) -> None:
        """Compile `program`, or take what was compiled of it and its text from `loaded`."""
        self.program = program
        self._inputs = [instruction.spec for instruction in program.inputs]
        self._results = _result_specs(program)
        self._outputs = len(program.outputs)
        self._device = BackendDevice.of(program.device)
        # The result that may take the memory of an input, by the position of the input.
        self._reused = {update.input: self._outputs + i for i, update in enumerate(program.updates)}
        self._compiled, self._text = self._compile(program) if loaded is None else loaded

    def _compile(self, program: Program) -> tuple[Any, str]:
        with all_bits():
            placed = SingleDeviceSharding(jax_device(program.device))
            given = [
                jax.ShapeDtypeStruct([spec.size[d] for d in order_of(spec)], jax_dtype(spec.dtype), sharding=placed)
                for spec in self._inputs
            ]
            given += [jax.ShapeDtypeStruct((), jax_dtype(number.spec.dtype)) for number in program.numbers]
            jitted = jax.jit(self._traced, donate_argnums=tuple(self._reused), out_shardings=placed)
            lowered = jitted.lower(*given)
            return lowered.compile(_OPTIONS), str(lowered.as_text())

    def text(self) -> str:
        """The program in XLA's own language."""
        return self._text

    def dump(self) -> bytes:
        """The program and its machine code."""
        return dump_data((self.program, serialize(self._compiled), self._text))

    @classmethod
    def load(cls, data: bytes) -> Executable:
        """The executable that `dump` wrote."""
        program, compiled, text = load_data(data)
        with all_bits():
            return cls(program, (deserialize_and_load(*compiled), text))

    def _traced(self, *given: Array) -> tuple[list[Array], Array | None]:
        """The program on arrays that are arranged as their tensors lie in memory."""
        count = len(self._inputs)
        arrays = [jnp.transpose(array, inverse_of(spec)) for spec, array in zip(self._inputs, given, strict=False)]
        results, failed = Lowering(self.program).run(*arrays, *given[count:])
        arranged = [jnp.transpose(r, order_of(spec)) for r, spec in zip(results, self._results, strict=True)]
        if failed is not None:
            # What is donated has no other copy: after a failure it must hold what it held.
            for position, result in self._reused.items():
                arranged[result] = jnp.where(failed, given[position], arranged[result])
        # New values of inputs first: JAX gives the memory of a donated input to the first result that it fits.
        return arranged[self._outputs :] + arranged[: self._outputs], failed

    def __call__(self, *given: Any) -> list[JaxData]:
        """Run; returns a handle per result."""
        if self._device.type.name == "cuda":
            # JAX has a stream of its own: what PyTorch still writes to shared memory must be there first.
            torch.cuda.current_stream(self._device.torch).synchronize()
        with all_bits():
            count = len(self._inputs)
            held: Sequence[Held] = given[:count]
            arrays = [self._array(position, item) for position, item in enumerate(held)]
            results, failed = self._compiled(*arrays, *(number.numpy() for number in given[count:]))
            # Inputs may share memory with tensors that are written to as soon as this returns.
            jax.block_until_ready(results)
            updated = len(results) - self._outputs
            handles = self._handles(held, results[updated:] + results[:updated])
            if failed is not None and bool(failed):
                raise IndexError("an index is out of range, or an integer was divided by zero")
        return handles

    def _array(self, position: int, item: Held) -> Array:
        array = array_of(item, self._inputs[position])
        if position in self._reused and not _is_ours(item):
            return copied(array)
        return array

    def _handles(self, held: Sequence[Held], results: Sequence[Array]) -> list[JaxData]:
        handles = [JaxData(self._device, spec, array) for spec, array in zip(self._results, results, strict=True)]
        for position, result in self._reused.items():
            item = held[position]
            if isinstance(item, JaxData) and _is_ours(item) and item.spec is self._results[result]:
                # The array that the handle held was consumed. It holds the new value now: an update in place.
                item.replace(results[result])
                handles[result] = item
        return handles


def version_text() -> str:
    """The versions and options that serialized machine code depends on."""
    parts = [jax.__version__, jax.lib.__version__, str(jax.config.values), *_OPTIONS, foreign_variable("XLA_FLAGS")]
    return " ".join(map(str, parts))


def _result_specs(program: Program) -> list[Spec]:
    """Layouts of the results: outputs as recorded, new values of inputs as the inputs do."""
    specs = program.specs()
    inputs = [instruction.spec for instruction in program.inputs]
    made = [specs[number] for number in program.outputs]
    for update in program.updates:
        old, new = inputs[update.input], specs[update.number]
        if old.size != new.size or old.dtype is not new.dtype:
            raise CompileError(f"program {program.identity} writes {new} where {old} is")
        made.append(old)
    return [held_spec(spec) for spec in made]


def _is_ours(item: Held) -> bool:
    """True when XLA may reuse the memory: it is a JAX array that no tensor shares."""
    return isinstance(item, JaxData) and not item.shared
