"""The installation and the machine: `ltc backends`, `devices`, `env`."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
from importlib import metadata
from typing import Any

import torch

import torch_ltc
from torch_ltc.cli.output import add_json, coloured, command, pairs, print_json, table
from torch_ltc.compile.disk_cache import Store
from torch_ltc.config import SETTINGS, Origin, cache_folder, foreign_variable, own_variables, settings
from torch_ltc.device import device_module as ltc
from torch_ltc.errors import BackendError
from torch_ltc.formatting import size_text
from torch_ltc.lowering.registry import registry
from torch_ltc.native import library
from torch_ltc.pytorch.entries import failing_probes
from torch_ltc.record.buffer import physical_device

_TIME_LIMIT_S = 10.0
_PACKAGES = (
    "numpy", "jax", "jaxlib", "triton", "transformers", "scikit-learn", "matplotlib", "tqdm", "expecttest", "pytest",
)  # fmt: skip
# Of other packages, with an effect on what programs do or how fast they are.
_FOREIGN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CXX", "PYTORCH_ENABLE_MPS_FALLBACK")


def cpu_name() -> str:
    """The processor's name and how many this process may use."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.partition(":")[2].strip() for line in file if line.startswith("model name")), name)
    except OSError:
        # Not Linux: the name that Python knows will do.
        return f"{name}, {os.cpu_count()} threads"
    return f"{name}, {len(os.sched_getaffinity(0))} of {os.cpu_count()} threads"


