"""Each way of being wrong is caught by the cases that are there for it, and by no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conformance import wrong_backends
from torch_ltc.config import settings
from torch_ltc.errors import BackendError
from torch_ltc.lowering.registry import registry
from torch_ltc.testing import Report, State, conformance
from torch_ltc.testing.records import CaseUnit

# The defect, cases that must catch it, cases that it does not touch.
DEFECTS = [
    (wrong_backends.ReturnsFloat64, ["view_chain", "zero_dimensions", "mlp_adam"], ["no_results"]),
    (wrong_backends.WrongShape, ["write_through_view", "empty_tensors", "gradients"], ["no_results"]),
    (
        wrong_backends.SwapsResults,
        ["several_results", "floating_dtypes"],
        ["view_of_input", "no_results"],
    ),
    (wrong_backends.DrawsTwice, ["random_as_eager"], ["random_drawn_once", "random_follows_seed", "mlp_adam"]),
    (wrong_backends.DrawsTheSame, ["random_follows_seed", "random_advances"], ["random_drawn_once", "mlp_adam"]),
    (
        wrong_backends.DropsWrites,
        ["input_written", "no_results", "swapped_inputs", "parameter_update", "mlp_adam", "running_statistics"],
        ["view_chain", "special_values"],
    ),
    (wrong_backends.IgnoresNumbers, ["numbers_change", "numbers_change_in_place"], ["data_changes", "special_values"]),
    (wrong_backends.SharesConstants, ["fresh_constants"], ["earlier_results", "numbers_change"]),
    (wrong_backends.MergesResults, ["equal_results"], ["input_written", "data_changes"]),
    (wrong_backends.Inexact, ["view_chain", "mlp_sgd", "data_changes"], ["no_results"]),
]


@pytest.fixture(autouse=True)
def forget_backends() -> Iterator[None]:
    """Backends of these tests are gone afterwards. What they break is for the cases to find, not for the invariants."""
    before = set(registry.names())
    with settings.scope(check="off"):
        yield
    for name in set(registry.names()) - before:
        registry.unregister(name)


def states(report: Report) -> dict[str, State]:
    return {each.unit.case: each.state for each in report if isinstance(each.unit, CaseUnit)}


@pytest.mark.parametrize(("backend", "caught", "untouched"), DEFECTS, ids=[each[0].name for each in DEFECTS])
def test_each_defect_is_caught_by_name(
    backend: type[wrong_backends.Right], caught: list[str], untouched: list[str]
) -> None:
    report = conformance(backend, only=[f"semantics/{name}" for name in [*caught, *untouched]], jobs=0)
    expected = dict.fromkeys(caught, State.WRONG) | dict.fromkeys(untouched, State.TAKEN)
    assert states(report) == expected, report.text(everything=True)
    assert not report.passed


def test_a_right_backend_passes_every_case() -> None:
    report = conformance(wrong_backends.Right, semantics_only=True, quick=True, strict=True, jobs=0)
    assert report.passed, report.text()
    assert set(states(report).values()) == {State.TAKEN}


def test_an_object_is_tested_where_it_is() -> None:
    backend = wrong_backends.Inexact()
    report = conformance(backend, only=["semantics/view_chain"])
    assert not report.passed
    assert "torch_ltc.testing.conformance(backend, only=['semantics/view_chain'])" in report.text()
    assert registry.get("inexact") is backend


def test_a_class_is_registered_once_and_its_name_is_then_taken() -> None:
    for _ in range(2):
        assert conformance(wrong_backends.Right, only=["semantics/view_chain"], jobs=0).passed
    assert conformance("right", only=["semantics/view_chain"]).passed
    with pytest.raises(BackendError, match="'right' is registered already"):
        conformance(wrong_backends.Right(), only=["semantics/view_chain"])


def test_eager_random_numbers_are_asked_of_those_that_claim_them() -> None:
    only = ["semantics/random_as_eager"]
    assert states(conformance(wrong_backends.DrawsTheSame, only=only, jobs=0)) == {"random_as_eager": State.NOTHING}
    assert states(conformance(wrong_backends.DrawsTwice, only=only, jobs=0)) == {"random_as_eager": State.WRONG}


def test_operators_of_a_wrong_backend_are_wrong_and_named() -> None:
    report = conformance(wrong_backends.Inexact, only=["neg", "mm"], dtypes=["float32", "int64"], max_samples=2)
    found = {(each.unit.operator, each.unit.dtype): each.state for each in report}
    assert found == {
        ("neg", "float32"): State.WRONG,
        ("neg", "int64"): State.TAKEN,
        ("mm", "float32"): State.WRONG,
        ("mm", "int64"): State.TAKEN,
    }
    repeat = (
        "python -m torch_ltc conformance tests.conformance.wrong_backends:Inexact --only neg --dtype float32 --sample 0"
    )
    assert repeat in report.text()
    assert " instead of " in report.text()


def test_a_program_that_is_taken_and_fails_is_wrong_whenever_it_comes() -> None:
    for _ in range(2):
        report = conformance(wrong_backends.FailsToRun, only=["semantics/view_chain"], jobs=0)
        assert states(report) == {"view_chain": State.WRONG}
        assert "out of order" in report.text()


def test_a_refusal_is_not_taken_and_a_table_of_gaps_excuses_it() -> None:
    report = conformance(
        wrong_backends.NoProducts, only=["mm", "mul", "addmm"], dtypes=["float32"], max_samples=2, strict=True
    )
    found = {each.unit.operator: each.state for each in report}
    assert found == {"mm": State.REFUSED, "mul": State.TAKEN, "addmm": State.REFUSED}
    assert [each.unit.operator for each in report.unexpected()] == ["addmm"]
    text = report.text(everything=True)
    assert "reason: there are no matrix products" in text
    assert "no rule for aten::addmm" in text
    report.strict = False
    assert report.passed


def test_a_backend_that_kills_its_process_or_hangs_is_named_and_the_rest_goes_on() -> None:
    for backend, what in ((wrong_backends.Crashes, "crash"), (wrong_backends.Hangs, "timeout")):
        only = ["exp", "neg", "semantics/copies_of_inputs"]
        report = conformance(backend, only=only, dtypes=["float32"], max_samples=1, jobs=1, time_limit_s=5.0)
        failures = {report_name(each): [failure.what for failure in each.failures] for each in report}
        assert failures == {"copies_of_inputs": [], "exp": [what], "neg": []}
        assert not report.passed


def report_name(result: object) -> str:
    unit = result.unit  # type: ignore[attr-defined]
    return unit.case if isinstance(unit, CaseUnit) else unit.operator
