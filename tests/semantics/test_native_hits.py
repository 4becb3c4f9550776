"""The hit path in C++: known calls are recorded there, and everything is as when Python records them."""

from __future__ import annotations

import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ltc
from tests.semantics.support import observe
from torch_ltc import metrics
from torch_ltc.config import settings
from torch_ltc.device.library import native_operators
from torch_ltc.events import catch_up
from torch_ltc.native.library import find
from torch_ltc.native.recording import native
from torch_ltc.record.buffer import buffer_of
from torch_ltc.record.recorder import recorder
from torch_ltc.shapes import inference

ROOT = Path(__file__).resolve().parents[2]
recorded_natively = pytest.mark.skipif(native is None, reason="the extension is not built, or LTC_NATIVE=0")


@pytest.mark.skipif(native is not None, reason="they run in this process")
@pytest.mark.skipif(find()[0] is None, reason="the extension is not built")
def test_the_tests_of_the_hit_path_pass_where_the_extension_is_built() -> None:
    # A process of its own: the variable is read at import.
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        cwd=ROOT,
        env={**os.environ, "LTC_NATIVE": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def hits() -> int:
    """Hits since the last call of this, and after it of a sync."""
    return recorder.take_hits()


def steady(step: Callable[[], object], times: int = 4) -> int:
    """Record a step so often; the hits of the last time."""
    for _ in range(times):
        torch_ltc.sync(wait=True)
        hits()
        made = step()
        found = hits()
        del made
    torch_ltc.sync(wait=True)
    return found


@recorded_natively
def test_a_known_call_is_recorded_without_python() -> None:
    x = torch.ones(4).to("ltc")

    def step() -> torch.Tensor:
        return ((x + x) * 3).relu()

    assert steady(step) == 3
    assert step().tolist() == [6.0] * 4


@recorded_natively
def test_hits_are_counted_as_a_metric() -> None:
    x = torch.ones(4).to("ltc")
    steady(lambda: (x + x) * 3 - 1)
    before = metrics.counter_value("NativeHits") or 0
    y = (x + x) * 3 - 1
    torch_ltc.sync(wait=True)
    assert (metrics.counter_value("NativeHits") or 0) - before == 3
    assert y.tolist() == [5.0] * 4


@recorded_natively
def test_inputs_views_and_writes_are_hits() -> None:
    x = torch.arange(6.0).to("ltc")
    y = torch.ones(3, 2).to("ltc")

    def step() -> torch.Tensor:
        made = x * 1
        made.view(2, 3).t().add_(y)
        return made[1:4]

    assert steady(step) == 5
    assert step().tolist() == [2.0, 3.0, 4.0]


@recorded_natively
def test_numbers_are_inputs_and_may_change() -> None:
    x = torch.ones(3).to("ltc")
    for rate in range(20):
        y = (x + 0).mul(float(rate)).add(2, alpha=rate)
        assert y.tolist() == [rate + 2.0 * rate] * 3
    hits()
    y = (x + 0).mul(0.5).add(2, alpha=7)
    assert hits() == 3
    assert y.tolist() == [14.5] * 3


@recorded_natively
def test_static_arguments_are_compared_in_full() -> None:
    x = torch.arange(6.0).view(2, 3).to("ltc")
    for dims, keep in (((0,), False), ((1,), False), ((0, 1), True), ((0,), True)) * 4:
        made = (x + 0).sum(dims, keepdim=keep)
        assert torch.equal(made.cpu(), torch.arange(6.0).view(2, 3).sum(dims, keepdim=keep))


@recorded_natively
def test_several_ways_on_are_all_hits() -> None:
    x = torch.ones(3).to("ltc")

    def step(way: int) -> torch.Tensor:
        made = x + 1
        return made.exp() if way == 0 else made.neg() if way == 1 else made.mul(2)

    for _ in range(4):
        for way in range(3):
            torch_ltc.sync(wait=True)
            hits()
            made = step(way)
            found = hits()
            del made
    assert found == 2


@recorded_natively
def test_lists_of_tensors_and_of_results() -> None:
    x = torch.arange(6.0).to("ltc")

    def step() -> list[torch.Tensor]:
        first, second = (x + 0).chunk(2)
        pair = torch._foreach_mul([first, second], 2.0)
        torch._foreach_add_(pair, 1.0)
        return [torch.cat(list(pair)), torch.stack(list(pair)), *torch.max(pair[1].view(1, 3), dim=1)]

    assert steady(step) >= 6
    joined, stacked, largest, place = step()
    wanted = torch.arange(6.0) * 2 + 1
    assert torch.equal(joined.cpu(), wanted)
    assert torch.equal(stacked.cpu(), wanted.view(2, 3))
    assert largest.item() == 11.0
    assert place.item() == 2


@recorded_natively
def test_copies_on_the_device_and_indices_are_hits() -> None:
    x = torch.arange(4.0).to("ltc")
    rows = torch.tensor([2, 0]).to("ltc")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        made = x * 1
        made.copy_(x)
        return made[rows], made.to(torch.float64)

    assert steady(step) == 4
    picked, wide = step()
    assert picked.tolist() == [2.0, 0.0]
    assert wide.dtype is torch.float64
    assert wide.tolist() == [0.0, 1.0, 2.0, 3.0]


@recorded_natively
def test_copies_that_name_the_device_and_the_layout_are_hits() -> None:
    """As autograd makes them, and `to` of a caller's: the same call in other words."""
    x = torch.ones(4, dtype=torch.bfloat16).to("ltc").requires_grad_()
    target = torch.zeros(4).to("ltc")

    def step() -> tuple[torch.Tensor, ...]:
        (x.float() * 3).sum().backward()
        gradient, x.grad = x.grad, None
        assert gradient is not None
        target.copy_(gradient, non_blocking=True)
        same = gradient.to(device="ltc", dtype=torch.float64, non_blocking=True)
        return same, target * 1, gradient.to("cpu")

    misses = {operator.op: operator.native.misses for operator in native_operators}
    for round in range(6):
        if round == 3:
            misses = {operator.op: operator.native.misses for operator in native_operators}
        made = step()
        assert [each.tolist() for each in made] == [[3.0] * 4] * 3
        assert [each.device.type for each in made] == ["ltc", "ltc", "cpu"]
    # Of the copies, only those to the CPU are Python's: three in a round.
    copies = [torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default]
    missed = {operator.op: operator.native.misses - misses[operator.op] for operator in native_operators}
    assert [missed[operator] for operator in copies] == [3 * 3, 0]


@recorded_natively
def test_results_that_are_operands_or_share_a_storage() -> None:
    x = torch.arange(4.0).to("ltc")

    def step() -> tuple[torch.Tensor, ...]:
        made = x * 1
        same = made.add_(1).contiguous()
        parts = made.split(2)
        parts[1].mul_(2)
        return (same, *parts, made.expand(2, 4))

    steady(step)
    same, first, second, wide = step()
    assert first.data_ptr() == same.data_ptr()
    assert second.tolist() == [6.0, 8.0]
    assert wide.tolist() == [[1.0, 2.0, 6.0, 8.0]] * 2


@recorded_natively
def test_tensors_of_calls_are_not_kept() -> None:
    x = torch.ones(3).to("ltc").requires_grad_()
    bias = torch.ones(3).to("ltc")
    weight = torch.ones(3, 3).to("ltc")

    def step() -> torch.Tensor:
        made = torch.nn.functional.linear((x * 2).view(1, 3), weight, bias)
        torch._foreach_mul_([bias, weight], 1.0)
        return torch._foreach_add([made, made], 1.0)[0].sum()

    steady(step)
    before = [sys.getrefcount(tensor) for tensor in (x, bias, weight)]
    uses = [tensor._use_count() for tensor in (x, bias, weight)]
    steady(step, 20)
    assert [sys.getrefcount(tensor) for tensor in (x, bias, weight)] == before
    assert [tensor._use_count() for tensor in (x, bias, weight)] == uses


@recorded_natively
def test_versions_of_lists_that_are_written_count_up() -> None:
    x = torch.ones(3).to("ltc")
    for _ in range(4):
        made = x + 0
        before = made._version
        torch._foreach_add_([made], 1.0)
        assert made._version == before + 1
        torch_ltc.sync()


@recorded_natively
def test_a_training_step_is_nearly_all_hits_and_equals_eager() -> None:
    def train(device: str) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)
        )
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x, y = torch.randn(5, 8).to(device), torch.randn(5, 4).to(device)
        losses = []
        for _ in range(8):
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss)
        return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]

    eager = train("cpu")
    ours = train("ltc")
    assert ours[0] == eager[0]
    assert all(torch.equal(a, b) for a, b in zip(ours[1], eager[1], strict=True))