def first_line(*command: str) -> str:
    """The first line that a program prints, as compilers print their version; empty when there is no such program."""
    path = shutil.which(command[0])
    if path is None:
        return ""
    try:
        done = subprocess.run(
            [path, *command[1:]], capture_output=True, text=True, timeout=_TIME_LIMIT_S, check=False, errors="replace"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run: {error}"
    return next(iter((done.stdout or done.stderr).strip().splitlines()), "")


@command(
    "backends",
    "list the backends: name, form of their programs, devices, where they come from",
    "List the backends that this installation has.",
    add_json,
)
def _backends(options: argparse.Namespace) -> int:
    found = [_backend(name) for name in registry.names()]
    if options.json:
        print_json(found)
        return 0
    print(table([("", "name", "auto", "form", "devices", "from"), *map(_backend_row, found)]))
    print(
        f"\nthe current one is {settings.backend}, from LTC_BACKEND or else the default, {SETTINGS['backend'].default};"
    )
    print(
        "auto measures those whose results are 'equal' to eager's, with LTC_NUMERICS=close also those that are 'close'"
    )
    return 0


def _backend(name: str) -> dict[str, Any]:
    known = {
        "name": name,
        "current": name == settings.backend,
        "measured": registry.numerics(name),
        "origin": registry.origin(name),
    }
    try:
        backend = registry.get(name)
    except BackendError as error:
        # One that cannot be loaded, for want of a package, is shown with the reason.
        return {**known, "form": None, "devices": [], "error": str(error).splitlines()[0]}
    devices = [str(device) for device in backend.get_backend_devices()]
    return {**known, "form": backend.form.name.lower(), "devices": devices, "error": None}


def _backend_row(backend: dict[str, Any]) -> tuple[str, ...]:
    return (
        "*" if backend["current"] else "",
        backend["name"],
        backend["measured"] or "-",
        backend["form"] or "-",
        ", ".join(backend["devices"]) or "-",
        backend["origin"] + (f"; {backend['error']}" if backend["error"] else ""),
    )


def _physical() -> list[dict[str, Any]]:
    """The physical devices that the lazy device may run on; the current one is marked."""
    current = physical_device()
    # What the lazy device answers depends on the setting.
    with settings.scope(device_type="cpu"):
        free, total = ltc.get_memory_info()
    found = [_device_row(torch.device("cpu"), cpu_name(), free, total, current.type == "cpu")]
    for ordinal in range(torch.cuda.device_count()):
        device = torch.device("cuda", ordinal)
        free, total = torch.cuda.mem_get_info(ordinal)
        found.append(_device_row(device, torch.cuda.get_device_name(ordinal), free, total, current == device))
    return found


def _device_row(device: torch.device, name: str, free: int, total: int, current: bool) -> dict[str, Any]:
    return {"device": str(device), "name": name, "free_bytes": free, "total_bytes": total, "current": current}


@command(
    "devices",
    "list the lazy device and the physical devices it can run on",
    "List the lazy device and the physical devices that its programs can run on, with their memory.",
    add_json,
)
def _devices(options: argparse.Namespace) -> int:
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


@command(
    "env",
    "print what a bug report needs: versions, machine, settings",
    "Print versions, the machine, settings and variables that are set, to be pasted into a bug report.",
    add_json,
)
def _env(options: argparse.Namespace) -> int:
    found = environment()
    if options.json:
        print_json(found)
        return 0
    for title, values in found.items():
        print(coloured(title, "strong"))
        print("\n".join(f"  {line}" for line in pairs(values).splitlines()) if values else "  none")
    return 0


def environment() -> dict[str, dict[str, str]]:
    """Everything, by section."""
    return {
        "versions": _versions(),
        "machine": _machine(),
        "optional packages": {name: _installed(name) for name in _PACKAGES},
        "settings that are not the default": {
            name: f"{getattr(settings, name)!r} ({settings.origin(name).value})"
            for name in SETTINGS
            if settings.origin(name) is not Origin.DEFAULT
        },
        "variables": _variables(),
        "cache": _cache(),
        "private interfaces of PyTorch that differ": {
            path: what for path, _, what in (line.partition(" ") for line in failing_probes())
        },
    }


def _installed(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _own_version() -> str:
    here = torch_ltc.__version__
    return here if _installed("torch-ltc") == here else f"{here}, not installed: from {torch_ltc.__path__[0]}"


def _versions() -> dict[str, str]:
    found = {
        "torch_ltc": _own_version(),
        "torch": str(torch.__version__),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": platform.platform(),
        "c++ compiler": first_line(foreign_variable("CXX") or "g++", "--version") or "not found",
        "native extension": library.state(),
    }
    if torch.version.cuda is not None:
        found["cuda of torch"] = str(torch.version.cuda)
    return found


def _machine() -> dict[str, str]:
    free, total = _host_memory()
    found = {
        "cpu": cpu_name(),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "torch threads": str(torch.get_num_threads()),
        "memory": f"{size_text(total)}, {size_text(free)} free",
    }
    for ordinal in range(torch.cuda.device_count()):
        _, size = torch.cuda.mem_get_info(ordinal)
        found[f"gpu {ordinal}"] = f"{torch.cuda.get_device_name(ordinal)}, {size_text(size)}"
    if torch.cuda.device_count() == 0:
        found["gpu"] = "none that PyTorch can use"
    return found


def _host_memory() -> tuple[int, int]:
    with settings.scope(device_type="cpu"):
        return ltc.get_memory_info()


def _variables() -> dict[str, str]:
    """Variables that are set; one of ours that no setting has is likely to be misspelt."""
    known = {setting.variable for setting in SETTINGS.values()}
    found = {
        name: value if name in known else f"{value} (no setting has this variable)"
        for name, value in own_variables().items()
    }
    return found | {name: foreign_variable(name) for name in _FOREIGN if foreign_variable(name)}


def _cache() -> dict[str, str]:
    folder = cache_folder()
    if not folder:
        return {"folder": "off"}
    files = Store(folder, settings.cache_bytes).files()
    state: dict[str, Any] = {"folder": folder}
    if not os.path.isdir(folder):
        return {**state, "state": "not there yet"}
    return {
        **state,
        "state": "writable" if os.access(folder, os.W_OK) else "read only",
        "files": f"{len(files)}, {size_text(sum(file.size_bytes for file in files))}",
    }
