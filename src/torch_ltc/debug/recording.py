"""A recording of one run, as plain values that JSON takes.

The report, the doctor, `explain` and the command line read recordings and nothing else, so that what they say of a
process that is running they also say of one that has ended. `history` makes recordings.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib import metadata
from typing import Any, get_args, get_origin, get_type_hints

import torch

from torch_ltc.errors import RecordingError
from torch_ltc.source import Source

# Raised whenever a field changes its meaning; a file of another version is refused.
FORMAT = 1
# Fields that earlier versions wrote under another name.
_RENAMED = {"elsewhere": "out_of_process"}
# Packages that have a part in what programs do, where they are installed.
_PACKAGES = ("numpy", "jax", "jaxlib", "triton", "transformers")


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a program's text, with where it was recorded."""

    text: str
    source: Source


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cause of a new program, or of another compilation.

    `code` is the stable message id, as "LTC104", which docs/debugging.md has a paragraph about; `cause` its short
    name, as "size". `nearest` is the known program that it resembles most (0: none), `difference` the first thing in
    which it differs from that, `source` the user's line there, `promoted` what has become a run-time input, `advice`
    what to change.
    """

    program: int
    code: str
    cause: str
    nearest: int
    difference: str
    source: Source
    promoted: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """A program: how often it was synced and run, what that cost, and its text (empty when it was dropped)."""

    identity: int
    calls: int
    inputs: int
    outputs: int
    # Where and why it was synced first, and the line of its first call.
    site: Source
    reason: str
    first: Source
    syncs: int
    runs: int
    # Runs in the interpreter, among `runs`; failed ones; the backend that it runs on now.
    interpreted: int
    failed: int
    backend: str
    compiles: int
    loads: int
    record_s: float
    compile_s: float
    run_s: float
    # Error text of the backend that could not compile or run it.
    refused: str
    lines: tuple[Line, ...]
    explanation: Explanation | None = None
    # The part of `run_s` that the runs in the interpreter took.
    interpreted_s: float = 0.0
    # The compile states that it went through, the present one last, and why it is in that.
    states: tuple[str, ...] = ("interpreted",)
    state_reason: str = ""
    # How it was captured as graphs of the device, or why not; and how many runs were replays of them.
    capture: str = ""
    replays: int = 0
    # The form that was kept by measurement, with the times of all that were measured.
    choice: str = ""
    # What the backend said of the code that it compiled last.
    remark: str = ""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time on one lane: kind "record", "sync", "compile", "load", "run", "wait", "copy" (off the device),
    "upload" or "fallback". `begin_s` counts from the start of the recording. `step` counts the syncs that end a step.
    Lanes: "user" (all threads of the program), "worker", "compiler". `label` is the backend of a run or compilation,
    the reason of a sync or read, the operator of a fallback, the user's line of an upload."""

    kind: str
    lane: str
    begin_s: float
    duration_s: float
    step: int
    program: int = 0
    label: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class SyncRow:
    """One line of the sync ledger: all syncs or reads with one reason at one line of the user's.

    `kind` is "sync" for a cut of the pending program, "read" for a value that left the device (`reason` is then "item",
    "copy", "print"). `steps` counts the steps in which it happened. `wait_s` is the time that the user's thread stood
    still; `size_bytes` what was copied.
    """

    source: Source
    kind: str
    reason: str
    count: int
    steps: int
    wait_s: float
    size_bytes: int
    programs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class FallbackRow:
    """All eager runs of one operator at one line."""

    op: str
    reason: str
    source: Source
    count: int
    total_s: float


@dataclass(frozen=True, slots=True)
class NonFiniteRow:
    """A NaN or an infinity that the finder found: the operation that made it, or none when an input held it already."""

    program: int
    op: str
    source: Source
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class CompileRow:
    """One compilation or load. `number` counts the compilations at the site, 1 for the first."""

    program: int
    backend: str
    begin_s: float
    duration_s: float
    step: int
    number: int
    loaded: bool
    out_of_process: bool
    explanation: Explanation


