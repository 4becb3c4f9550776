"""PyTorch's device-generic tests, made for the CPU and for the device side by side; inside a worker process.

Owns the test class of the device for `torch.testing._internal.common_device_type`, the loading of a test file, the
pairing of each CPU test with its counterpart, and the run of one pair.
"""

import contextlib
import sys
import time
import traceback
import unittest
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch.testing._internal import common_device_type
from torch.testing._internal.opinfo import core

import torch_ltc
from tests.pytorch import stand_ins
from tests.pytorch.records import LATE, LATE_WARNING, Outcome, Record
from torch_ltc.errors import ExecutionError, LtcError

DEVICE = "ltc"
MESSAGE_LENGTH = 400
TRACEBACK_LENGTH = 2500


class DeviceTestBase(common_device_type.PrivateUse1TestBase):
    """The base of test classes of the device: its kernels are those of the CPU, and so are dtypes and tolerances."""

    device_type = DEVICE

    @classmethod
    def _get_dtypes(cls, test):
        dtypes = getattr(test, "dtypes", None)
        return dtypes and dtypes.get("cpu", dtypes["all"])


DATA_ERRORS = frozenset(
    f"aten::{name}"
    for name in (
        "_embedding_bag", "_embedding_bag_forward_only", "_linalg_check_errors", "embedding", "index.Tensor",
        "index_put_", "linalg_cholesky_ex", "linalg_eig", "linalg_inv_ex", "masked_fill.Tensor", "masked_fill_.Tensor",
        "masked_scatter", "masked_scatter_", "normal.Tensor_Tensor", "normal.float_Tensor", "scatter_.value",
        "segment_reduce",
    )
)  # fmt: skip
"""Operators whose errors may depend on the values of their arguments: only these may raise them at the sync."""


class Late:
    """While a test runs on the device: a block that is to raise or to warn, and did not yet, ends with a sync.

    Errors that depend on data are raised at the next sync or read, as on other asynchronous devices, kernels warn when
    they run, and many tests read nothing. An error of an operator that is not in `DATA_ERRORS` is not accepted: eager's
    shapes and dtypes alone would have raised it at the call.
    """

    def __init__(self) -> None:
        self.seen: set[str] = set()
        self.warned = False

    @contextlib.contextmanager
    def accepted(self) -> Iterator[None]:
        """Within this, every `assertRaises` and `assertWarns` ends with a sync."""
        with (
            mock.patch.object(unittest.case._AssertRaisesContext, "__exit__", self._raises_exit),
            mock.patch.object(unittest.case._AssertWarnsContext, "__exit__", self._warns_exit),
        ):
            yield

    @property
    def message(self) -> str:
        """What was late, for a test that passes."""
        if self.seen:
            return f"{LATE}: {', '.join(sorted(self.seen))}"
        return LATE_WARNING if self.warned else ""

    @property
    def _warns_exit(self) -> Callable[..., None]:
        original, late = unittest.case._AssertWarnsContext.__exit__, self

        def has_warned(context):
            return any(isinstance(warning.message, context.expected) for warning in context.warnings)

        def at_exit(context, kind, error, trace):
            if kind is None and not has_warned(context):
                torch_ltc.sync(wait=True)
                late.warned = late.warned or has_warned(context)
            original(context, kind, error, trace)

        return at_exit

    @property
    def _raises_exit(self) -> Callable[..., bool | None]:
        original, late = unittest.case._AssertRaisesContext.__exit__, self

        def at_exit(context, kind, error, trace):
            if kind is None:
                try:
                    torch_ltc.sync(wait=True)
                except ExecutionError as raised:
                    if raised.op in DATA_ERRORS:
                        late.seen.add(raised.op)
                        kind, error, trace = type(raised), raised, raised.__traceback__
            return original(context, kind, error, trace)

        return at_exit


def _is_active(self, cls_name, test_name, device_type, dtype, param_kwargs):
    """What the database says about the CPU it says about the device, whose kernels are the CPU's."""
    as_cpu = "cpu" if device_type == DEVICE and self.device_type == "cpu" else device_type
    return _database_is_active(self, cls_name, test_name, as_cpu, dtype, param_kwargs)


_database_is_active = core.DecorateInfo.is_active


def _desired_bases(bases, except_for=None, only_for=None):
    """Tests that are for the CPU and CUDA are for the device, too: PyTorch lists the devices that it builds."""
    desired = _listed_bases(bases, except_for, only_for)
    if only_for is not None and not isinstance(only_for, str) and {"cpu", "cuda"} <= set(only_for):
        desired += [DeviceTestBase] if DeviceTestBase in bases and DeviceTestBase not in desired else []
    return desired


_listed_bases = common_device_type.filter_desired_device_types


