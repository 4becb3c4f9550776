"""Compiles the extension: all sources as one, into a library whose name has a digest of all that goes into it.

PyTorch's headers are what takes long: read once, the whole takes no more than two of its files would by themselves.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["BuildError", "Compiler", "build", "find_compiler", "library_name"]

_SOURCES = Path(__file__).parent
_TORCH = Path(torch.__file__).parent
_INCLUDE = re.compile(rb'^#include "([^"]+)"', re.MULTILINE)
_SCRATCH = "unfinished-"
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
        """Flags for the sources."""
        optimise = _SANITIZE if self.sanitize else ("-O2", "-g0")
        return (*_flags(), *optimise)

    def link_flags(self) -> tuple[str, ...]:
        """Flags for the library."""
        libraries = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
        return ("-shared", f"-L{_TORCH / 'lib'}", *libraries, *(_SANITIZE[:1] if self.sanitize else ()))


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


def build(folder: Path, compiler: Compiler, note: Callable[[str], None], force: bool = False) -> Path:
    """The library in `folder`, compiled if it is not there; raises BuildError with the compiler's messages."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    target = folder / library_name()
    with _locked(folder):
        if target.exists() and not force:
            return target
        note("compiling the extension: a minute or two")
        for abandoned in folder.glob(f"{_SCRATCH}*"):
            # Of a process that was killed: nobody else builds here now.
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH) as scratch:
            os.replace(_compile(Path(scratch), compiler), target)
        _remove_old(folder, target)
    return target


def _compile(scratch: Path, compiler: Compiler) -> Path:
    """The library, made in this folder."""
    unit, made, log = scratch / "extension.cpp", scratch / "library", scratch / "log"
    # PyTorch's conversions first: they must be there before anything of pybind11's is used with tensors.
    headers = ("<torch/csrc/utils/pybind.h>", *(f'"{source.name}"' for source in _sources()))
    unit.write_text("".join(f"#include {header}\n" for header in headers), encoding="utf-8")
    places = ("-I", str(_SOURCES), str(unit), "-o", str(made))
    command = (*compiler.command, *compiler.compile_flags(), *places, *compiler.link_flags())
    with open(log, "wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        try:
            status = process.wait()
        finally:
            # After an interrupt: nobody waits for it.
            process.kill()
            process.wait()
    if status:
        raise BuildError(f"{shlex.join(command)}\n{log.read_text(encoding='utf-8', errors='replace')}")
    os.chmod(made, 0o700)
    return made


def _remove_old(folder: Path, made: Path) -> None:
    """Remove libraries that nobody has used for a month, and object files, which earlier versions made."""
    oldest = time.time() - _KEPT_S
    for file in (*folder.glob("_native-*.so"), *folder.glob("objects/*.o")):
        if file != made and file.stat().st_mtime < oldest:
            file.unlink(missing_ok=True)
