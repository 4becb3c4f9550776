"""The cases of one operator: its samples in the database, each in every form in which the operator can be called.

Owns how a case is made (arguments, `out=` targets, what is compared), not how it is run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.tolerance import Tolerance, default_tolerance, larger
from torch_ltc.record.buffer import physical_device
from torch_ltc.testing.compare import Rules
from torch_ltc.testing.outcome import Call, Outcome, Snapshot, run
from torch_ltc.testing.placement import ARGUMENTS_ON_CPU, Arguments, leaves, place
from torch_ltc.testing.records import Unit, Variant

UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose result holds what was in memory before."""
UNREPRODUCIBLE = frozenset({"linalg.lstsq", "linalg.lstsq.grad_oriented"})
"""Operators whose last bits differ from run to run in eager itself (seen with the driver gelsy): compared as close."""
RESIZING = frozenset({"resize_", "resize_as_"})
"""Operators whose result holds what was in memory before where it is larger than their input."""

COMPARING_TESTS = frozenset(
    {"TestCommon", "TestConsistency", "TestDecomp", "TestEagerFusionOpInfo", "TestInductorOpInfo", "TestJit"}
)
"""PyTorch's test classes that compare an operator's kernel with another form of it. Those that compare with NumPy, or
with a higher precision, allow for differences that two kernels of one precision do not have."""
MOST_ABSOLUTE = 1e-2
"""The database names absolute tolerances up to 0.7, meant for comparison with a higher precision."""


@dataclass(frozen=True, slots=True)
class Case:
    """One call of an operator: what eager makes of it, and how to compare."""

    sample: Sample
    variant: Variant
    call: Call
    out: Any
    expected: Outcome
    rules: Rules
    eager: str
    """The device on which eager computed what is expected."""

    @property
    def resizes(self) -> bool:
        """True when the call resizes one of its arguments."""
        return self.variant is Variant.OUT and self.sample.index % 2 == 1

    def arguments(self, device: str) -> Arguments:
        """Fresh arguments on a device."""
        return self.sample.arguments(device, self.out)

    def run_eagerly(self) -> Outcome:
        """The outcome in eager."""
        return run(self.call, self.arguments(self.eager), self.eager)


def samples(op: Any, unit: Unit) -> Iterator[Sample]:
    """The samples to run; the same ones whichever of them are chosen."""
    dtype = getattr(torch, unit.dtype)
    random.seed(0)
    torch.manual_seed(0)
    differentiable = dtype in op.supported_backward_dtypes("cpu")
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        if unit.max_samples is not None and index >= unit.max_samples:
            return
        if unit.sample is None or unit.sample == index:
            yield Sample(op, unit, index, sample)


