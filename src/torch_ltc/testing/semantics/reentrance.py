"""Programs that run while others do: from listeners, step closures, hooks and other threads; and other backends."""

from __future__ import annotations

import threading
from typing import Any

import torch

from torch_ltc import api, closures
from torch_ltc.config import settings
from torch_ltc.events import ExecuteEvent, SyncEvent, subscribe
from torch_ltc.lowering.registry import registry
from torch_ltc.testing.semantics.table import Stage, case

THREADS = 3
WAIT_S = 120.0


def _work(on: Stage, number: int) -> torch.Tensor:
    x = on.ramp(4) * (number + 1)
    return (x.view(2, 2) @ x.view(2, 2)).relu().sum(0)


@case(compiled=False)
def listener_runs_programs(on: Stage) -> Any:
    """A listener that records and reads while a program is synced or runs."""
    inside: list[torch.Tensor] = []
    entered = False

    def listen(event: object) -> None:
        nonlocal entered
        if not entered:
            entered = True
            inside.append(_work(on, 7).cpu())

    results = []
    for kind in (SyncEvent, ExecuteEvent):
        entered = False
        stop = subscribe(listen, kind)
        try:
            result = _work(on, 1)
            on.sync()
            results.append(result.cpu())
            if on.lazy:
                api.wait_device_ops()
            else:
                listen(None)
        finally:
            stop()
    return [[each.tolist() for each in results], [each.tolist() for each in inside]]


@case()
def closure_runs_program(on: Stage) -> Any:
    """A step closure that runs a program."""
    found: list[list[float]] = []
    result = _work(on, 2)
    if on.lazy:
        closures.add_step_closure(lambda tensor: found.append((_work(on, 3) + tensor).tolist()), args=(result,))
        on.sync()
    else:
        found.append((_work(on, 3) + result).tolist())
    return [result, found]


@case()
def hook_reads(on: Stage) -> Any:
    """A gradient hook that reads a value in the middle of the backward pass."""
    seen: list[float] = []
    errors: list[Exception] = []

    def hook(gradient: torch.Tensor) -> None:
        # An error that leaves a hook can end the process: PyTorch unwinds with it through the Python device guard.
        try:
            seen.append(gradient.sum().item())
        except Exception as error:
            errors.append(error)

    x = on.ramp(3).requires_grad_()
    hidden = x * 2
    hidden.register_hook(hook)
    (hidden * hidden).sum().backward()
    if errors:
        raise errors[0]
    return [x.grad, seen]


@case(compiled=False)
def threads_share_program(on: Stage) -> Any:
    """Threads that run the same program at the same time."""
    results: dict[int, list[float]] = {}
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            for _ in range(4):
                results[number] = _work(on, number).tolist()
        except BaseException as error:
            errors.append(error)

    # A case on threads starts threads.
    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(THREADS)]  # noqa: TID251
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    on.claim(not any(thread.is_alive() for thread in threads), "a thread does not end")
    if errors:
        raise errors[0]
    return [results[number] for number in range(THREADS)]


@case(compiled=False)
def backend_changes(on: Stage) -> Any:
    """The backend is changed between steps, and tensors, views and writes go on."""
    weight = on.ramp(3, 3)
    view = weight[1]
    seen = []
    for number in range(6):
        name = on.backend.name if number % 2 else registry.reference.name
        with settings.scope(backend=name if on.lazy else settings.backend):
            product = weight @ weight.t()
            weight.mul_(0.5)
            view.add_(product[0] * 0.01)
            on.sync()
        seen.append(product)
    return [weight, view, seen]
