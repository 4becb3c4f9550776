"""Calls into `out=` targets of every kind leave behind what eager leaves, beside the target too, and raise alike."""

import warnings

import pytest
import torch

from tests.ops.out_destinations import KINDS, differences, operators
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
    assert not found, "\n".join(found)


def test_there_are_operators_and_kinds_to_test() -> None:
    assert len(operators()) > 300
    assert len(KINDS) == 11


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
