"""The module `torch.ltc`: what users of a PyTorch device expect to find under its name."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import torch

from torch_ltc.config import Origin, local_rank, local_size, settings
from torch_ltc.errors import DeviceMismatchError
from torch_ltc.events import SyncReason
from torch_ltc.execute.executor import NOTHING, executor
from torch_ltc.execute.graph_cache import graph_cache
from torch_ltc.execute.memory import memory, physical_figures, summary_text
from torch_ltc.execute.random_state import device_random
from torch_ltc.execute.sync import cut, sync
from torch_ltc.native.library import extension
from torch_ltc.record.ordinal import ordinal
from torch_ltc.record.recorder import recorder

_PROCESS = os.getpid()
# PyTorch's checkpointing asks for this before it saves the random state.
_initialized = True
_Device = torch.device | str | int | None


def _check(device: _Device) -> None:
    """Raise unless `device` names the device of this process."""
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    kind = "ltc" if device is None or isinstance(device, int) else torch.device(device).type
    if kind != "ltc" or not ordinal.is_own(index):
        raise DeviceMismatchError(ordinal.refusal(device), hint="use 'ltc'; torchrun starts a process for each")


def is_available() -> bool:
    """True: the device runs wherever PyTorch does."""
    return True


def is_initialized() -> bool:
    """True: importing the package registers the device."""
    return True


def init() -> None:
    """Nothing to do: importing the package registers the device."""


def device_count() -> int:
    """The number of GPUs of the machine, of which a process uses one; on the CPU, that of `torchrun`'s processes here.

    Without the extension in C++ it is 1: PyTorch then knows no other device than ltc:0."""
    return ordinal.count


def current_device() -> int:
    """The index of the device of this process."""
    return ordinal.index


def set_device(device: _Device) -> None:
    """Choose the device of this process: `ltc:1` is the GPU `cuda:1`.

    Under `torchrun` it is that of the local rank from the start. It can be chosen as long as nothing is on the device.
    """
    # Without the extension the device is ltc:0, whichever the GPU.
    count = max(ordinal.count, torch.cuda.device_count() if settings.device_type == "cuda" else 1)
    index = device if isinstance(device, int) else torch.device("ltc" if device is None else device).index
    if not isinstance(index, int) or not 0 <= index < count or (extension is None and not isinstance(device, int)):
        _check(device)
        return
    if index == _chosen():
        return
    if memory.current_bytes or not recorder.empty:
        raise DeviceMismatchError(
            f"there are tensors on ltc:{ordinal.index} already, and a process has one device",
            hint="call set_device before the first tensor is made, or start a process for each GPU with torchrun",
        )
    _choose(index)


# The number that was chosen where programs run on the CPU, which has none of its own.
_on_cpu: list[int] = []


def _chosen() -> int:
    """The number of the GPU, or what stands for it on the CPU."""
    if settings.device_type != "cpu":
        return settings.device_ordinal
    return _on_cpu[0] if _on_cpu else local_rank() or 0


def _choose(index: int) -> None:
    if settings.device_type != "cpu":
        settings.device_ordinal = index
        return
    _on_cpu[:] = [index]
    _number_device()


def _number_device() -> None:
    """Give the device its number: that of the GPU, or on the CPU of the process among those of the machine."""
    if extension is None:
        return
    there = local_size() if settings.device_type == "cpu" else torch.cuda.device_count()
    index = _chosen()
    if (index, max(there, index + 1)) != (ordinal.index, ordinal.count):
        ordinal.set(index, max(there, index + 1))
        extension.set_ordinal(ordinal.index, ordinal.count)


def _follow_local_rank() -> None:
    """Of several processes on a machine each takes a GPU of its own, unless a setting says which."""
    rank = local_rank()
    if settings.device_type != "cpu" and rank is not None and settings.origin("device_ordinal") is Origin.DEFAULT:
        settings.device_ordinal = rank % max(torch.cuda.device_count(), 1)
    _number_device()


settings.watch("device_type", _follow_local_rank)
settings.watch("device_ordinal", _number_device)
_follow_local_rank()


def get_device_name(device: _Device = None) -> str:
    """A name for people."""
    _check(device)
    return "torch_ltc lazy device"


def get_device_capability(device: _Device = None) -> dict[str, Any]:
    """Capabilities of the device, in the form of `torch.accelerator`."""
    _check(device)
    return {"supported_dtypes": {d for d in vars(torch).values() if isinstance(d, torch.dtype)}}


@contextlib.contextmanager
def device(index: _Device) -> Iterator[None]:
    """A context in which the one device is current, as it always is."""
    _check(index)
    yield


def synchronize(device: _Device = None) -> None:
    """Sync, and return when everything has run."""
    _check(device)
    sync(wait=True)


def empty_cache() -> None:
    """Nothing to give back: memory is the physical device's."""


