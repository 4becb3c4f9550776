"""Choosing backends, changing them between steps, and handles on data of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torch_ltc
from tests.semantics.support import lazy
from tests.support.backends import (
    ArrayBackend,
    ArrayData,
    FunctionalBackend,
    Misbehaving,
    RecordedBackend,
    registered,
    run_functional,
    seen_events,
    steps,
    used,
)
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.errors import (
    BackendError,
    BackendWarning,
    UnknownBackendError,
)
from torch_ltc.lowering.interface import Form
from torch_ltc.lowering.registry import registry
from torch_ltc.program.instruction import Program

pytestmark = [pytest.mark.blocking_tiers, pytest.mark.usefixtures("same_backend_afterwards")]
# The backend outside of the blocks: one that compiles, and that runs what it has compiled.
DEFAULT = "torchscript"


@pytest.fixture(autouse=True)
def _default_backend() -> Iterator[None]:
    with settings.scope(backend=DEFAULT):
        yield
        torch_ltc.sync(wait=True)


# ---- choosing


def test_use_backend_takes_a_name_a_class_or_an_object() -> None:
    backend = FunctionalBackend()
    with registered(backend):
        with torch_ltc.use_backend("functional") as chosen:
            assert chosen is backend
            assert settings.backend == "functional"
        with torch_ltc.use_backend(FunctionalBackend) as chosen:
            assert chosen is backend
        with torch_ltc.use_backend(backend) as chosen:
            assert chosen is backend


def test_use_backend_registers_a_class_that_is_not_known_yet() -> None:
    try:
        with torch_ltc.use_backend(RecordedBackend) as chosen:
            assert isinstance(chosen, RecordedBackend)
            assert registry.get("recorded") is chosen
    finally:
        registry.unregister("recorded")


def test_use_backend_refuses_another_object_of_a_known_name() -> None:
    with registered(FunctionalBackend()), pytest.raises(BackendError, match="'functional' is registered already"):
        torch_ltc.use_backend(FunctionalBackend())


def test_use_backend_lasts_until_the_next_when_it_is_no_block() -> None:
    try:
        chosen = torch_ltc.use_backend("interpreter")
        assert settings.backend == "interpreter"
        assert repr(chosen) == "use_backend('interpreter')"
    finally:
        torch_ltc.use_backend(DEFAULT)


def test_blocks_nest_and_end_with_an_exception() -> None:
    with registered(FunctionalBackend(), RecordedBackend()):
        with torch_ltc.use_backend("functional"):
            with pytest.raises(ValueError, match="inside"), torch_ltc.use_backend("recorded"):
                assert settings.backend == "recorded"
                raise ValueError("inside")
            assert settings.backend == "functional"
            with torch_ltc.use_backend("functional"):
                assert settings.backend == "functional"
            assert settings.backend == "functional"
        assert settings.backend == DEFAULT


def test_an_unknown_name_changes_nothing_and_lists_the_known() -> None:
    with pytest.raises(
        UnknownBackendError, match=r"no backend named 'nope'\n  try: one of: .*interpreter.*torchscript"
    ):
        torch_ltc.use_backend("nope")
    assert settings.backend == DEFAULT
    with pytest.raises(UnknownBackendError):
        settings.backend = "nope"
    assert settings.backend == DEFAULT


def test_programs_keep_the_backend_they_were_recorded_under() -> None:
    functional, recorded = FunctionalBackend(), RecordedBackend()
    with registered(functional, recorded):
        x = lazy(torch.ones(2))
        torch_ltc.sync(wait=True)
        for _ in range(3):
            with seen_events() as seen:
                with torch_ltc.use_backend("functional"):
                    y = x.sin() + 1
                with torch_ltc.use_backend("recorded"):
                    z = y.cos()
                assert torch.allclose(z.cpu(), (torch.ones(2).sin() + 1).cos())
        assert used(seen) == ["functional", "recorded"]


@pytest.mark.parametrize("name", ["interpreter", "torchscript", "null"])
def test_the_environment_chooses(name: str) -> None:
    script = """
import torch, torch_ltc
used = []
torch_ltc.events.subscribe(lambda event: used.append(event.backend), torch_ltc.events.ExecuteEvent)
for _ in range(3):
    torch.ones(2, device="ltc").add_(1)
    torch_ltc.sync(wait=True)
