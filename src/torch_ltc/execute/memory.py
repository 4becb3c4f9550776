"""Memory accounting: a running total of the live buffers by the call or line that made them, the figures of the
physical device, and what an out-of-memory error adds.
"""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from torch_ltc.errors import LtcError, PoisonedTensorError
from torch_ltc.formatting import size_text
from torch_ltc.lowering.out_of_memory import is_out_of_memory, memory_needed
from torch_ltc.native.recording import native
from torch_ltc.program.instruction import Call, Program
from torch_ltc.record.buffer import Buffer, physical_device
from torch_ltc.source import UNKNOWN, Source

__all__ = [
    "Holding",
    "MemoryCount",
    "add_holdings",
    "add_largest",
    "add_upload",
    "is_out_of_memory",
    "largest_value",
    "memory",
    "physical_figures",
    "summary_text",
]

_SHOWN = 5
_MOST_SAMPLES = 2_000
_PROCESS_PAGES = "/proc/self/statm"


@dataclass(frozen=True, slots=True)
class Holding:
    """Live buffers that one call made at one line. `op` is empty for what was copied to the device or made eagerly.
    `runs` says how many different runs of programs they come from: one for parameters, one per step for what piles
    up."""

    op: str
    source: Source
    count: int
    size_bytes: int
    runs: int = 1

    def __str__(self) -> str:
        buffers = "1 buffer" if self.count == 1 else f"{self.count} buffers"
        made = self.op or "copied to the device or made eagerly"
        return f"{size_text(self.size_bytes)} in {buffers}: {made} at {self.source.describe()}"


# What made a buffer: the call of a program; the line of an upload; None when that is not known.
Maker = Call | Source | None


