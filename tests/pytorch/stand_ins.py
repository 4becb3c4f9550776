"""What test files of an older PyTorch import that the installed one has elsewhere, or no more."""

import importlib
import importlib.util
import sys
import unittest
from collections.abc import Callable
from types import ModuleType
from unittest import mock

INTERNAL = "torch.testing._internal"


def install() -> None:
    """Put a stand-in wherever a name is missing; what is there stays."""
    invocations = importlib.import_module(f"{INTERNAL}.common_methods_invocations")
    device_type = importlib.import_module(f"{INTERNAL}.common_device_type")
    moved = {name: getattr(device_type, name, None) for name in ("skip", "skipOps", "xfail")}
    moved["binary_ufuncs_and_refs"] = invocations.binary_ufuncs
    names = {
        "common_cuda": {"tf32_is_not_fp32": lambda: False},
        "common_mkldnn": {"bf32_on_and_off": lambda *_, **__: _unchanged},
        "common_methods_invocations": moved,
        "common_nn": {"new_module_tests": []},
    }
    for module_name, members in names.items():
        module = importlib.import_module(f"{INTERNAL}.{module_name}")
        for name, value in members.items():
            if not hasattr(module, name):
                setattr(module, name, value)
    if importlib.util.find_spec("hypothesis") is None:
        _install_hypothesis()


def _unchanged(test: Callable[..., object]) -> Callable[..., object]:
    return test


def _install_hypothesis() -> None:
    """A package that is not there: its tests are skipped, instead of all tests of a file that imports it."""
    package = ModuleType("hypothesis")
    package.given = lambda *_, **__: unittest.skip("needs hypothesis")
    sys.modules["hypothesis"] = package
    sys.modules[f"{INTERNAL}.hypothesis_utils"] = mock.MagicMock()
