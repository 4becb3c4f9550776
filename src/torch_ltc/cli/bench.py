"""`ltc bench`: the cost of recording, or the speed of training, next to eager PyTorch.

The benchmarks are in the repository, not in the installed package. Where they are not, the cost of recording is
measured here, in a simpler way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from torch_ltc import api
from torch_ltc.cli.output import add_json, command, note, print_json, progress, table
from torch_ltc.errors import LtcError

_PACKAGE = Path(__file__).resolve().parents[1]
_CHAIN = 200
_REPETITIONS = 20
_ROUNDS = 15


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        nargs="?",
        choices=("recording", "training"),
        default="recording",
        help="what recording an operation costs, about a minute (the default); or all workloads in short, minutes",
    )
    parser.add_argument("--built-in", action="store_true", help="the small measurement of recording in any case")
    add_json(parser)


@command(
    "bench",
    "measure what recording costs, or training, next to eager PyTorch",
    "Measure what it costs to record an operation, next to running it eagerly, or with `training` how fast the "
    "workloads of the repository are. Figures of one run are comparable with each other only.",
    _add_options,
)
def _run(options: argparse.Namespace) -> int:
    root = _checkout()
    if root is not None and not options.built_in:
        return _run_benchmarks(root, options)
    if options.what == "training":
        raise LtcError(
            "the benchmarks of training are not in the installed package",
            hint="run `ltc bench training` from a checkout of the repository",
        )
    note("built-in measurement of recording; a checkout of the repository has more (benchmarks/README.md)")
    measured = measure_recording()
    if options.json:
        print_json(measured)
    else:
        print(_text(measured))
    return 0


def _checkout() -> Path | None:
    """The folder of the repository that this package is in, if it is in one."""
    root = _PACKAGE.parents[1]
    return root if (root / "benchmarks" / "trace.py").is_file() else None


def _run_benchmarks(root: Path, options: argparse.Namespace) -> int:
    note(f"the benchmarks of the checkout in {root}")
    if options.what == "recording":
        return _module(root, "benchmarks.trace", *(["--json"] if options.json else []))
    if not options.json:
        return _module(root, "benchmarks.run", "--quick")
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        status = _module(root, "benchmarks.run", "--quick", "--json", str(results), to_stderr=True)
        if status == 0:
            print_json(json.loads(results.read_text(encoding="utf-8")))
    return status


def _module(root: Path, name: str, *arguments: str, to_stderr: bool = False) -> int:
    command = [sys.executable, "-m", name, *arguments]
    sys.stdout.flush()
    return subprocess.run(command, cwd=root, check=False, stdout=sys.stderr if to_stderr else None).returncode


# ---- the built-in measurement -------------------------------------------------------------------------------------


def measure_recording(rounds: int = _ROUNDS) -> dict[str, Any]:
    """Microseconds for one addition of 16 floats, recorded and eager, in turns; the ratio is taken round by round."""
    systems: dict[str, tuple[torch.Tensor, Callable[[], None]]] = {
        "eager": (torch.ones(16, device="cpu"), lambda: None),
        "recorded": (torch.ones(16, device="ltc"), lambda: api.sync(wait=True)),
    }
    for tensor, finish in systems.values():
        # Until the program is compiled: compiling goes on beside, and would be measured.
        for _ in range(5):
            _chain(tensor, finish)
    api.wait_for_compiles()
    times: dict[str, list[float]] = {name: [] for name in systems}
    for _ in progress(range(rounds), "rounds"):
        for name, (tensor, finish) in systems.items():
            times[name].append(statistics.median(_chain(tensor, finish) for _ in range(_REPETITIONS)))
    ratios = [recorded / eager for recorded, eager in zip(times["recorded"], times["eager"])]
    return {
        "what": "built-in: one addition of 16 floats",
        "rounds": rounds,
        **{f"{name}_us": round(statistics.median(found) * 1e6, 3) for name, found in times.items()},
        "ratio": round(statistics.median(ratios), 3),
    }


def _chain(tensor: torch.Tensor, finish: Callable[[], None]) -> float:
    """Seconds for one of a chain of additions; running what was recorded is not part of it."""
    began = time.perf_counter()
    result = tensor
    for _ in range(_CHAIN):
        result = result + tensor
    took_s = time.perf_counter() - began
    finish()
    return took_s / _CHAIN


def _text(measured: dict[str, Any]) -> str:
    rows = [
        ("one addition of 16 floats", "µs", "to eager"),
        ("eager, computed", f"{measured['eager_us']:.2f}", "1.00"),
        ("ltc, recorded", f"{measured['recorded_us']:.2f}", f"{measured['ratio']:.2f}"),
    ]
    return table(rows, " rr")
