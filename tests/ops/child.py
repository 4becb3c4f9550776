"""The inside of a worker process: runs units one after the other and sends their reports.

Owns the process it runs in: its output, its warnings, its time limit.
"""

import faulthandler
import os
import sys
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO

import torch

from tests.ops.probe import Probe
from tests.ops.records import Report, Unit
from tests.ops.unit import run_unit, supported


def send_supported(sending: Connection) -> None:
    """Sends the operators and their dtypes."""
    sending.send(supported())


def serve(sending: Connection, units: Sequence[Unit], log_path: str, time_limit_s: float) -> None:
    """Runs units of one backend and sends a report of each; ends the process when one takes too long."""
    log = _redirect_output(log_path)
    faulthandler.enable(log)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    probe = Probe(units[0].device, units[0].backend)
    for unit in units:
        log.seek(0)
        log.truncate()
        faulthandler.dump_traceback_later(time_limit_s, exit=True, file=log)
        sending.send(run_unit(unit, probe))
    faulthandler.cancel_dump_traceback_later()


def run_here(units: Sequence[Unit]) -> list[Report]:
    """Reports of units of one backend, run in this process: for a debugger."""
    probe = Probe(units[0].device, units[0].backend)
    return [run_unit(unit, probe) for unit in units]


def _redirect_output(path: str) -> IO[str]:
    """Sends all output of this process to a file: what a dying process says last is the reason of its death."""
    log = open(path, "w+")  # noqa: SIM115 (open until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    return log
