"""Files and folders that no other user can have written: what is read from them is executed."""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from functools import lru_cache
from typing import BinaryIO

__all__ = [
    "is_private_folder",
    "is_trusted",
    "open_own_file",
    "open_plain_file",
    "private_opener",
    "user_key",
    "write_private_file",
]

_KEY_BYTES = 32

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def open_plain_file(path: str) -> BinaryIO:
    """Open a file to read it. Raises OSError for what is no plain file: a pipe would wait for a writer."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no plain file")
    return open(descriptor, "rb")


def open_own_file(path: str) -> BinaryIO:
    """Open a file to read it that nobody but this user can have written or put in its place. Raises PermissionError for
    one that others may write to, or whose folder they may, and OSError for what is no plain file.

    Folder and file are looked at as they are opened: what is put in their place meanwhile is not read.
    """
    if not hasattr(os, "getuid"):
        return open_plain_file(path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or status.st_mode & _OTHERS_WRITE:
            raise PermissionError("others may write to its folder")
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW
        descriptor = os.open(os.path.basename(path), flags, dir_fd=folder)
    finally:
        os.close(folder)
    status = os.fstat(descriptor)
    if not is_trusted(status):
        os.close(descriptor)
        plain = stat.S_ISREG(status.st_mode)
        raise PermissionError("others may write to it") if plain else OSError(f"{path} is no plain file")
    return open(descriptor, "rb")


def private_opener(path: str, flags: int) -> int:
    """For `open`: a file that is made is for this user alone."""
    return os.open(path, flags, 0o600)


def write_private_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file for this user alone, in one step: who reads meanwhile finds the old one or the new one. Raises
    OSError.

    Under a new name first: a link that somebody else has put in its place is replaced, and not followed.
    """
    folder, name = os.path.split(os.fspath(path))
    descriptor, unfinished = tempfile.mkstemp(prefix=f".{name}.", dir=folder or ".")
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(unfinished, path)
    except BaseException:
        with suppress(OSError):
            os.remove(unfinished)
        raise


@lru_cache(maxsize=8)
def user_key(folder: str) -> bytes:
    """The secret in the file `key` of this folder of the user's, made when there is none; empty where none can be kept.

    Files that are read only by this user are signed with it: one that was copied from somebody else is not.
    """
    path = os.path.join(folder, "key")
    with suppress(OSError):
        os.makedirs(folder, mode=0o700, exist_ok=True)
        if not os.path.lexists(path):
            descriptor, made = tempfile.mkstemp(dir=folder)
            with open(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            # Another process may have made one at the same time: the first counts.
            with suppress(FileExistsError):
                os.link(made, path)
            os.remove(made)
    try:
        with open_own_file(path) as file:
            secret = not hasattr(os, "getuid") or not os.fstat(file.fileno()).st_mode & _OTHERS
            key = file.read(_KEY_BYTES)
    except OSError:
        return b""
    return key if secret and len(key) == _KEY_BYTES else b""


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
