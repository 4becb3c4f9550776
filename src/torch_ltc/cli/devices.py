"""`ltc devices`: the lazy device and the physical ones behind it."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from torch_ltc.cli.command import Command, add_json
from torch_ltc.cli.hardware import cpu_name
from torch_ltc.cli.output import coloured, print_json, table
from torch_ltc.config import settings
from torch_ltc.device import device_module as ltc
from torch_ltc.formatting import size_text
from torch_ltc.record.buffer import physical_device


def _physical() -> list[dict[str, Any]]:
    """The physical devices that the lazy device may run on; the current one is marked."""
    current = physical_device()
    # What the lazy device answers depends on the setting.
    with settings.scope(device_type="cpu"):
        free, total = ltc.get_memory_info()
    found = [_row(torch.device("cpu"), cpu_name(), free, total, current.type == "cpu")]
    for ordinal in range(torch.cuda.device_count()):
        device = torch.device("cuda", ordinal)
        free, total = torch.cuda.mem_get_info(ordinal)
        found.append(_row(device, torch.cuda.get_device_name(ordinal), free, total, current == device))
    return found


def _row(device: torch.device, name: str, free: int, total: int, current: bool) -> dict[str, Any]:
    return {"device": str(device), "name": name, "free_bytes": free, "total_bytes": total, "current": current}


def _run(options: argparse.Namespace) -> int:
    physical = _physical()
    lazy = {"device": "ltc:0", "name": ltc.get_device_name(), "backend": settings.backend}
    if options.json:
        print_json({"lazy": lazy, "physical": physical})
        return 0
    print(f"{coloured('ltc:0', 'strong')}: {lazy['name']}, backend {lazy['backend']}\n")
    rows = [("", "physical", "name", "free", "memory")]
    for row in physical:
        sizes = size_text(row["free_bytes"]), size_text(row["total_bytes"])
        rows.append(("*" if row["current"] else "", row["device"], row["name"], *sizes))
    print(table(rows, "   rr"))
    print("\n* is where programs run, from the settings device_type (LTC_TS_CUDA) and device_ordinal")
    return 0


COMMAND = Command(
    name="devices",
    help="list the lazy device and the physical devices it can run on",
    description="List the lazy device and the physical devices that its programs can run on, with their memory.",
    add_options=add_json,
    run=_run,
)
