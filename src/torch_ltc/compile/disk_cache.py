"""The disk cache: files of compiled programs for later processes.

One file per artifact, named by a hash of its key and found by comparing the key, which is in the file, in full.
Files are written under another name and then renamed, so that several processes may use one folder. Whatever is wrong
with a file makes it a miss. A file that another user could have written is not read: what it holds is executed. Each is
signed with a key of the user's, so that one that was copied from elsewhere is a miss, too.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch_ltc.config import user_folder
from torch_ltc.private_files import open_own_file, open_plain_file, user_key

__all__ = ["Key", "Store", "Stored", "read_key"]

log = logging.getLogger(__name__)

_MAGIC = b"torch_ltc program 2\n"
_HEAD = struct.Struct("<QQ32s")
_SUFFIX = ".ltc"
# A file under its first name that is older than this was left by a process that ended too early.
_ABANDONED_S = 3600.0
# What is evicted at once, as a part of the bound: not every file that is written looks for one that goes.
_EVICTED_PART = 16
_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Key:
    """The key of an artifact, as text, and a brief part of it that costs nothing to compare."""

    brief: str
    text: str

    @property
    def name(self) -> str:
        """The prefix of its file names."""
        return f"{self.brief}-{hashlib.blake2b(self.text.encode(), digest_size=_DIGEST_BYTES).hexdigest()}"


@dataclass(frozen=True, slots=True)
class Stored:
    """A file of a store. `kind` is the first part of its name; one that is not `finished` is being written, or was
    left by a process that ended too early."""

    path: str
    size_bytes: int
    used_s: float
    kind: str
    finished: bool


class Store:
    """A folder of artifacts, at most `bound_bytes` large; the empty name stands for none."""

    def __init__(self, folder: str, bound_bytes: int) -> None:
        self.folder = folder
        self.bound_bytes = bound_bytes
        self._lock = threading.Lock()
        self._names: dict[str, list[str]] = {}
        """The names of the files by the brief part of their keys, as they were when the folder had changed last."""
        self._listed: int | None = None
        self._room_bytes = 0
        """Bytes that may be written before all files are looked through: folders of thousands of files are common."""
        self._readable = self._writable = bool(folder)

    def may_have(self, brief: str) -> bool:
        """False when there is certainly no file for a key of this kind. Costs one question to the file system."""
        if not self._readable:
            return False
        try:
            changed = os.stat(self.folder).st_mtime_ns
            if changed != self._listed:
                names: dict[str, list[str]] = {}
                for name in os.listdir(self.folder):
                    names.setdefault(name.partition("-")[0], []).append(name)
                self._names, self._listed = names, changed
        except FileNotFoundError:
            return False
        except OSError as error:
            self._readable = self._writable = False
            log.warning("cannot read %s, nothing is loaded from it: %s", self.folder, error)
            return False
        return brief in self._names

    def find(self, key: Key) -> Iterator[tuple[str, bytes]]:
        """Every file with this key, and its contents; the latest used first."""
        if not self.may_have(key.brief):
            return
        for path in self._newest_first(key):
            data = _read(path, key.text.encode())
            if data is not None:
                yield path, data

    def _newest_first(self, key: Key) -> list[str]:
        prefix = key.name + "-"
        found: list[tuple[int, str]] = []
        for name in self._names.get(key.brief, ()):
            if name.startswith(prefix) and name.endswith(_SUFFIX):
                path = os.path.join(self.folder, name)
                # Another process may have removed it meanwhile.
                with suppress(OSError):
                    found.append((os.stat(path).st_mtime_ns, path))
        return [path for _, path in sorted(found, reverse=True)]

    def put(self, key: Key, variant: str, data: bytes) -> bool:
        """Write `data`, in the place of what had the same key and variant. True when it is written."""
        if not self._writable:
            return False
        text = key.text.encode()
        head = _HEAD.pack(len(text), len(data), _signature(text + data))
        body = b"".join((_MAGIC, head, text, data))
        if len(body) > self.bound_bytes:
            return False
        mark = hashlib.blake2b(variant.encode(), digest_size=4).hexdigest()
        path = os.path.join(self.folder, f"{key.name}-{mark}{_SUFFIX}")
        unfinished = f"{path}.{os.getpid()}.{threading.get_ident()}"
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb") as file:
                file.write(body)
            os.replace(unfinished, path)
        except OSError as error:
            _remove(unfinished)
            # Once is enough, to try and to say so.
            self._writable = False
            log.warning("cannot write to %s, nothing more is cached there: %s", self.folder, error)
            return False
        except BaseException:
            _remove(unfinished)
            raise
        with self._lock:
            self._room_bytes -= len(body)
            if self._room_bytes < 0:
                self._keep_bounded()
        return True

    def drop(self, path: str) -> None:
        """Remove a corrupt or stale file."""
        _remove(path)

    def files(self) -> list[Stored]:
        """All files that programs are in, the one that was not used for longest first; nothing is read or changed."""
        found: list[Stored] = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    # Whatever else is in the folder is not ours to count, or to remove.
                    if _SUFFIX not in entry.name:
                        continue
                    # Another process may have removed it meanwhile.
                    with suppress(FileNotFoundError):
                        status = entry.stat()
                        kind, finished = entry.name.partition("-")[0], entry.name.endswith(_SUFFIX)
                        found.append(Stored(entry.path, status.st_size, status.st_mtime, kind, finished))
        except OSError as error:
            log.info("cannot look through %s: %s", self.folder, error)
        return sorted(found, key=lambda file: (file.used_s, file.path))

    def _keep_bounded(self) -> None:
        """Evict the least recently used files, if all are more than the bound."""
        files = self.files()
        newest = files[-1].used_s if files else 0.0
        left = sum(file.size_bytes for file in files)
        wanted = self.bound_bytes - (self.bound_bytes // _EVICTED_PART if left > self.bound_bytes else 0)
        for file in files[:-1]:
            abandoned = not file.finished and file.used_s < newest - _ABANDONED_S
            if abandoned or left > wanted:
                _remove(file.path)
                left -= file.size_bytes
        # Other processes write, too.
        self._room_bytes = (self.bound_bytes - left) // 2


def read_key(path: str) -> str:
    """The text of the key in a file, empty when there is none; what was compiled is not read."""
    try:
        with open_plain_file(path) as file:
            start = file.read(len(_MAGIC) + _HEAD.size)
            if len(start) < len(_MAGIC) + _HEAD.size or not start.startswith(_MAGIC):
                return ""
            text_bytes, _, _ = _HEAD.unpack_from(start, len(_MAGIC))
            # A damaged head may name any size.
            if text_bytes > os.fstat(file.fileno()).st_size:
                return ""
            return file.read(text_bytes).decode(errors="replace")
    except OSError:
        return ""


def _read(path: str, text: bytes) -> bytes | None:
    """The contents of a file, if it is whole, ours, and has this key."""
    try:
        with open_own_file(path) as file:
            body = file.read()
    except PermissionError as error:
        log.warning("%s is not read: %s", path, error)
        return None
    except OSError:
        return None
    with suppress(OSError):
        # When it was last used; a folder that may only be read does without.
        os.utime(path)
    start = len(_MAGIC) + _HEAD.size
    if len(body) < start or not body.startswith(_MAGIC):
        return None
    text_bytes, data_bytes, digest = _HEAD.unpack_from(body, len(_MAGIC))
    if len(body) != start + text_bytes + data_bytes or body[start : start + text_bytes] != text:
        return None
    return body[start + text_bytes :] if hmac.compare_digest(_signature(body[start:]), digest) else None


def _signature(body: bytes) -> bytes:
    return hmac.digest(user_key(user_folder()), body, "sha256")


def _remove(path: str) -> None:
    try:
        os.remove(path)
    except OSError as error:
        log.debug("cannot remove %s: %s", path, error)