class Sample:
    """One sample input of an operator, able to make calls and fresh arguments from it."""

    def __init__(self, op: Any, unit: Unit, index: int, sample: Any) -> None:
        self.op = op
        self.unit = unit
        self.index = index
        self._before_gradient = sample.output_process_fn_grad
        # Copies, because the database may write to a tensor again once it has handed it out.
        self._arguments = place(Arguments(sample.input, sample.args, sample.kwargs), "cpu")
        # Beside this device PyTorch's autograd takes no other accelerator: eager has no gradients to compare with there.
        self._differentiable = (
            getattr(torch, unit.dtype) in op.supported_backward_dtypes("cpu")
            and not unit.forward_only
            and physical_device().type == "cpu"
        )

    def cases(self, spec: Backend, eager: str) -> Iterator[Case]:
        """The sample in every form that the unit asks for, with what eager makes of it on the device `eager`."""
        wanted = self.unit.variant
        reference = run(self._call(Variant.FUNCTION), self.arguments(eager), eager)
        for variant, out in self._variants(reference):
            if wanted in (None, variant.value):
                call = self._call(variant)
                is_reference = variant is Variant.FUNCTION
                expected = reference if is_reference else run(call, self.arguments(eager, out), eager)
                yield Case(self, variant, call, out, expected, self._rules(variant, expected, spec), eager)

    def arguments(self, device: str, out: Any = None) -> Arguments:
        """Fresh arguments on a device."""
        kwargs = self._arguments.kwargs if out is None else {**self._arguments.kwargs, "out": out}
        arguments = Arguments(self._arguments.input, self._arguments.args, kwargs)
        return place(arguments, device, rest_on_cpu=self.op.full_name in ARGUMENTS_ON_CPU)

    def _call(self, variant: Variant) -> Call:
        inplace = variant is Variant.INPLACE
        function = self.op.inplace_variant if inplace else self.op
        differentiate = self._differentiable and variant is not Variant.OUT
        if inplace:
            differentiate &= self.op.supports_inplace_autograd
        return Call(function, variant, 1000 + self.index, differentiate, self._before_gradient)

    def _variants(self, reference: Outcome) -> Iterator[tuple[Variant, Any]]:
        """The forms of the call, each with its `out=` argument."""
        yield Variant.FUNCTION, None
        if self.unit.forward_only:
            return
        if self.op.inplace_variant is not None and isinstance(self._arguments.input, torch.Tensor):
            yield Variant.INPLACE, None
        if self.op.supports_out and reference.forward_error is None and "out" not in self._arguments.kwargs:
            out = _out_like(reference.result, resized=self.index % 2 == 1)
            if out is not None:
                yield Variant.OUT, out

    def _rules(self, variant: Variant, expected: Outcome, spec: Backend) -> Rules:
        return Rules(
            exact=spec.exact_values and self.op.full_name not in UNREPRODUCIBLE,
            device=self.unit.device if variant is Variant.OUT or self._touches_device() else "cpu",
            uninitialized=self._uninitialized(expected) or not spec.computes,
            tolerances=tolerances(self.op, spec.tolerances),
        )

    def _uninitialized(self, expected: Outcome) -> bool:
        return self.op.name in UNINITIALIZED or (self.op.name in RESIZING and self._grows(expected))

    def _touches_device(self) -> bool:
        """True when an argument names the device: a factory that is given none makes CPU tensors."""
        found = leaves((self._arguments.input, self._arguments.args, self._arguments.kwargs))
        return any(isinstance(leaf, (torch.Tensor, torch.device)) or leaf == "cpu" for leaf in found)

    def _grows(self, expected: Outcome) -> bool:
        """True when the first input is larger after the call: the new part of it was never written."""
        result = expected.result
        return isinstance(result, Snapshot) and result.values.numel() > self._arguments.input.numel()


def _out_like(result: Any, *, resized: bool) -> Any:
    """CPU tensors to be given as `out=` for a call that returned `result`, or None where there can be none."""
    leaves = list(result) if isinstance(result, tuple) else [result]
    if not leaves or not all(isinstance(each, Snapshot) and each.stride is not None for each in leaves):
        return None
    tensors = [_out_tensor(leaf, resized) for leaf in leaves]
    return tuple(tensors) if isinstance(result, tuple) else tensors[0]


def _out_tensor(like: Snapshot, resized: bool) -> torch.Tensor:
    if resized:
        return torch.empty(0, dtype=like.dtype)
    if like.stride is None or 0 in like.stride or like.conjugate:
        return torch.ones(like.shape, dtype=like.dtype)
    return torch.empty_strided(like.shape, like.stride, dtype=like.dtype).fill_(1)


def tolerances(op: Any, claimed: Mapping[torch.dtype, Tolerance]) -> dict[torch.dtype, Tolerance]:
    """Per dtype what is allowed for an operator of the database; dtypes that have only the default are left out."""
    found = {dtype: larger(default_tolerance(dtype), tolerance) for dtype, tolerance in claimed.items()}
    for dtype, tolerance in _overrides(op):
        found[dtype] = larger(found.get(dtype, default_tolerance(dtype)), tolerance)
    return found


def _overrides(op: Any) -> Iterator[tuple[torch.dtype, Tolerance]]:
    """The tolerances in an operator's list of test decorators."""
    for entry in op.decorators or ():
        for decorator in _applicable(entry):
            # Both decorators keep a dictionary `d`: of (absolute, relative), or of a number that is the absolute one.
            for dtype, given in getattr(decorator, "d", {}).items():
                absolute, relative = (given.atol, given.rtol) if hasattr(given, "atol") else (given, 0.0)
                yield dtype, (relative, min(absolute, MOST_ABSOLUTE))


def _applicable(entry: Any) -> tuple[Any, ...]:
    """The decorators behind an entry: itself, or those that it holds for tests that compare on the CPU."""
    if not hasattr(entry, "cls_name"):
        return (entry,)
    if entry.device_type not in (None, "cpu") or entry.cls_name not in {None, *COMPARING_TESTS}:
        return ()
    return tuple(entry.decorators)
