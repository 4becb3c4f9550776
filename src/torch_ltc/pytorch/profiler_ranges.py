"""Ranges that PyTorch's profiler shows: what the device does, under the name "ltc ..." and with the program's number.

Nothing is done while no profiler is on. A profiler sees the thread that started it; the worker's and the compiler's
threads only when it was made to look at all threads, as `torch_ltc.debug.profile` does.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from types import TracebackType

from torch_ltc.pytorch.private import RecordFunction, profiler

__all__ = ["span"]


class _Nothing:
    """The range of a process that nobody profiles."""

    # A class of its own, not contextlib.nullcontext: that takes twice as long to enter and leave.
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


_NOTHING = _Nothing()


def span(what: str, program: int = 0, detail: str = "") -> AbstractContextManager[object]:
    """A range for the block, as "ltc run program 7 (torchscript)"."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    name = f"ltc {what} program {program}" if program else f"ltc {what}"
    # Not `torch.profiler.record_function`, which is an operator: modes of the user's would see it.
    made: AbstractContextManager[object] = RecordFunction(f"{name} ({detail})" if detail else name)
    return made
