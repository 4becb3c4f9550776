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


def _is_command_line() -> bool:
    # While `python -m` looks for the package, its first argument is "-m".
    if sys.argv[:1] == ["-m"]:
        words = sys.orig_argv
        return "-m" in words and words[words.index("-m") + 1 :][:1] == ["torch_ltc"]
    return bool(sys.argv) and os.path.splitext(os.path.basename(sys.argv[0]))[0] == "ltc"
