"""Files and folders that no other user can have written: what is read from them is executed."""

from __future__ import annotations

import os
import stat
from typing import BinaryIO

__all__ = ["is_private_folder", "is_trusted", "open_plain_file"]

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_plain_file(path: str) -> BinaryIO:
    """Open a file to read it. Raises OSError for what is no plain file: a pipe would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return open(descriptor, "rb")


def is_trusted(status: os.stat_result) -> bool:
    """True for a plain file of this user that nobody else may write to."""
    if not hasattr(os, "getuid"):
        return True
    mine = status.st_uid == os.getuid() and not status.st_mode & _OTHERS_WRITE
    return mine and stat.S_ISREG(status.st_mode)


def is_private_folder(path: str) -> bool:
    """True for a folder of this user in which nobody else can put, replace or rename anything, nor rename the folder or
    one above it."""
    if not hasattr(os, "getuid"):
        return True
    folder = os.path.realpath(path)
    try:
        status = os.stat(folder)
        if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE or not stat.S_ISDIR(status.st_mode):
            return False
        while folder != os.path.dirname(folder):
            folder = os.path.dirname(folder)
            above = os.stat(folder)
            # In a sticky folder, as /tmp, each user renames what is their own.
            kept = not above.st_mode & _OTHERS_WRITE or above.st_mode & stat.S_ISVTX
            if above.st_uid not in (0, os.getuid()) or not kept:
                return False
    except OSError:
        return False
    return True
