"""The tests of the original, `test/lazy`, with `torch._lazy` replaced by this package; inside a worker process.

Owns the modules that stand in for those of the original, and the loading of such a file. Device "lazy" is "ltc" there,
and what is otherwise on purpose stands in a table of its own.
"""

import re
import sys
import time
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch

import torch_ltc
from tests.pytorch import harness, on_purpose
from tests.pytorch._lazy import mark_step
from tests.pytorch.records import Record
from torch_ltc import extract_compiled_graph, metrics
from torch_ltc.compile.program_cache import CachedProgram
from torch_ltc.execute.sync import program_synced


def load(path: Path) -> ModuleType:
    """The module of a test file of the original, which finds this package where it looks for its own."""
    _install()
    # Of the counters' names, "lazy" is a part here too.
    text = re.sub(r'(?<!else )"lazy"', '"ltc"', path.read_text())
    return harness.execute(path, on_purpose.reworded(path.stem, text))


def tests(module: ModuleType) -> Iterator[unittest.TestCase]:
    """The tests of a module: those of its classes, and its functions."""
    yield from _flat(unittest.TestLoader().loadTestsFromModule(module))
    for name, value in vars(module).items():
        if name.startswith("test_") and callable(value):
            yield unittest.FunctionTestCase(value)


def name_of(test: unittest.TestCase) -> str:
    """Class and method, or the name of the function."""
    if isinstance(test, unittest.FunctionTestCase):
        return test.id()
    return f"{type(test).__name__}.{test._testMethodName}"


def run(test: unittest.TestCase, before_device: Callable[[], None]) -> Record:
    """The result of a test; the original's tests have no counterpart on the CPU."""
    before_device()
    start_s = time.perf_counter()
    outcome, message, trace = harness.run_test(test)
    return Record(name_of(test), outcome, message, trace, device_s=time.perf_counter() - start_s)


def _flat(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from _flat(test)
        else:
            yield test


def _install() -> None:
    """Put this package in the place of `torch._lazy`, and what its tests use of `torch._C._lazy` beside it."""
    names = ("closures", "computation", "config", "debug", "ir_cache", "metrics")
    parts = {"closure" if name == "closures" else name: getattr(torch_ltc, name) for name in names}
    parts["extract_compiled_graph"] = sys.modules[extract_compiled_graph.__module__]
    parts["ts_backend"] = _module("ts_backend", init=lambda: None)
    public = {name: getattr(torch_ltc, name) for name in torch_ltc.__all__}
    package = _module("torch._lazy", **{**public, **parts, "mark_step": mark_step})
    package.__path__ = []
    sys.modules["torch._lazy"] = torch._lazy = package
    for name, part in parts.items():
        sys.modules[f"torch._lazy.{name}"] = part
    torch._C._lazy = SimpleNamespace(
        _get_tensors_text=torch_ltc.debug.dump_ir,
        # Sizes that change become symbolic by themselves: there is no mode to switch on.
        _get_symbolic_shape_mode=lambda: True,
        _set_symbolic_shape_mode=lambda on: None,
    )
    program_synced.add(_count_reused)
    torch._C._lazy_ts_backend = SimpleNamespace(_get_latest_computation_graph=_latest_graph)


_synced: set[int] = set()


def _count_reused(entry: CachedProgram) -> None:
    """Count the calls of a program that was synced before as the original counts nodes of its graph that it reuses."""
    if entry.program.identity not in _synced:
        _synced.add(entry.program.identity)
        return
    for name, n in entry.op_counts.items():
        plain, _, overload = name.removeprefix("aten::").partition(".")
        node = "".join(word.capitalize() for word in [*plain.split("_"), overload])
        metrics.count(f"IrNodeReused_torch::lazy::{node}", n)


def _module(name: str, **contents: object) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def _latest_graph() -> str:
    raise NotImplementedError("the text of a program is that of the device, not of a backend")
