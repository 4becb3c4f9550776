"""The sweep itself: it sees what is wrong, blames the right operator, and keeps aliasing when it copies arguments."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_ltc import events
from torch_ltc.backends.torchscript import TorchScriptBackend
from torch_ltc.errors import CompileError
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program
from torch_ltc.testing import gaps, operators
from torch_ltc.testing.compare import Rules, differences
from torch_ltc.testing.gaps import Gaps
from torch_ltc.testing.outcome import Call, run
from torch_ltc.testing.placement import Arguments, place, storage_key
from torch_ltc.testing.probe import Activity, Probe, is_dynamic, opened, unneeded_fallbacks
from torch_ltc.testing.records import Difference, Result, State, Unit, Variant, What
from torch_ltc.testing.report import Report
from torch_ltc.testing.samples import tolerances
from torch_ltc.testing.suite import repeat_command
from torch_ltc.testing.workers import run_units

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


@dataclass(frozen=True)
class Decorated:
    """What the database says about an operator's tests."""

    decorators: tuple[object, ...]


def test_tolerances_are_those_of_the_database_where_implementations_are_compared() -> None:
    wide, narrow = SimpleNamespace(atol=1e-3, rtol=1e-2), SimpleNamespace(atol=1e-9, rtol=1e-9)

    def entry(tolerance: object, cls_name: str | None, device_type: str | None = None) -> SimpleNamespace:
        decorators = [SimpleNamespace(d={torch.float32: tolerance}), SimpleNamespace()]
        return SimpleNamespace(decorators=decorators, cls_name=cls_name, device_type=device_type)

    def allowed(*entries: object, claimed: dict[torch.dtype, tuple[float, float]] | None = None) -> object:
        return tolerances(Decorated(entries), claimed or {}).get(torch.float32)

    assert allowed() is None
    assert allowed(entry(wide, "TestCommon")) == (1e-2, 1e-3)
    assert allowed(entry(wide, None, "cpu")) == (1e-2, 1e-3)
    assert allowed(entry(wide, "TestUnaryUfuncs")) is None
    assert allowed(entry(wide, "TestCommon", "cuda")) is None
    assert allowed(entry(narrow, "TestCommon")) == (1.3e-6, 1e-5)
    assert allowed(SimpleNamespace(d={torch.float32: 0.7})) == (1.3e-6, 1e-2)
    assert allowed(entry(wide, "TestCommon"), claimed={torch.float32: (0.5, 0.0)}) == (0.5, 1e-3)


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
    results = {result.unit.operator: result for result in run_units(units, jobs=1, chunk_size=10, time_limit_s=60.0)}
    assert [failure.what for failure in results["no such name"].failures] == ["crash"]
    assert "KeyError" in results["no such name"].failures[0].message
    assert all(results[name].cases > 0 and not results[name].failures for name in ("add", "mul"))


def test_an_operator_without_end_is_stopped() -> None:
    (result,) = run_units([Unit("add", "float32", "interpreter", "cpu")], jobs=1, chunk_size=1, time_limit_s=0.001)
    assert [failure.what for failure in result.failures] == ["timeout"]


def report(*results: Result, complete: bool = True, strict: bool = False, own: dict[str, str] | None = None) -> Report:
    return Report("mine", Gaps(own or {}), repeat_command, list(results), complete, strict)


