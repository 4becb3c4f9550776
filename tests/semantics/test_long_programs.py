"""Programs of any length: nothing is recursive in it, and memory does not grow with it."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable

import pytest
import torch

import torch_ltc
from tests.semantics.support import LONG_S, observe, run_script
from torch_ltc.config import SETTINGS, settings
from torch_ltc.record.recorder import recorder
from torch_ltc.shapes import inference
from torch_ltc.shapes.rules import meta_kernels

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


def settle() -> None:
    """Nothing pending, nothing cached, nothing waiting for the collector."""
    torch_ltc.sync(wait=True)
    torch_ltc.ir_cache.reset()
    gc.collect()


# In a process of its own: what it guards against is a crash.
CHAIN = """
    import gc, os, threading
    import torch, torch_ltc
    from torch_ltc.config import settings

    def resident_bytes():
        with open("/proc/self/statm") as statistics:
            return int(statistics.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def work():
        x = torch.ones(1, device="ltc")
        y = torch.zeros(1, device="ltc")
        sizes = []
        for number in range(1, {length} + 1):
            y = y + x
            if number % ({length} // 5) == 0:
                sizes.append(resident_bytes())
        torch_ltc.sync(wait=True)
        print(int(y.item()))
        del x, y
        sizes.append(resident_bytes())
        print(sizes[-1] - sizes[1])

    torch.ones(1, device="ltc").item()  # the worker has a stack of the usual size
    torch_ltc.config.settings.pending_bound = {bound}
    threading.stack_size({stack})
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch_ltc.ir_cache.reset()
    gc.collect()
    print(torch.ltc.memory_allocated())
"""


# The memory that compiling takes for a while must not fall between two measurements.
@pytest.mark.blocking_tiers
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads the resident memory from /proc")
def test_a_million_chained_operations_run_on_a_flat_stack_in_flat_memory() -> None:
    # With the default settings.
    script = CHAIN.format(length=MILLION, bound=SETTINGS["pending_bound"].default, stack=SMALL_STACK_BYTES)
    total, growth_bytes, held_bytes = map(int, run_script(script).split())
    assert total == MILLION
    # 600,000 operations lie between the two measurements; 100 bytes kept for each would be 60 MB.
    assert growth_bytes < 40 * 2**20
    assert held_bytes == 0


@pytest.mark.blocking_tiers
@pytest.mark.slow
@pytest.mark.parametrize("bound", [3_000, 200_000])
def test_a_million_chained_operations_run_with_any_bound(bound: int) -> None:
    script = CHAIN.format(length=MILLION, bound=bound, stack=SMALL_STACK_BYTES)
    total, _growth_bytes, held_bytes = map(int, run_script(script).split())
    assert (total, held_bytes) == (MILLION, 0)


def test_a_long_pending_program_is_synced_and_dropped_as_one_on_a_flat_stack() -> None:
    settle()

    def work() -> None:
        x = torch.ones(1, device="ltc")
        y = x
        for _ in range(30_000):
            y = y + x
        assert y.item() == 30_001.0

    with observe() as seen, settings.scope(backend="interpreter", pending_bound=100_000):
        on_a_small_stack(work)
    assert [sync.instructions for sync in seen.syncs] == [30_001]
    on_a_small_stack(settle)
    assert recorder.tree.size == 1


def test_chained_operations_dropped_without_a_sync_are_freed_on_a_flat_stack() -> None:
    # The chain dies unread; what is recorded still runs, once, at the next sync.
    settle()

    def work() -> None:
        y = torch.ones(1, device="ltc")
        for _ in range(30_000):
            y = y * 1.0
        del y

    with settings.scope(backend="interpreter", pending_bound=100_000):
        on_a_small_stack(work)
        assert recorder.node.depth >= 30_000
        with observe() as seen:
            torch_ltc.sync(wait=True)
    assert [sync.outputs for sync in seen.syncs] == [0]
    settle()


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_long_autograd_chain_runs_backward_and_is_freed_on_a_flat_stack(times: int) -> None:
    # In a process of its own; recorded the second time, the program is known.
    script = """
        import torch, torch_ltc
        from torch_ltc.config import settings
        settings.backend = "interpreter"
        for _ in range({times}):
            x = torch.ones(1, device="ltc", requires_grad=True)
            y = x
            for _ in range(60_000):
                y = y + x
            y.sum().backward()
            del y
        print(int(x.grad.item()))
    """
    assert int(run_script(script.format(times=times))) == 60_001


@pytest.mark.blocking_tiers
def test_compiled_long_program_gives_the_same() -> None:
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


def test_a_loop_that_assigns_rows_asks_for_no_shape_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    for module, name in ((inference, "_infer"), (meta_kernels, "meta_tensor")):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda of, ask=original: (asked.append(of), ask(of))[1])

    def assign(device: str, first: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(0)
        numbers, values = torch.randperm(90)[first : first + rows], torch.rand(5, 90, 3)[:, :rows].to(device)
        copied = torch.index_copy(torch.zeros(5, 90, 3, device=device), 1, numbers.to(device), values)
        asked.clear()
        assigned = torch.zeros(5, 90, 3, device=device)
        for row, number in enumerate(numbers.tolist()):
            assigned[:, number, :] = values[:, row, :]
        for row, number in enumerate(numbers.tolist()):
            assigned[:, number : number + 1] = values[:, row : row + 1]
        return copied, assigned

    torch.use_deterministic_algorithms(True)
    try:
        assign("ltc", 0, 2)
        with observe() as seen:
            results = assign("ltc", 10, 80)
            assert not asked
            assert not seen.syncs
            assert not seen.fallbacks
            torch_ltc.sync()
        assert sum(sync.instructions for sync in seen.syncs) <= 6 * 80 + 40
        for ours, theirs in zip(results, assign("cpu", 10, 80), strict=True):
            assert torch.equal(ours.cpu(), theirs)
        assert torch.equal(*(each.cpu() for each in results))
    finally:
        torch.use_deterministic_algorithms(False)
