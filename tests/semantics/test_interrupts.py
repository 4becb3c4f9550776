"""An interrupt at any point of recording, where Python may call a handler of signals: nothing later is wrong."""

from __future__ import annotations

import dis
import itertools
import random
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch

import torch_ltc
from torch_ltc.signals import signals_are_deferred

PACKAGE = str(Path(torch_ltc.__file__).parent)
_exception_table: Callable[[CodeType], list[Any]] = dis._parse_exception_table  # type: ignore[attr-defined]
# After these CPython looks for signals, and when a function begins.
_CALLS = {number for name, number in dis.opmap.items() if name.startswith("CALL") or name == "JUMP_BACKWARD"}


class Interrupt(BaseException):
    """As KeyboardInterrupt, of this test alone."""


@cache
def _ends_of_calls(code: CodeType) -> frozenset[int]:
    """Where the instructions behind calls lie. CPython raises at the call: left out are those that another `except` or
    `with` is for, as behind `return call()` in a `with`."""
    table = _exception_table(code)

    def handler(offset: int) -> int | None:
        return next((entry.target for entry in table if entry.start <= offset < entry.end), None)

    pairs = itertools.pairwise(dis.get_instructions(code))
    return frozenset(
        after.offset
        for before, after in pairs
        if before.opcode in _CALLS and handler(before.offset) == handler(after.offset)
    )


class _Points:
    """Counts the points where a handler may run in code of the package, and raises at one of them."""

    def __init__(self, at: int) -> None:
        self.passed = 0
        self._at = at

    def _reach(self) -> None:
        if signals_are_deferred():
            return
        self.passed += 1
        if self.passed == self._at:
            raise Interrupt

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            if frame.f_lasti in _ends_of_calls(frame.f_code):
                self._reach()
        elif event == "call":
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._reach()
        return self._trace

    def run(self, work: Callable[[], object]) -> bool:
        """True when `work` was interrupted."""
        before, hook = sys.gettrace(), sys.unraisablehook
        # In the end of a generator or a finalizer Python cannot raise.
        sys.unraisablehook = lambda what: None if isinstance(what.exc_value, Interrupt) else hook(what)
        sys.settrace(self._trace)
        try:
            work()
        except Interrupt:
            return True
        finally:
            sys.settrace(before)
            sys.unraisablehook = hook
        return False


def _step(x: torch.Tensor, rate: float) -> list[torch.Tensor]:
    """Numbers, views, writes through them, memory that is written to first here, lists, random numbers, gradients."""
    size = x.shape[0]
    y = (x * rate + 1).add(x, alpha=rate + 1)
    z = torch.empty(size, device=x.device).fill_(rate)
    y[1:].mul_(z[:-1]).sub_(0.5)
    u = y.view(-1, 1).expand(size, 2).t()
    z.copy_(y)
    weight = x.detach().clone().requires_grad_()
    loss = (weight.clamp(max=rate) * u.sum(0)).sum() / size
    loss.backward()
    assert weight.grad is not None
    return [y, z, torch.cat([u[0], z * 3]), loss.detach(), weight.grad]


def _expect_eager(x: torch.Tensor, rate: float) -> None:
    wanted = _step(x, rate)
    found = [each.cpu() for each in _step(x.to("ltc"), rate)]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


# Sizes that no other test has: their calls are new.
_sizes = iter(range(1001, 9999, 2))


def _interrupt_everywhere(prepare: Callable[[torch.Tensor], None], tries: int, seed: int) -> None:
    choose = random.Random(seed)
    points = 0
    for attempt in range(tries + 1):
        x = torch.linspace(-1, 2, next(_sizes))
        on_device = x.to("ltc")
        prepare(x)
        # The first time only counts.
        meter = _Points(choose.randrange(1, points) if attempt else -1)
        kept = on_device + 1
        interrupted = meter.run(lambda given=on_device: _step(given, 2.5))  # type: ignore[misc]
        points = points or meter.passed
        # Whatever of the step is pending is part of the next program.
        for rate in (2.5, 3.5):
            _expect_eager(x, rate)
        assert torch.equal(kept.cpu(), x + 1), f"point {meter.passed}, {interrupted}"
        assert torch.equal(on_device.cpu(), x)
    assert points > 100


def test_an_interrupt_while_new_calls_are_recorded_spoils_nothing() -> None:
    _interrupt_everywhere(lambda x: None, tries=120, seed=0)


def test_an_interrupt_while_known_calls_are_recorded_spoils_nothing() -> None:
    def prepare(x: torch.Tensor) -> None:
        for rate in (0.5, 1.5, 2.0):
            _step(x.to("ltc"), rate)
            torch_ltc.sync(wait=True)

    _interrupt_everywhere(prepare, tries=60, seed=1)


@pytest.mark.slow
def test_an_interrupt_at_thousands_of_points_spoils_nothing() -> None:
    _interrupt_everywhere(lambda x: None, tries=3000, seed=2)


def test_an_interrupt_at_every_point_of_a_new_call_leaves_its_number_out() -> None:
    x = torch.arange(3.0)
    on_device = x.to("ltc")

    def interrupt(meter: _Points) -> None:
        other = torch.ones(next(_sizes)).to("ltc")
        # What is around the new call is known.
        kept = on_device + 1
        meter.run(lambda: other * 2.5)
        assert torch.equal((kept * 3.5).cpu(), (x + 1) * 3.5), f"point {meter.passed}"

    for _ in range(4):
        assert torch.equal(((on_device + 1) * 3.5).cpu(), (x + 1) * 3.5)
    meter = _Points(-1)
    interrupt(meter)
    for at in range(1, meter.passed + 20):
        interrupt(_Points(at))
