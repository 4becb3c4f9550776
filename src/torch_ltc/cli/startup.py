"""Errors of the import itself, as a wrong LTC_* variable, as messages of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch_ltc.errors import LtcError

WRONG_ARGUMENTS = 2


@contextmanager
def messages_of_import() -> Iterator[None]:
    """Inside, an error ends the process with a message if the process is the command line."""
    try:
        yield
    except LtcError as error:
        if not _is_command_line():
            raise
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(WRONG_ARGUMENTS) from None


def is_command(name: str) -> bool:
    """True when the process is the command line, and runs this command."""
    return _command_line()[:1] == [name]


def _is_command_line() -> bool:
    return _command_line() is not _NONE


_NONE: list[str] = []


def _command_line() -> list[str]:
    """What follows `ltc` or `python -m torch_ltc`; `_NONE` when the process is something else."""
    # While `python -m` looks for the package, its first argument is "-m".
    if sys.argv[:1] == ["-m"]:
        words = sys.orig_argv
        start = words.index("-m") + 1 if "-m" in words else len(words)
        return words[start + 1 :] if words[start : start + 1] == ["torch_ltc"] else _NONE
    if sys.argv and os.path.splitext(os.path.basename(sys.argv[0]))[0] == "ltc":
        return sys.argv[1:]
    return _NONE
