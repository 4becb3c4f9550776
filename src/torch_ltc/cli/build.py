"""Compiling the extension in C++: `ltc build`."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from torch_ltc.cli.output import command, note
from torch_ltc.config import foreign_variable, native_folder
from torch_ltc.errors import LtcError
from torch_ltc.native.compiler import BuildError, build, find_compiler
from torch_ltc.private_files import is_private_folder


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="compile it again even if it is there")
    parser.add_argument("--sanitize", action="store_true", help="find errors of memory while it runs; slow")
    parser.add_argument("--if-possible", action="store_true", help="do nothing where there is no C++ compiler")


@command(
    "build",
    "compile the extension in C++ for this PyTorch and this Python",
    "Compile the extension in C++, which makes recording quicker, for the PyTorch and the Python that run this. It is "
    "kept in the user's cache folder; the package uses it from the next import on (LTC_NATIVE=0 for not).",
    _options,
)
def _build(options: argparse.Namespace) -> int:
    folder = Path(native_folder())
    try:
        compiler = find_compiler(foreign_variable("CXX"), options.sanitize)
    except BuildError as error:
        if options.if_possible:
            note(f"the extension in C++ is not built: {error}")
            return 0
        raise LtcError(str(error), hint="install g++ or clang, and the headers of Python") from error
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if not is_private_folder(str(folder)):
        raise LtcError(
            f"others may write to {folder}", hint="take the right from them: chmod go-w, or set XDG_CACHE_HOME"
        )
    try:
        print(build(folder, compiler, note, options.force))
    except BuildError as error:
        raise LtcError(f"the compiler failed\n{error}", hint="LTC_NATIVE=0 does without the extension") from error
    return 0
