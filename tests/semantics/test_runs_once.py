"""Every recorded call runs once, however often and in whatever order values are read."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import torch_ltc
from tests.semantics.support import assert_same, counted, lazy, observe, probe

pytestmark = pytest.mark.usefixtures("no_fallback", "any_fingerprints")


@pytest.mark.usefixtures("backend")
def test_a_read_runs_each_call_once_and_the_next_read_runs_none() -> None:
    # A side effect counts how often the operator really ran.
    for round_number in range(1, 4):
        probe.reset()
        x = torch.ones(3, device="ltc")
        parts = [counted(x * i) for i in range(20)]
        assert probe.runs == 0
        with observe() as seen:
            for _ in range(2):
                for number, part in enumerate(parts):
                    assert part.tolist() == [number + 1.0] * 3
        assert probe.runs == 20, f"round {round_number}"
        assert len(seen.runs) == 1
        assert seen.reasons == ["READ"]


def test_a_second_read_executes_no_program() -> None:
    # 20 matmuls, read three times.
    x = torch.eye(8, device="ltc")
    y = x
    for _ in range(20):
        y = y @ x
    with observe() as first:
        y.cpu()
    with observe() as second:
        y.cpu()
        y.sum(0).shape  # noqa: B018
        x.cpu()
    assert len(first.runs) == 1
    assert len(second.runs) == 0 or [sync.instructions for sync in second.syncs] == [2]


def test_what_was_read_is_an_input_of_the_next_program_not_computed_again() -> None:
    x = counted(torch.ones(2, device="ltc"))
    x.cpu()
    y = counted(x)
    z = counted(y)
    assert z.tolist() == [4.0, 4.0]
    assert y.tolist() == [3.0, 3.0]
    assert probe.runs == 3


def test_results_that_nobody_holds_still_run_their_calls_in_order() -> None:
    # Every instruction runs exactly once, in recorded order, dead or not: side effects and draws are those of eager.
    counted(torch.ones(2, device="ltc"))
    torch.manual_seed(0)
    torch.randn(3, device="ltc")
    kept = torch.randn(3, device="ltc")
    torch_ltc.sync(wait=True)
    assert probe.runs == 1
    torch.manual_seed(0)
    torch.randn(3)
    assert_same(kept, torch.randn(3))


def test_dead_results_are_no_outputs() -> None:
    x = lazy(torch.ones(4))
    with observe() as seen:
        y = x
        for _ in range(10):
            y = y * 2
        torch_ltc.sync()
        assert y.tolist() == [1024.0] * 4
    assert [sync.outputs for sync in seen.syncs] == [1]


def test_in_place_updates_stay_in_place() -> None:
    x = lazy(torch.ones(4))
    from_before = x[1:]
    with observe() as seen:
        x.add_(1)
        x.mul_(3)
        torch_ltc.sync(wait=True)
    assert [sync.outputs for sync in seen.syncs] == [0]
    assert from_before.tolist() == [6.0, 6.0, 6.0]


def test_a_dropped_result_is_freed_and_a_held_one_is_not() -> None:
    gc.collect()
    before = torch.ltc.memory_allocated()
    kept = torch.ones(1000, device="ltc") + 1
    dropped = torch.ones(2000, device="ltc") + 1
    reference = weakref.ref(dropped)
    torch_ltc.sync(wait=True)
    assert torch.ltc.memory_allocated() - before == 4 * 3000
    del dropped
    assert reference() is None
    torch_ltc.sync(wait=True)
    assert torch.ltc.memory_allocated() - before == 4 * 1000
    assert kept.sum().item() == 2000.0


def test_printing_and_converting_read_once_each() -> None:
    x = counted(torch.ones(2, 2, device="ltc"))
    text = repr(x)
    assert "device='ltc:0'" in text
    assert "2., 2." in text
    assert str(x) == text
    assert x.tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert x.cpu().numpy().sum() == 8.0
    assert float(x[0, 0]) == 2.0
    assert int(x[0, 0]) == 2
    assert bool((x > 1).all())
    assert f"{x[0, 0]:.1f}" == "2.0"
    assert [row.tolist() for row in x] == [[2.0, 2.0]] * 2
    assert 2.0 in x
    assert probe.runs == 1


def test_a_read_of_what_is_not_pending_cuts_nothing() -> None:
    x = lazy(torch.ones(2))
    y = torch.zeros(2, device="ltc") + 1
    with observe() as seen:
        assert x.tolist() == [1.0, 1.0]
    assert seen.syncs == []
    with observe() as seen:
        assert y.tolist() == [1.0, 1.0]
    assert seen.reasons == ["READ"]


def test_empty_syncs_do_nothing() -> None:
    with observe() as seen:
        torch_ltc.sync()
        torch_ltc.mark_step()
        torch_ltc.mark_step("ltc:0", wait=True)
        torch_ltc.wait_device_ops()
        torch_ltc.wait_device_ops(["ltc:0"])
    assert seen.syncs == []


def test_sync_event_tells_how_long_the_program_was_recorded() -> None:
    # A program without inputs, all of it known: the time begins with its first call, not with the process.
    for _ in range(3):
        with observe() as seen:
            x = torch.arange(5, device="ltc")
            y = torch.full((2,), 3.0, device="ltc")
            torch_ltc.sync(wait=True)
        assert (x.size(), y.size()) == ((5,), (2,))
        assert 0 <= seen.syncs[0].record_s < 5


def test_reading_a_number_is_counted_under_the_originals_name() -> None:
    before = torch_ltc.metrics.counter_value("aten::_local_scalar_dense") or 0
    (torch.ones(2, device="ltc") * 2).sum().item()
    assert torch_ltc.metrics.counter_value("aten::_local_scalar_dense") == before + 1
