"""`python -m torch_ltc backends`: which backends there are."""

from __future__ import annotations

import argparse

from torch_ltc.cli.command import Command
from torch_ltc.config import SETTINGS, settings
from torch_ltc.errors import BackendError
from torch_ltc.lowering.registry import registry


def _add_options(parser: argparse.ArgumentParser) -> None:
    """There are none."""
    del parser


def _run(options: argparse.Namespace) -> int:
    del options
    rows = [("", "name", "form", "devices", "from"), *(_row(name) for name in registry.names())]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    print(f"\n* is the current one, from LTC_BACKEND or else the default, {SETTINGS['backend'].default}")
    return 0


def _row(name: str) -> tuple[str, str, str, str, str]:
    mark = "*" if name == settings.backend else ""
    shown = f"{name} (default)" if name == SETTINGS["backend"].default else name
    origin = registry.origin(name)
    try:
        backend = registry.get(name)
    except BackendError as error:
        # One that cannot be loaded, for want of a package, is shown with the reason.
        return mark, shown, "-", "-", f"{origin}; {str(error).splitlines()[0]}"
    devices = ", ".join(str(device) for device in backend.get_backend_devices())
    return mark, shown, backend.form.name.lower(), devices, origin


COMMAND = Command(
    name="backends",
    help="list the backends: name, form of their programs, devices, where they come from",
    description="List the backends that this installation has.",
    add_options=_add_options,
    run=_run,
)
