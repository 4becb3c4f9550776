"""What a command of the command line is."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A word after `ltc`, its options, and what it does. `epilog` is shown below the options, line by line."""

    name: str
    help: str
    description: str
    add_options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    """Gives the exit status."""
    epilog: str = ""


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option for output that programs read."""
    parser.add_argument("--json", action="store_true", help="print plain data as JSON instead of text")
