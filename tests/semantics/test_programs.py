"""Programs are told apart in full: what was recorded is what runs, whatever ran before."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import assert_same, lazy, observe, repeat
from torch_ltc import computation
from torch_ltc.config import settings
from torch_ltc.record.recorder import recorder

pytestmark = [pytest.mark.blocking_tiers, pytest.mark.usefixtures("any_fingerprints")]

Binary = Callable[[Tensor, Tensor], Tensor]


def pair() -> tuple[Tensor, Tensor]:
    """Fresh inputs: x = 2, y = 3."""
    x, y = lazy(torch.full((2,), 2.0), torch.full((2,), 3.0))
    return x, y


@pytest.mark.usefixtures("backend")
def test_graphs_that_differ_in_one_operand_are_not_confused() -> None:
    # x*y+x, then with fresh inputs x*y+y.
    for _ in range(3):
        x, y = pair()
        first = x * y + x
        assert first.tolist() == [8.0, 8.0]
        x, y = pair()
        second = x * y + y
        assert second.tolist() == [9.0, 9.0]


# Programs of the same operators and shapes, told apart by wiring, order, type of a number or static argument alone.
TWINS: dict[str, tuple[Binary, ...]] = {
    "operand order": (lambda x, y: x - y, lambda x, y: y - x),
    "operand of a later call": (lambda x, y: (x + y) * x, lambda x, y: (x + y) * y),
    "intermediate or input": (lambda x, y: (x * y) * (x * y), lambda x, y: (x * y) * y),
    "type of a number": (lambda x, y: (x * 0 + 7).int() / 2, lambda x, y: (x * 0 + 7).int() / 2.5),
    "integer and float": (lambda x, y: x.long() * 2, lambda x, y: x.long() * 2.0),
    "one and true": (lambda x, y: x.bool() + 1, lambda x, y: x.bool() + True),
    "static argument": (lambda x, y: (x - y).clamp(min=0), lambda x, y: (x - y).clamp(max=0)),
    "dimension": (lambda x, y: torch.stack([x, y], 0), lambda x, y: torch.stack([x, y], 1)),
    "list order": (lambda x, y: torch.cat([x, y]), lambda x, y: torch.cat([y, x])),
    "rounding mode": (
        lambda x, y: torch.div(x - 9, y, rounding_mode="floor"),
        lambda x, y: torch.div(x - 9, y, rounding_mode="trunc"),
    ),
    "in-place or not": (lambda x, y: x.add_(y) + x, lambda x, y: x.add(y) + x),
    "view written through": (
        lambda x, y: torch.cat([x, x[:1].add_(y[1:])]),
        lambda x, y: torch.cat([x, x[:1].add(y[1:])]),
    ),
    "broadcast shape": (lambda x, y: x.view(2, 1) + y, lambda x, y: x.view(1, 2) + y),
}


@pytest.mark.parametrize("name", TWINS)
@pytest.mark.usefixtures("backend")
def test_twin_programs_give_each_its_own_result(name: str) -> None:
    functions = TWINS[name]
    expected = [function(torch.full((2,), 2.0), torch.full((2,), 3.0)) for function in functions]
    for _ in range(3):
        for function, value in zip(functions, expected, strict=True):
            assert_same(function(*pair()), value)


def test_programs_that_differ_in_what_is_still_alive_are_not_confused() -> None:
    # The same calls, other outputs.
    for _ in range(3):
        for kept in itertools.product([True, False], repeat=3):
            x, y = pair()
            made = [x + y, x * y, x - y]
            results = [value if keep else None for value, keep in zip(made, kept, strict=True)]
            del made
            torch_ltc.sync()
            for value, number in zip(results, (5.0, 6.0, -1.0), strict=True):
                assert value is None or value.tolist() == [number, number]
            del value, results


def test_a_shared_input_is_not_confused_with_two_equal_ones() -> None:
    # Aliasing of the inputs is part of the program.
    for _ in range(3):
        x, _y = pair()
        other = x
        x.add_(1)
        assert (x + other).tolist() == [6.0, 6.0]
        x, _y = pair()
        other = x.clone()
        torch_ltc.sync()
        x.add_(1)
        assert (x + other).tolist() == [5.0, 5.0]


def test_graph_hashes_of_two_programs_differ_and_each_runs_its_own_program() -> None:
    # For callers that keep only bytes.
    hashes, inputs = [], []
    for function in (lambda x, y: x * y + x, lambda x, y: x * y + y):
        x, y = pair()
        torch_ltc.sync()
        out = function(x, y)
        hashes.append(computation.get_graph_hash([out]))
        identities, values = computation.get_tensors_ts_device_data_node([out])
        assert [torch_ltc.get_tensor_id(x), torch_ltc.get_tensor_id(y)] == identities
        inputs.append(values)
        del out
        torch_ltc.sync(wait=True)
    assert hashes[0] != hashes[1]
    for _ in range(3):
        assert computation.run_cached_graph(hashes[0], inputs[0])[0].tolist() == [8.0, 8.0]
        assert computation.run_cached_graph(hashes[1], inputs[1])[0].tolist() == [9.0, 9.0]


def test_graph_hash_of_the_same_program_stays_the_same() -> None:
    def digest() -> bytes:
        x, y = pair()
        torch_ltc.sync()
        out = x * y + x
        found = computation.get_graph_hash([out])
        del out
        torch_ltc.sync(wait=True)
        return found

    assert len(set(repeat(digest))) == 1


def test_graph_hash_distinguishes_which_tensors_are_asked_for() -> None:
    x, y = pair()
    torch_ltc.sync()
    total, product = x + y, x * y
    _, values = computation.get_tensors_ts_device_data_node([total, product])
    one, two = computation.get_graph_hash([total, product]), computation.get_graph_hash([product, total])
    assert one != two
    assert [t.tolist() for t in computation.run_cached_graph(one, values)] == [[5.0, 5.0], [6.0, 6.0]]
    assert [t.tolist() for t in computation.run_cached_graph(two, values)] == [[6.0, 6.0], [5.0, 5.0]]


def test_unknown_graph_hash_is_refused() -> None:
    with pytest.raises(torch_ltc.errors.LtcError, match="no program is known"):
        computation.run_cached_graph(b"nobody published", [])


def program_of_a_step(seed: int | None) -> int:
    """Record and run one program that draws random numbers; its identity."""
    if seed is not None:
        torch.manual_seed(seed)
    x, _ = pair()
    torch_ltc.sync(wait=True)
    with observe() as seen:
        out = torch.nn.functional.dropout(x, 0.5) + torch.randn(2, device="ltc")
        torch_ltc.sync(wait=True)
    assert out.numel() == 2
    return seen.syncs[0].program


def test_the_seed_is_no_part_of_the_program() -> None:
    # Another seed compiles nothing.
    repeat(lambda: program_of_a_step(1), 2)
    with observe() as seen:
        programs = {program_of_a_step(seed) for seed in range(5)}
    assert len(programs) == 1
    assert seen.compiles == []
    assert len(seen.runs) == 5


def test_the_generator_state_is_no_part_of_the_program() -> None:
    # Drawing on without a new seed compiles nothing.
    repeat(lambda: program_of_a_step(1), 2)
    with observe() as seen:
        programs = set(repeat(lambda: program_of_a_step(None), 5))
    assert len(programs) == 1
    assert seen.compiles == []


def test_changing_the_backend_and_back_compiles_nothing_again() -> None:
    # The backend is no part of the program.
    def step() -> list[float]:
        x, y = pair()
        torch_ltc.sync(wait=True)
        return list((torch.sin(x) * y - x).tolist())

    with settings.scope(backend="torchscript"):
        expected = repeat(step)[-1]
        with observe() as seen:
            for backend in ("interpreter", "torchscript", "interpreter", "torchscript"):
                with settings.scope(backend=backend):
                    assert step() == expected
        assert [run.backend for run in seen.runs] == ["interpreter", "torchscript"] * 2
        assert seen.compiles == []
        assert len({sync.program for sync in seen.syncs}) == 1


def test_a_changing_number_is_no_part_of_the_program() -> None:
    # A learning rate that a scheduler changes is a run-time input.
    def step(rate: float) -> float:
        x, _ = pair()
        torch_ltc.sync(wait=True)
        return (x.mul_(1 - rate).add_(rate, alpha=rate)).sum().item()

    repeat(lambda: step(0.1))
    with observe() as seen:
        for rate in (0.2, 0.3, 0.4, 1e-3, 17.0):
            cpu = torch.full((2,), 2.0)
            assert step(rate) == cpu.mul_(1 - rate).add_(rate, alpha=rate).sum().item()
    assert seen.compiles == []
    assert len({sync.program for sync in seen.syncs}) == 1


def test_another_default_dtype_is_seen_at_once() -> None:
    def quotient(device: str) -> torch.Tensor:
        return torch.ones(2, dtype=torch.int64, device=device) / 3

    assert torch.equal(quotient("ltc").cpu(), quotient("cpu"))
    pending = quotient("ltc")
    torch.set_default_dtype(torch.float64)
    try:
        assert quotient("ltc").dtype is torch.float64
        assert torch.equal(quotient("ltc").cpu(), quotient("cpu"))
        assert torch.zeros(2, device="ltc").dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert pending.dtype is torch.float32
    assert torch.equal(pending.cpu(), quotient("cpu"))
    assert quotient("ltc").dtype is torch.float32


def test_reading_what_the_pending_program_only_takes_cuts_nothing() -> None:
    x = lazy(torch.arange(4.0))
    y = x + 1
    assert x[2].item() == 2.0
    assert not recorder.empty
    x.add_(10)
    assert x[2].item() == 12.0
    assert recorder.empty
    assert y.tolist() == [1.0, 2.0, 3.0, 4.0]
    view = x[1:]
    view.mul_(2)
    z = x * 1
    assert x[0].item() == 10.0
    assert recorder.empty
    assert z.tolist() == [10.0, 22.0, 24.0, 26.0]


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("op", [torch.add, torch.sub, torch.mul, torch.div, torch.true_divide, torch.multiply])
def test_a_number_may_stand_in_the_place_of_the_first_tensor(op: Callable[..., Tensor]) -> None:
    for number, x in itertools.product((2, 2.5, 3), (torch.arange(1.0, 4.0), torch.arange(1, 4), torch.ones(2, 1).t())):
        got, wanted = op(number, lazy(x)), op(number, x)
        assert got.dtype is wanted.dtype
        assert_same(got, wanted)


class Doubled(torch.Tensor):
    """A class of tensors that changes what a function does."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs or {})
        return result * 2 if func is torch.sin else result


@torch.library.custom_op("torch_ltc_tests::by_class", mutates_args=(), device_types="cpu")
def by_class(tensor: torch.Tensor) -> torch.Tensor:
    return torch.sin(tensor.as_subclass(Doubled)).as_subclass(torch.Tensor)


@by_class.register_fake
def _(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


class Reading(torch.Tensor):
    """A class of tensors whose functions read a plain tensor."""

    read: torch.Tensor

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return cls.read.cpu()


@pytest.mark.parametrize("inside", [False, True], ids=["read", "read inside of a class"])
@pytest.mark.parametrize("backend", ["torchscript", "interpreter"])
def test_a_kernel_in_python_may_use_a_class_of_tensors(backend: str, inside: bool) -> None:
    expected = torch.ones(3).sin() * 2 + 1
    with settings.scope(backend=backend, hot_after=2):
        for _ in range(3):
            result = torch.ops.torch_ltc_tests.by_class(torch.ones(3).to("ltc")) + 1
            if inside:
                Reading.read = result
                result = torch.sin(torch.ones(1).as_subclass(Reading))
            assert_same(result, expected)
