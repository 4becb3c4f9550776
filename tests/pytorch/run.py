"""`python -m tests.pytorch.run --source <a PyTorch source tree>`: PyTorch's device-generic tests on the device.

Each file runs in worker processes; a test that crashes or hangs is named, and the rest goes on. Results are kept in a
journal per file, from which a run that was stopped goes on. Exit status 1 if a failure is not in the table of known
ones, a known one is gone, or a file does not load; 130 if the run was stopped, with its workers, by an interrupt or
SIGTERM.
"""

import argparse
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.pytorch import report
from tests.pytorch.files import FILES, FULL, LAZY, SAMPLED
from tests.pytorch.records import BATCH, BEGIN, DEVICE, LOADED, Outcome, Record, chosen
from tests.pytorch.workers import Workers

LOG_LINES = 100


@dataclass(frozen=True)
class Runner:
    """Where the tests are, where results go, and how much is run."""

    source: Path
    results: Path
    sample: int
    seeds: tuple[int, ...]
    time_limit_s: float
    again: frozenset[str]
    """Outcomes of earlier runs that are run anew."""
    workers: Workers = field(default_factory=Workers)

    def run(self, file: str, *, whole: bool) -> list[Record]:
        """The results of a file, those of earlier runs included."""
        journal, listed = self._path(file, "jsonl"), self._path(file, "txt")
        sample = 0 if whole else self.sample
        if not listed.exists():
            # Loading a file may take long: the process that lists its tests begins with them.
            seeds = map(str, self.seeds)
            self._batch(file, (), journal, "--names", str(listed), "--sample", str(sample), "--seed", *seeds)
        names = chosen(listed.read_text().split(), sample, self.seeds)
        done = _records(journal)
        todo = [name for name in names if name not in done or done[name].outcome.value in self.again]
        # Earlier results stay where they are: the last one counts, and a run that is stopped has lost none.
        start = _size(journal)
        while todo:
            self._batch(file, todo[:BATCH], journal)
            new = _records(journal, start)
            todo = [name for name in todo if name not in new]
        done = _records(journal)
        return [done[name] for name in names]

    def results_of(self, file: str) -> tuple[list[Record], int]:
        """What earlier runs have left of a file, and how many tests it has."""
        listed = self._path(file, "txt")
        records = _records(self._path(file, "jsonl"))
        return [records[name] for name in sorted(records)], len(listed.read_text().split()) if listed.exists() else 0

    def _batch(self, file: str, names: Sequence[str], journal: Path, *options: str) -> None:
        """Run tests in one process; the one that ends it too early gets a record of that."""
        before = _size(journal)
        status, log = self._worker(file, names, journal, *options)
        lines = _lines(journal, before)
        if LOADED not in lines:
            raise RuntimeError(f"{file} does not load with this PyTorch: status {status}\n{log}")
        running, on_device = None, False
        for line in lines:
            if line.startswith(BEGIN):
                running, on_device = line.removeprefix(BEGIN), False
            elif line == DEVICE:
                on_device = True
            elif line.startswith("{"):
                running = None
        if running is None:
            return
        timed_out = "Timeout (" in log
        outcome = (Outcome.TIMEOUT if timed_out else Outcome.CRASH) if on_device else Outcome.CPU_FAILS
        message = f"not done after {self.time_limit_s:.0f} s" if timed_out else f"the process ended with {status}"
        with journal.open("a", encoding="utf-8") as file_:
            file_.write(Record(running, outcome, message, log).line() + "\n")

    def _worker(self, file: str, names: Iterable[str], journal: Path, *options: str) -> tuple[int, str]:
        """The exit status of a worker, and the end of what it wrote: the stack dump, innermost call first."""
        command = [sys.executable, "-m", "tests.pytorch.worker", str(self.source / "test" / f"{file}.py")]
        command += ["--journal", str(journal), "--time-limit", str(self.time_limit_s), *options]
        with tempfile.TemporaryFile() as log:
            status = self.workers.run(command, names, log)
            log.seek(0)
            return status, _last_words(log.read().decode(errors="replace").splitlines())

    def _path(self, file: str, suffix: str) -> Path:
        return self.results / f"{file.replace('/', '.')}.{suffix}"


def _last_words(log: Sequence[str]) -> str:
    for number, line in enumerate(log):
        if line.startswith(("Timeout (", "Fatal Python error")):
            return "\n".join(log[number : number + LOG_LINES])
    return "\n".join(log[-LOG_LINES:])


def _size(journal: Path) -> int:
    return journal.stat().st_size if journal.exists() else 0


def _lines(journal: Path, start: int) -> list[str]:
    """The lines of a journal from a place on."""
    return journal.read_bytes()[start:].decode().splitlines() if journal.exists() else []


