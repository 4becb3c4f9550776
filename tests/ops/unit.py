"""One unit of the sweep: all samples of one operator with one dtype on one backend.

Owns which cases a unit has (samples times variants) and how each is made, run on both sides and judged. Runs inside a
worker process, which may die of it.
"""

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.ops.compare import Rules, differences
from tests.ops.outcome import Call, Outcome, Snapshot, describe, run
from tests.ops.placement import ARGUMENTS_ON_CPU, Arguments, place, transform
from tests.ops.probe import Activity, Probe, unneeded_fallbacks
from tests.ops.records import DTYPES, Difference, Report, Unit, Variant, What

UNINITIALIZED = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
"""Operators whose result holds what was in memory before."""
UNREPRODUCIBLE = frozenset({"linalg.lstsq", "linalg.lstsq.grad_oriented"})
"""Operators whose last bits differ from run to run in eager itself (seen with the driver gelsy): compared as close."""
RESIZING = frozenset({"resize_", "resize_as_"})
"""Operators whose result holds what was in memory before where it is larger than their input."""


def supported() -> list[tuple[str, list[str]]]:
    """The operators in the order of PyTorch's database, each with those of our dtypes that it takes on the CPU."""
    return [(op.full_name, [name for name in DTYPES if op.supports_dtype(getattr(torch, name), "cpu")]) for op in op_db]


def run_unit(unit: Unit, probe: Probe) -> Report:
    """Runs all cases of a unit; an error of the sweep itself becomes a failure of the sample it came from."""
    report = Report(unit)
    started_s = time.perf_counter()
    op = _operators()[unit.operator]
    try:
        for index, sample in _samples(op, unit):
            try:
                _run_sample(_Sample(op, unit, index, sample), probe, report)
            except Exception as error:
                found = Difference(What.HARNESS, f"the sweep itself failed: {describe(error)}")
                report.add(index, Variant.FUNCTION, [found])
    except Exception as error:
        report.add(None, None, [Difference(What.HARNESS, f"samples could not be made: {describe(error)}")])
    report.duration_s = time.perf_counter() - started_s
    return report


_BY_NAME: dict[str, Any] = {}


def _operators() -> dict[str, Any]:
    if not _BY_NAME:
        _BY_NAME.update({op.full_name: op for op in op_db})
    return _BY_NAME


def _samples(op: Any, unit: Unit) -> Iterator[tuple[int, Any]]:
    """The samples to run with their numbers; the same ones whichever of them are chosen."""
    dtype = getattr(torch, unit.dtype)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    differentiable = dtype in op.supported_backward_dtypes("cpu")
    for index, sample in enumerate(op.sample_inputs("cpu", dtype, requires_grad=differentiable)):
        if unit.max_samples is not None and index >= unit.max_samples:
            return
        if unit.sample is None or unit.sample == index:
            yield index, sample


