"""Calls into `out=` targets of every kind leave behind what eager leaves, beside the target too, and raise alike."""

import warnings
from collections.abc import Callable

import pytest
import torch

from tests.ops.out_destinations import KINDS, differences, operators, shared, shared_differences
from torch_ltc.config import settings

CHUNKS = 8
# One of them in each test run, all with `make test-slow`.
PARTS = [0, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in range(1, CHUNKS))]


@pytest.mark.parametrize("chunk", PARTS)
def test_out_targets_of_every_kind_are_written_as_in_eager(chunk: int) -> None:
    found = []
    with warnings.catch_warnings(), settings.scope(backend="interpreter", fallback="allow"):
        # The database warns when it makes sparse samples.
        warnings.simplefilter("ignore")
        for name in operators()[chunk::CHUNKS]:
            found += [f"{name}, {kind}: {difference}" for kind, difference in differences(name)]
            found += [f"{name}, {kind}: {difference}" for kind, difference in shared_differences(name)]
    assert not found, "\n".join(found)


def test_there_are_operators_and_kinds_to_test() -> None:
    assert len(operators()) > 300
    assert len(KINDS) == 11
    places = {kind for name in operators()[:20] for kind, _, _ in shared(name)}
    assert len(places) == 5


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["interpreter", "torchscript"])
@pytest.mark.parametrize("device", ["cpu", "ltc"])
def test_factories_write_into_a_window_as_it_lies(backend: str, device: str) -> None:
    def fill(call) -> list[list[float]]:
        base = torch.zeros(2, 3, device=device)
        call(base.narrow(1, 1, 2))
        return base.tolist()

    with settings.scope(backend=backend, hot_after=2):
        for _ in range(3):
            assert fill(lambda out: torch.arange(0, 4, out=out)) == [[0, 0, 1], [0, 2, 3]]
            assert fill(lambda out: torch.linspace(0, 3, 4, out=out)) == [[0, 0, 1], [0, 2, 3]]
            assert fill(lambda out: torch.logspace(0, 3, 4, out=out)) == [[0, 1, 10], [0, 100, 1000]]


@pytest.mark.parametrize("device", ["cpu", "ltc"])
def test_random_factories_resize_an_empty_target(device: str) -> None:
    for dtype, draw in (
        (torch.int64, lambda out: torch.randperm(5, out=out)),
        (torch.int64, lambda out: torch.randint(9, (5,), out=out)),
        (torch.float32, lambda out: torch.rand(5, out=out)),
        (torch.float32, lambda out: torch.randn(5, out=out)),
        (torch.float32, lambda out: torch.normal(0.0, 1.0, (5,), out=out)),
    ):
        out = torch.empty(0, dtype=dtype, device=device)
        torch.manual_seed(0)
        assert draw(out) is out
        expected = torch.empty(0, dtype=dtype)
        torch.manual_seed(0)
        draw(expected)
        assert out.tolist() == expected.tolist()


def test_a_target_that_a_fallback_resizes_leaves_other_views_as_they_are() -> None:
    target = torch.empty(0, device="ltc")
    view = target.as_strided((0,), (1,))
    with settings.scope(fallback="allow"):
        torch.masked_select(torch.arange(4.0, device="ltc"), torch.ones(4, dtype=torch.bool, device="ltc"), out=target)
    assert target.tolist() == [0, 1, 2, 3]
    assert view.tolist() == []


def _numbers(device: str, *values: object) -> torch.Tensor:
    return torch.tensor(values, device=device)


def _ctc_loss(device: str, targets: object) -> object:
    torch.manual_seed(0)
    given = torch.randn(5, 2, 4).log_softmax(-1).to(device), _numbers(device, 1, 2, 3, 1)
    lengths = ([5, 5], [2, 2]) if targets is list else (_numbers(device, 5, 5), _numbers(device, 2, 2))
    overload = torch.ops.aten._ctc_loss.out if targets is list else torch.ops.aten._ctc_loss.Tensor_out
    made = [torch.empty(0, device=device) for _ in range(2)]
    overload(*given, *lengths, 0, False, out0=made[0], out1=made[1])
    # What lies beside the paths in the second target is not defined.
    return made[:1]


def _sized_by_data(overload: torch._ops.OpOverload, *arguments: object) -> Callable[[str], list[torch.Tensor]]:
    """A call into empty targets; tuples among the arguments are tensors of the device."""

    def call(device: str) -> list[torch.Tensor]:
        placed = [
            _numbers(device, *each)
            if isinstance(each, tuple)
            else [_numbers(device, *each[0])]
            if isinstance(each, list)
            else each
            for each in arguments
        ]
        names = [argument.name for argument in overload._schema.arguments if argument.is_out]
        targets = {name: torch.empty(0, dtype=torch.int64, device=device) for name in names}
        overload(*placed, **targets)
        return list(targets.values())

    return call


aten = torch.ops.aten
SIZED_BY_DATA = {
    "bincount": _sized_by_data(aten.bincount.out, (0, 1, 1, 3)),
    "repeat_interleave": _sized_by_data(aten.repeat_interleave.Tensor_out, (1, 2)),
    "index by a mask": _sized_by_data(aten.index.Tensor_out, (1, 2, 3), [(True, False, True)]),
    "index by numbers": _sized_by_data(aten.index.Tensor_out, (1, 2, 3), [(0, 2)]),
    "_unique2": _sized_by_data(aten._unique2.out, (1, 2, 1), True, True, True),
    "unique_consecutive": _sized_by_data(aten.unique_consecutive.out, (1, 1, 2, 1), True, True),
    "nonzero": _sized_by_data(aten.nonzero.out, (1, 0, 3)),
    "masked_select": _sized_by_data(aten.masked_select.out, (1, 0, 3), (True, False, True)),
    "_ctc_loss, lengths in lists": lambda device: _ctc_loss(device, list),
    "_ctc_loss, lengths in tensors": lambda device: _ctc_loss(device, torch.Tensor),
}


@pytest.mark.parametrize("name", SIZED_BY_DATA)
def test_results_whose_size_depends_on_data_are_written_into_out(name: str) -> None:
    expected = SIZED_BY_DATA[name]("cpu")
    with settings.scope(fallback="allow"):
        got = SIZED_BY_DATA[name]("ltc")
    assert [each.tolist() for each in got] == [each.tolist() for each in expected]
