"""Where in the user's code an instruction was recorded.

The stack is walked only when a new tree node is made: a program that was recorded before costs nothing here. Frames of
PyTorch and of torch_ltc are skipped, so that the innermost line is one the user wrote.
"""

from __future__ import annotations

import os
import sys
from types import CodeType, FrameType

import torch

from torch_ltc.source import UNKNOWN, Source

__all__ = ["UNKNOWN", "Source", "current_source", "is_user_file"]

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_SKIPPED = (_PACKAGE, _TORCH, "<torch_ltc", "<frozen", "<eval_with_key>")
_ENGINE = "_engine_run_backward"


# Whether a file is the user's, and lines that were found before, each by place in its code. The code is kept with them:
# its address is the key.
_files: dict[str, bool] = {}
_lines: dict[tuple[int, int, bool], tuple[CodeType, Source]] = {}
_MOST_LINES = 65_536


class _LatestBackward:
    """The line of the backward pass that was asked for last, by the number of the pass."""

    # In one piece: passes may run on several threads.
    found = (-1, UNKNOWN)


_latest = _LatestBackward()


def is_user_file(file: str) -> bool:
    """True for a source file that is neither PyTorch's nor this package's."""
    known = _files.get(file)
    if known is None:
        known = _files[file] = not file.startswith(_SKIPPED)
    return known


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _backward_caller() -> FrameType | None:
    """The user frame of a thread that waits in the autograd engine: backward runs on a thread of its own."""
    for outer in sys._current_frames().values():
        frame: FrameType | None = outer
        while frame is not None:
            if frame.f_code.co_name == _ENGINE:
                return _user_frame(frame)
            frame = frame.f_back
    return None


def _backward_source() -> Source:
    # Asking PyTorch which autograd node runs would give the node a Python object, and a long chain of those is freed by
    # recursion. The number of the pass is enough: all its calls have one line, which takes long to find.
    task = torch._C._current_graph_task_id()
    known, source = _latest.found
    if task < 0 or task != known:
        frame = _backward_caller()
        source = UNKNOWN if frame is None else _source(frame, backward=True)
        _latest.found = (task, source)
    return source


def _source(frame: FrameType, backward: bool) -> Source:
    code = frame.f_code
    place = (id(code), frame.f_lasti, backward)
    found = _lines.get(place)
    if found is None:
        if len(_lines) >= _MOST_LINES:
            _lines.clear()
        name = getattr(code, "co_qualname", code.co_name)
        found = _lines[place] = (code, Source(code.co_filename, frame.f_lineno, name, backward))
    return found[1]


def current_source(depth: int = 1) -> Source:
    """The innermost user line now, or the user's `backward()` line on an autograd thread."""
    frame = _user_frame(sys._getframe(depth))
    return _backward_source() if frame is None else _source(frame, backward=False)