@recorded_natively
def test_autograd_adds_up_in_place_as_when_python_records() -> None:
    """It does when nobody else has the storage of a gradient: an input of the pending program is no such somebody."""
    programs: list[int] = []

    def cut_and_read(grads: tuple[torch.Tensor, ...], _: tuple[torch.Tensor, ...]) -> None:
        torch_ltc.sync(wait=True)
        grads[0].exp()

    stop = torch_ltc.events.subscribe(lambda event: programs.append(event.program), torch_ltc.events.SyncEvent)
    try:
        for _ in range(5):
            x = torch.ones(3).to("ltc").requires_grad_()
            shared = x * 1
            first, second = shared * 2, shared * 3
            second.grad_fn.register_hook(cut_and_read)
            (first + second).sum().backward()
            torch_ltc.sync(wait=True)
            assert x.grad is not None
            assert x.grad.tolist() == [5.0] * 3
    finally:
        stop()
    # The first round is Python's, and so is the second.
    assert programs[2:] == programs[2:4] * 4


@recorded_natively
def test_a_value_that_nobody_holds_is_no_output() -> None:
    x = torch.ones(3).to("ltc")
    for _ in range(4):
        kept = (x + 1).exp().neg()
        outputs, _ = recorder.live_outputs()
        assert [buffer is buffer_of(kept) for buffer in outputs] == [True]
        torch_ltc.sync(wait=True)


