"""`ltc env`: what a bug report needs to say about the machine and the installation."""

from __future__ import annotations

import argparse
import os
import platform
from importlib import metadata
from typing import Any

import torch

import torch_ltc
from torch_ltc.cli.command import Command, add_json
from torch_ltc.cli.hardware import cpu_name, first_line
from torch_ltc.cli.output import coloured, pairs, print_json
from torch_ltc.compile.disk_cache import Store
from torch_ltc.config import SETTINGS, Origin, cache_folder, foreign_variable, own_variables, settings
from torch_ltc.device import device_module as ltc
from torch_ltc.formatting import size_text

_PACKAGES = (
    "numpy", "jax", "jaxlib", "triton", "transformers", "scikit-learn", "matplotlib", "tqdm", "expecttest", "pytest",
)  # fmt: skip
# Of other packages, with an effect on what programs do or how fast they are.
_FOREIGN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CXX", "PYTORCH_ENABLE_MPS_FALLBACK")


def _run(options: argparse.Namespace) -> int:
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


COMMAND = Command(
    name="env",
    help="print what a bug report needs: versions, machine, settings",
    description="Print versions, the machine, settings and variables that are set, to be pasted into a bug report.",
    add_options=add_json,
    run=_run,
)
