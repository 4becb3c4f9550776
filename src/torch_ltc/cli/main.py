"""Choosing the command, and turning errors into messages and exit statuses.

Exit status: what the command says (0 for success, 1 for a failed test), 2 for wrong arguments, 130 when interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch_ltc.cli import backends, conformance
from torch_ltc.errors import LtcError

COMMANDS = (backends.COMMAND, conformance.COMMAND)
WRONG_ARGUMENTS = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; without arguments, show what there is."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        status: int = options.run(options)
    except LtcError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    return status


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_ltc", description="A lazy tensor device for PyTorch: its backends, and tests for yours."
    )
    parser.set_defaults(run=None)
    words = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        subparser = words.add_parser(command.name, help=command.help, description=command.description)
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return parser
