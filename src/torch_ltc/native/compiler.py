"""Compiles the extension: one object file per source, kept by a digest of all that goes into it, and one library.

Needs the standard library and PyTorch alone: `setup.py` loads this file by its path, before the package is there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["BuildError", "Compiler", "build", "find_compiler", "library_name"]

_SOURCES = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)
_SCRATCH = "unfinished-"
_POLL_S = 0.05
_KEPT_S = 30 * 86400.0
_SANITIZE = ("-fsanitize=address,undefined", "-fno-omit-frame-pointer", "-g", "-O1")


class BuildError(Exception):
    """The extension cannot be compiled; the text says why."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler and the flags for this PyTorch and this Python."""

    command: tuple[str, ...]
    sanitize: bool = False

    def compile_flags(self) -> tuple[str, ...]:
        """Flags that make an object file of a source."""
        optimise = _SANITIZE if self.sanitize else ("-O2", "-g0")
        return (*_flags(), *optimise)

    def link_flags(self) -> tuple[str, ...]:
        """Flags that make the library of object files."""
        libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
        return ("-shared", f"-L{_TORCH / 'lib'}", *libraries, *(_SANITIZE[:1] if self.sanitize else ()))

    def version(self) -> str:
        """The first line of what the compiler says of itself."""
        done = subprocess.run([*self.command, "--version"], capture_output=True, text=True, check=False)
        return next(iter(done.stdout.splitlines()), "")


def _flags() -> tuple[str, ...]:
    standard = "c++17" if torch.__version__.startswith("2.11") else "c++20"
    includes = (_TORCH / "include", _TORCH / "include/torch/csrc/api/include", sysconfig.get_paths()["include"])
    # PyTorch's headers are not ours to warn about.
    found = [part for folder in includes for part in ("-isystem", str(folder))]
    abi = int(torch.compiled_with_cxx11_abi())
    warnings = ("-Wall", "-Wextra", "-Werror=return-type")
    return (f"-std={standard}", "-fPIC", "-fvisibility=hidden", *warnings, f"-D_GLIBCXX_USE_CXX11_ABI={abi}", *found)


def find_compiler(chosen: str = "", sanitize: bool = False) -> Compiler:
    """The compiler `chosen`, as the variable CXX names it, or the system's; raises BuildError when something is
    missing."""
    words = shlex.split(chosen) or [next(filter(shutil.which, ("c++", "g++", "clang++")), "c++")]
    if shutil.which(words[0]) is None:
        raise BuildError(f"there is no C++ compiler: {words[0]} is not on the PATH")
    headers = Path(sysconfig.get_paths()["include"], "Python.h")
    if not headers.exists():
        raise BuildError(f"Python's headers are not installed: there is no {headers}")
    return Compiler(tuple(words), sanitize)


def _sources() -> list[Path]:
    return sorted(_SOURCES.glob("*.cpp"))


def _text(source: Path) -> bytes:
    """The source and the headers of ours that it includes, directly or not."""
    texts: dict[str, bytes] = {}
    names = [source.name]
    while names:
        name = names.pop()
        if name not in texts:
            texts[name] = Path(_SOURCES, name).read_bytes()
            names += [found.decode() for found in _INCLUDE.findall(texts[name])]
    return b"\0".join(part for name in sorted(texts) for part in (name.encode(), texts[name]))


def _digest(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:20]


def library_name() -> str:
    """The name of the library's file: PyTorch's version, Python's ABI, and a digest of sources and PyTorch's commit."""
    digest = _digest(str(torch.version.git_version).encode(), *map(_text, _sources()))
    return f"_native-torch{torch.__version__}-{sysconfig.get_config_var('SOABI')}-{digest}.so"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Inside, no other process builds in this folder."""
    with open(folder / "lock", "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(folder: Path, compiler: Compiler, note: Callable[[str], None], jobs: int = 0, force: bool = False) -> Path:
    """The library in `folder`, compiled if it is not there; raises BuildError with the compiler's messages.

    Sources that did not change since they were compiled for the same PyTorch, Python and compiler are not compiled.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / library_name()
    with _locked(folder):
        if target.exists() and not force:
            return target
        objects = folder / "objects"
        objects.mkdir(mode=0o700, exist_ok=True)
        common = repr((compiler.command, compiler.version(), compiler.compile_flags(), torch.version.git_version))
        digests = {source: _digest(common.encode(), _text(source)) for source in _sources()}
        wanted = {source: objects / f"{source.stem}-{digest}.o" for source, digest in digests.items()}
        missing = [source for source, made in wanted.items() if not made.exists()]
        if missing:
            note(f"compiling {', '.join(source.name for source in missing)}: half a minute each")
        for abandoned in folder.glob(f"{_SCRATCH}*"):
            # Of a process that was killed: nobody else builds here now.
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
            compile_one = (*compiler.command, *compiler.compile_flags(), "-c")
            steps = [
                _Step((*compile_one, str(source)), Path(scratch, source.stem), wanted[source]) for source in missing
            ]
            _run_all(steps, jobs or len(os.sched_getaffinity(0)))
            link = (*compiler.command, *map(str, wanted.values()), *compiler.link_flags())
            _run_all([_Step(link, Path(scratch, "library"), target)], 1)
        for kept in wanted.values():
            os.utime(kept)
        _remove_old(folder, target)
    return target


@dataclass(frozen=True, slots=True)
class _Step:
    """A run of the compiler: it writes the file `made`, which becomes `target` once it is whole."""

    command: tuple[str, ...]
    made: Path
    target: Path

    def start(self) -> subprocess.Popen[bytes]:
        """Start the compiler; what it prints goes into a file beside `made`."""
        with open(self._log(), "wb") as file:
            return subprocess.Popen([*self.command, "-o", str(self.made)], stdout=file, stderr=subprocess.STDOUT)

    def finish(self, status: int) -> str:
        """Put the file into its place; the compiler's messages when it has failed."""
        if status:
            return f"{shlex.join(self.command)}\n{self._log().read_text(encoding='utf-8', errors='replace')}"
        os.chmod(self.made, 0o700)
        os.replace(self.made, self.target)
        return ""

    def _log(self) -> Path:
        return self.made.with_suffix(".log")


def _run_all(steps: Sequence[_Step], jobs: int) -> None:
    """Run all steps, so many at a time; raises BuildError with the messages of those that failed."""
    waiting = list(steps)
    running: dict[_Step, subprocess.Popen[bytes]] = {}
    failed = ""
    try:
        while running or (waiting and not failed):
            while waiting and len(running) < jobs and not failed:
                step = waiting.pop(0)
                running[step] = step.start()
            for step, process in list(running.items()):
                status = process.poll()
                if status is not None:
                    del running[step]
                    failed += step.finish(status)
            time.sleep(_POLL_S)
    finally:
        # After an interrupt: nobody waits for these.
        for process in running.values():
            process.kill()
            process.wait()
    if failed:
        raise BuildError(failed)


def _remove_old(folder: Path, made: Path) -> None:
    """Remove libraries and object files that nobody has used for a month."""
    oldest = time.time() - _KEPT_S
    for file in (*folder.glob("_native-*.so"), *folder.glob("objects/*.o")):
        if file != made and file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)
