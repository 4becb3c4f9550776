"""The running total of memory held."""

from __future__ import annotations

import threading

import torch

from torch_ltc.program.spec import make_spec
from torch_ltc.runtime.buffer import Buffer, new_buffer
from torch_ltc.runtime.memory import MemoryCount


def full_buffer(length: int) -> Buffer:
    return new_buffer(make_spec(torch.float32, (length,), (1,)), data=torch.zeros(length))


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