def empty_host_cache() -> None:
    """Nothing to give back: host memory is PyTorch's."""


def get_memory_info(device: _Device = None) -> tuple[int, int]:
    """Free and total bytes of the physical device's memory."""
    _check(device)
    if settings.device_type == "cuda":
        return torch.cuda.mem_get_info(settings.device_ordinal)
    page, total, free = (os.sysconf(name) for name in ("SC_PAGE_SIZE", "SC_PHYS_PAGES", "SC_AVPHYS_PAGES"))
    return free * page, total * page


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """True: kernels are the physical device's, and PyTorch's CPU and CUDA kernels take bfloat16."""
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Dtypes that autocast may choose."""
    return [torch.bfloat16, torch.float16]


def is_autocast_enabled() -> bool:
    """True when autocast is on for the device."""
    return torch.is_autocast_enabled("ltc")


def _is_in_bad_fork() -> bool:
    return os.getpid() != _PROCESS


# ---- random numbers -----------------------------------------------------------------------------------------------

# With the extension in C++ the device's generator is an object too, as those of other devices.
default_generators = () if extension is None else (extension.default_generator(),)


def manual_seed(seed: int) -> None:
    """Seed the device's generator, from this point of the program on."""
    seed = int(seed)
    executor.wait_for_room()
    with recorder.lock:
        if recorder.random:
            # Draws recorded before this line belong to the old state.
            cut(SyncReason.SEED)
        # Work that is queued may be what draws first: the seed has its place behind it.
        if not executor.is_idle():
            executor.submit(lambda: device_random.generator.manual_seed(seed), NOTHING, wait=False)
        elif not device_random.seed_before_use(seed):
            device_random.generator.manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    """As `manual_seed`: there is one device."""
    manual_seed(seed)


def seed() -> int:
    """Seed from the operating system; returns the seed."""
    fresh = int.from_bytes(os.urandom(8), "little") >> 1
    manual_seed(fresh)
    return fresh


def seed_all() -> int:
    """As `seed`: there is one device."""
    return seed()


def initial_seed(device: _Device = None) -> int:
    """The seed in force."""
    _check(device)
    return int(_in_order(lambda: device_random.generator.initial_seed()))


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """The generator's state at this point of the program, as a CPU tensor. Runs what was recorded before."""
    _check(device)
    state: torch.Tensor = _in_order(lambda: device_random.generator.get_state())
    return state


def set_rng_state(new_state: torch.Tensor, device: _Device = None) -> None:
    """Set the generator's state, from this point of the program on."""
    _check(device)
    state = new_state.clone()
    _in_order(lambda: device_random.generator.set_state(state))


def get_rng_state_all() -> list[torch.Tensor]:
    """States of all devices: one."""
    return [get_rng_state()]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    """Set the states of all devices: one."""
    for state in new_states:
        set_rng_state(state)


def _in_order(work: Any) -> Any:
    with recorder.lock:
        if recorder.random:
            cut(SyncReason.SEED)
        future = executor.submit(work, NOTHING, wait=False)
    return executor.result_of(future)


# ---- memory -------------------------------------------------------------------------------------------------------