def _records(journal: Path, start: int = 0) -> dict[str, Record]:
    """The last record of each test of a journal, from a place on."""
    # A process that was killed while it wrote leaves half a line behind.
    records = (Record.parse(line) for line in _lines(journal, start) if line.startswith("{") and line.endswith("}"))
    return {record.name: record for record in records}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    version = (options.source / "version.txt").read_text().strip()
    results = options.results / version
    results.mkdir(parents=True, exist_ok=True)
    runner = Runner(
        options.source.resolve(),
        results.resolve(),
        options.sample,
        tuple(options.seed),
        options.time_limit,
        frozenset(options.again),
    )
    files = options.file or FILES
    if options.report:
        return _report_all(runner, files, version, options)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        tables = _run_all(runner, files, options)
    except KeyboardInterrupt:
        print("stopped: the same command goes on from here", file=sys.stderr)
        return 130
    return _report(tables, version, _extent(options), options, complete=not options.file)


def _report(tables: report.Tables, version: str, extent: str, options: argparse.Namespace, *, complete: bool) -> int:
    """Print the table and what is not in the table of known failures, write the page, and give the exit status."""
    text = report.table(tables)
    print(f"\n{text}")
    unknown, gone = report.judge(tables, complete=complete)
    for line in report.lines(unknown):
        print(line)
    for known in gone:
        print(f"known failure that is gone: {known}")
    if options.docs is not None:
        report.write(options.docs, tables, version, extent)
    return 1 if unknown or gone or not all(tables.values()) else 0


def _report_all(runner: Runner, files: Sequence[str], version: str, options: argparse.Namespace) -> int:
    """Report what the journals have, whatever it was chosen by."""
    tables: dict[str, list[Record]] = {}
    full, part = [], []
    for file in files:
        records, count = runner.results_of(file)
        if records:
            tables[file] = records
            (full if len(records) >= count else part).append(
                f"`{file}`" if len(records) >= count else f"{len(records)} of {count} tests of `{file}`"
            )
    extent = f"{', '.join(full)} in full; {', '.join(part)}{f'; {options.note}' if options.note else ''}"
    return _report(tables, version, extent, options, complete=False)


def _run_all(runner: Runner, files: Sequence[str], options: argparse.Namespace) -> dict[str, list[Record]]:
    tables: dict[str, list[Record]] = {}
    with ThreadPoolExecutor(options.jobs) as pool:
        try:
            for file, records in pool.map(lambda each: _run(runner, each, options), files):
                tables[file] = records
                print(f"{file}: {_counts(records)}", flush=True)
        except BaseException:
            runner.workers.stop()
            raise
    return tables


def _run(runner: Runner, file: str, options: argparse.Namespace) -> tuple[str, list[Record]]:
    try:
        return file, runner.run(file, whole=options.whole or (file in FULL + LAZY and not options.quick))
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        return file, []


def _extent(options: argparse.Namespace) -> str:
    """How much is run, in words."""
    if options.whole:
        return "every test"
    files = "each file" if options.quick else f"each file from `{SAMPLED[0]}` on but those of `lazy/`"
    seeds = ", ".join(map(str, options.seed))
    return f"up to {options.sample} tests of {files} by each of the seeds {seeds}"


def _counts(records: Iterable[Record]) -> str:
    counts = Counter(record.outcome for record in records)
    return ", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]) or "no results"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.pytorch.run", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a PyTorch source tree")
    parser.add_argument(
        "--file", action="append", metavar="NAME", help="a file under its folder test, as test_torch; repeatable"
    )
    parser.add_argument("--sample", type=int, default=500, metavar="N", help="tests of each file that is sampled (500)")
    parser.add_argument(
        "--seed", type=int, nargs="+", default=[1], help="of samples; each draws from what those before it left (1)"
    )
    parser.add_argument("--whole", action="store_true", help="every test of every file")
    parser.add_argument("--quick", action="store_true", help="a sample of every file")
    parser.add_argument(
        "--again",
        nargs="*",
        default=(),
        choices=[each.value for each in Outcome],
        help="run these of an earlier run anew",
    )
    parser.add_argument("--time-limit", type=float, default=300.0, metavar="SECONDS", help="for one test (300)")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="worker processes at once (2)")
    parser.add_argument(
        "--results", type=Path, default=Path("build/pytorch"), help="folder of the journals; delete it to start anew"
    )
    parser.add_argument("--report", action="store_true", help="run nothing: report all that the journals have")
    parser.add_argument("--note", default="", help="how the tests of a report were run")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table into FILE, between its markers")
    return parser


if __name__ == "__main__":
    sys.exit(main())
