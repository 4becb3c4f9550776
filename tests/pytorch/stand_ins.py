"""What test files of an older PyTorch import or say that the installed one has elsewhere, or no more, or says else."""

import importlib
import importlib.util
import sys
import unittest
from collections.abc import Callable
from types import ModuleType
from unittest import mock

INTERNAL = "torch.testing._internal"
Make = Callable[[ModuleType], object]


TEXT = {
    # Test classes inherit from the generic ones in newer versions, where this calls itself for ever.
    "super(self.__class__, self)": "super()",
    # Samples that are skipped or expected to fail have a context of their own.
    "for sample, subtest_ctx in op.": "for sample, subtest_ctx, sample_ctx in op.",
    "with subtest_ctx(self):": "with subtest_ctx(self), sample_ctx(self):",
}
"""Parts of test files that are worded otherwise now."""


def reworded(text: str) -> str:
    """The text of a test file for the installed PyTorch."""
    for old, new in TEXT.items():
        text = text.replace(old, new)
    return text


def install(text: str) -> None:
    """Put a stand-in wherever a name is missing that the text of a test file imports; what is there stays."""
    for module_name, members in STAND_INS.items():
        if module_name in text:
            module = importlib.import_module(module_name if "." in module_name else f"{INTERNAL}.{module_name}")
            for name, make in members.items():
                if not hasattr(module, name):
                    setattr(module, name, make(module))
    if "hypothesis" in text and importlib.util.find_spec("hypothesis") is None:
        _install_hypothesis()


def _unchanged(test: Callable[..., object]) -> Callable[..., object]:
    return test


def _moved(name: str) -> Make:
    return lambda _: getattr(importlib.import_module(f"{INTERNAL}.common_device_type"), name)


STAND_INS: dict[str, dict[str, Make]] = {
    "common_cuda": {"tf32_is_not_fp32": lambda _: lambda: False},
    "common_mkldnn": {"bf32_on_and_off": lambda _: lambda *_, **__: _unchanged},
    "common_methods_invocations": {
        **{name: _moved(name) for name in ("skip", "xfail")},
        # Its arguments are others now. What it leaves out fails on the CPU too, and does not count.
        "skipOps": lambda _: lambda *_: _unchanged,
        "binary_ufuncs_and_refs": lambda module: module.binary_ufuncs,
    },
    "common_nn": {"new_module_tests": lambda _: []},
    "torch.nn.attention.flex_attention": {"create_nested_block_mask": lambda _: None},
}
"""By module (without a dot, one of PyTorch's test utilities) and name, a function that makes the stand-in."""


def _install_hypothesis() -> None:
    """A package that is not there: its tests are skipped, instead of all tests of a file that imports it."""
    package = ModuleType("hypothesis")
    package.given = lambda *_, **__: unittest.skip("needs hypothesis")
    sys.modules["hypothesis"] = package
    sys.modules[f"{INTERNAL}.hypothesis_utils"] = mock.MagicMock()