class _Holdings:
    """Buffers that have their data, with their bytes and what made them: native/holdings.cpp in Python."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[weakref.ref[Buffer], tuple[int, Maker, int]] = {}
        self.size_bytes = self.most_bytes = 0

    def forget_most(self) -> None:
        """Begin a new peak, at what is held now."""
        self.most_bytes = self.size_bytes

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self._held)

    def hold(self, made: Iterable[tuple[Buffer, Maker]], run: int) -> None:
        """Count these buffers until they die."""
        held, release = self._held, self._release
        with self._lock:
            for buffer, maker in made:
                data = buffer.data
                # The same as `size_bytes` in nearly all cases, for a tenth of the time.
                if isinstance(data, torch.Tensor) and buffer.spec.contiguous and not buffer.grown_bytes:
                    size_bytes = data.nbytes
                else:
                    size_bytes = buffer.size_bytes
                reference = weakref.ref(buffer, release)
                # A gradient that a replay writes to anew is counted once.
                counted = held.get(reference)
                held[reference] = (size_bytes, maker, run)
                self.size_bytes += size_bytes if counted is None else size_bytes - counted[0]
            self.most_bytes = max(self.most_bytes, self.size_bytes)

    def hold_made(self, buffers: list[Buffer], makers: Sequence[Maker], run: int) -> None:
        """As `hold`, for those of these buffers that have data."""
        made = zip(buffers, makers, strict=True)
        self.hold([(buffer, maker) for buffer, maker in made if buffer.data is not None], run)

    def _release(self, reference: weakref.ref[Buffer]) -> None:
        # Called while a buffer is freed, possibly inside `hold`: a plain dict operation, no lock.
        held = self._held.pop(reference, None)
        if held is not None:
            self.size_bytes -= held[0]

    def install(self, buffers: list[Buffer], results: list[Any], makers: Sequence[Maker], run: int) -> list[int]:
        """Give these buffers the plain tensors among the results as their data, and count them; the places of those
        that the caller has to look at."""
        others: list[int] = []
        made: list[tuple[Buffer, Maker]] = []
        for place, (buffer, result, maker) in enumerate(zip(buffers, results, makers, strict=True)):
            # Most outputs of a captured program lie where they lay.
            if buffer.data is result:
                continue
            if type(result) is torch.Tensor:
                buffer.data = result
                buffer.error = None
                made.append((buffer, maker))
            else:
                others.append(place)
        self.hold(made, run)
        return others

    def all(self) -> list[tuple[int, Maker, int]]:
        """The bytes, the maker and the run of each."""
        # A copy, which is made in one go: buffers may die meanwhile.
        return list(self._held.copy().values())


class MemoryCount:
    """Bytes held now and at most, and by whom."""

    def __init__(self) -> None:
        self._holdings: Any = _Holdings() if native is None else native.Holdings()
        # The number of the program that ran last.
        self.run = 0
        self.forget_samples()

    @property
    def current_bytes(self) -> int:
        """Bytes held now, also by buffers that eager regions have made and that Python has not seen."""
        return int(self._holdings.size_bytes) + (0 if native is None else int(native.unseen_bytes()))

    @property
    def peak_bytes(self) -> int:
        """The most bytes held."""
        return int(self._holdings.most_bytes)

    def forget_samples(self) -> None:
        """Begin to sample anew."""
        # Times, and the bytes held then; of every so many-th run, so many have not been sampled since.
        self.samples: list[tuple[float, int]] = []
        self._every = 1
        self._skipped = 0

    def end_run(self) -> None:
        """A program has run: keep the bytes that are held now; in a long run only every second, fourth, ... time."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self.samples.append((time.perf_counter(), self.current_bytes))
        if len(self.samples) >= _MOST_SAMPLES:
            self.samples = self.samples[::2]
            self._every *= 2

    def hold(self, buffer: Buffer, maker: Maker = None) -> None:
        """Count this buffer, which has just got its data, until it dies."""
        self.hold_all([(buffer, maker)])

    def hold_all(self, made: list[tuple[Buffer, Maker]]) -> None:
        """Count these buffers, which have just got their data, until they die."""
        self._holdings.hold(made, self.run)

    def hold_made(self, buffers: list[Buffer], makers: Sequence[Maker]) -> None:
        """As `hold_all`, for those of the buffers that have data."""
        self._holdings.hold_made(buffers, makers, self.run)

    def install(self, buffers: list[Buffer], results: list[Any], makers: Sequence[Maker]) -> list[int]:
        """Give these buffers what a program has made for them, and count them until they die: plain tensors. The places
        of those that are something else."""
        others: list[int] = self._holdings.install(buffers, results, makers, self.run)
        return others

    def figures(self) -> dict[str, int]:
        """Current and peak bytes, under the names other devices use."""
        return {
            "allocated_bytes.all.current": self.current_bytes,
            "allocated_bytes.all.peak": self.peak_bytes,
            "reserved_bytes.all.current": self.current_bytes,
            "reserved_bytes.all.peak": self.peak_bytes,
            "allocation.all.current": int(self._holdings.count),
        }

    def reset_peak(self) -> None:
        """Begin a new peak."""
        self._holdings.forget_most()

    def largest(self, count: int, since: int = 0) -> list[Holding]:
        """The largest holdings first: live buffers by the line and the call that made them. Runs are counted from
        that of number `since` on."""
        groups: dict[tuple[str, Source], list[tuple[int, int]]] = {}
        for size_bytes, maker, run in self._holdings.all():
            call = maker.name if isinstance(maker, Call) else ""
            source = maker.source if isinstance(maker, Call) else maker or UNKNOWN
            groups.setdefault((call, source), []).append((size_bytes, run))
        found = [
            Holding(op, source, len(rows), sum(size for size, _ in rows), len({run for _, run in rows if run >= since}))
            for (op, source), rows in groups.items()
        ]
        return sorted(found, key=lambda item: (-item.size_bytes, item.op, str(item.source)))[:count]

    def describe_largest(self, count: int = _SHOWN) -> str:
        """As `largest`, as the lines of an error message."""
        held = size_text(self.current_bytes)
        lines = [f"  live buffers hold {held}, at most {size_text(self.peak_bytes)} so far; the largest groups:"]
        return "\n".join(lines + [f"    {item}" for item in self.largest(count)])


memory = MemoryCount()


