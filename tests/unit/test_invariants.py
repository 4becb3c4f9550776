"""The checks of the device's own state: each finds what it is there for, and finds nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import torch_ltc
from torch_ltc.config import settings
from torch_ltc.debug.invariants import _MOST_KEPT, invariants
from torch_ltc.errors import InvariantError
from torch_ltc.execute.run import program_queued, program_ran
from torch_ltc.execute.sync import program_cut
from torch_ltc.record.buffer import Buffer, buffer_of, new_buffer
from torch_ltc.record.recorder import recorder


@pytest.fixture(autouse=True)
def verified() -> Iterator[None]:
    """Verify, and leave nothing behind that was found."""
    with settings.scope(check="invariants", backend="interpreter"):
        yield
        invariants.found.clear()
        invariants._waiting.clear()


def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two live outputs, one input, one run-time number."""
    return x * 2.5, x + x


def changed_program(change: Callable[[Any], Any]) -> Callable[..., None]:
    """A listener that makes the program of an entry another one, before the checks see it."""

    def listen(entry: Any, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> None:
        whole = entry.program
        entry.program = change(whole)
        invariants._verified.discard(whole.identity)
        invariants._cut(entry, inputs, scalars, outputs)
        entry.program = whole

    return listen


def found_by(listen: Callable[..., None]) -> list[str]:
    """What is found when `listen` is called with a program that is cut."""
    x = torch.ones(3).to("ltc")
    kept = step(x)
    remove = program_cut.add(listen)
    try:
        with pytest.raises(InvariantError) as raised:
            torch_ltc.sync(wait=True)
    finally:
        remove()
    assert torch.equal(kept[0].cpu(), torch.full((3,), 2.5)), "nothing is lost"
    return str(raised.value).splitlines()[1:]


def test_nothing_is_found_in_training() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout()).to("ltc")
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(3, 4, device="ltc")).sum().backward()
        optimizer.step()
    torch_ltc.sync(wait=True)
    invariants.check_idle()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p: replace(p, instructions=p.instructions[:-1]), "is not the one that was recorded"),
        (lambda p: replace(p, instructions=(*p.instructions[::-1],)), "is not the one that was recorded"),
        (lambda p: replace(p, instructions=(*p.instructions[1:],)), "takes a value that is not made before it"),
        (lambda p: replace(p, instructions=(p.instructions[0], *p.instructions)), "are made where value 1 comes next"),
        (lambda p: replace(p, values=p.values + 1), "values are made"),
        (lambda p: replace(p, outputs=(p.outputs[0],) * 2), "an output is named twice"),
        (lambda p: replace(p, outputs=(99, p.outputs[1])), "is no value of the program"),
        (lambda p: replace(p, scalars=p.scalars + 1), "run-time numbers were recorded"),
        (lambda p: replace(p, outputs=p.outputs[::-1]), "the outputs are not the values that the program names"),
    ],
)
def test_a_program_that_is_not_as_recorded(change: Callable[[Any], Any], expected: str) -> None:
    assert any(expected in line for line in found_by(changed_program(change)))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda i, o: (i * 2, o), "one buffer is two inputs"),
        (lambda i, o: ([], o), "takes another number of buffers"),
        (lambda i, o: (o[:1], o), "an input is made by the program itself"),
        (lambda i, o: (i, [o[0], o[0]]), "one buffer is two outputs"),
        (lambda i, o: (o[:1], o), "input and output"),
    ],
)
def test_buffers_that_are_not_at_their_place(change: Callable[..., Any], expected: str) -> None:
    def listen(entry: Any, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> None:
        others = change(inputs, outputs)
        invariants._cut(entry, others[0], scalars, others[1])

    assert any(expected in line for line in found_by(listen))


def test_values_that_were_counted_otherwise() -> None:
    def listen(entry: Any, inputs: list[Buffer], scalars: list[object], outputs: list[Buffer]) -> None:
        before = recorder.base
        recorder.base = before - 1
        invariants._cut(entry, inputs, scalars, outputs)
        recorder.base = before

    assert any("not those of the path in the tree" in line for line in found_by(listen))


def ran(*outputs: Buffer) -> str:
    """What is found of a run with these outputs."""
    x = torch.ones(3).to("ltc")
    entries: list[Any] = []
    remove = program_queued.add(lambda entry, made: entries.append(entry))
    kept = step(x)
    torch_ltc.sync(wait=True)
    remove()
    assert kept
    queued = list(outputs)
    program_queued(entries[0], queued)
    program_ran(entries[0], [buffer_of(x)], queued)
    with pytest.raises(InvariantError) as raised:
        invariants.raise_found()
    return str(raised.value)


def test_an_output_without_a_value() -> None:
    spec = buffer_of(torch.ones(3).to("ltc")).spec
    assert "an output has neither data nor an error" in ran(new_buffer(spec))


@pytest.mark.parametrize(
    "data", [torch.ones(4), torch.ones(3, dtype=torch.int32), torch.ones(6)[::2]], ids=["size", "dtype", "stride"]
)
def test_an_output_of_another_geometry(data: torch.Tensor) -> None:
    spec = buffer_of(torch.ones(3).to("ltc")).spec
    assert "an output was recorded as" in ran(new_buffer(spec, data=data))


def test_two_buffers_in_the_same_memory() -> None:
    spec, data = buffer_of(torch.ones(3).to("ltc")).spec, torch.ones(3)
    assert "two buffers lie in the same memory" in ran(new_buffer(spec, data=data), new_buffer(spec, data=data[:]))


def test_a_program_that_runs_twice() -> None:
    again: list[Any] = []
    remove = program_ran.add(lambda *given: again.append(given))
    kept = step(torch.ones(3).to("ltc"))
    torch_ltc.sync(wait=True)
    remove()
    assert kept
    program_ran(*again[0])
    with pytest.raises(InvariantError, match="it ran twice, or without having been queued"):
        invariants.raise_found()


def test_a_program_that_never_runs() -> None:
    entries: list[Any] = []
    remove = program_queued.add(lambda entry, made: entries.append(entry))
    kept = step(torch.ones(3).to("ltc"))
    torch_ltc.sync(wait=True)
    remove()
    lost = [new_buffer(buffer_of(kept[0]).spec)]
    program_queued(entries[0], lost)
    with pytest.raises(InvariantError, match="never got its value"):
        invariants.check_idle()
    invariants.check_idle()


def test_what_is_found_is_raised_once_and_bounded() -> None:
    for number in range(2 * _MOST_KEPT):
        invariants._note(number, "x")
    assert len(invariants.found) == _MOST_KEPT
    with pytest.raises(InvariantError):
        invariants.raise_found()
    invariants.raise_found()


def test_other_values_of_the_setting_verify_nothing() -> None:
    with settings.scope(check="off"):
        assert not program_cut
        assert not program_ran
    assert program_cut
