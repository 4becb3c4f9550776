"""Call sites: the line of the user's code that records an instruction.

The stack is walked only when a new tree node is made: a program that was recorded before costs nothing here. Frames of
PyTorch and of torch_ltc are skipped, so that the innermost line is one the user wrote.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch

from torch_ltc.pytorch.private import backward_node, backward_pass, next_node_number
from torch_ltc.record.module_path import MODULE_CALL, module_path
from torch_ltc.source import UNKNOWN, Source

__all__ = [
    "UNKNOWN",
    "Source",
    "backward_number",
    "call_source",
    "current_source",
    "forward_number",
    "is_user_file",
    "paired",
    "pass_on_another_thread",
    "sequence_number",
]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SKIPPED = (_PACKAGE, _TORCH, "<torch_ltc", "<frozen", "<eval_with_key>")

# Whether a file is the user's, and lines that were found before, each by place in its code and by module. The code is
# kept with them: its address is the key.
_files: dict[str, bool] = {}
_lines: dict[tuple[int, int, bool, str], tuple[CodeType, Source]] = {}
_MOST_LINES = 65_536

# Asking PyTorch which autograd node runs gives the node a Python object that lives as long as the node, and a long
# chain of those is freed by recursion: some 15,000 fit a stack of 8 MiB. So only so many of a pass are asked for.
_MOST_NODES = 2_000


# Of PyTorch: what calls the autograd engine.
_ENGINE = "_engine_run_backward"


class _LatestBackward:
    """The line of the backward pass that was asked for last, by the number of the pass, and how many of its nodes were
    asked for."""

    # In one piece: passes may run on several threads.
    found = (-1, UNKNOWN)
    asked = 0


_latest = _LatestBackward()
# The lines of passes that run on a thread of the engine's.
_under_way: list[Source] = []


def is_user_file(file: str) -> bool:
    """True for a source file that is neither PyTorch's nor this package's."""
    known = _files.get(file)
    if known is None:
        known = _files[file] = not file.startswith(_SKIPPED)
    return known


def _user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of the user's; None if a backward pass has been asked for since."""
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        if frame.f_code.co_name == _ENGINE:
            return None
        frame = frame.f_back
    return frame


def _backward_caller() -> FrameType | None:
    """The user frame that has asked for the backward pass that this thread runs."""
    # Not this frame: it would hold itself, and with it whatever those before it hold. And none of another thread: while
    # that runs, CPython 3.11 ends the process, or gives other objects in place of frames.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == _ENGINE:
            return _user_frame(frame.f_back)
        frame = frame.f_back
    return None


@contextmanager
def pass_on_another_thread() -> Iterator[None]:
    """A block in which the engine runs a backward pass for this thread on one of its own."""
    frame = _user_frame(sys._getframe(2))
    if frame is None:
        yield
        return
    source = _source(frame, backward=True)
    _under_way.append(source)
    try:
        yield
    finally:
        _under_way.remove(source)


def _line_under_way() -> Source:
    """The line of the pass that runs on a thread of the engine's, if there is only one."""
    lines = set(_under_way)
    return lines.pop() if len(lines) == 1 else UNKNOWN


def _backward_source() -> Source:
    """The line that called backward. All calls of one pass have one, which takes long to find."""
    job = backward_pass()
    known, source = _latest.found
    if job < 0 or job != known:
        frame = _backward_caller()
        source = _line_under_way() if frame is None else _source(frame, backward=True)
        _latest.found = (job, source)
        _latest.asked = 0
    return source


def sequence_number() -> int:
    """The number that the next autograd node of this thread gets. Each thread counts by itself."""
    number: int = next_node_number()
    return number


def forward_number(values: Iterable[object]) -> int | None:
    """The number of the autograd node of the call that is being recorded with these arguments, if it has one: autograd
    makes the node, then calls the kernel. It has none when none of its tensors wants a gradient."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                return sequence_number() - 1
        elif isinstance(value, list) and any(isinstance(one, torch.Tensor) and one.requires_grad for one in value):
            return sequence_number() - 1
    return None


def backward_number() -> int | None:
    """The number of the autograd node that runs on this thread; None when there is none, or it is not to be asked."""
    if _latest.asked >= _MOST_NODES:
        return None
    _latest.asked += 1
    node = backward_node()
    return None if node is None else node._sequence_nr()


def _source(frame: FrameType, backward: bool, module: str = "") -> Source:
    code = frame.f_code
    place = (id(code), frame.f_lasti, backward, module)
    found = _lines.get(place)
    if found is None:
        if len(_lines) >= _MOST_LINES:
            _lines.clear()
        name = getattr(code, "co_qualname", code.co_name)
        found = _lines[place] = (code, Source(code.co_filename, frame.f_lineno, name, backward, module))
    return found[1]


def current_source(depth: int = 1) -> Source:
    """The innermost user line now, or the user's `backward()` line in a backward pass."""
    frame = _user_frame(sys._getframe(depth))
    return _backward_source() if frame is None else _source(frame, backward=False)


# Lines of backward calls with their forward lines, by the identities of both, which are kept with them.
_pairs: dict[tuple[int, int], tuple[Source, Source, Source]] = {}


def call_source(depth: int = 1) -> Source:
    """As `current_source`, with the path of the module that runs. For calls that are recorded for the first time: it
    looks at more of the stack."""
    user: FrameType | None = None
    module: FrameType | None = None
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None:
        code = frame.f_code
        if code.co_name == _ENGINE:
            break
        if code is MODULE_CALL:
            if module is None:
                module = frame
                if user is not None:
                    break
        elif user is None and (_files[name] if (name := code.co_filename) in _files else is_user_file(name)):
            user = frame
            if module is not None:
                break
        frame = frame.f_back
    if user is not None:
        return _source(user, False, "" if module is None else module_path(module))
    return _backward_source()


def paired(backward: Source, forward: Source) -> Source:
    """The line of a backward call with that of its forward call."""
    found = _pairs.get((id(backward), id(forward)))
    if found is None:
        if len(_pairs) >= _MOST_LINES:
            _pairs.clear()
        made = Source(backward.file, backward.line, backward.function, True, forward.module, forward)
        found = _pairs[id(backward), id(forward)] = (backward, forward, made)
    return found[2]
