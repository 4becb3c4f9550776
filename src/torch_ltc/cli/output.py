"""The commands of `ltc` and their output: data on stdout, everything else on stderr; colours on a terminal; tables."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar

from torch_ltc.config import foreign_variable

Item = TypeVar("Item")
PROGRESS_EVERY_S = 10.0
_COLOURS = {"error": "31", "warning": "33", "hint": "36", "good": "32", "faint": "2", "strong": "1"}


@dataclass(frozen=True, slots=True)
class Command:
    """A word after `ltc`, its options, and the function that runs it and gives the exit status. `epilog` is shown below
    the options, line by line."""

    name: str
    help: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    epilog: str = ""


COMMANDS: dict[str, Command] = {}
"""The commands of the modules that are loaded."""


def command(
    name: str, help: str, description: str, add_options: Callable[[argparse.ArgumentParser], None], epilog: str = ""
) -> Callable[[Callable[[argparse.Namespace], int]], Callable[[argparse.Namespace], int]]:
    """Make a command of the function that follows."""

    def add(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
        COMMANDS[name] = Command(name, help, description, add_options, run, epilog)
        return run

    return add


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option for output that programs read."""
    parser.add_argument("--json", action="store_true", help="print plain data as JSON instead of text")


def coloured(text: str, style: str, stream: TextIO | None = None) -> str:
    """The text in a colour, where `stream` (stdout) is a terminal and the user did not forbid it."""
    stream = sys.stdout if stream is None else stream
    if foreign_variable("NO_COLOR") or foreign_variable("TERM") == "dumb" or not stream.isatty():
        return text
    return f"\x1b[{_COLOURS[style]}m{text}\x1b[0m"


def print_json(value: Any) -> None:
    """Plain data on stdout."""
    print(json.dumps(value, indent=1))


def note(text: str) -> None:
    """A message that is no result."""
    print(f"{coloured('torch_ltc:', 'faint', sys.stderr)} {text}", file=sys.stderr, flush=True)


def table(rows: Sequence[Sequence[str]], right: str = "") -> str:
    """Rows as aligned columns, the first row the header; `right` has an "r" for each column that is aligned right."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    sides = right.ljust(len(widths))
    lines = [
        "  ".join(
            cell.rjust(width) if side == "r" else cell.ljust(width) for cell, width, side in zip(row, widths, sides)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([coloured(lines[0], "strong"), *lines[1:]])


def pairs(values: Mapping[str, str]) -> str:
    """Names and values, one pair a line."""
    width = max((len(name) for name in values), default=0)
    return "\n".join(f"{name.ljust(width)}  {value}".rstrip() for name, value in values.items())


_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse_size(text: str) -> int:
    """Bytes that "500M", "1.5 GiB" or "1024" stand for; raises ValueError."""
    word = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = word[-1:] if word[-1:] in "KMGT" else ""
    try:
        number = float(word.removesuffix(unit))
    except ValueError as error:
        raise ValueError(f"{text!r} is no size") from error
    # Nor is NaN, or infinity.
    if not 0 <= number < float("inf"):
        raise ValueError(f"{text!r} is no size")
    return int(number * _BINARY[unit])


def count(text: str) -> int:
    """The number of an option, which is not negative; for argparse."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 0 or more")
    return int(text)


def age_text(age_s: float) -> str:
    """As "5 min"; ages in the future, which clocks of other machines cause, are none."""
    for unit, length_s in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if age_s >= length_s:
            return f"{age_s / length_s:.0f} {unit}"
    return f"{max(age_s, 0.0):.0f} s"


def progress(items: Sequence[Item], label: str) -> Iterator[Item]:
    """The items one by one, with a bar on stderr where that is a terminal and tqdm is installed."""
    if sys.stderr.isatty() and importlib.util.find_spec("tqdm") is not None:
        yield from importlib.import_module("tqdm").tqdm(items, desc=label, leave=False)
        return
    began = shown = time.monotonic()
    for number, item in enumerate(items, 1):
        yield item
        now = time.monotonic()
        if now - shown >= PROGRESS_EVERY_S:
            shown = now
            print(f"{label}: {number} of {len(items)}, {now - began:.0f} s", file=sys.stderr, flush=True)
