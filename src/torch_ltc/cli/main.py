"""Choosing the command, and turning errors into messages and exit statuses.

Exit status: what the command says (0 for success, 1 when it found something or failed), 2 for wrong arguments and for
input that cannot be read, 130 when interrupted. `run` ends with the status of its script.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

import torch_ltc
from torch_ltc.cli import output
from torch_ltc.cli.output import Command
from torch_ltc.errors import LtcError

# The module of each command. Only the one that is asked for is loaded: some take a while.
COMMANDS = {"run": "run", "report": "recordings", "doctor": "recordings", "explain": "recordings", "dump": "recordings"}
COMMANDS |= {"cache": "cache", "devices": "about", "backends": "about", "conformance": "conformance"}
COMMANDS |= {"bench": "bench", "env": "about", "build": "build"}
WRONG_ARGUMENTS = 2
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; without arguments, show what there is."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = build_parser(arguments[0] if arguments else "")
    options = parser.parse_args(arguments)
    if options.run is None:
        parser.print_help()
        return 0
    try:
        status: int = options.run(options)
        sys.stdout.flush()
    except LtcError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_ARGUMENTS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads has seen enough, as in `ltc dump show | head`. Python must not try to write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return status


def load_command(name: str) -> Command:
    """The command of this name."""
    importlib.import_module(f"torch_ltc.cli.{COMMANDS[name]}")
    return output.COMMANDS[name]


def build_parser(word: str = "") -> argparse.ArgumentParser:
    """The parser of all commands, or of one when `word` is its name."""
    parser = argparse.ArgumentParser(
        prog="ltc",
        description="A lazy tensor device for PyTorch: run scripts on it, see what it did, look after its cache.",
        epilog="`ltc COMMAND --help` says more about a command. `python -m torch_ltc` is the same as `ltc`.",
    )
    parser.add_argument("--version", action="version", version=f"torch_ltc {torch_ltc.__version__}")
    parser.set_defaults(run=None)
    words = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name in [word] if word in COMMANDS else COMMANDS:
        command = load_command(name)
        subparser = words.add_parser(
            command.name,
            help=command.help,
            description=command.description,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter if command.epilog else argparse.HelpFormatter,
        )
        command.add_options(subparser)
        subparser.set_defaults(run=command.run)
    return parser
