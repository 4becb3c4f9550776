"""`export_program`: what a function records, as a `torch.export` program for the physical device, or compiled ahead."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc.errors import LtcError
from torch_ltc.events import FallbackEvent, SyncReason, subscribe
from torch_ltc.execute.eager_region import eager_regions
from torch_ltc.execute.pending import pending_entry_for, pending_inputs
from torch_ltc.execute.sync import cut
from torch_ltc.lowering.interface import Arguments
from torch_ltc.lowering.kernel_call import run_call
from torch_ltc.lowering.own_operators import composition, uses_nested_tensors
from torch_ltc.program.instruction import Program
from torch_ltc.pytorch.private import pytree
from torch_ltc.record.buffer import buffer_of, physical_device

__all__ = ["export_program"]


def export_program(
    function: Callable[..., Any], args: Sequence[Any], package: str | os.PathLike[str] | None = None
) -> torch.export.ExportedProgram:
    """Record `function(*args)`, and export the program: it takes tensors on the physical device in place of those of
    `args`, and needs nothing of torch_ltc to run. Tensors that the function reaches otherwise, as parameters, are part
    of it; those that it writes to stay changed from call to call.

    With `package`, AOTInductor compiles it into a file of this name (".pt2"), which C++ and `torch._inductor` load.
    Raises LtcError when a call of the function must run at once, as there is no program then, or is one on nested
    tensors.
    """
    lazy = [arg.detach().to("ltc") if isinstance(arg, torch.Tensor) else arg for arg in args]
    cut(SyncReason.JIT)
    fallbacks: list[str] = []
    stop = subscribe(lambda event: fallbacks.append(event.op), FallbackEvent)  # type: ignore[union-attr]
    try:
        with torch.no_grad(), eager_regions.suspended():
            returned = function(*lazy)
    finally:
        stop()
    if fallbacks:
        cut(SyncReason.JIT)
        raise LtcError(
            f"the function is no single program: {', '.join(sorted(set(fallbacks)))} ran at once",
            hint="leave calls out whose results depend on data in their sizes",
        )
    module = _RecordedProgram(returned, lazy)
    cut(SyncReason.JIT)
    _refuse_nested_tensors(module.program)
    physical = physical_device()
    given = tuple(arg.detach().to(physical) if isinstance(arg, torch.Tensor) else arg for arg in args)
    exported = torch.export.export(module, given)
    if package is not None:
        packages: Any = importlib.import_module("torch_ltc.pytorch.packages")
        packages.aoti_compile_and_package(exported, package_path=os.fspath(package))
    return exported


def _refuse_nested_tensors(program: Program) -> None:
    for call in program.calls:
        if uses_nested_tensors(call.op):
            raise LtcError(
                f"{call.name} computes in nested tensors, which torch.export does not take",
                source=str(call.source),
                hint="pad the sequences; nn.TransformerEncoder(..., enable_nested_tensor=False)",
            )


class _RecordedProgram(torch.nn.Module):
    """The pending program with PyTorch's own operators, on the physical device."""

    def __init__(self, returned: Any, lazy: Sequence[Any]) -> None:
        super().__init__()
        leaves, self._structure = pytree.tree_flatten(returned)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self.program: Program = pending_entry_for(tensors).program
        # Of each leaf the number of its value; what is no tensor is itself.
        numbers = iter(self.program.outputs)
        self._leaves = [(next(numbers), None) if isinstance(leaf, torch.Tensor) else (-1, leaf) for leaf in leaves]
        identities, values = pending_inputs()
        count = len(self.program.inputs)
        self._numbers = values[count:]
        position = {buffer_of(arg).identity: i for i, arg in enumerate(lazy) if isinstance(arg, torch.Tensor)}
        # Of each input its argument, or the name of the buffer that holds it.
        self._sources: list[int | str] = []
        held: dict[int, str] = {}
        for identity, value in zip(identities[:count], values[:count], strict=True):
            if identity in position:
                self._sources.append(position[identity])
                continue
            if identity not in held:
                held[identity] = f"held_{len(held)}"
                assert isinstance(value, torch.Tensor)
                self.register_buffer(held[identity], value.detach().clone())
            self._sources.append(held[identity])

    def forward(self, *args: Any) -> Any:
        """Run the program."""
        values: dict[int, Any] = {}
        for instruction, source in zip(self.program.inputs, self._sources, strict=True):
            tensor = getattr(self, source) if isinstance(source, str) else args[source]
            spec = instruction.spec
            if (tuple(tensor.size()), tensor.stride()) != (spec.size, spec.stride):
                tensor = tensor.as_strided(spec.size, spec.stride, spec.offset)
            values[instruction.number] = tensor
        arguments = Arguments([], self._numbers, None, physical_device())  # type: ignore[arg-type]
        for call in self.program.calls:
            values.update(run_call(call, values.__getitem__, arguments, composition(call.op)))
        results = [values[number] if number >= 0 else leaf for number, leaf in self._leaves]
        return pytree.tree_unflatten(results, self._structure)
