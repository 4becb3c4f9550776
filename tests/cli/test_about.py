"""Commands about the installation: `env`, `devices`, `backends`, `bench`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_ltc
from torch_ltc.cli import about, bench
from torch_ltc.cli.main import main
from torch_ltc.config import settings
from torch_ltc.lowering.registry import registry

Printed = pytest.CaptureFixture[str]


def test_env_has_what_a_bug_report_needs(capsys: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LTC_BAKCEND", "xla")
    with settings.scope(hot_after=3, cache_dir=str(tmp_path)):
        assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == [
        "versions", "machine", "optional packages", "settings that are not the default", "variables", "cache",
        "private interfaces of PyTorch that differ",
    ]  # fmt: skip
    assert found["versions"]["torch"] == str(torch.__version__)
    assert found["versions"]["torch_ltc"].startswith(torch_ltc.__version__)
    assert found["settings that are not the default"]["hot_after"] == "3 (code)"
    assert "pending_bound" not in found["settings that are not the default"]
    assert found["variables"]["LTC_BAKCEND"] == "xla (no setting has this variable)"
    assert found["variables"]["LTC_CACHE_DIR"] == "off"
    assert found["cache"] == {"folder": str(tmp_path), "state": "writable", "files": "0, 0 B"}
    assert found["optional packages"]["pytest"] == pytest.__version__


def test_env_as_text_has_a_section_a_block(capsys: Printed) -> None:
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("versions\n  torch_ltc  ")
    assert text.endswith("cache\n  folder  off\nprivate interfaces of PyTorch that differ\n  none\n")


def test_a_program_that_is_missing_or_silent_has_no_first_line() -> None:
    assert about.first_line("no-such-program-at-all") == ""
    assert about.first_line("true") == ""
    assert about.first_line("printf", "one\\ntwo") == "one"


def test_devices_marks_where_programs_run(capsys: Printed) -> None:
    assert main(["devices", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lazy"] == {"device": "ltc:0", "name": "torch_ltc lazy device", "backend": settings.backend}
    assert [row["device"] for row in found["physical"] if row["current"]] == ["cpu"]
    assert 0 < found["physical"][0]["free_bytes"] <= found["physical"][0]["total_bytes"]
    assert main(["devices"]) == 0
    assert "\n*  cpu       " in capsys.readouterr().out


def test_backends_as_data(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    # The others load large packages.
    monkeypatch.setattr(registry, "names", lambda: ("interpreter", "torchscript"))
    with settings.scope(backend="interpreter"):
        assert main(["backends", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert first == {
        "name": "interpreter",
        "current": True,
        "measured": None,
        "origin": "built-in",
        "form": "recorded",
        "devices": ["CPU0"],
        "error": None,
    }
    assert (second["name"], second["current"], second["measured"]) == ("torchscript", False, "equal")


# ---- bench ----------------------------------------------------------------------------------------------------------


def test_the_built_in_measurement_says_that_it_is_one(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "measure_recording", lambda: bench_result)
    bench_result = {"eager_us": 1.234, "recorded_us": 3.0, "ratio": 2.431}
    assert main(["bench", "--built-in"]) == 0
    printed = capsys.readouterr()
    assert "built-in measurement of recording" in printed.err
    assert printed.out == (
        "one addition of 16 floats    µs  to eager\n"
        "eager, computed            1.23      1.00\n"
        "ltc, recorded              3.00      2.43\n"
    )


def test_the_built_in_measurement_measures() -> None:
    measured = bench.measure_recording(rounds=2)
    assert measured["rounds"] == 2
    assert min(measured["eager_us"], measured["recorded_us"], measured["ratio"]) > 0


def test_outside_of_a_checkout_training_cannot_be_measured(capsys: Printed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "_checkout", lambda: None)
    assert main(["bench", "training"]) == 2
    assert "the benchmarks of training are not in the installed package" in capsys.readouterr().err


def test_in_a_checkout_its_benchmarks_run(capsys: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run: list[tuple[str, ...]] = []

    def module(root: Path, name: str, *arguments: str, to_stderr: bool = False) -> int:
        run.append((name, *arguments[:2]))
        if "--quick" in arguments and len(arguments) > 1:
            assert to_stderr
            Path(arguments[-1]).write_text('{"results": 1}')
        return 0

    monkeypatch.setattr(bench, "_checkout", lambda: tmp_path)
    monkeypatch.setattr(bench, "_module", module)
    commands: Sequence[Any] = ([], ["--json"], ["training"], ["training", "--json"])
    assert [main(["bench", *command]) for command in commands] == [0, 0, 0, 0]
    assert run == [
        ("benchmarks.trace",),
        ("benchmarks.trace", "--json"),
        ("benchmarks.run", "--quick"),
        ("benchmarks.run", "--quick", "--json"),
    ]
    assert json.loads(capsys.readouterr().out) == {"results": 1}