@dataclass(frozen=True, slots=True)
class BufferRow:
    """Live buffers that were made at one line: for the question what holds the memory. `runs` says how many different
    runs of programs they come from."""

    source: Source
    op: str
    count: int
    size_bytes: int
    runs: int = 1


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that the device's buffers hold: now, at most, and over time as (seconds, bytes); the largest groups of live
    buffers; what the physical device itself says."""

    current_bytes: int = 0
    peak_bytes: int = 0
    samples: tuple[tuple[float, int], ...] = ()
    largest: tuple[BufferRow, ...] = ()
    physical: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SettingRow:
    """A setting, its value as text, and where that came from: "default", "env" or "code"."""

    name: str
    value: str
    origin: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding of the doctor. `severity` is "error", "warning" or "hint"; `evidence` has figures; `fix` the advice;
    `cost_s` an estimate of the time lost, 0 when unknown. `rule` is the rule's name, `code` its stable message id."""

    rule: str
    code: str
    severity: str
    title: str
    evidence: str
    source: Source
    fix: str
    cost_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EagerRow:
    """Eager regions: how many there were, their calls and reads, and lines that read where they began, with how
    often."""

    begun: int = 0
    calls: int = 0
    reads: int = 0
    places: tuple[tuple[Source, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything. `started` is local time in ISO form; `dropped_spans` and `dropped_programs` count what was too old to
    be kept; figures in rows count all of the run all the same."""

    command: tuple[str, ...]
    started: str
    duration_s: float
    steps: int
    versions: Mapping[str, str]
    settings: tuple[SettingRow, ...]
    programs: tuple[ProgramRow, ...]
    spans: tuple[Span, ...]
    syncs: tuple[SyncRow, ...]
    fallbacks: tuple[FallbackRow, ...]
    compiles: tuple[CompileRow, ...]
    memory: Memory
    metrics: Mapping[str, Any]
    nonfinite: tuple[NonFiniteRow, ...] = ()
    # What each jit function says of its calls, as `explain()` has it.
    functions: tuple[str, ...] = ()
    eager: EagerRow = field(default_factory=EagerRow)
    dropped_spans: int = 0
    dropped_programs: int = 0
    format: int = FORMAT

    def to_json(self) -> str:
        """The recording as text that `from_json` reads."""
        values = PlainValues()
        data = values.plain(self)
        return json.dumps({**data, "sources": values.sources}, separators=(",", ":"))


def from_json(text: str, name: str = "the recording") -> Recording:
    """The recording in this text; `name` is what messages call it. Raises RecordingError when it is none."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise RecordingError(f"{name} is not JSON: {error}", hint=_HINT) from error
    if not isinstance(data, dict) or "format" not in data:
        raise RecordingError(f"{name} is no recording of torch_ltc", hint=_HINT)
    if data["format"] != FORMAT:
        raise RecordingError(f"{name} has format {data['format']}, this version reads {FORMAT}", hint=_HINT)
    try:
        sources: list[Source] = []
        for row in data["sources"]:
            sources.append(_read(Source, row, sources))
        made: Recording = _read(Recording, data, sources)
    except (TypeError, KeyError, IndexError, ValueError) as error:
        raise RecordingError(f"{name} is damaged: {error}", hint=_HINT) from error
    return made


def anonymous(recording: Recording) -> Recording:
    """The recording for others to see: without the command, the names of files, functions and modules, the folders in
    settings, and the values that the check for NaNs has found. Programs, shapes and figures stay."""
    values = PlainValues()
    data = values.plain(recording)
    data.update(command=[], functions=[], nonfinite=[], sources=values.sources)
    for row in data["settings"]:
        row["value"] = "" if os.sep in row["value"] else row["value"]
    names: dict[str, str] = {}
    for row in data["sources"]:
        file = names.setdefault(row["file"], f"file{len(names)}.py") if row["file"] else ""
        names.setdefault(f"{row['file']}:{row['line']} in {row['function']}", f"{file}:{row['line']}")
        names.setdefault(os.path.basename(row["file"]), file)
        # A name that can be found in other text is left there: it may be a word of ours.
        row.update(file=file, function="", module="")
    # Longest first: the line before the file that it is in.
    known = sorted((name for name in names if name), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, known)) or "(?!)")
    made = json.dumps({key: _replaced(value, pattern, names) for key, value in data.items()})
    return from_json(made)


