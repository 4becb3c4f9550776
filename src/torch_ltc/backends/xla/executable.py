"""Programs compiled by XLA, and running them on tensors and JAX arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax import Array
from jax.sharding import SingleDeviceSharding

from torch_ltc.backends.xla.data import JaxData, array_of, copied, inverse_of, jax_device, order_of
from torch_ltc.backends.xla.lowering import array_function, has_rule
from torch_ltc.backends.xla.promotion import jax_dtype
from torch_ltc.lowering.data import BackendData, BackendDevice
from torch_ltc.program.instruction import Program

__all__ = ["Executable", "has_rule"]


# XLA would keep half-precision values of a fused computation in float32; PyTorch rounds after each call.
_OPTIONS: dict[str, bool | str] = {"xla_allow_excess_precision": False}


class Executable:
    """A compiled program. Called with a tensor or handle per input, then a tensor without dimensions per number."""

    def __init__(self, program: Program) -> None:
        specs = program.specs()
        self._inputs = [instruction.spec for instruction in program.inputs]
        self._results = [specs[number] for number in program.results]
        self._device = BackendDevice.of(program.device)
        self._torch_device = program.device
        # The input whose memory each updated result may take: position of the result by position of the input.
        self._reused = {update.input: len(program.outputs) + i for i, update in enumerate(program.updates)}
        # PyTorch has 64-bit types everywhere. The rest of the process keeps its own setting.
        with jax.enable_x64(True):
            placed = SingleDeviceSharding(jax_device(program.device))
            given = [
                jax.ShapeDtypeStruct([spec.size[d] for d in order_of(spec)], jax_dtype(spec.dtype), sharding=placed)
                for spec in self._inputs
            ]
            given += [jax.ShapeDtypeStruct((), jax_dtype(number.spec.dtype)) for number in program.numbers]
            jitted = jax.jit(_in_memory_order(program), donate_argnums=program.donated, out_shardings=placed)
            self._lowered = jitted.lower(*given)
            self._compiled = self._lowered.compile(_OPTIONS)

    def text(self) -> str:
        """The program in XLA's own language."""
        return str(self._lowered.as_text())

    def __call__(self, *given: Any) -> list[JaxData]:
        """Run; returns a handle per result."""
        with jax.enable_x64(True):
            count = len(self._inputs)
            held: Sequence[torch.Tensor | BackendData] = given[:count]
            arrays = [self._array(position, item) for position, item in enumerate(held)]
            results = self._compiled(*arrays, *(number.numpy() for number in given[count:]))
            # Inputs may share memory with tensors that are written to as soon as this returns.
            jax.block_until_ready(results)
        return self._handles(held, results)

    def _array(self, position: int, item: torch.Tensor | BackendData) -> Array:
        array = array_of(item, self._inputs[position])
        if position in self._reused and not _is_ours(item):
            return copied(array)
        return array

    def _handles(self, held: Sequence[torch.Tensor | BackendData], results: Sequence[Array]) -> list[JaxData]:
        handles = [JaxData(self._device, spec, array) for spec, array in zip(self._results, results, strict=True)]
        for position, result in self._reused.items():
            item = held[position]
            if isinstance(item, JaxData) and _is_ours(item) and item.spec is self._results[result]:
                # The array that the handle held was consumed. It holds the new value now: an update in place.
                item.replace(results[result])
                handles[result] = item
        return handles


def _is_ours(item: torch.Tensor | BackendData) -> bool:
    """Whether XLA may reuse the memory: it is a JAX array that no tensor shares."""
    return isinstance(item, JaxData) and not item.shared


def _in_memory_order(program: Program) -> Callable[..., list[Array]]:
    """The program's function on arrays that are arranged as their tensors lie in memory."""
    run = array_function(program)
    specs = program.specs()
    inputs = [instruction.spec for instruction in program.inputs]

    def function(*given: Array) -> list[Array]:
        arrays = [jnp.transpose(array, inverse_of(spec)) for spec, array in zip(inputs, given, strict=False)]
        results = run(*arrays, *given[len(inputs) :])
        arranged = [
            jnp.transpose(result, order_of(specs[number]))
            for number, result in zip(program.results, results, strict=True)
        ]
        return _distinct(arranged, given)

    return function


def _distinct(results: list[Array], given: Sequence[Array]) -> list[Array]:
    """The results, with a copy of each that is an input or an earlier result: no two of them may share memory."""
    seen = {id(array) for array in given}
    distinct = []
    for result in results:
        distinct.append(jnp.copy(result) if id(result) in seen else result)
        seen.add(id(result))
    return distinct
