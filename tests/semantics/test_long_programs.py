"""Programs of any length: nothing is recursive in it, and memory does not grow with it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

import torch_ltc
from tests.semantics.support import LONG_S, observe
from torch_ltc.config import settings
from torch_ltc.runtime.recorder import recorder

pytestmark = pytest.mark.usefixtures("no_fallback")

MILLION = 1_000_000
SMALL_STACK_BYTES = 256 * 1024


def on_a_small_stack(work: Callable[[], None]) -> None:
    """Run on a thread whose stack is too small for anything that recurses with the length of a program."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    before = threading.stack_size(SMALL_STACK_BYTES)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join(5 * LONG_S)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def resident_bytes() -> int:
    with open("/proc/self/statm") as statistics:
        return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def settle() -> None:
    """Nothing pending, nothing cached, nothing waiting for the collector."""
    torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()
    gc.collect()


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident memory from /proc")
def test_a_million_chained_operations_run_on_a_flat_stack_in_flat_memory() -> None:
    # lesson 8
    settle()
    sizes: list[int] = []

    def work() -> None:
        x = torch.ones(1, device="ltc")
        y = torch.zeros(1, device="ltc")
        # A smaller bound than the default's: the same program ten times as often, an equal number of operations.
        for number in range(MILLION):
            y = y + x
            if number % (MILLION // 5) == 0:
                sizes.append(resident_bytes())
        torch_ltc.sync(wait=True)
        assert y.item() == MILLION
        del x, y
        sizes.append(resident_bytes())

    with observe() as seen, settings.scope(pending_bound=10_000):
        on_a_small_stack(work)
        settle()
    assert sum(sync.instructions for sync in seen.syncs) >= MILLION
    assert seen.reasons.count("BOUND") >= 99
    assert sizes[-1] - sizes[2] < 20 * 2**20, sizes


def test_a_hundred_thousand_pending_operations_are_synced_and_dropped_as_one_program() -> None:
    # lesson 8: at the default bound, which one program may reach.
    settle()

    def work() -> None:
        x = torch.ones(1, device="ltc")
        y = x
        for _ in range(99_000):
            y = y + x
        assert y.item() == 99_001.0

    with observe() as seen, settings.scope(backend="interpreter"):
        on_a_small_stack(work)
    assert [sync.instructions for sync in seen.syncs] == [99_002]
    on_a_small_stack(settle)
    assert recorder.tree.size == 1


def test_chained_operations_dropped_without_a_sync_are_freed_on_a_flat_stack() -> None:
    # lesson 8: the chain dies unread; what is recorded still runs, once, at the next sync.
    settle()

    def work() -> None:
        y = torch.ones(1, device="ltc")
        for _ in range(50_000):
            y = y * 1.0
        del y

    with settings.scope(backend="interpreter"):
        on_a_small_stack(work)
        assert recorder.node.depth >= 50_000
        with observe() as seen:
            torch_ltc.sync(wait=True)
    assert [sync.outputs for sync in seen.syncs] == [0]
    settle()


def test_long_autograd_chain_runs_backward_on_a_flat_stack() -> None:
    # lesson 8
    settle()

    def work() -> None:
        x = torch.ones(1, device="ltc", requires_grad=True)
        y = x
        for _ in range(10_000):
            y = y + x
        y.sum().backward()
        assert x.grad.item() == 10_001.0

    with settings.scope(backend="interpreter"):
        on_a_small_stack(work)
    settle()


def test_compiled_long_program_gives_the_same() -> None:
    # lesson 8
    settle()

    def run() -> float:
        x = torch.ones(1, device="ltc")
        y = x
        for _ in range(5_000):
            y = y + x
        return y.item()

    with observe() as seen, settings.scope(backend="torchscript"):
        assert [run() for _ in range(3)] == [5_001.0] * 3
    assert [run.backend for run in seen.runs] == ["interpreter", "torchscript", "torchscript"]
    settle()


def test_the_pending_program_is_cut_at_its_bound() -> None:
    def run() -> float:
        x = torch.ones(2, device="ltc")
        y = x
        for number in range(100):
            y = y + x * number
        return y.sum().item()

    expected = run()
    for bound in (1, 2, 7, 50, 1000):
        with settings.scope(pending_bound=bound), observe() as seen:
            for _ in range(3):
                assert run() == expected
        if bound < 1000:
            assert seen.reasons.count("BOUND") >= 200 // max(bound, 3)
            assert max(sync.instructions for sync in seen.syncs) <= bound + 4
        else:
            assert "BOUND" not in seen.reasons
    torch_ltc.metrics.reset()
    with settings.scope(pending_bound=10):
        run()
    assert torch_ltc.metrics.counter_value("TrimIrGraph") >= 10


def test_cutting_at_the_bound_keeps_views_in_place_calls_and_gradients_right() -> None:
    def run(device: str) -> list[list[float]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)).to(device)
        x = torch.linspace(-1, 1, 6).view(2, 3).to(device)
        x[0].mul_(2)
        x.resize_(2, 3).t()[1].add_(1)
        model(x).square().sum().backward()
        return [parameter.grad.flatten().tolist() for parameter in model.parameters()]

    expected = run("cpu")
    for bound in range(1, 12):
        with settings.scope(pending_bound=bound):
            for ours, theirs in zip(run("ltc"), expected, strict=True):
                torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs))
