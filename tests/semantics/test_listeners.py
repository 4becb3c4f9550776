"""Code that the device calls back may use the device: event listeners, hooks, custom operators, closures."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import LONG_S, counted, gated, lazy, observe, probe, run_script
from torch_ltc import events
from torch_ltc.config import settings

pytestmark = pytest.mark.usefixtures("no_fallback")


def test_a_listener_may_record_when_a_program_is_synced() -> None:
    made: list[Tensor] = []

    def listen(event: events.Event) -> None:
        if not made:
            made.append(torch.ones(2, device="ltc") * 3)

    x = torch.ones(2, device="ltc") + 1
    stop = events.subscribe(listen, events.SyncEvent)
    try:
        torch_ltc.sync(wait=True)
    finally:
        stop()
    assert made[0].tolist() == [3.0, 3.0]
    assert x.tolist() == [2.0, 2.0]


def test_a_listener_may_read_what_is_being_synced_and_nothing_runs_twice() -> None:
    seen: list[Any] = []
    x = counted(torch.ones(2, device="ltc"))

    def listen(event: events.Event) -> None:
        if not seen:
            seen.append(None)
            seen[0] = x.tolist()

    stop = events.subscribe(listen, events.SyncEvent)
    try:
        torch_ltc.sync(wait=True)
    finally:
        stop()
    assert seen == [[2.0, 2.0]]
    assert x.tolist() == [2.0, 2.0]
    assert probe.runs == 1


def test_a_listener_on_the_worker_may_read() -> None:
    seen: list[list[float]] = []
    x = lazy(torch.full((2,), 4.0))
    stop = events.subscribe(lambda event: seen.append(x.tolist()), events.ExecuteEvent)
    try:
        (torch.ones(2, device="ltc") + 1).cpu()
        torch_ltc.sync(wait=True)
    finally:
        stop()
    assert seen == [[4.0, 4.0]]


def test_a_listener_on_the_worker_may_read_while_the_queue_is_full() -> None:
    # In a process of its own: what it guards against hangs.
    script = """
        import torch, torch_ltc
        from torch_ltc import events
        from torch_ltc.config import settings
        settings.queue_bound = 1
        kept = torch.ones(2, device="ltc") + 1
        torch_ltc.sync(wait=True)
        seen = []
        stop = events.subscribe(lambda event: seen.append(kept.tolist()), events.ExecuteEvent)
        for number in range(20):
            value = torch.ones(2, device="ltc") + number
            torch_ltc.sync()
        torch_ltc.sync(wait=True)
        stop()
        print(len(seen), value.tolist())
    """
    assert run_script(script, timeout_s=30).strip() == "20 [20.0, 20.0]"


def test_a_gradient_hook_may_read_and_sync() -> None:
    seen: list[float] = []
    x = torch.ones(3, device="ltc", requires_grad=True)
    y = x * 2

    def hook(gradient: Tensor) -> Tensor:
        seen.append(gradient.sum().item())
        torch_ltc.sync()
        return gradient * 10

    y.register_hook(hook)
    (y * y).sum().backward()
    assert seen == [12.0]
    assert x.grad.tolist() == [80.0, 80.0, 80.0]


def test_a_module_hook_may_read_without_running_anything_twice() -> None:
    norms: list[float] = []
    layer = torch.nn.Linear(2, 2).to("ltc")
    layer.register_forward_hook(lambda module, args, out: norms.append(counted(out.detach()).norm().item()))
    with observe() as seen:
        layer(torch.ones(1, 2, device="ltc")).sum().backward()
        torch_ltc.sync(wait=True)
    assert probe.runs == len(norms) == 1
    assert len(seen.runs) == 2


def test_a_custom_function_may_read_in_its_backward() -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.factor = x.max().item()
            return x * ctx.factor

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * (ctx.factor + gradient.min().item())

    x = torch.arange(3.0).to("ltc").requires_grad_()
    Scaled.apply(x).sum().backward()
    assert x.grad.tolist() == [3.0, 3.0, 3.0]


def test_a_finalizer_may_use_the_device() -> None:
    class Holder:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor

        def __del__(self) -> None:
            seen.append((self.tensor + 1).sum().item())

    seen: list[float] = []
    holder = Holder(torch.ones(2, device="ltc") * 2)
    torch_ltc.sync()
    x = torch.zeros(2, device="ltc") + 5
    del holder
    assert seen == [6.0]
    assert x.tolist() == [5.0, 5.0]


def test_a_failing_listener_disturbs_nobody() -> None:
    def fail(event: events.Event) -> None:
        raise ValueError("a bad listener")

    with pytest.warns(torch_ltc.errors.ListenerWarning, match="a bad listener"):
        stop = events.subscribe(fail, events.SyncEvent)
        try:
            x = torch.ones(2, device="ltc") + 1
            assert x.tolist() == [2.0, 2.0]
        finally:
            stop()


def test_a_listener_on_the_worker_may_record_while_an_eager_call_waits_for_room() -> None:
    # In a process of its own: what it guards against hangs.
    script = """
        import torch, torch_ltc
        from torch_ltc import events
        from torch_ltc.config import settings
        settings.queue_bound = 1
        settings.fallback = "allow"
        x = torch.ones(4).to("ltc")
        stop = events.subscribe(lambda event: x + 1, events.ExecuteEvent)
        for number in range(10):
            y = x * number
            found = torch.nonzero(y)
            torch.manual_seed(number)
            torch.ltc.get_rng_state()
        stop()
        print(found.flatten().tolist())
    """
    assert run_script(script).strip() == "[0, 1, 2, 3]"


def test_a_listener_may_read_inside_a_kernel_while_one_on_the_worker_records() -> None:
    # In a process of its own: what it guards against hangs.
    script = """
        import torch, torch_ltc
        from torch_ltc import events
        from torch_ltc.config import settings
        settings.pending_bound = 8
        x = torch.ones(4).to("ltc")
        seen = []
        made = []
        def read(event):
            if len(seen) < 5:
                seen.append(None)
                seen[-1] = (x * 2).tolist()
        events.subscribe(read, events.SyncEvent)
        stop = events.subscribe(lambda event: made.append(x + 1), events.ExecuteEvent)
        y = x
        for _ in range(100):
            y = y + 1
        total = y.tolist()
        stop()
        print(total, seen[-1], all(value.tolist() == [2.0] * 4 for value in made))
    """
    assert run_script(script).strip() == "[101.0, 101.0, 101.0, 101.0] [2.0, 2.0, 2.0, 2.0] True"


def test_a_listener_on_the_worker_may_record_while_programs_are_queued() -> None:
    # Programs that the worker cuts, at the bound, wait for what was queued before.
    x = lazy(torch.ones(4))
    made: list[Tensor] = []
    bound = settings.pending_bound
    stop = events.subscribe(lambda event: made.append(x + 1), events.ExecuteEvent)
    try:
        settings.pending_bound = 8
        for _ in range(5):
            y = x
            for _ in range(100):
                y = y + 1
            assert y.tolist() == [101.0] * 4
    finally:
        stop()
        settings.pending_bound = bound
    assert [value.tolist() for value in made] == [[2.0] * 4] * len(made)


def test_a_listener_on_the_worker_may_read_what_comes_of_the_results() -> None:
    x = lazy(torch.ones(4))
    seen: list[list[float]] = []
    heard = threading.Event()

    def listen(event: events.Event) -> None:
        if not seen:
            seen.append([])
            seen[0] = (y * 2).tolist()
            heard.set()

    with probe.closed():
        y = gated(x) + 1
        stop = events.subscribe(listen, events.ExecuteEvent)
        try:
            torch_ltc.sync()
            z = y + 1
            torch_ltc.sync()
            probe.gate.set()
            assert z.tolist() == [4.0] * 4
            assert heard.wait(LONG_S)
        finally:
            stop()
    assert seen == [[6.0] * 4]


def test_what_a_listener_records_while_the_programs_are_forgotten_is_computed() -> None:
    x = lazy(torch.ones(2))
    made: list[Tensor] = []
    stop = events.subscribe(lambda event: made.append(x + 5), events.SyncEvent)
    bound = settings.pending_bound
    try:
        forget = (torch_ltc.ir_cache.reset, lambda: setattr(settings, "pending_bound", bound - 1))
        for forgotten in forget:
            kept = x * 2
            forgotten()
            assert kept.tolist() == [2.0, 2.0]
    finally:
        stop()
        settings.pending_bound = bound
    assert [value.tolist() for value in made] == [[6.0, 6.0]] * len(made)
    assert len(made) >= 2