def memory_stats(device: _Device = None) -> dict[str, int]:
    """Bytes held by live buffers: now and at most, named as other devices name them; captured programs and the bytes of
    their graphs ("graphs.count", "graphs.bytes"); and under names that begin with "physical." what the physical device
    says, on CUDA all that PyTorch's allocator counts there."""
    _check(device)
    physical = physical_figures()
    if settings.device_type == "cuda":
        physical.update(torch.cuda.memory_stats(settings.device_ordinal))
    figures = {**memory.figures(), **graph_cache.figures()}
    return {**figures, **{f"physical.{name}": value for name, value in physical.items()}}


def memory_allocated(device: _Device = None) -> int:
    """Bytes held by live buffers now."""
    _check(device)
    return memory.current_bytes


def max_memory_allocated(device: _Device = None) -> int:
    """Most bytes held by live buffers since the last reset, as seen at syncs."""
    _check(device)
    return memory.peak_bytes


def memory_summary(device: _Device = None, abbreviated: bool = False) -> str:
    """A listing of memory in use: live buffers by the call and the line that made them, largest first, and what the
    physical device says. The ten largest groups; with `abbreviated` three."""
    _check(device)
    largest = memory.largest(3 if abbreviated else 10)
    return summary_text(memory.figures(), physical_figures(), largest, graph_cache.figures())


def memory_reserved(device: _Device = None) -> int:
    """As `memory_allocated`: nothing is held in reserve."""
    return memory_allocated(device)


def max_memory_reserved(device: _Device = None) -> int:
    """As `max_memory_allocated`."""
    return max_memory_allocated(device)


def reset_peak_memory_stats(device: _Device = None) -> None:
    """Begin a new peak."""
    _check(device)
    memory.reset_peak()


def reset_accumulated_memory_stats(device: _Device = None) -> None:
    """Nothing accumulates."""
    _check(device)


# ---- streams: the device has one, in program order ------------------------------------------------------------------


class Event:
    """A point of the program. With `enable_timing` it ends the pending program where it is recorded, and takes the time
    when that has run."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.device = ordinal.device
        self._timing = enable_timing
        self._reached: Future[float] | None = None

    def record(self, stream: object = None) -> None:
        """Be this point from now on."""
        if self._timing:
            with recorder.lock:
                cut(SyncReason.EXPLICIT)
                self._reached = executor.submit(time.perf_counter, NOTHING, wait=False)

    def wait(self, stream: object = None) -> None:
        """Nothing to wait for: work runs in the order in which it was recorded."""

    def query(self) -> bool:
        """True when everything before it has run."""
        if self._reached is not None:
            return self._reached.done()
        return recorder.empty and executor.is_idle()

    def synchronize(self) -> None:
        """Sync, and return when everything has run."""
        synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds between this event and a later one, both recorded with `enable_timing`."""
        if self._reached is None or end._reached is None:
            raise ValueError("both events must be recorded, and made with enable_timing=True")
        return 1e3 * (executor.result_of(end._reached) - executor.result_of(self._reached))


class Stream:
    """The device's only stream: work runs in the order in which it was recorded."""

    def __init__(self, device: _Device = None, priority: int = 0) -> None:
        _check(device)
        self.device = ordinal.device
        self.stream_id = 0

    def synchronize(self) -> None:
        """Sync, and return when everything has run."""
        synchronize()

    def wait_stream(self, stream: object) -> None:
        """Nothing to wait for: there is one stream."""

    def wait_event(self, event: object) -> None:
        """Nothing to wait for: work runs in the order in which it was recorded."""

    def query(self) -> bool:
        """True when everything that was recorded has run."""
        return recorder.empty and executor.is_idle()

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one if none is given."""
        made = Event() if event is None else event
        made.record(self)
        return made

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        return None


def current_stream(device: _Device = None) -> Stream:
    """The only stream."""
    return Stream(device)


def default_stream(device: _Device = None) -> Stream:
    """The only stream."""
    return Stream(device)


def set_stream(stream: Stream) -> None:
    """Accepts the only stream."""


def stream(chosen: Stream | None) -> contextlib.AbstractContextManager[None]:
    """A context in which the only stream is current, as it always is."""
    return contextlib.nullcontext()
