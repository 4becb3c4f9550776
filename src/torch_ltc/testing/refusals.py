"""Calls that eager refuses: the device must refuse them too, at the call and with the same kind of error.

PyTorch's database has such calls for many operators. They do not depend on a dtype: they run with the first dtype of
their operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torch_ltc.testing.outcome import describe
from torch_ltc.testing.placement import ARGUMENTS_ON_CPU, Arguments, place, tensors_in
from torch_ltc.testing.probe import Probe
from torch_ltc.testing.records import DTYPES, Difference, Result, Unit, Variant, What


def run_refusals(unit: Unit, op: Any, probe: Probe, result: Result) -> None:
    """Run the calls of the database that the operator refuses, if the unit asks for them."""
    if unit.variant not in (None, Variant.REFUSED.value) or unit.forward_only:
        return
    if getattr(op, "error_inputs_func", None) is None:
        return
    if unit.dtype != next((each for each in DTYPES if op.supports_dtype(_dtype(each), "cpu")), None):
        return
    try:
        made = list(op.error_inputs("cpu"))
    except Exception as error:
        found = Difference(What.HARNESS, f"calls that are refused could not be made: {describe(error)}")
        result.add(None, Variant.REFUSED, [found])
        return
    for index, refused in enumerate(made):
        sample = refused.sample_input
        arguments = Arguments(sample.input, sample.args, sample.kwargs)
        wanted = unit.sample in (None, index) and (unit.max_samples is None or index < unit.max_samples)
        if wanted and all(tensor.device.type == "cpu" for tensor in tensors_in((sample.input, sample.args))):
            result.add(index, Variant.REFUSED, _judge(op, arguments, probe))


def _dtype(name: str) -> Any:
    return getattr(torch, name)


def _judge(op: Any, arguments: Arguments, probe: Probe) -> list[Difference]:
    rest_on_cpu = op.full_name in ARGUMENTS_ON_CPU

    def call(device: str) -> Any:
        given = place(arguments, device, rest_on_cpu=rest_on_cpu)
        return op(given.input, *given.args, **given.kwargs)

    return refusal_differences(call, probe)


def refusal_differences(call: Callable[[str], Any], probe: Probe) -> list[Difference]:
    """Differences between eager, which refuses a call on its device, and the device of the probe."""
    expected = _error(lambda: call(probe.eager))
    probe.settle()
    if expected is None:
        return []
    # Held until its program has run: what nobody holds is computed too, but views are not.
    results: list[Any] = []
    actual = _error(lambda: results.append(call(probe.device)))
    if actual is None:
        late = probe.wait_for(results)
        what = What.SILENT if late is None else What.LATE
        came = "nothing" if late is None else f"at the read {describe(late)}"
        return [Difference(what, f"{came}\ninstead of {describe(expected)}")]
    if not isinstance(actual, type(expected)):
        return [Difference(What.RAISES, f"raised {describe(actual)}\ninstead of {describe(expected)}")]
    return []


def _error(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except Exception as error:
        return error.with_traceback(None)
    return None
