"""Every error and warning class of the package, each documented as a manual page.

The lowest layer: it imports nothing of the package. Messages are put together here, so that every error reads the
same way: what happened, where the user recorded it, what to try.
"""

import copy
from collections.abc import Sequence
from typing import TypeVar

Error = TypeVar("Error", bound="LtcError")


class LtcError(RuntimeError):
    """Base of every error that the package raises on purpose.

    When: never raised itself. What to do: catch it to handle any failure of the lazy device in one place; an
    error of PyTorch that the device passes on (a wrong argument, found when the operation is recorded) is not
    an `LtcError`, it has the class that eager PyTorch raises.
    """

    def __init__(self, what: str, *, source: str | None = None, hint: str | None = None) -> None:
        """Build the message: `what`, then the user's line (`source`), then what to try (`hint`)."""
        lines = [what]
        if source:
            lines.append(f"  recorded at {source}")
        if hint:
            lines.append(f"  try: {hint}")
        super().__init__("\n".join(lines))
        self.source = source
        self.hint = hint

    def untraced(self: Error) -> Error:
        """A copy without tracebacks: what may be kept.

        An error that was raised has the frames that it went through, and these have the tensors of the user's.
        """
        made, cause = copy.copy(self), self.__cause__
        try:
            made.__cause__ = copy.copy(cause)
        except Exception:
            # Classes of others need not be such that they can be copied.
            made.__cause__ = RuntimeError(repr(cause))
        return made

    def list_others(self, others: Sequence["LtcError"]) -> None:
        """Add errors of the same moment to the message, because only one error can be raised."""
        if others:
            listed = "\n".join(str(other) for other in others)
            self.args = (f"{self.args[0]}\nand {len(others)} more failed:\n{listed}",)


class JitError(LtcError):
    """A call of a jit function cannot be replayed.

    When: the function does what a replay would not do (a read, a print, a list that grows), and `fallback` is "error".
    What to do: move that out of the function, or leave `fallback` at "record", which records such calls each time.
    """


class SettingError(LtcError, ValueError):
    """A setting was given a value that it cannot have, or a setting of that name does not exist.

    When: on assignment to an attribute of `torch_ltc.config.settings`, on entering `settings.scope(...)`, or at
    import when an `LTC_*` environment variable holds a value that cannot be read. What to do: the message lists
    the allowed values; `print(torch_ltc.config.settings.describe())` lists all settings.
    """


class UnsupportedTorchError(LtcError, ImportError):
    """The installed PyTorch is a version that the device cannot be registered with.

    When: at `import torch_ltc`, with a version older than the message names, or one that lacks the interfaces that the
    device is built on. What to do: install a version inside the range that the message names.
    """


class FallbackError(LtcError):
    """An operation could not be recorded and would have run eagerly, which the setting `fallback` forbids.

    When: `fallback` is "error" and an operation has a result whose shape depends on data (`nonzero`, a boolean
    index), or has no meta kernel, or is named by `force_fallback`. What to do: replace the operation at the line
    named (`torch.where` with three arguments instead of a boolean index), or allow it with
    `settings.fallback = "warn"`.
    """


class ExecutionError(LtcError):
    """An operation failed when its program ran, later than the line that recorded it.

    When: at a sync or a read. The message names the operation, the shapes of its inputs and the line that recorded
    it; the original error is the `__cause__`. Raised once: results that do not depend on the operation are intact
    and the device stays usable. What to do: correct the line named;
    `torch_ltc.config.settings.scope(backend="interpreter")` shows whether the backend is to blame.
    """

    def __init__(
        self,
        what: str,
        *,
        op: str | None = None,
        input_shapes: Sequence[str] = (),
        source: str | None = None,
        hint: str | None = None,
    ) -> None:
        """Build the message of a failed operation `op` whose inputs had `input_shapes` (as "float32[2, 3]")."""
        shapes = f"\n  inputs: {', '.join(input_shapes)}" if input_shapes else ""
        super().__init__(f"{what}{shapes}", source=source, hint=hint)
        self.op = op
        self.input_shapes = tuple(input_shapes)


class ExecutionIndexError(ExecutionError, IndexError):
    """An `ExecutionError` where eager raises an `IndexError`: either class catches it.

    When: an index is out of range. What to do: as for `ExecutionError`.
    """


class ExecutionValueError(ExecutionError, ValueError):
    """An `ExecutionError` where eager raises a `ValueError`: either class catches it.

    When: a kernel does not take a value. What to do: as for `ExecutionError`.
    """


