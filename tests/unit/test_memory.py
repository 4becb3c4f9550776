"""The running total of memory held."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_ltc
from torch_ltc.backends import interpreter
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.config import settings
from torch_ltc.errors import LtcError, PoisonedTensorError
from torch_ltc.execute import memory as module
from torch_ltc.execute.memory import (
    Holding,
    MemoryCount,
    add_holdings,
    is_out_of_memory,
    memory,
    physical_figures,
    summary_text,
)
from torch_ltc.execute.pending import pending_program
from torch_ltc.formatting import size_text
from torch_ltc.lowering.interface import Arguments, Computation, Outcome
from torch_ltc.program.instruction import Call
from torch_ltc.program.spec import make_spec
from torch_ltc.record.buffer import Buffer, new_buffer
from torch_ltc.record.recorder import recorder
from torch_ltc.source import UNKNOWN, Source

NO_ROOM = (
    "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
)
HERE = Source("/home/me/train.py", 12, "main", module="Net.fc1")


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def full_buffer(length: int) -> Buffer:
    return new_buffer(make_spec(torch.float32, (length,), (1,)), data=torch.zeros(length))


def test_a_buffer_that_gets_other_data_is_counted_once() -> None:
    count = MemoryCount()
    buffer = new_buffer(make_spec(torch.float32, (4,), (1,)), data=torch.ones(4))
    count.hold(buffer)
    buffer.data = torch.zeros(4)
    count.hold(buffer)
    assert count.figures()["allocated_bytes.all.current"] == 16
    assert count.figures()["allocation.all.current"] == 1
    del buffer
    assert count.figures()["allocated_bytes.all.current"] == 0


def test_memory_is_counted_from_hold_to_the_death_of_the_buffer() -> None:
    count = MemoryCount()
    first, second = full_buffer(10), full_buffer(5)
    count.hold(first)
    count.hold(second)
    assert count.current_bytes == count.peak_bytes == 60
    del first
    assert count.current_bytes == 20
    assert count.peak_bytes == 60
    count.reset_peak()
    assert count.peak_bytes == 20
    assert count.figures()["allocated_bytes.all.current"] == 20
    assert count.figures()["allocation.all.current"] == 1
    del second
    assert count.figures()["allocated_bytes.all.current"] == 0


def test_counting_from_several_threads_adds_up() -> None:
    count = MemoryCount()

    def work() -> None:
        for _ in range(500):
            buffer = full_buffer(1)
            count.hold(buffer)
            del buffer

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.current_bytes == 0
    assert count.figures()["allocation.all.current"] == 0


def test_bytes_of_a_buffer_without_data_are_those_it_will_need() -> None:
    assert new_buffer(make_spec(torch.float64, (3, 2), (2, 1))).size_bytes == 48
    assert full_buffer(7).size_bytes == 28


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (2**20 - 1, "1.0 MiB"),
        (40 * 10**9, "37.3 GiB"),
        (2**52, "4096.0 TiB"),
    ],
)
def test_bytes_for_people(size_bytes: int, text: str) -> None:
    assert size_text(size_bytes) == text


def a_call(source: Source) -> Call:
    (call,) = pending_program([torch.ones(2).to("ltc").relu()]).calls
    return replace(call, source=source)


def test_live_buffers_are_grouped_by_call_and_line_largest_first() -> None:
    count = MemoryCount()
    call, others = a_call(HERE), replace(HERE, line=20)
    made = [full_buffer(10), full_buffer(20), full_buffer(100), full_buffer(5), full_buffer(1)]
    for buffer, maker in zip(made, (call, replace(call), HERE, others, None), strict=True):
        count.hold(buffer, maker)
    assert count.largest(9) == [
        Holding("", HERE, 1, 400),
        Holding("aten::relu", HERE, 2, 120),
        Holding("", others, 1, 20),
        Holding("", UNKNOWN, 1, 4),
    ]
    count.run += 1
    later = full_buffer(1)
    count.hold(later, call)
    assert count.largest(2)[1] == Holding("aten::relu", HERE, 3, 124, runs=2)
    del later
    del made[2]
    assert count.largest(1) == [Holding("aten::relu", HERE, 2, 120)]
    assert count.describe_largest(2) == (
        "  live buffers hold 144 B, at most 548 B so far; the largest groups:\n"
        "    120 B in 2 buffers: aten::relu at /home/me/train.py:12 in main [Net.fc1]\n"
        "    20 B in 1 buffer: copied to the device or made eagerly at /home/me/train.py:20 in main [Net.fc1]"
    )


def held_here() -> dict[str, int]:
    """Bytes of live buffers of lines in this file, by call."""
    held: dict[str, int] = {}
    for item in memory.largest(10**6):
        if item.source.file == __file__:
            held[item.op] = held.get(item.op, 0) + item.size_bytes
    return held


@pytest.mark.parametrize("backend", ["interpreter", "torchscript"])
def test_results_of_programs_and_uploads_are_held_by_their_lines(backend: str) -> None:
    with settings.scope(backend=backend):
        x = torch.ones(1000).to("ltc")
        x.relu_()
        for _ in range(3):
            y = [x.exp(), x.log().sin()]
            y[0].mul_(2)
            torch_ltc.sync(wait=True)
            assert held_here() == {"": 4000, "aten::exp": 4000, "aten::sin": 4000}
        (kept,) = [item for item in memory.largest(10**6) if item.op == "aten::sin"]
        assert kept.source.function == "test_results_of_programs_and_uploads_are_held_by_their_lines"
        del y
        assert held_here() == {"": 4000}


def test_results_of_one_call_and_of_calls_after_one_without_results_have_their_makers() -> None:
    x = torch.ones(10, 4).to("ltc")
    x.add_(1)
    values, places = x.topk(2)
    x.add_(1)
    y = x.neg()
    torch_ltc.sync(wait=True)
    held = held_here()
    assert held["aten::topk"] == 10 * 2 * (4 + 8)
    assert held["aten::neg"] == 160
    del values, places, y


def test_the_physical_device_tells_its_own_figures() -> None:
    figures = physical_figures()
    assert figures["process_bytes.peak"] >= figures["process_bytes.current"] > 10**6
    stats = torch.ltc.memory_stats()
    assert stats["physical.process_bytes.peak"] >= figures["process_bytes.peak"]
    assert stats["allocated_bytes.all.current"] == torch.ltc.memory_allocated()
    assert stats["allocated_bytes.all.peak"] == torch.ltc.max_memory_allocated()


def test_on_cuda_the_figures_are_those_of_its_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
    told = {**dict(zip(kinds, (1, 2, 3), strict=True)), "segment.all.current": 4}
    monkeypatch.setattr(module, "physical_device", lambda: torch.device("cuda", 1))
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: told)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5, 6))
    wanted = {**dict(zip(kinds, (1, 2, 3), strict=True)), "free_bytes": 5, "total_bytes": 6}
    assert physical_figures() == wanted


def test_the_summary_to_the_letter() -> None:
    count = MemoryCount()
    buffer = full_buffer(512)
    count.hold(buffer, HERE)
    physical = {"process_bytes.peak": 3 * 2**20, "process_bytes.current": 2**20}
    assert summary_text(count.figures(), physical, count.largest(3)) == (
        "live buffers: 2.0 KiB in 1, at most 2.0 KiB\n"
        "  2.0 KiB in 1 buffer: copied to the device or made eagerly at /home/me/train.py:12 in main [Net.fc1]\n"
        "physical device cpu:\n"
        "  process bytes, peak: 3.0 MiB\n"
        "  process bytes, current: 1.0 MiB\n"
    )


def test_the_device_has_a_summary() -> None:
    x = torch.ones(10**6).to("ltc")
    text = torch.ltc.memory_summary()
    assert re.search(r"3\.8 MiB in 1 buffer: copied to the device or made eagerly at .*test_memory\.py:\d+ in", text)
    assert len(torch.ltc.memory_summary(abbreviated=True).splitlines()) <= len(text.splitlines())
    del x


# ---- no memory left --------------------------------------------------------------------------------------------------


def test_what_counts_as_no_memory() -> None:
    caused = LtcError("it failed")
    caused.__cause__ = RuntimeError(NO_ROOM)
    for error in (torch.OutOfMemoryError("CUDA out of memory."), MemoryError(), RuntimeError(NO_ROOM), caused):
        assert is_out_of_memory(error), error
    for other in (RuntimeError("shapes differ"), ValueError(NO_ROOM), None):
        assert not is_out_of_memory(other), other


def test_only_errors_for_lack_of_memory_tell_what_holds_it() -> None:
    other = LtcError("the shapes differ")
    assert str(add_holdings(other)) == "the shapes differ"
    lost = PoisonedTensorError("never computed")
    lost.__cause__ = RuntimeError(NO_ROOM)
    assert str(add_holdings(lost)) == "never computed"


TOO_MUCH = 10**13


def test_a_call_without_memory_is_named_with_its_line_and_what_holds_the_memory() -> None:
    x = torch.ones(1000).to("ltc")
    torch_ltc.sync(wait=True)
    y = x.expand(TOO_MUCH, 1000).clone()
    with pytest.raises(LtcError) as caught:
        torch_ltc.sync(wait=True)
    text = str(caught.value)
    assert text.startswith("aten::clone failed when its program ran: ")
    assert re.search(r"recorded at .*test_memory\.py:\d+ in test_a_call_without_memory", text)
    assert re.search(r"\n  live buffers hold [\d.]+ \w+, at most [\d.]+ \w+ so far; the largest groups:\n", text)
    assert re.search(r"\n    3\.9 KiB in 1 buffer: copied to the device or made eagerly at .*test_memory\.py", text)
    del y


def known_entries() -> list[CachedProgram]:
    return [entry for node in recorder.tree.nodes() for entry in node.programs.values()]


@pytest.mark.blocking_tiers
def test_a_compiled_program_without_memory_names_its_largest_result(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_ltc.ir_cache.reset()
    x = torch.ones(1000).to("ltc")
    w = torch.zeros(1000).to("ltc")

    def step() -> torch.Tensor:
        w.add_(1)
        return (x.exp().expand(50, 1000) * 2).sum()

    with settings.scope(backend="torchscript"):
        for _ in range(3):
            y = step()
            torch_ltc.sync(wait=True)
        (computation,) = [entry.compiled.computation for entry in known_entries() if entry.compiled and entry.runs == 3]
        kind, run = type(computation), type(computation).run

        def run_and_fail(self: Computation, arguments: Arguments) -> Outcome:
            run(self, arguments)
            raise RuntimeError(NO_ROOM)

        monkeypatch.setattr(kind, "run", run_and_fail)
        y = step()
        with pytest.raises(LtcError) as caught:
            torch_ltc.sync(wait=True)
    text = str(caught.value)
    assert re.match(r"program \d+ failed: RuntimeError: \[enforce fail", text)
    assert re.search(
        r"\n  its largest result is float32\[50,1000\] \(195\.3 KiB\) of aten::mul\.Tensor at .*test_memory\.py:\d+ in "
        r"\S*step\n  live buffers hold ",
        text,
    )
    monkeypatch.undo()
    assert w[0].item() == 4, "nothing is run a second time: the first run has written"
    del y


def test_an_upload_without_memory_names_the_tensor_and_what_holds_the_memory() -> None:
    kept = torch.ones(1000).to("ltc")
    with pytest.raises(RuntimeError) as caught:
        torch.ones(1).expand(TOO_MUCH, 1000).to("ltc")
    assert "DefaultCPUAllocator" in str(caught.value)
    assert re.search(
        r"\n  copying float32\[10000000000000,1000\] \(36379\.8 TiB\) to the device at .*test_memory\.py:\d+ in "
        r"test_an_upload\S*\n  live buffers hold ",
        str(caught.value),
    )
    assert kept.sum().item() == 1000


def test_samples_are_thinned() -> None:
    count = MemoryCount()
    for _ in range(10_000):
        count.end_run()
    assert module._MOST_SAMPLES // 2 <= len(count.samples) < module._MOST_SAMPLES
    assert count.samples == sorted(count.samples)
    count.forget_samples()
    assert not count.samples


def test_without_memory_tensors_in_cycles_are_freed_and_the_call_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run, attempts = interpreter.run_recorded_call, []

    def short(call: Call, values: list[Any], arguments: Arguments) -> None:
        if call.name.startswith("aten::exp"):
            attempts.append(memory.current_bytes)
            if len(attempts) == 1:
                raise MemoryError("no room")
        run(call, values, arguments)

    class Cycle:
        def __init__(self) -> None:
            self.me, self.data = self, torch.ones(1000).to("ltc")

    x = torch.zeros(3).to("ltc")
    gc.disable()
    try:
        Cycle()
        with settings.scope(backend="interpreter"), monkeypatch.context() as patched:
            patched.setattr(interpreter, "run_recorded_call", short)
            assert x.exp().tolist() == [1.0, 1.0, 1.0]
    finally:
        gc.enable()
    assert attempts[1] <= attempts[0] - 4000