print(torch_ltc.config.settings.backend, used[-1])
"""
    environment = {**os.environ, "LTC_BACKEND": name}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name, name]


def test_backends_compile_for_themselves_and_are_not_asked_twice() -> None:
    functional, recorded = FunctionalBackend(), RecordedBackend()
    with registered(functional, recorded), seen_events() as seen:
        x = lazy(torch.ones(2))
        for name in ("functional", "recorded", "functional", "recorded", DEFAULT, "functional"):
            with torch_ltc.use_backend(name):
                for _ in range(2):
                    torch_ltc.sync(wait=True)
                    x.mul_(2)
                torch_ltc.sync(wait=True)
        assert x.tolist() == [2.0**12] * 2
    compiled = [event.backend for event in seen if isinstance(event, events.CompileEvent)]
    assert sorted(compiled) == sorted(["functional", "recorded", DEFAULT])


def test_another_backend_of_a_name_compiles_anew() -> None:
    x = lazy(torch.ones(2))
    for number in (2.0, 3.0):

        def scaled(program: Program, attempt: int, given: Sequence[Any], number: float = number) -> Any:
            return [given[0] * number]

        with registered(Misbehaving("again", Form.RECORDED, scaled)), torch_ltc.use_backend("again"):
            for _ in range(3):
                y = x.sin()
                torch_ltc.sync(wait=True)
            assert y.tolist() == [number, number]


class Learner(nn.Module):
    """Parameters, buffers and optimizer state of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        # No bias before the norm: its gradient would be rounding alone, which the optimizer would blow up.
        first = nn.Linear(4, 6, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.25), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def train(device: str, schedule: Sequence[str]) -> tuple[list[float], list[Tensor]]:
    """Losses and final state of a training whose backend changes from step to step."""
    torch.manual_seed(0)
    model = Learner().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
    x, y = torch.rand(8, 4).to(device), torch.randint(0, 3, (8,)).to(device)
    torch.manual_seed(1)
    losses = []
    for name in schedule:
        with torch_ltc.use_backend(name):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
    state = [value.detach().cpu() for value in model.state_dict().values()]
    return torch.stack(losses).tolist(), state


@pytest.mark.parametrize("every", [1, 3])
def test_backends_change_between_steps_with_tensors_intact(every: int) -> None:
    names = ["interpreter", "torchscript", "functional", "recorded", "arrays"]
    schedule = [name for name in (names + names[::-1]) * 2 for _ in range(every)]
    functional, recorded, arrays = FunctionalBackend(), RecordedBackend(), ArrayBackend()
    with registered(functional, recorded, arrays):
        losses, state = train("ltc", schedule)
    expected_losses, expected_state = train("cpu", schedule=[DEFAULT] * len(schedule))
    torch.testing.assert_close(losses, expected_losses, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(state, expected_state, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert min(functional.runs, recorded.runs, arrays.runs) >= 2


def test_tensors_of_outside_the_program_outlive_a_backend_that_computes_nothing() -> None:
    x, weight = lazy(torch.arange(3.0)), lazy(torch.ones(3))
    with torch_ltc.use_backend("null"):
        for _ in range(3):
            y = x * weight
            torch_ltc.sync(wait=True)
        assert y.shape == (3,)
    assert x.tolist() == [0.0, 1.0, 2.0]
    assert (x * weight).tolist() == [0.0, 1.0, 2.0]


# ---- handles of a backend's own


@pytest.fixture
def arrays() -> Iterator[ArrayBackend]:
    backend = ArrayBackend()
    with registered(backend), torch_ltc.use_backend("arrays"):
        yield backend
        torch_ltc.sync(wait=True)


def test_a_backend_gets_its_own_handles_back(arrays: ArrayBackend) -> None:
    x = lazy(torch.ones(3))
    made = ArrayData.made
    steps(4, lambda: x.add_(1))
    assert arrays.given == [["Tensor"], ["ArrayData"], ["ArrayData"]]
    # The backend itself asks for a tensor once per run; saving the input before the first run asks once more.
    assert ArrayData.made - made <= 3
    assert x.tolist() == [5.0, 5.0, 5.0]
    assert x[1:].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("name", ["interpreter", "torchscript", "functional", "recorded"])
def test_another_backend_reads_and_writes_what_a_handle_holds(name: str, arrays: ArrayBackend) -> None:
    with registered(FunctionalBackend(), RecordedBackend()):
        x = lazy(torch.ones(3))
        steps(4, lambda: x.add_(1))
        assert "ArrayData" in arrays.given[-1]
        with torch_ltc.use_backend(name):
            steps(4, lambda: x.mul_(2))
            assert (x + 1).tolist() == [81.0, 81.0, 81.0]
            steps(1, lambda: x[0].zero_())
        steps(4, lambda: x.add_(1))
        assert x.tolist() == [4.0, 84.0, 84.0]


def test_a_backend_without_handles_gets_tensors(arrays: ArrayBackend) -> None:
    kinds: list[str] = []

    def noted(program: Program, attempt: int, given: Sequence[Any]) -> Any:
        kinds.extend(type(held).__name__ for held in given)
        return run_functional(program, given)

    x = lazy(torch.ones(3))
    steps(4, lambda: x.add_(1))
    with registered(Misbehaving("noting", Form.FUNCTIONAL, noted)), torch_ltc.use_backend("noting"):
        steps(3, lambda: x.mul_(2))
    assert set(kinds) == {"Tensor"}
    assert x.tolist() == [40.0, 40.0, 40.0]


@pytest.mark.parametrize("place", [0, 1])
def test_views_and_copies_of_what_a_handle_holds(arrays: ArrayBackend, place: int) -> None:
    def values(device: str) -> list[Any]:
        x = torch.arange(6.0).view(2, 3).to(device)
        rows = []
        for _ in range(4):
            x.mul_(1.5)
            row = x[1]
            row.add_(1)
            torch_ltc.sync(wait=True)
            rows.append(row.clone())
            x.t()[0].sub_(row[place])
            torch_ltc.sync(wait=True)
        return [x.tolist(), [row.tolist() for row in rows]]

    # The first element of the row is written to by the call that reads it, which the interpreter runs.
    refused = pytest.warns(BackendWarning, match="reads elements that it has written to")
    with refused if place == 0 else nullcontext():
        assert values("ltc") == values("cpu")
    assert arrays.runs >= (3 if place == 0 else 4)
