"""Running a script or a module as `python` runs it: arguments, search path, `__main__`, exit status, traceback."""

from __future__ import annotations

import builtins
import io
import os
import runpy
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType

from torch import overrides

from torch_ltc.errors import LtcError
from torch_ltc.record.call_site import is_user_file

FAILED = 1
INTERRUPTED = 130
# As a shell has it of a process that the signal ended.
TERMINATED = 128 + signal.SIGTERM
_RUNPY = runpy.__file__
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OVERRIDES = overrides.__file__
# What calls raise for wrong arguments. Others, raised by the package, are faults that are to be reported in full.
_OF_CALLS = (RuntimeError, ValueError, IndexError, TypeError)


def run_script(script: str, as_module: bool = False) -> int:
    """Run it to its end, inside of `torch_state`; gives the exit status."""
    with _ending_on_sigterm():
        return _status_of(lambda: _execute(script, as_module))


@contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the script as `sys.exit` does, so that its recording is written. A script may set a handler
    of its own."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(TERMINATED)

    mine = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if mine:
        signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if mine and signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def torch_state(script: str, arguments: Sequence[str], as_module: bool) -> Iterator[None]:
    """Inside, the process looks as it does to a script. Raises LtcError when there is nothing to run."""
    if not as_module and not os.path.exists(script):
        raise LtcError(f"there is no file {script!r}", hint="name a script, or a module with -m")
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    sys.argv = [script, *arguments]
    # Started as `python -m torch_ltc`, the first place is the current folder; started as `ltc`, the folder of that;
    # with `python -P` there is no such place.
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [os.getcwd() if as_module else os.path.dirname(os.path.realpath(script))]
    try:
        yield
    finally:
        sys.argv, sys.path[:], sys.modules["__main__"] = before


def _execute(script: str, as_module: bool) -> None:
    if as_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    elif os.path.isdir(script) or script.endswith(".zip"):
        runpy.run_path(script, run_name="__main__")
    else:
        # As in Python, the file's name is absolute, whatever the argument is; runpy would take it as it is.
        path = os.path.abspath(script)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        module = types.ModuleType("__main__")
        module.__dict__.update(__file__=path, __builtins__=builtins, __spec__=None, __cached__=None)
        sys.modules["__main__"] = module
        exec(code, module.__dict__)


def _status_of(run: Callable[[], None]) -> int:
    """The exit status that Python would have; what it would print is printed."""
    try:
        run()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
        return FAILED
    except BaseException as error:
        _hide_ours(error)
        # The script may have set a hook of its own.
        sys.excepthook(type(error), error, error.__traceback__)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    return 0


def _hide_ours(error: BaseException) -> None:
    """Take this package's frames out of the tracebacks of an error and of its causes; of a fault of the package itself,
    only those before the script's first."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        one.__traceback__ = _from_script(one.__traceback__)
        if isinstance(one, _OF_CALLS):
            one.__traceback__ = _without_ours(one.__traceback__)
        one = one.__cause__ or one.__context__


def _from_script(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from the script's first frame on; an error in finding the script has none."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file != __file__ and file != _RUNPY and not file.startswith("<frozen "):
            return trace
        trace = trace.tb_next
    return None


def _without_ours(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without frames of this package, and without those of PyTorch that they lead to."""
    kept: list[TracebackType] = []
    below = False
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        if file.startswith((_PACKAGE, "<torch_ltc")):
            below = True
        elif is_user_file(file):
            below = False
        if not below and file != _OVERRIDES:
            kept.append(trace)
        trace = trace.tb_next
    made: TracebackType | None = None
    for one in reversed(kept):
        made = TracebackType(made, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return made
