"""`ltc backends`: which backends there are."""

from __future__ import annotations

import argparse
from typing import Any

from torch_ltc.cli.command import Command, add_json
from torch_ltc.cli.output import print_json, table
from torch_ltc.config import SETTINGS, settings
from torch_ltc.errors import BackendError
from torch_ltc.lowering.registry import registry


def _run(options: argparse.Namespace) -> int:
    found = [_backend(name) for name in registry.names()]
    if options.json:
        print_json(found)
        return 0
    print(table([("", "name", "form", "devices", "from"), *map(_row, found)]))
    print(f"\n* is the current one, from LTC_BACKEND or else the default, {SETTINGS['backend'].default}")
    return 0


def _backend(name: str) -> dict[str, Any]:
    known = {
        "name": name,
        "current": name == settings.backend,
        "default": name == SETTINGS["backend"].default,
        "origin": registry.origin(name),
    }
    try:
        backend = registry.get(name)
    except BackendError as error:
        # One that cannot be loaded, for want of a package, is shown with the reason.
        return {**known, "form": None, "devices": [], "error": str(error).splitlines()[0]}
    devices = [str(device) for device in backend.get_backend_devices()]
    return {**known, "form": backend.form.name.lower(), "devices": devices, "error": None}


def _row(backend: dict[str, Any]) -> tuple[str, ...]:
    return (
        "*" if backend["current"] else "",
        f"{backend['name']} (default)" if backend["default"] else backend["name"],
        backend["form"] or "-",
        ", ".join(backend["devices"]) or "-",
        backend["origin"] + (f"; {backend['error']}" if backend["error"] else ""),
    )


COMMAND = Command(
    name="backends",
    help="list the backends: name, form of their programs, devices, where they come from",
    description="List the backends that this installation has.",
    add_options=add_json,
    run=_run,
)
