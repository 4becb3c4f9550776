"""The benchmark: every workload on every system, interleaved, as ratios to eager.

Owns the command line; `schedule` measures, `results` makes figures of it, `table` and `picture` show them.

    python -m benchmarks.run [--quick] [--only a,c] [--systems eager,ltc-inductor] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.results import BASE, FORMAT, machine, save, summarise, threads_text
from benchmarks.schedule import Options, Session
from benchmarks.systems import SYSTEMS, missing_package
from benchmarks.table import render_ratios, render_workload
from benchmarks.trace import collect
from benchmarks.workloads import WORKLOADS

# Not a workload: the cost of recording one operation, as `benchmarks.trace` measures it.
ADDS = "adds"
RESULTS = Path(__file__).parent / "results"
# The short form: cheap workloads first, and what is not reached in time is left out.
QUICK_ORDER = tuple("abcgjihfed")
QUICK_SYSTEMS = ("eager", "original", "compile", "ltc-torchscript", "ltc-inductor")
QUICK_LIMIT_S = 270.0


def quick_options() -> Options:
    """Few rounds, no figure that needs more processes, and what was compiled is kept for the next time."""
    return Options(
        rounds=5,
        first_steps=10,
        starts=1,
        sample_s=0.15,
        first_limit_s=6.0,
        rounds_limit_s=6.0,
        settle_limit_s=45.0,
        short=True,
        memory=False,
        second=False,
        cache=Path(tempfile.gettempdir()) / f"torch_ltc_bench_{os.getuid()}",
        deadline=time.monotonic() + QUICK_LIMIT_S,
    )


def measure(workloads: tuple[str, ...], systems: tuple[str, ...], options: Options, path: Path) -> dict[str, Any]:
    """Run it all; the file is written after every workload, so that an early end loses little."""
    skipped = {name: missing_package(name) for name in systems if name not in options.pythons}
    skipped = {name: reason for name, reason in skipped.items() if reason is not None}
    for name, reason in skipped.items():
        _say(f"{name}: left out: {reason}")
    running = [name for name in systems if name not in skipped]
    results: dict[str, Any] = {
        "format": FORMAT,
        "machine": machine(f"CPU, {threads_text(options.threads)}"),
        "began": time.strftime("%Y-%m-%dT%H:%M:%S"),
        "options": _plain(options),
        "systems": running,
        "skipped": skipped,
        "titles": {},
        "workloads": {},
    }
    for key in workloads:
        if options.over():
            _say(f"{key}: left out: the time was over")
            continue
        if key == ADDS:
            results[ADDS] = collect(options.rounds)
            save(path, results)
            continue
        figures = Session(key, running, options, _say).measure()
        summarise(figures)
        results["workloads"][key] = figures
        results["titles"][key] = WORKLOADS[key].title
        print(render_workload(f"{key}: {WORKLOADS[key].title}", figures) + "\n", flush=True)
        save(path, results)
    return results


def _plain(options: Options) -> dict[str, Any]:
    plain = dataclasses.asdict(options)
    del plain["deadline"]
    plain["cache"] = None if options.cache is None else "kept"
    return plain


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def chosen(text: str | None, known: tuple[str, ...], default: tuple[str, ...], what: str) -> tuple[str, ...]:
    """The names in a list separated by commas, or the default; an unknown one ends the command."""
    if text is None:
        return default
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"there is no {what} '{unknown[0]}'\n  try: one of {', '.join(known)}")
    return names


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this command and `benchmarks.bars` have in common."""
    parser.add_argument("--quick", action="store_true", help="a short form that ends within 5 minutes")
    parser.add_argument("--only", metavar="a,c", help="these workloads")
    parser.add_argument("--systems", metavar="eager,...", help="these systems; eager always runs")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of each workload")
    parser.add_argument("--first-steps", type=int, metavar="N", help="first steps that are timed one by one")
    parser.add_argument("--starts", type=int, metavar="N", help="processes whose first step is timed")
    parser.add_argument("--read-every", type=int, metavar="N", help="steps between two reads of the loss")
    parser.add_argument(
        "--threads", type=int, metavar="N", help="threads of a kernel, by default 1; 0: PyTorch's choice"
    )
    parser.add_argument("--no-memory", action="store_true", help="do not measure memory")
    parser.add_argument("--no-second", action="store_true", help="do not run a second process")
    parser.add_argument("--settle-limit", type=float, metavar="S", help="the most seconds that warming up may take")
    parser.add_argument("--memory-limit", type=float, metavar="GB", help="the most memory that a process may take")
    parser.add_argument("--limit", type=float, metavar="S", help="leave out what has not begun after S seconds")
    parser.add_argument(
        "--cache", type=Path, metavar="DIR", help="keep what is compiled there; first steps are not cold then"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="SYSTEM=FILE", help="another interpreter for one system"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go")


def options_from(arguments: argparse.Namespace) -> Options:
    """The options that the command line asks for."""
    options = quick_options() if arguments.quick else Options()
    changes: dict[str, Any] = {
        "rounds": arguments.rounds,
        "first_steps": arguments.first_steps,
        "starts": arguments.starts,
        "read_every": arguments.read_every,
        "threads": arguments.threads,
        "settle_limit_s": arguments.settle_limit,
        "memory_limit_gb": arguments.memory_limit,
        "memory": False if arguments.no_memory else None,
        "second": False if arguments.no_second else None,
        "cache": arguments.cache.resolve() if arguments.cache is not None else None,
        "deadline": time.monotonic() + arguments.limit if arguments.limit is not None else None,
        "pythons": dict(pair.split("=", 1) for pair in arguments.python) or None,
    }
    for name in ("rounds", "first_steps", "starts", "read_every"):
        if changes[name] is not None and changes[name] < 1:
            raise SystemExit(f"--{name.replace('_', '-')} must be at least 1, not {changes[name]}")
    return dataclasses.replace(options, **{name: value for name, value in changes.items() if value is not None})


def selection(arguments: argparse.Namespace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The workloads and systems that the command line asks for."""
    everything = (*WORKLOADS, ADDS)
    workloads = chosen(arguments.only, everything, QUICK_ORDER if arguments.quick else everything, "workload")
    default = QUICK_SYSTEMS if arguments.quick else tuple(SYSTEMS)
    systems = chosen(arguments.systems, tuple(SYSTEMS), default, "system")
    return workloads, systems if BASE in systems else (BASE, *systems)


def end_on_signals() -> None:
    """Turn SIGTERM into an exception, so that workers are ended on the way out."""

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise SystemExit(128 + number)

    signal.signal(signal.SIGTERM, stop)


def main() -> None:
    """Parse the command line, measure, print and save."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Step times as ratios to eager.")
    add_arguments(parser)
    arguments = parser.parse_args()
    workloads, systems = selection(arguments)
    options = options_from(arguments)
    name = "quick" if arguments.quick else "cpu"
    path = arguments.json or RESULTS / (f"{name}.json" if options.threads == 1 else f"{name}-threads.json")
    end_on_signals()
    results = measure(workloads, systems, options, path)
    print(render_ratios(results))
    for name, reason in results["skipped"].items():
        print(f"{name}: left out: {reason}")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