def test_a_known_gap_must_show_in_a_full_run(monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit("add", "float32", "interpreter")
    failing, passing = Result(unit), Result(unit)
    failing.add(3, Variant.INPLACE, [Difference(What.STRIDE, "stride differs")])
    assert not report(failing).passed
    for key in ("add", "add/float32", "add/*/stride", "a*/float32/stride"):
        assert report(failing, own={key: "because"}).passed
        assert not report(passing, own={key: "because"}).passed
        assert report(passing, own={key: "because"}, complete=False).passed
        assert "because" in report(failing, own={key: "because"}).text()
    for key in ("mul", "add/int64", "add/*/value", "semantics/add"):
        assert not report(failing, own={key: "because"}).passed
    monkeypatch.setitem(gaps.DEVICE_GAPS, "add/*/stride", "because")
    assert report(failing).passed
    assert report(Result(Unit("add", "float32", "interpreter", "cpu"))).passed


def test_a_refused_program_is_not_wrong_and_fails_a_strict_run_only() -> None:
    refused, partly = (Result(Unit("add", "float32", "mine", group="binary")) for _ in range(2))
    for result in (refused, partly):
        result.add(0, Variant.FUNCTION, [Difference(What.REFUSED, "no rule for add")])
    partly.taken_cases = 1
    assert (refused.state, partly.state, partly.covered) == (State.REFUSED, State.PARTLY, False)
    assert report(refused, partly).passed
    assert not report(refused, strict=True).passed
    assert "not taken, by reason:\n  no rule for add\n    once in add" in report(refused).text()
    assert "not taken: no rule for add" in report(refused).text(everything=True)
    partly.failures = [replace(partly.failures[0], variant="out")]
    assert partly.covered
    refused.add(0, Variant.FUNCTION, [Difference(What.VALUE, "values differ")])
    assert refused.state is State.WRONG


def test_a_failure_prints_the_command_that_repeats_it() -> None:
    result = Result(Unit("nn.functional.linear", "bfloat16", "torchscript"))
    result.add(3, Variant.INPLACE, [Difference(What.VALUE, "values differ\n1 instead of 2")])
    repeat = "python -m torch_ltc conformance torchscript --only nn.functional.linear --dtype bfloat16"
    assert repeat_command(result.unit, result.failures[0]) == f"{repeat} --sample 3 --variant inplace"
    text = report(result).text()
    assert f"{repeat} --sample 3 --variant inplace" in text
    assert "nn.functional.linear bfloat16 sample 3 inplace: values differ: 1 instead of 2" in text


@dataclass(frozen=True)
class SampleInput:
    input: torch.Tensor
    args: tuple[object, ...] = ()
    kwargs: dict[str, object] = field(default_factory=dict)

    @staticmethod
    def output_process_fn_grad(result: torch.Tensor) -> torch.Tensor:
        return result


class Negation:
    """An operator as the database describes them, with three samples, that can be made to fail."""

    name = full_name = "negation"
    decorators = ()
    inplace_variant = staticmethod(torch.Tensor.neg_)
    supports_inplace_autograd = True
    supports_out = False

    def supported_backward_dtypes(self, device: str) -> set[torch.dtype]:
        return {torch.float32}

    def sample_inputs(self, device: str, dtype: torch.dtype, requires_grad: bool) -> Iterator[SampleInput]:
        for size in (1, 2, 3):
            sample = SampleInput(torch.ones(size, dtype=dtype, requires_grad=requires_grad))
            yield sample
            # As some of the database do.
            sample.input.detach().zero_()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        assert x.device.type != "cpu" or bool(x.all()), "the sample was changed after it had been taken"
        return -x


def negation_result(*, together: bool, time_limit_s: float = 60.0) -> Result:
    unit = Unit("negation", "float32", "torchscript", together=together)
    with opened("ltc", registry.get("torchscript")) as probe:
        return operators.run_unit(unit, Negation(), probe, time_limit_s)


@pytest.mark.parametrize("together", [True, False])
def test_samples_in_one_program_are_judged_as_samples_one_by_one(together: bool) -> None:
    syncs: list[object] = []
    stop = events.subscribe(syncs.append, events.SyncEvent)
    result = negation_result(together=together)
    stop()
    assert (result.state, result.cases, result.taken_cases, result.left_out) == (State.TAKEN, 6, 6, 0)
    assert len(syncs) == 2 * (1 if together else 6)


def test_what_is_wrong_only_in_one_program_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_run_together", lambda *_: operators.Joint.WRONG)
    assert [failure.what for failure in negation_result(together=True).failures] == ["together"]


def test_a_refused_program_leaves_its_samples_to_be_tried_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_program = TorchScriptBackend.compile

    def refuse_two_elements(self: TorchScriptBackend, program: Program) -> Any:
        if any(each.spec.size == (2,) for each in program.inputs):
            raise CompileError("no tensors of two elements")
        return compile_program(self, program)

    monkeypatch.setattr(TorchScriptBackend, "compile", refuse_two_elements)
    result = negation_result(together=True)
    assert result.state is State.PARTLY
    assert {(each.sample, each.what) for each in result.failures} == {(1, "refused")}
    assert (result.cases, result.failed_cases, result.taken_cases) == (6, 2, 4)


def test_a_unit_that_is_wrong_does_not_spend_all_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operators, "_differences", lambda *_: [Difference(What.VALUE, "values differ")])
    result = negation_result(together=False, time_limit_s=1e-6)
    assert (len(result.failures), result.left_out) == (1, 5)


@pytest.mark.parametrize(("stage", "what"), [("compile", What.REFUSED), ("run", What.RAISES)])
def test_a_program_that_another_backend_runs_is_known_by_why_it_was_given_up(stage: str, what: What) -> None:
    probe = Probe("ltc", registry.get("torchscript"))
    probe.on_event(events.RefusalEvent(7, "torchscript", stage, "no luck (train.py:3 in <module>)\n  recorded there"))
    ours, theirs = (Activity(executed_by=[name], programs=[7]) for name in ("torchscript", "interpreter"))
    assert probe.not_taken(ours) == []
    assert probe.not_taken(theirs) == [Difference(what, "no luck")]
    other = Activity(executed_by=["interpreter"], programs=[8])
    assert probe.not_taken(other) == [Difference(What.REFUSED, "interpreter ran it instead of torchscript")]
