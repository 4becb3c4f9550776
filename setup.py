"""Takes the version from the tag, and compiles the extension in C++ into a wheel, where PyTorch and a compiler are
there; all else is in pyproject.toml.

PyTorch is not in an isolated build: `pip install --no-build-isolation .` compiles, `pip install .` does not, and
`ltc build` does it afterwards. A failure costs the extension, and a line, never the installation.
"""

import importlib.util
import os
import subprocess
import sys
from email import message_from_string
from pathlib import Path
from types import ModuleType

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("torch_ltc", "native")
WITHOUT_TAG = "0.1.0.dev0"


def _git(*arguments: str) -> str:
    """What git prints; nothing where it fails, or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version() -> str:
    """The version of a source distribution, or that of the last tag, `v1.2.3`, and with commits since it
    `1.2.3+5.gabcdef0`."""
    written = ROOT / "PKG-INFO"
    if written.is_file():
        return str(message_from_string(written.read_text(encoding="utf-8"))["Version"])
    # Sources without a repository may lie in the repository of something else.
    described = _git("describe", "--tags", "--long", "--match", "v[0-9]*")
    if not described or Path(_git("rev-parse", "--show-toplevel")).resolve() != ROOT:
        return WITHOUT_TAG
    tag, commits, commit = described.rsplit("-", 2)
    return tag[1:] if commits == "0" else f"{tag[1:]}+{commits}.{commit}"


def _compiler() -> ModuleType:
    """`torch_ltc.native.compiler`, without the package, which registers the device."""
    file = ROOT / "src" / PACKAGE / "compiler.py"
    spec = importlib.util.spec_from_file_location("ltc_compiler", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class BuildNative(build_ext):
    """Builds the library that `torch_ltc.native.library` looks for beside the package."""

    def run(self) -> None:
        """Compile, unless there is nothing to compile with or nobody wants it; an editable installation uses `ltc
        build`."""
        if self.editable_mode or os.environ.get("LTC_NATIVE") == "0":
            return
        try:
            compiler = _compiler()
            made = compiler.build(Path(self.build_temp), compiler.find_compiler(os.environ.get("CXX", "")), print)
            target = Path(self.build_lib) / PACKAGE / "built"
            target.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(made), str(target / made.name))
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            print(f"torch_ltc: the extension in C++ is not built ({reason}): `ltc build` does it", file=sys.stderr)

    def get_outputs(self) -> list[str]:
        """Files that belong to the wheel."""
        return [str(file) for file in (Path(self.build_lib) / PACKAGE / "built").glob("*.so")]

    def get_output_mapping(self) -> dict[str, str]:
        """Nothing is made in the source tree."""
        return {}


setup(
    version=_version(),
    cmdclass={"build_ext": BuildNative},
    # The wheel is for one platform; the sources are found by `compiler.py`.
    ext_modules=[Extension("torch_ltc._native", [], optional=True)],
)
