"""Compiling the extension, with a compiler that writes down what it was asked for; finding and refusing libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torch_ltc.cli.main import main
from torch_ltc.native import compiler, library
from torch_ltc.native.compiler import BuildError, Compiler, build, find_compiler, library_name

# Its "library" holds its sources; each run adds a line to `calls`.
FAKE = """#!/usr/bin/env python3
import pathlib, sys
words = sys.argv[1:]
made, folder = (pathlib.Path(words[words.index(option) + 1]) for option in ("-o", "-I"))
unit = next(word for word in words if word.endswith(".cpp"))
names = [line.split('"')[1] for line in pathlib.Path(unit).read_text().splitlines() if '"' in line]
with open(pathlib.Path(__file__).parent / "calls", "a") as calls:
    calls.write(" ".join(names) + "\\n")
text = "".join((folder / name).read_text() for name in names)
if "broken" in text:
    print("this is wrong")
    sys.exit(1)
made.write_text(text)
"""


class Workshop:
    """A folder with two sources and a compiler."""

    def __init__(self, folder: Path) -> None:
        self.sources, self.made = folder / "sources", folder / "made"
        self.sources.mkdir()
        self.script = folder / "fake-compiler"
        self.script.write_text(FAKE)
        self.script.chmod(0o700)
        self.write("one.cpp", "1")
        self.write("two.cpp", "2")

    def write(self, name: str, text: str) -> None:
        (self.sources / name).write_text(text)

    def build(self) -> Path:
        return build(self.made, Compiler((str(self.script),)), lambda text: None)

    def calls(self) -> list[str]:
        """What was compiled and linked since the last question."""
        file = self.script.parent / "calls"
        found = file.read_text().splitlines() if file.exists() else []
        file.write_text("")
        return found


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workshop:
    made = Workshop(tmp_path)
    monkeypatch.setattr(compiler, "_SOURCES", made.sources)
    return made


def test_all_sources_are_compiled_as_one_and_a_second_build_compiles_nothing(workshop: Workshop) -> None:
    made = workshop.build()
    assert made.read_text() == "12"
    assert workshop.calls() == ["one.cpp two.cpp"]
    assert workshop.build() == made
    assert workshop.calls() == []


def test_a_changed_source_makes_another_library(workshop: Workshop) -> None:
    first = workshop.build()
    workshop.calls()
    workshop.write("two.cpp", "3")
    second = workshop.build()
    assert (second != first, second.read_text(), workshop.calls()) == (True, "13", ["one.cpp two.cpp"])


def test_a_changed_header_makes_another_library(workshop: Workshop) -> None:
    workshop.write("two.cpp", '#include "outer.h"')
    workshop.write("outer.h", '#include "inner.h"')
    workshop.write("inner.h", "// as it was")
    first = workshop.build()
    workshop.calls()
    workshop.write("inner.h", "// changed")
    assert workshop.build() != first
    assert workshop.calls() == ["one.cpp two.cpp"]


def test_a_failure_has_the_messages_and_leaves_nothing(workshop: Workshop) -> None:
    workshop.write("two.cpp", "broken")
    with pytest.raises(BuildError, match=r"extension\.cpp(.|\n)*\nthis is wrong"):
        workshop.build()
    assert {file.name for file in workshop.made.iterdir()} == {"lock"}
    workshop.write("two.cpp", "2")
    assert workshop.build().read_text() == "12"


def test_what_a_killed_build_has_left_is_removed(workshop: Workshop) -> None:
    left = workshop.made / "unfinished-abc"
    left.mkdir(parents=True)
    (left / "one.log").write_text("")
    workshop.build()
    assert not left.exists()
    assert {file.name for file in workshop.made.iterdir()} == {"lock", library_name()}


def test_an_interrupted_build_stops_the_compiler(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.script.write_text("#!/bin/sh\nexec sleep 600\n")
    started: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen[bytes]):
        def wait(self, timeout: float | None = None) -> int:
            if self not in started:
                started.append(self)
                raise KeyboardInterrupt
            return super().wait(timeout)

    monkeypatch.setattr(compiler.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        workshop.build()
    assert [process.poll() for process in started] == [-9]


def test_processes_that_build_at_the_same_time_compile_once(workshop: Workshop) -> None:
    script = (
        "import sys; from pathlib import Path; from torch_ltc.native import compiler\n"
        "compiler._SOURCES = Path(sys.argv[1])\n"
        "compiler.build(Path(sys.argv[2]), compiler.Compiler((sys.argv[3],)), print)\n"
    )
    command = [sys.executable, "-c", script, str(workshop.sources), str(workshop.made), str(workshop.script)]
    running = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [process.wait(timeout=120) for process in running] == [0, 0]
    assert workshop.calls() == ["one.cpp two.cpp"]


def test_the_name_tells_other_versions_apart(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {library_name()}
    workshop.write("one.cpp", "other")
    names.add(library_name())
    monkeypatch.setattr("torch.__version__", "9.9.9")
    names.add(library_name())
    monkeypatch.setattr("torch.version.git_version", "another commit")
    names.add(library_name())
    assert len(names) == 4


def test_a_missing_compiler_is_named() -> None:
    with pytest.raises(BuildError, match="no-such-compiler is not on the PATH"):
        find_compiler("no-such-compiler -O2")


def test_build_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["build"]) == 2
    assert "install g++ or clang" in capsys.readouterr().err
    assert main(["build", "--if-possible"]) == 0
    assert "is not built" in capsys.readouterr().err


def test_build_refuses_a_folder_of_others(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(workshop.made))
    monkeypatch.setenv("CXX", str(workshop.script))
    folder = workshop.made / "torch_ltc" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert main(["build"]) == 2
    assert "others may write" in capsys.readouterr().err
    assert workshop.calls() == []
    folder.chmod(0o700)
    assert main(["build"]) == 0
    assert Path(capsys.readouterr().out.strip()).parent == folder


@pytest.mark.parametrize("right", [0o770, 0o702])
def test_a_library_that_others_may_write_is_not_loaded(
    right: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "torch_ltc" / "native"
    folder.mkdir(parents=True, mode=0o700)
    file = folder / library_name()
    file.write_text("")
    file.chmod(0o700)
    assert library.find() == (file, "")
    file.chmod(right)
    assert library.find()[0] is None
    file.chmod(0o700)
    folder.chmod(right)
    assert library.find() == (None, f"{file} is not loaded: others may write to it")


def _python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **variables}, check=False
    )


STATE = "import torch_ltc; from torch_ltc.native import library; print(library.state())"


def test_without_a_library_python_does_it_and_1_is_an_error(tmp_path: Path) -> None:
    empty = {"XDG_CACHE_HOME": str(tmp_path)}
    assert _python(STATE, LTC_NATIVE="auto", **empty).stdout == "not used: it is not built: `ltc build` does it\n"
    failed = _python(STATE, LTC_NATIVE="1", **empty)
    assert failed.returncode == 1
    assert "LTC_NATIVE=1 asks for the native extension, but it is not built" in failed.stderr
    assert "try: ltc build" in failed.stderr


def test_0_does_not_look_for_a_library() -> None:
    assert _python(STATE, LTC_NATIVE="0").stdout == "not used: LTC_NATIVE=0\n"


def test_a_library_that_is_none_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "torch_ltc" / "native"
    folder.mkdir(parents=True, mode=0o700)
    file = folder / library_name()
    file.write_text("no library")
    file.chmod(0o700)
    done = _python(STATE, LTC_NATIVE="auto", XDG_CACHE_HOME=str(tmp_path))
    assert done.stdout.startswith(f"not used: {file} cannot be loaded: ")
    assert _python(STATE, LTC_NATIVE="1", XDG_CACHE_HOME=str(tmp_path)).returncode == 1


def test_build_runs_where_1_asks_for_what_is_not_built(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "torch_ltc", "build", "--if-possible"],
        capture_output=True,
        text=True,
        env={**os.environ, "LTC_NATIVE": "1", "XDG_CACHE_HOME": str(tmp_path), "CXX": "no-such-compiler"},
        check=False,
    )
    assert (done.returncode, "is not built" in done.stderr) == (0, True)


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("found", [True, False])
def test_an_installation_compiles_or_says_in_one_line_why_not(found: bool, workshop: Workshop) -> None:
    if not (ROOT / "setup.py").exists():
        pytest.skip("the package is not in a source tree")
    folders = ["--build-lib", str(workshop.made / "lib"), "--build-temp", str(workshop.made / "temporary")]
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", *folders],
        capture_output=True,
        text=True,
        env={**os.environ, "CXX": str(workshop.script) if found else "no-such-compiler", "LTC_NATIVE": "auto"},
        cwd=ROOT,
        check=False,
    )
    built = [file.parent.name for file in (workshop.made / "lib").rglob("*.so")]
    assert (done.returncode, built) == (0, ["built"] if found else [])
    said = [line for line in done.stderr.splitlines() if line.startswith("torch_ltc: ")]
    assert len(said) == (not found)
    assert found or "`ltc build` does it" in said[0]