class _Sample:
    """One sample input of an operator, able to make calls and fresh arguments from it."""

    def __init__(self, op: Any, unit: Unit, index: int, sample: Any) -> None:
        self.op = op
        self.unit = unit
        self.index = index
        self._before_gradient = sample.output_process_fn_grad
        self._arguments = Arguments(sample.input, sample.args, sample.kwargs)
        self._differentiable = getattr(torch, unit.dtype) in op.supported_backward_dtypes("cpu")

    def call(self, variant: Variant) -> Call:
        inplace = variant is Variant.INPLACE
        function = self.op.inplace_variant if inplace else self.op
        differentiate = self._differentiable and variant is not Variant.OUT
        if inplace:
            differentiate &= self.op.supports_inplace_autograd
        return Call(function, variant, 1000 + self.index, differentiate, self._before_gradient)

    def arguments(self, device: str, out: Any = None) -> Arguments:
        kwargs = self._arguments.kwargs if out is None else {**self._arguments.kwargs, "out": out}
        arguments = Arguments(self._arguments.input, self._arguments.args, kwargs)
        return place(arguments, device, rest_on_cpu=self.op.full_name in ARGUMENTS_ON_CPU)

    def variants(self, reference: Outcome) -> Iterator[tuple[Variant, Any]]:
        """The variants after the first, each with its `out=` argument."""
        if self.op.inplace_variant is not None and isinstance(self._arguments.input, torch.Tensor):
            yield Variant.INPLACE, None
        if self.op.supports_out and reference.forward_error is None and "out" not in self._arguments.kwargs:
            out = _out_like(reference.result, resized=self.index % 2 == 1)
            if out is not None:
                yield Variant.OUT, out

    def rules(self, variant: Variant, expected: Outcome) -> Rules:
        return Rules(
            exact=self.unit.backend == "interpreter" and self.op.full_name not in UNREPRODUCIBLE,
            device=self.unit.device if variant is Variant.OUT or self._touches_device() else "cpu",
            uninitialized=self.op.name in UNINITIALIZED or (self.op.name in RESIZING and self._grows(expected)),
        )

    def _touches_device(self) -> bool:
        """Whether anything in the call names the device: a factory that is given none makes CPU tensors."""
        leaves: list[Any] = []
        transform((self._arguments.input, self._arguments.args, self._arguments.kwargs), leaves.append)
        return any(isinstance(leaf, (torch.Tensor, torch.device)) or leaf == "cpu" for leaf in leaves)

    def _grows(self, expected: Outcome) -> bool:
        """Whether the first input is larger after the call: the new part of it was never written."""
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


def _run_sample(sample: _Sample, probe: Probe, report: Report) -> None:
    wanted = report.unit.variant
    function = sample.call(Variant.FUNCTION)
    reference = run(function, sample.arguments("cpu"), "cpu")
    if wanted in (None, Variant.FUNCTION.value):
        rules = sample.rules(Variant.FUNCTION, reference)
        found = _judge(sample, function, None, reference, rules, probe, report)
        report.add(sample.index, Variant.FUNCTION, found)
    for variant, out in sample.variants(reference):
        if wanted in (None, variant.value):
            call = sample.call(variant)
            expected = run(call, sample.arguments("cpu", out), "cpu")
            found = _judge(sample, call, out, expected, sample.rules(variant, expected), probe, report)
            report.add(sample.index, variant, found)


def _judge(
    sample: _Sample, call: Call, out: Any, expected: Outcome, rules: Rules, probe: Probe, report: Report
) -> list[Difference]:
    """Runs a case on the device, twice where the backend compiles, and says what differs from eager."""
    found: list[Difference] = []
    for number in range(probe.runs_per_case):
        probe.settle()
        try:
            arguments = sample.arguments(probe.device, out)
        except Exception as error:
            return [Difference(What.RAISES, f"copying the arguments to the device raised {describe(error)}")]
        actual = run(call, arguments, probe.device)
        activity = probe.take()
        found += differences(expected, actual, rules)
        found += unneeded_fallbacks(activity.fallbacks, lambda: run(call, sample.arguments("cpu", out), "cpu"))
        if number == 1 and expected.forward_error is None:
            found += _not_compiled(activity, probe)
        _note(activity, report)
        if found:
            break
    return found


def _not_compiled(activity: Activity, probe: Probe) -> list[Difference]:
    others = sorted({each for each in activity.executed_by if each != probe.backend})
    if not others:
        return []
    return [Difference(What.BACKEND, f"the second run used {', '.join(others)} instead of {probe.backend}")]


def _note(activity: Activity, report: Report) -> None:
    # One example for each operator is enough, and there is one for each shape.
    examples = {each.partition(": ")[0]: each for each in [*activity.mismatches, *report.mismatches]}
    report.mismatches = sorted(examples.values())
    report.fallbacks = sorted({*report.fallbacks, *activity.fallbacks})