@dataclass(frozen=True)
class Pair:
    """A test of the CPU, and the same test of the device where PyTorch makes one."""

    cpu: unittest.TestCase
    device: unittest.TestCase | None

    @property
    def name(self) -> str:
        """The name of the CPU's test, class and method."""
        return f"{type(self.cpu).__name__}.{self.cpu._testMethodName}"


def load(path: Path) -> ModuleType:
    """The module of a test file, its generic classes instantiated for the CPU and the device."""
    common_device_type.device_type_test_bases[:] = [common_device_type.CPUTestBase, DeviceTestBase]
    common_device_type.filter_desired_device_types = _desired_bases
    core.DecorateInfo.is_active = _is_active
    text = path.read_text()
    stand_ins.install(text)
    # Test files import each other by the names that they have in the folder of tests.
    sys.path.insert(0, str(_test_folder(path)))
    return execute(path, stand_ins.reworded(text))


def execute(path: Path, text: str) -> ModuleType:
    """The module of a file, made from a text in the place of its own."""
    module = ModuleType(path.stem)
    module.__file__ = str(path)
    sys.modules[path.stem] = module
    exec(compile(text, path, "exec"), vars(module))
    return module


def _test_folder(path: Path) -> Path:
    return next((parent for parent in path.parents if parent.name == "test"), path.parent)


def pairs(module: ModuleType) -> Iterator[Pair]:
    """Every test that was made for the CPU from a generic class, in the order of names."""
    classes = {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, common_device_type.DeviceTypeTestBase)
    }
    for name, cpu in sorted(classes.items()):
        if cpu.device_type != "cpu" or not name.endswith("CPU"):
            continue
        device = classes.get(name.removesuffix("CPU") + DEVICE.upper())
        for method in unittest.TestLoader().getTestCaseNames(cpu):
            yield Pair(cpu(method), _counterpart(device, method))


def _counterpart(device: type | None, method: str) -> unittest.TestCase | None:
    """The test of the device with the same name, but for the last "cpu" in it."""
    head, found, tail = method.rpartition("_cpu")
    name = f"{head}_{DEVICE}{tail}" if found else method
    return device(name) if device is not None and hasattr(device, name) else None


def run_pair(pair: Pair, before_device: Callable[[], None]) -> Record:
    """A test on the CPU first: only where it passes there does the device count."""
    start_s = time.perf_counter()
    on_cpu, message, trace = run_test(pair.cpu)
    cpu_s = time.perf_counter() - start_s
    if on_cpu is not Outcome.PASS:
        outcome = Outcome.SKIPPED if on_cpu is Outcome.SKIPPED else Outcome.CPU_FAILS
        return Record(pair.name, outcome, message, trace, cpu_s)
    if pair.device is None:
        return Record(pair.name, Outcome.CPU_ONLY, "not made for other devices", cpu_s=cpu_s)
    before_device()
    late = Late()
    with late.accepted():
        outcome, message, trace = run_test(pair.device)
    if outcome is Outcome.PASS:
        message = late.message
    device_s = time.perf_counter() - start_s - cpu_s
    if outcome is Outcome.SKIPPED:
        outcome = Outcome.CPU_ONLY
    return Record(pair.name, outcome, message, trace, cpu_s, device_s)


def run_test(test: unittest.TestCase) -> tuple[Outcome, str, str]:
    """The outcome of a test, the first line of an error, and its traceback."""
    result = _Result()
    unittest.TestSuite([test]).run(result)
    # A later test must not inherit what this one left behind: a failure that nobody has read is this test's own.
    torch.set_default_dtype(torch.float32)
    try:
        torch_ltc.sync(wait=True)
    except LtcError as error:
        if result.outcome is Outcome.PASS:
            result.addError(test, (type(error), error, error.__traceback__))
    return result.outcome, result.message, result.trace


class _Result(unittest.TestResult):
    """The outcome of one test; of several errors, in subtests or when cleaning up, the first."""

    def __init__(self) -> None:
        super().__init__()
        self.outcome, self.message, self.trace = Outcome.PASS, "", ""

    def addError(self, test, err):
        super().addError(test, err)
        self._failed(err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self._failed(err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self._failed(err)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        if self.outcome is Outcome.PASS:
            self.outcome, self.message = Outcome.SKIPPED, reason[:MESSAGE_LENGTH]

    def addExpectedFailure(self, test, err):
        super().addExpectedFailure(test, err)
        self.outcome, self.message = Outcome.SKIPPED, "expected to fail"

    def _failed(self, err) -> None:
        if self.outcome is Outcome.FAIL:
            return
        _, error, _ = err
        self.outcome = Outcome.FAIL
        root = error.__cause__ if error.__cause__ is not None and "Comparing" in str(error) else error
        self.message = f"{type(root).__name__}: {root}"[:MESSAGE_LENGTH]
        self.trace = "".join(traceback.format_exception(type(root), root, root.__traceback__))[-TRACEBACK_LENGTH:]