class ExecutionNotImplementedError(ExecutionError, NotImplementedError):
    """An `ExecutionError` where eager raises a `NotImplementedError`: either class catches it.

    When: the physical device has no kernel for the call. What to do: as for `ExecutionError`.
    """


class PoisonedTensorError(ExecutionError):
    """A tensor was used whose value was never computed, because the operation that makes it failed.

    When: reading such a tensor, or recording an operation on it, after the `ExecutionError` was raised. The failed
    operation is named again. What to do: compute the tensor anew, from inputs that are intact.
    """


class DeviceLostError(ExecutionError):
    """The physical device runs nothing any more: a kernel has failed in a way that a CUDA device does not survive.

    When: an assertion in a kernel failed (an index that is out of range), or a kernel touched memory that is not there;
    at the call that notices, and at every later one that needs the device. The calls that may have caused it are named
    with their lines. What to do: correct the line, and start the process anew; with CUDA_LAUNCH_BLOCKING=1 the call is
    known for certain.
    """


class DeviceMismatchError(LtcError):
    """An operation mixes tensors of devices that cannot meet, or names a device that does not exist.

    When: an operation is recorded on tensors of the lazy device and of another device (a tensor with no dimensions
    on the CPU is allowed, as in eager PyTorch), or an ordinal such as "ltc:7" is asked for and not there. What to
    do: move the tensor with `.to("ltc")`; `torch.ltc.device_count()` says how many there are.
    """


class GroupError(LtcError):
    """A collective on tensors of the device that its process group cannot run.

    When: the group was made for other devices than ltc, it was destroyed before the collective ran, another rank died
    or does not come, or the collective has no recorded form (sparse tensors, `PREMUL_SUM`, `recv()` from any rank).
    What to do: make the group with `init_process_group("ltc")` or `"cpu:gloo,ltc:ltc"`, and do what the message says.
    """


class RankMismatchError(LtcError):
    """The ranks of a process group recorded different programs.

    When: with the setting `rank_check`, the programs that the ranks have queued are compared every so many syncs, and
    they differ: one rank took another branch, has another shape, or synced elsewhere. Without the comparison the ranks
    would wait for each other until the group's timeout. What to do: make the ranks record the same; the message has
    the first difference and the lines.
    """


class DataAccessError(LtcError):
    """Memory of a lazy tensor was asked for directly, and a lazy tensor has none to point at.

    When: DLPack with `copy=False`, `share_memory_()`, a queue of processes. What to do: `tensor.cpu()` first, which
    runs what is pending and copies the value.
    """


class UnsupportedLayoutError(LtcError, NotImplementedError):
    """A tensor was asked for whose layout the device does not hold: nested and strided.

    When: at the call that would make it. What to do: the message names the way round; such tensors work on the CPU.
    """


class OtherAcceleratorError(LtcError):
    """A backward pass went through tensors of a GPU that are not the device's own.

    When: at `backward()` or `torch.autograd.grad` of CUDA tensors in a process that has imported `torch_ltc`: PyTorch's
    autograd engine knows one accelerator, and that is `ltc` then. What to do: put the model on `ltc` with
    `LTC_TS_CUDA=1`, which runs its programs on the GPU, or train in a process without `torch_ltc`.
    """


class BackendError(LtcError):
    """Base of the errors of backends.

    When: a backend fails outside of compiling, for example when asked for a physical device that it cannot drive.
    What to do: run the same code on the reference with `settings.backend = "interpreter"`; if that works, the
    backend is at fault.
    """


class CompileError(BackendError):
    """A backend could not compile a program that the interpreter can run.

    When: a program has become hot and its backend refuses it; the original error is the `__cause__`. What to do:
    report the program (`torch_ltc.debug.dump_ir`), and go on with `settings.backend = "interpreter"`.
    """


class VerifyError(BackendError):
    """A program is not well formed.

    When: a pass over programs, of the package or of a backend, made one that uses a value before it is defined, writes
    where it must not, or does not fit an operator's schema; checked in tests and by `torch_ltc.program.verify`. What
    to do: correct the pass; the message shows the instruction.
    """


class UnsupportedCallError(CompileError):
    """A program has a call that its backend has no rule for, and the setting `backend_failure` forbids to run it apart.

    When: a program has become hot. The operator and the line that recorded it are named. What to do: allow PyTorch's
    own kernel for that call with `settings.backend_failure = "warn"`, add a rule to the backend, or replace the
    operator.
    """


class UnknownBackendError(BackendError, ValueError):
    """A backend was named that is not registered.

    When: at the first compile or at the choice of the backend. What to do: pick one of the names in the message, or
    install the package that provides the backend.
    """