def _replaced(value: Any, pattern: re.Pattern[str], names: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(lambda found: names[found[0]], value)
    if isinstance(value, list):
        return [_replaced(item, pattern, names) for item in value]
    return {key: _replaced(part, pattern, names) for key, part in value.items()} if isinstance(value, dict) else value


_HINT = "write it again, with `python -m torch_ltc run SCRIPT` or LTC_REPORT=FILE.json"


class PlainValues:
    """Values as JSON takes them, with lines of code as positions in a table: programs name few of them, often."""

    def __init__(self) -> None:
        self.sources: list[Any] = []
        self._positions: dict[Source, int] = {}

    def plain(self, value: Any) -> Any:
        """`value` as JSON takes it."""
        if isinstance(value, Source):
            if value not in self._positions:
                # Those that it refers to come first.
                row = self.source_row(value)
                self._positions[value] = len(self.sources)
                self.sources.append(row)
            return self._positions[value]
        if is_dataclass(value):
            return {item.name: self.plain(getattr(value, item.name)) for item in fields(value)}
        if isinstance(value, (tuple, list)):
            return [self.plain(item) for item in value]
        return {str(key): self.plain(part) for key, part in value.items()} if isinstance(value, Mapping) else value

    def source_row(self, source: Source) -> Any:
        """A line as a row of the table."""
        return {item.name: self.plain(getattr(source, item.name)) for item in fields(source)}


def _read(kind: Any, value: Any, sources: Sequence[Source]) -> Any:
    """`value`, as JSON gives it, as an object of type `kind`."""
    if kind is Source and isinstance(value, int):
        return sources[value]
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        if not isinstance(value, dict):
            raise TypeError(f"expected {kind}, got {value!r:.60}")
        named = {_RENAMED.get(name, name): part for name, part in value.items()}
        return kind(**{name: _read(hints[name], part, sources) for name, part in named.items() if name in hints})
    parts = get_args(kind)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected {kind}, got {value!r:.60}")
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple([_read(parts[0], item, sources) for item in value])
        return tuple([_read(part, item, sources) for part, item in zip(parts, value, strict=True)])
    if type(None) in parts:
        return None if value is None else _read(parts[0], value, sources)
    wanted = _JSON_TYPES.get(get_origin(kind) or kind)
    if wanted is not None and (not isinstance(value, wanted) or isinstance(value, bool) != (kind is bool)):
        raise TypeError(f"expected {kind}, got {value!r:.60}")
    return value


# The types of JSON values that stand for values of a type; True is an int to Python.
_JSON_TYPES: Mapping[Any, Any] = {int: int, float: (int, float), str: str, bool: bool, Mapping: dict, dict: dict}


@cache
def _hints(kind: Any) -> dict[str, Any]:
    """The fields of a class and their types; asking takes long, and there are thousands of rows."""
    return get_type_hints(kind)


def versions() -> dict[str, str]:
    """Versions of the package, of PyTorch, of Python, of the system, and of packages that matter."""
    # Asked of the package, which may be used without being installed.
    own = str(getattr(sys.modules.get("torch_ltc"), "__version__", "unknown"))
    found = {"torch_ltc": own, "torch": str(torch.__version__), "python": sys.version.split()[0]}
    found["system"] = platform.platform()
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = str(torch.version.cuda)
    return found
