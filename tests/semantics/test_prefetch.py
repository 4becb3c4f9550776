"""`torch_ltc.prefetch`: batches come in order, on the device, and the thread that uploads them ends with the loop."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import torch_ltc
from torch_ltc.device import uploads

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Item:
    x: Tensor
    name: str


def threads() -> int:
    return sum(thread.name == "torch_ltc prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    assert threads() == 0


def test_batches_are_those_of_the_loader_in_order() -> None:
    data = TensorDataset(torch.arange(20.0), torch.arange(20))
    torch.manual_seed(3)
    expected = [(x.tolist(), y.tolist()) for x, y in DataLoader(data, batch_size=3, shuffle=True)]
    torch.manual_seed(3)
    found = []
    loader = torch_ltc.prefetch(DataLoader(data, batch_size=3, shuffle=True))
    assert len(loader) == 7
    assert loader.batch_size == 3
    for x, y in loader:
        assert x.device.type == y.device.type == "ltc"
        found.append((x.tolist(), y.tolist()))
    assert found == expected


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ({"x": torch.ones(2), "n": 3}, lambda made: (made["x"], made["n"] == 3)),
        (OrderedDict(x=torch.ones(2)), lambda made: (made["x"], type(made) is OrderedDict)),
        ([torch.ones(2), "name"], lambda made: (made[0], made[1] == "name" and type(made) is list)),
        ((torch.ones(2), [1]), lambda made: (made[0], made[1] == [1] and type(made) is tuple)),
        (Pair(torch.ones(2), 1), lambda made: (made.x, type(made) is Pair and made.y == 1)),
        (Item(torch.ones(2), "a"), lambda made: (made.x, type(made) is Item and made.name == "a")),
        ({"deep": [Item(torch.ones(2), "a")]}, lambda made: (made["deep"][0].x, True)),
    ],
)
def test_structures_keep_their_kind_and_the_loader_its_batches(batch: Any, parts: Any) -> None:
    (made,) = list(torch_ltc.prefetch([batch]))
    tensor, same = parts(made)
    assert tensor.device.type == "ltc"
    assert same
    assert parts(batch)[0].device.type == "cpu"


def test_an_exception_comes_after_the_batches_before_it() -> None:
    def batches() -> Iterator[Tensor]:
        yield torch.ones(1)
        yield torch.ones(1) * 2
        raise ValueError("no more")

    found = []
    with pytest.raises(ValueError, match="no more"):
        for batch in torch_ltc.prefetch(batches()):
            found.append(batch.item())
    assert found == [1.0, 2.0]


def test_leaving_the_loop_ends_the_thread() -> None:
    taken = []

    def batches() -> Iterator[Tensor]:
        for number in range(1000):
            taken.append(number)
            yield torch.full((2,), float(number))

    for batch in torch_ltc.prefetch(batches(), batches=2):
        if batch[0].item() == 3.0:
            break
    assert threads() == 0
    # The batch in use, those ahead, and the one that the thread was at.
    assert len(taken) <= 4 + 2 + 2


def test_no_more_than_the_bound_is_taken_ahead() -> None:
    taken = []

    def batches() -> Iterator[Tensor]:
        for number in range(50):
            taken.append(number)
            yield torch.zeros(1)

    loop = iter(torch_ltc.prefetch(batches(), batches=3))
    next(loop)
    deadline = time.monotonic() + 10
    while len(taken) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    # The first, three in the queue, and one that waits for room.
    assert len(taken) == 5
    loop.close()  # type: ignore[attr-defined]


def test_each_loop_begins_anew_and_an_empty_loader_has_none() -> None:
    loader = torch_ltc.prefetch([torch.ones(1), torch.zeros(1)])
    assert [[x.item() for x in loader] for _ in range(2)] == [[1.0, 0.0]] * 2
    assert list(torch_ltc.prefetch([])) == []
    with pytest.raises(ValueError, match="at least one"):
        torch_ltc.prefetch([], batches=0)


def test_training_with_jit_is_replayed_while_batches_are_uploaded() -> None:
    weight = torch.ones(4).to("ltc")

    @torch_ltc.jit
    def step(x: Tensor) -> Tensor:
        return (x * weight).sum()

    got = [step(x).item() for x in torch_ltc.prefetch([torch.full((4,), float(n)) for n in range(12)])]
    assert got == [4.0 * n for n in range(12)]
    assert "2 recorded, 10 replayed" in step.explain()


class Streams:
    """A stand-in for `torch.cuda` that writes down what happens."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def device(self, device: Any) -> Any:
        return contextlib.nullcontext()

    def Stream(self, device: Any) -> Any:
        event = SimpleNamespace(synchronize=lambda: self.log.append("wait for the copy"))
        return SimpleNamespace(record_event=lambda: event)

    def default_stream(self, device: Any) -> Any:
        return SimpleNamespace(wait_event=lambda event: self.log.append("programs wait"))

    def stream(self, stream: Any) -> Any:
        return contextlib.nullcontext()


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_a_copy_to_a_gpu_comes_from_pinned_memory_and_waits_where_the_source_is_the_users(
    pinned: bool, non_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Streams()
    monkeypatch.setattr(uploads, "physical_device", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(uploads.torch, "cuda", cuda)
    monkeypatch.setattr(uploads, "_streams", {})
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: pinned)
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: cuda.log.append("held for programs"))
    monkeypatch.setattr(uploads, "_staged", lambda source: source.clone())
    source = torch.ones(3)
    given = []

    def copy(host: Tensor, later: bool) -> Tensor:
        given.append((host is source, later))
        return host.clone()

    assert uploads.upload(source, copy, non_blocking).tolist() == [1.0] * 3
    assert given == [(pinned, True)]
    waits = ["wait for the copy"] if pinned and not non_blocking else []
    assert cuda.log == ["programs wait", "held for programs", *waits]