@recorded_natively
def test_an_input_that_dies_before_the_sync_is_still_read() -> None:
    for _ in range(4):
        x = torch.full((3,), 2.0).to("ltc")
        z = x + 0
        y = torch.full((3,), 5.0).to("ltc")
        made = z * y
        del x, y, z
        gc.collect()
        assert made.tolist() == [10.0] * 3


@recorded_natively
def test_the_setting_force_fallback_is_obeyed_by_known_calls() -> None:
    x = torch.ones(3).to("ltc")
    steady(lambda: (x + 1).exp())
    with settings.scope(force_fallback="aten::exp"):
        before = metrics.counter_value("aten::exp") or 0
        made = (x + 1).exp()
        assert (metrics.counter_value("aten::exp") or 0) == before + 1
    assert torch.equal(made.cpu(), torch.full((3,), 2.0).exp())


@recorded_natively
def test_a_call_that_fails_has_the_line_of_this_recording() -> None:
    table = torch.ones(3, 2).to("ltc")
    good, bad = torch.tensor([0, 1]).to("ltc"), torch.tensor([0, 7]).to("ltc")

    def pick(rows: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(rows, table + 0)

    for _ in range(4):
        assert pick(good).sum().item() == 4.0
    with pytest.raises(torch_ltc.errors.ExecutionError, match=r"test_native_hits\.py:\d+ in .*pick"):
        pick(bad).sum().item()


@recorded_natively
@pytest.mark.parametrize("count", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_threads_that_record_at_once_get_what_they_asked_for(count: int) -> None:
    x = torch.ones(8).to("ltc")
    wrong: list[float] = []

    def work(number: int) -> None:
        for _ in range(60):
            made = x
            for _ in range(10):
                made = made + number
            if made.sum().item() != 8 + 80 * number:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@recorded_natively
def test_buffers_and_storages_do_not_pile_up() -> None:
    x = torch.ones(8).to("ltc")

    def step() -> None:
        made = (x + 1).view(2, 4).exp()
        torch_ltc.sync(wait=True)
        del made

    def objects_after(steps: int) -> int:
        for _ in range(steps):
            step()
        # Figures of events are added up some hundred at a time.
        catch_up()
        gc.collect()
        return len(gc.get_objects())

    before = objects_after(5)
    assert objects_after(200) - before < 100


@recorded_natively
def test_numbers_among_the_results_of_a_known_call_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, 2, 8, 16).to("ltc")

    class OnCuda:
        """The settings, by which shapes are inferred as for CUDA."""

        device_type = "cuda"

        def __getattr__(self, name: str) -> Any:
            return getattr(settings, name)

    monkeypatch.setattr(inference, "settings", OnCuda())

    def step() -> Any:
        # It has kernels for CUDA only: so it can be recorded, and fails when it runs.
        return torch.ops.aten._scaled_dot_product_flash_attention(x + x, x, x)

    for _ in range(4):
        with pytest.raises(torch_ltc.errors.LtcError, match="flash_attention"):
            torch_ltc.sync(wait=True)
            hits()
            output, logsumexp, *_, longest_query, longest_key, _, _, _ = step()
            found = hits()
            assert (longest_query, longest_key, type(longest_key)) == (8, 8, int)
            assert (output.shape, logsumexp.shape) == ((2, 2, 8, 16), (2, 2, 8))
            del output, logsumexp
            torch_ltc.sync(wait=True)
    assert found == 2


@recorded_natively
@pytest.mark.slow
def test_steps_after_ten_thousand_take_no_more_memory() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.ones(4, 8).to("ltc")

    def resident_bytes() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    for step in range(14_000):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if step % 50 == 0:
            torch_ltc.sync(wait=True)
        # Until here what metrics and the history keep grows to its bounds: by 4 MiB since step 2,000.
        if step == 10_000:
            before = resident_bytes()
    torch_ltc.sync(wait=True)
    assert resident_bytes() - before < 2**20


@recorded_natively
def test_a_call_that_python_does_not_record_leaves_no_input_behind() -> None:
    x = torch.ones(4).to("ltc")
    # A program whose first call takes `x`: the input is what the hit path expects next.
    steady(lambda: x + 1)
    with observe() as seen:
        copied = x.detach().cpu()
        shape = torch.nonzero(x).shape
        torch_ltc.sync(wait=True)
    assert (copied.tolist(), shape) == ([1.0] * 4, (4, 1))
    assert [event.instructions for event in seen.syncs] == []


class TooLate(Exception):
    """Raised by a handler of an alarm."""


def _after(delay_s: float, raised: type[BaseException], work: Callable[[], object]) -> None:
    """Repeat `work`, and have this raised in the middle of it; once more where Python cannot raise, in a finalizer."""

    def ring(*_: object) -> None:
        raise raised

    def ignored(unraisable: Any) -> None:
        if isinstance(unraisable.exc_value, raised):
            signal.setitimer(signal.ITIMER_REAL, delay_s)
        else:
            hook(unraisable)

    before, hook = signal.signal(signal.SIGALRM, ring), sys.unraisablehook
    sys.unraisablehook = ignored
    try:
        signal.setitimer(signal.ITIMER_REAL, delay_s)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


@recorded_natively
@pytest.mark.parametrize("raised", [KeyboardInterrupt, TooLate])
def test_what_a_signal_raises_while_known_calls_are_recorded_is_not_lost(raised: type[BaseException]) -> None:
    table, rows = torch.ones(3, 2).to("ltc"), torch.tensor([0, 2]).to("ltc")

    def step() -> torch.Tensor:
        # A first call, and calls that may fail: of these Python is told.
        made = torch.nn.functional.embedding(rows, table)
        for _ in range(20):
            made = made + torch.nn.functional.embedding(rows, table)
        return made

    def synced() -> None:
        step()
        torch_ltc.sync()

    steady(step)
    choose = random.Random(0)
    for _ in range(40):
        with pytest.raises(raised):
            _after(choose.uniform(1e-4, 4e-3), raised, synced)
    torch_ltc.sync(wait=True)
    hits()
    made = step()
    assert hits() > 20
    assert made.tolist() == [[21.0, 21.0], [21.0, 21.0]]


@recorded_natively
def test_what_is_raised_where_a_line_is_noted_comes_out_and_leaves_nothing_behind() -> None:
    table, rows = torch.ones(3, 2).to("ltc"), torch.tensor([0, 2]).to("ltc")
    pick = torch.nn.functional.embedding

    def step() -> torch.Tensor:
        return pick(rows, table) + 1

    steady(step)

    def refuse(_: object) -> None:
        raise TooLate("now")

    recorder.set_note_line(refuse)
    try:
        with pytest.raises(TooLate, match="now"):
            step()
    finally:
        recorder.set_note_line(recorder.note_line)
    assert recorder.empty
    assert step().tolist() == [[2.0, 2.0], [2.0, 2.0]]


@recorded_natively
def test_a_wrong_call_after_known_ones_raises_what_eager_raises_and_the_rest_is_computed() -> None:
    x, y = torch.ones(3).to("ltc"), torch.ones(4).to("ltc")
    steady(lambda: (x + 1).exp().neg())
    for _ in range(3):
        made = (x + 1).exp()
        with pytest.raises(RuntimeError, match="must match the size"):
            made + y
        assert torch.equal(made.neg().cpu(), torch.full((3,), 2.0).exp().neg())


WORK_PENDING = """
import torch, torch_ltc
x = torch.ones(16).to("ltc").requires_grad_()
def step():
    made = x
    for _ in range(50):
        made = made * 1.5
    return made
for _ in range(30):
    step().sum().backward()
    torch_ltc.sync()
assert torch_ltc.metrics.counter_value("NativeHits") > 1000
held = [step(), step().view(4, 4)]
"""


@recorded_natively
def test_a_process_ends_cleanly_with_known_calls_pending() -> None:
    # Without threads of its own: one that is in PyTorch when the interpreter ends aborts the process, in eager, too.
    done = subprocess.run(
        [sys.executable, "-c", WORK_PENDING], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert (done.returncode, done.stderr) == (0, "")


FORKED = """
import os, warnings, torch, torch_ltc
warnings.simplefilter("ignore")
x = torch.ones(3).to("ltc")
for _ in range(4):
    made = (x + 1) * 2
    made.tolist()
kept = (x + 1) * 2
child = os.fork()
if child == 0:
    try:
        ((x + 1) * 2).tolist()
    except torch_ltc.errors.LtcError:
        os._exit(7)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), kept.tolist(), ((x + 1) * 2).tolist())
"""


@recorded_natively
def test_a_forked_process_is_refused_in_the_middle_of_a_known_program() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.stdout == "7 [4.0, 4.0, 4.0] [4.0, 4.0, 4.0]\n", done.stderr


@recorded_natively
def test_a_list_with_other_tensors_is_another_call() -> None:
    x = torch.arange(3.0).to("ltc")

    def joined(turned: bool) -> torch.Tensor:
        first, second = x + 1, x * 2
        return torch.cat([second, first] if turned else [first, second])

    steady(lambda: joined(False))
    expected = torch.cat([torch.arange(3.0) * 2, torch.arange(3.0) + 1])
    assert joined(True).tolist() == expected.tolist()


@recorded_natively
def test_a_number_in_place_of_none_is_another_call() -> None:
    x = torch.tensor([1.0, float("nan")]).to("ltc")
    steady(lambda: torch.nan_to_num(x))
    assert torch.nan_to_num(x, nan=0.5).tolist() == [1.0, 0.5]
    steady(lambda: torch.nan_to_num(x, nan=0.5))
    assert torch.nan_to_num(x).tolist() == [1.0, 0.0]