# ---- the physical device --------------------------------------------------------------------------------------------


def physical_figures() -> dict[str, int]:
    """Memory figures of the physical device in bytes: on CUDA those of PyTorch's allocator, else the resident size of
    the process, now and at most."""
    device = physical_device()
    if device.type == "cuda":
        stats = torch.cuda.memory_stats(device)
        free, total = torch.cuda.mem_get_info(device)
        kinds = ("allocated_bytes.all.current", "allocated_bytes.all.peak", "reserved_bytes.all.current")
        return {**{name: int(stats.get(name, 0)) for name in kinds}, "free_bytes": free, "total_bytes": total}
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    if not os.path.exists(_PROCESS_PAGES):
        return {"process_bytes.peak": peak}
    with open(_PROCESS_PAGES, encoding="ascii") as file:
        current = int(file.read().split()[1]) * resource.getpagesize()
    # The kernel updates the two at different times.
    return {"process_bytes.current": current, "process_bytes.peak": max(current, peak)}


def summary_text(
    figures: Mapping[str, int],
    physical: Mapping[str, int],
    holdings: Iterable[Holding],
    graphs: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """The memory of the device for people."""
    now, most = figures["allocated_bytes.all.current"], figures["allocated_bytes.all.peak"]
    lines = [f"live buffers: {size_text(now)} in {figures['allocation.all.current']}, at most {size_text(most)}"]
    lines += [f"  {holding}" for holding in holdings]
    if graphs.get("graphs.count"):
        lines += [f"graphs: {size_text(graphs['graphs.bytes'])} in {graphs['graphs.count']} captured programs"]
    lines += [f"physical device {physical_device()}:"]
    lines += [f"  {name.replace('_', ' ').replace('.', ', ')}: {size_text(size)}" for name, size in physical.items()]
    return "\n".join(lines) + "\n"


def _collect_garbage() -> bool:
    """Free tensors in cycles, as those that an error's frames refer to; True when there were some."""
    before = memory.current_bytes
    gc.collect()
    return memory.current_bytes < before


memory_needed.add(_collect_garbage)


# ---- running out of it -----------------------------------------------------------------------------------------------


def largest_value(program: Program) -> str:
    """The largest result that the program makes, with its call and line; empty when it makes none."""
    sized = [
        (item.spec.numel * item.spec.dtype.itemsize, item.spec, call)
        for call in program.calls
        for item, number in zip(call.flat_returns, call.numbers, strict=True)
        if number >= 0 and item.operand < 0 and item.spec is not None
    ]
    if not sized:
        return ""
    size_bytes, spec, call = max(sized, key=lambda item: item[0])
    return f"its largest result is {spec!r} ({size_text(size_bytes)}) of {call.name} at {call.source.describe()}"


def add_largest(error: LtcError, program: Program) -> None:
    """If the error says that there is no memory left: add which result of the program is the largest. For a program
    that was compiled as a whole, so that nobody knows which call failed."""
    largest = largest_value(program) if is_out_of_memory(error) else ""
    if largest:
        error.args = (f"{str(error.args[0]).rstrip()}\n  {largest}",)


def add_holdings(error: LtcError) -> LtcError:
    """The error; if it says that there is no memory left, with what holds the memory."""
    if is_out_of_memory(error) and not isinstance(error, PoisonedTensorError):
        error.args = (f"{error.args[0]}\n{memory.describe_largest()}",)
    return error


def add_upload(error: RuntimeError, tensor: torch.Tensor, source: Source) -> None:
    """If the error says that there is no memory left: add the tensor that was to be copied to the device, and what
    holds the memory. It stays the error that PyTorch raised: programs catch it to try with less."""
    if is_out_of_memory(error):
        shape = ",".join(map(str, tensor.shape))
        kind = str(tensor.dtype).removeprefix("torch.")
        size = size_text(tensor.numel() * tensor.dtype.itemsize)
        what = f"  copying {kind}[{shape}] ({size}) to the device at {source.describe()}"
        error.args = (f"{error}\n{what}\n{memory.describe_largest()}",)
