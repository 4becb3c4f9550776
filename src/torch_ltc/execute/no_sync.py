"""The sync guard: `no_sync` forbids syncs to the thread that enters it.

A backward pass runs on threads of PyTorch's own, for a thread that waits meanwhile; what is forbidden to any thread is
forbidden to every backward pass.
"""

from __future__ import annotations

import threading
from types import TracebackType

from torch_ltc.errors import SyncForbiddenError
from torch_ltc.events import SyncReason
from torch_ltc.native.recording import native
from torch_ltc.pytorch.private import backward_pass
from torch_ltc.record.call_site import current_source

__all__ = ["allow_sync", "no_sync", "sync_guard"]


class _SyncGuard:
    """The threads that may not sync; nearly always none."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def check(self, reason: SyncReason) -> None:
        """Raise SyncForbiddenError, with the user's line, when a sync may not happen on this thread."""
        if threading.get_ident() in self.threads or backward_pass() >= 0:
            raise SyncForbiddenError(
                f"a sync inside of no_sync(): {_WHAT[reason]}",
                source=str(current_source(2)),
                hint=_HINTS.get(reason, _HINT),
            )


_WHAT = {
    SyncReason.EXPLICIT: "sync(), mark_step() or a change of backend asked for it",
    SyncReason.READ: "a value is read (item, bool, print, cpu, numpy, ...)",
    SyncReason.OPTIMIZER: "an optimizer finished its step",
    SyncReason.BOUND: "the pending program has reached the setting pending_bound",
    SyncReason.FALLBACK: "an operation cannot be recorded and would run eagerly",
    SyncReason.SEED: "the state of the random number generator is read or set",
    SyncReason.JIT: "a call of a jit function begins or ends",
    SyncReason.STATE: "a global switch of PyTorch is changed",
    SyncReason.EAGER: "an eager region begins",
}
_HINT = "move it out of the block, or allow it there: with torch_ltc.allow_sync():"
_HINTS = {
    SyncReason.READ: "async_item(tensor) and add_step_closure() read without a sync; or torch_ltc.allow_sync()",
    SyncReason.OPTIMIZER: "end the block before optimizer.step(), or set settings.sync_after_optimizer = False",
    SyncReason.BOUND: "a larger settings.pending_bound, or a shorter block",
}

sync_guard = _SyncGuard()


class _Scope:
    """Changes what this thread may do for a block; scopes nest."""

    _forbids: bool

    def __init__(self) -> None:
        self._before: list[bool] = []

    def __enter__(self) -> None:
        thread = threading.get_ident()
        self._before.append(thread in sync_guard.threads)
        _set(thread, self._forbids)

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        _set(threading.get_ident(), self._before.pop())


def _set(thread: int, forbidden: bool) -> None:
    if native is not None and forbidden != (thread in sync_guard.threads):
        # What is read in an eager region is no sync: it is recorded, and the sync is refused.
        native.suspend_eager(1 if forbidden else -1)
    if forbidden:
        sync_guard.threads.add(thread)
    else:
        sync_guard.threads.discard(thread)


class no_sync(_Scope):
    """`with torch_ltc.no_sync():` raises SyncForbiddenError at the line that would sync: a read, an eager operation,
    the end of a step, the bound of the pending program."""

    _forbids = True


class allow_sync(_Scope):
    """`with torch_ltc.allow_sync():` allows syncs for a block inside of `no_sync`."""

    _forbids = False
