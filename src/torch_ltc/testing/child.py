"""The inside of a worker process: runs units one after the other and sends their results.

Owns the process it runs in: its output, its warnings, its time limit.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import IO, Any

import torch

from torch_ltc.config import settings
from torch_ltc.lowering.interface import Backend
from torch_ltc.testing import backends
from torch_ltc.testing.operators import run_unit
from torch_ltc.testing.probe import Probe, opened
from torch_ltc.testing.records import READY, AnyUnit, Result, Unit
from torch_ltc.testing.semantics.runner import run_case


def send_supported(sending: Connection) -> None:
    """Sends the operators and their dtypes, or the error that keeps the database away."""
    try:
        sending.send(_database().supported())
    except Exception as error:
        sending.send(error)


def serve(
    sending: Connection,
    units: Sequence[AnyUnit],
    log_path: str,
    time_limit_s: float,
    physical: Mapping[str, str | int],
) -> None:
    """Says when it is ready, then runs units of one backend and sends a result of each; ends the process when one takes
    too long.

    `physical` are the settings that choose the physical device.
    """
    log = _redirect_output(log_path)
    faulthandler.enable(log)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    # The first unit pays for loading the backend, and a backend may hang there too.
    faulthandler.dump_traceback_later(time_limit_s + START_S, exit=True, file=log)
    with settings.scope(**physical), opened(units[0].device, _backend(units[0])) as probe:
        sending.send(READY)
        for unit in units:
            log.seek(0)
            log.truncate()
            faulthandler.dump_traceback_later(time_limit_s, exit=True, file=log)
            sending.send(_run(unit, probe, time_limit_s))
    faulthandler.cancel_dump_traceback_later()


def run_here(units: Sequence[AnyUnit], backend: Backend | None, time_limit_s: float) -> Iterator[Result]:
    """Results of units of one backend, run in this process: for a debugger, or for a backend that exists only here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with opened(units[0].device, backend or _backend(units[0])) as probe:
            for unit in units:
                yield _run(unit, probe, time_limit_s)


START_S = 60.0
"""How long a worker may take to load its backend, beyond the time limit of a unit."""


def _backend(unit: AnyUnit) -> Backend | None:
    return None if unit.device == "cpu" else backends.find(unit.backend)


def _run(unit: AnyUnit, probe: Probe, time_limit_s: float) -> Result:
    if isinstance(unit, Unit):
        return run_unit(unit, _database().seeded(unit.operator), probe, time_limit_s)
    return run_case(unit, probe)


def _database() -> Any:
    """PyTorch's database, imported late: semantics do without it and what it needs."""
    return importlib.import_module("torch_ltc.testing.database")


def _redirect_output(path: str) -> IO[str]:
    """Sends all output of this process to a file: what a dying process says last is the reason of its death."""
    log = open(path, "w+", encoding="utf-8")  # noqa: SIM115 (open until the process ends)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    return log
