"""The sweep itself: it sees what is wrong, blames the right operator, and keeps aliasing when it copies arguments."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.ops import known_gaps
from tests.ops.compare import Rules, differences
from tests.ops.outcome import Call, run
from tests.ops.placement import Arguments, place, storage_key
from tests.ops.probe import is_dynamic, unneeded_fallbacks
from tests.ops.records import Difference, Report, Unit, Variant, What
from tests.ops.summary import Summary, command
from tests.ops.workers import run_units

Function = Callable[..., Any]


def compared(eager: Function, device: Function, *inputs: torch.Tensor, exact: bool = True) -> set[What]:
    """What the sweep finds when the device computes `device` where eager computes `eager`."""
    arguments = Arguments(inputs[0], inputs[1:], {})
    expected, actual = (
        run(Call(function, Variant.FUNCTION, 0, True, lambda result: result), place(arguments, "cpu"), "cpu")
        for function in (eager, device)
    )
    return {each.what for each in differences(expected, actual, Rules(exact=exact, device="cpu"))}


def fail(*_: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no")


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


def next_float(x: torch.Tensor) -> torch.Tensor:
    double = x * 2
    return double + (torch.nextafter(double, torch.tensor(100.0)) - double).detach()


def changes_its_input(x: torch.Tensor) -> torch.Tensor:
    result = x * 2
    x.detach().add_(1)
    return result


@pytest.mark.parametrize(
    ("eager", "device", "what"),
    [
        (lambda x: x * 2, next_float, {What.VALUE}),
        (lambda x: x.detach() * 0.0, lambda x: x.detach() * -0.0, {What.VALUE}),
        (lambda x: x * 2, lambda x: (x * 2).double(), {What.DTYPE}),
        (lambda x: x * 2, lambda x: (x * 2)[:1], {What.SHAPE, What.VALUE}),
        (lambda x: x * 2, lambda x: [x * 2], {What.SHAPE}),
        (lambda x: (x * 2).t().contiguous(), lambda x: (x * 2).t(), {What.STRIDE}),
        (lambda x: (x * 2)[1:], lambda x: (x * 2)[1:].clone(), {What.OFFSET}),
        (lambda x: x.view(-1), lambda x: x.clone().view(-1), {What.ALIAS}),
        (lambda x: x * 2, lambda x: (x * 2).detach(), {What.REQUIRES_GRAD, What.SHAPE}),
        (lambda x: x * 2, fail, {What.RAISES}),
        (fail, lambda x: x * 2, {What.SILENT}),
        (lambda x: x * 2, WrongGradient.apply, {What.VALUE}),
        (lambda x: x * 2, changes_its_input, {What.VALUE}),
        (lambda x: x.sum().item(), lambda x: x.sum().item() + 1, {What.VALUE}),
        (lambda x: torch.rand(3), lambda x: (torch.rand(1), torch.rand(3))[1], {What.VALUE}),
        (lambda x: x / 0.0 * 0.0, lambda x: x / 0.0 * 0.0, set()),
        (lambda x: torch.rand(3), lambda x: torch.rand(3), set()),
    ],
)
def test_sweep_finds_what_is_wrong(eager: Function, device: Function, what: set[What]) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
    assert compared(eager, device, x) == what


def test_tolerance_is_for_compilers_only() -> None:
    x = torch.tensor([[1.0, 2.0]], requires_grad=True)
    assert compared(lambda x: x * 2, next_float, x, exact=False) == set()
    assert compared(lambda x: x * 2, lambda x: x * 2.01, x, exact=False) == {What.VALUE}


def test_copies_keep_strides_sharing_and_identity() -> None:
    base = torch.arange(24.0)
    window = base[2:14].view(3, 4).t()
    expanded = torch.ones(3, 1).expand(3, 5)
    conjugate = torch.ones(2, dtype=torch.complex64).mul(1j).conj()
    leaf = torch.ones(2, 2, requires_grad=True)
    generator = torch.Generator().manual_seed(3)
    original = Arguments(window, (base, expanded, [leaf, leaf]), {"c": conjugate, "generator": generator})
    copy = place(original, "cpu")
    assert [(each.shape, each.stride(), each.storage_offset()) for each in copy.tensors()] == [
        (each.shape, each.stride(), each.storage_offset()) for each in original.tensors()
    ]
    assert all(torch.equal(got, wanted) for got, wanted in zip(copy.tensors(), original.tensors(), strict=True))
    assert storage_key(copy.input) == storage_key(copy.args[0]) != storage_key(base)
    assert copy.args[2][0] is copy.args[2][1]
    assert copy.args[2][0].is_leaf
    assert copy.args[2][0].requires_grad
    assert copy.kwargs["c"].is_conj()
    assert torch.equal(torch.rand(2, generator=copy.kwargs["generator"]), torch.rand(2, generator=generator))


def test_a_device_argument_follows_the_tensors() -> None:
    placed = place(Arguments(torch.ones(2), (torch.device("cpu"), "cpu"), {"device": "cpu"}), "meta")
    assert (placed.input.device.type, placed.args[0].type, placed.args[1]) == ("meta", "meta", "meta")
    assert placed.kwargs == {"device": "meta"}


def test_only_operators_without_a_shape_may_fall_back() -> None:
    assert [is_dynamic(f"aten::{name}") for name in ("nonzero", "equal", "_local_scalar_dense")] == [True] * 3
    assert [is_dynamic(f"aten::{name}") for name in ("add.Tensor", "sort", "no_such_operator")] == [False] * 3
    x, positions = torch.ones(3), torch.tensor([0, 1])
    unneeded = [Difference(What.FALLBACK, "unneeded fallback of aten::index.Tensor")]
    assert unneeded_fallbacks(["aten::index.Tensor"], lambda: x[positions]) == unneeded
    assert unneeded_fallbacks(["aten::index.Tensor", "aten::nonzero"], lambda: x[x > 0]) == []


def test_a_dying_process_is_blamed_on_its_operator_and_the_rest_goes_on() -> None:
    units = [Unit(name, "float32", "interpreter", "cpu", max_samples=1) for name in ("add", "no such name", "mul")]
    reports = {report.unit.operator: report for report in run_units(units, jobs=1, chunk_size=10, time_limit_s=60.0)}
    assert [failure.what for failure in reports["no such name"].failures] == ["crash"]
    assert "KeyError" in reports["no such name"].failures[0].message
    assert all(reports[name].cases > 0 and not reports[name].failures for name in ("add", "mul"))


def test_an_operator_without_end_is_stopped() -> None:
    (report,) = run_units([Unit("add", "float32", "interpreter", "cpu")], jobs=1, chunk_size=1, time_limit_s=0.001)
    assert [failure.what for failure in report.failures] == ["timeout"]


def test_a_known_gap_must_show_in_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit("add", "float32", "interpreter")
    failing, passing = Report(unit), Report(unit)
    failing.add(3, Variant.INPLACE, [Difference(What.STRIDE, "stride differs")])
    assert not Summary(complete=True, reports=[failing]).passed()
    monkeypatch.setitem(known_gaps.KNOWN_GAPS, ("add", None, "interpreter", "stride"), "because")
    assert Summary(complete=True, reports=[failing]).passed()
    assert not Summary(complete=True, reports=[passing]).passed()
    assert Summary(complete=False, reports=[passing]).passed()
    assert Summary(complete=True, reports=[Report(Unit("add", "float32", "interpreter", "cpu"))]).passed()
    assert "because" in Summary(complete=True, reports=[failing]).text()


def test_a_failure_prints_the_command_that_repeats_it() -> None:
    report = Report(Unit("nn.functional.linear", "bfloat16", "torchscript"))
    report.add(3, Variant.INPLACE, [Difference(What.VALUE, "values differ\n1 instead of 2")])
    repeat = "python -m tests.ops.sweep --only nn.functional.linear --dtype bfloat16 --backend torchscript"
    assert command(report.unit, report.failures[0]) == f"{repeat} --sample 3 --variant inplace"
    assert f"{repeat} --sample 3 --variant inplace" in Summary(complete=True, reports=[report]).text()