class InferenceError(LtcError):
    """The shape of a result could not be found without running the operation.

    When: an operation's meta kernel is missing or fails in a way that eager PyTorch would not. What to do: register
    a meta kernel for a custom operation (`torch.library.register_fake`); without one it runs eagerly, as `fallback`
    says.
    """


class ClosureError(LtcError):
    """A step closure failed on the thread of asynchronous closures, or its queue could not be drained.

    When: at the next step after an asynchronous closure raised, or in `wait()`. `exceptions` holds all that was
    raised since the last report, the first of them is the `__cause__`. Closures queued behind a failing one still
    run. What to do: correct the closure; none of the failures stops the training by itself.
    """

    def __init__(self, what: str, *, exceptions: Sequence[BaseException] = (), hint: str | None = None) -> None:
        """Build the message; `exceptions` are the errors of the closures, oldest first."""
        super().__init__(what, hint=hint)
        self.exceptions = tuple(exceptions)


class RecompileError(LtcError):
    """A program was compiled again and again, which the setting `recompiles` forbids.

    When: `recompiles` is "error", at the sync or read after the third compilation for one site. What to do: the message
    says what changed and what to do about it, `torch_ltc.explain()` says more; nothing is lost, the program has run.
    """


class SyncForbiddenError(LtcError):
    """Something would have synced inside `with torch_ltc.no_sync():`.

    When: at the line that reads a value, runs an operation eagerly, ends a step or reaches the bound of the pending
    program. Nothing was synced. What to do: move that line out of the block, log with `torch_ltc.async_item`, or allow
    it there with `with torch_ltc.allow_sync():`.
    """


class ValidationError(BackendError):
    """A backend computed something else than the interpreter, beyond the tolerance for the dtype.

    When: the setting `check` is "validate" or "all", at the sync or read after such a program. The first call
    that differs is named. What to do: report it with what `torch_ltc.debug.dump_repro` writes; the interpreter's
    results were kept.
    """


class InvariantError(LtcError):
    """Something that must always hold of the device's own state does not.

    When: the setting `check` is "invariants", at the end of a sync. The text says which invariant, and of which
    program. What to do: report it, with the script; results since the sync before it may be wrong.
    """


class RecordingError(LtcError, ValueError):
    """A file is no recording of a run, or one of another version.

    When: `python -m torch_ltc report`, `doctor`, `explain` or `dump` read a file. What to do: write it again with
    `python -m torch_ltc run SCRIPT`, or by setting LTC_REPORT to its name.
    """


class LtcWarning(UserWarning):
    """Base of every warning of the package.

    When: never shown itself. What to do: use it to filter all of them at once.
    """


class UntestedTorchWarning(LtcWarning):
    """The installed PyTorch is newer than the versions that the tests have run on.

    When: at `import torch_ltc`, once. What to do: nothing while things work: the device is built on interfaces that
    PyTorch may change in any release. If something fails, install a version inside the range that the message names.
    """


class FallbackWarning(LtcWarning):
    """An operation ran eagerly instead of being recorded, after a sync.

    When: `fallback` is "warn"; once per operation and process, with the user's line. What to do: nothing if the
    step is fast enough; otherwise replace the operation, or set `settings.fallback = "allow"` to silence it.
    """


class BackendWarning(LtcWarning):
    """A backend could not compile or run a program, or part of it, and PyTorch's own kernels ran it instead.

    When: `backend_failure` is "warn"; once per program. Backend, operator and line are named. What to do: nothing if
    the step is fast enough; the results are right either way. `settings.backend_failure = "error"` raises instead.
    """


class ListenerWarning(LtcWarning):
    """A listener of `torch_ltc.events` raised an exception.

    When: at the first event for which it did; the listener stays subscribed and its later failures are silent. What
    to do: correct the listener. Recording and syncing are not affected.
    """


class RecompileWarning(LtcWarning):
    """Programs of one site are compiled again and again.

    When: `recompiles` is "warn", at the third, sixth, twelfth, ... compilation for one site; the message says what
    changed and where, under a stable id. What to do: what the message says; `torch_ltc.explain()` says more.
    """


class NonFiniteWarning(LtcWarning):
    """An operation made a NaN or an infinity out of finite numbers.

    When: the setting `check` is "nan" or "all", at the sync or read after the program in which it happened; once per
    operation and line. The operation is the first such one of its program; the ranges of its inputs and the line that
    recorded it are named. What to do: look at that line; `warnings.simplefilter("error", NonFiniteWarning)` makes it an
    error. The results of the program are as they would be without the check.
    """
