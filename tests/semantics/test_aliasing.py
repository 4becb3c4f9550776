"""Random programs of views and in-place calls, read in the middle and at the end, against eager."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_ltc
from tests.semantics.support import assert_like_eager, observe
from tests.semantics.view_programs import grow, run_on_device
from torch_ltc.config import settings

pytestmark = pytest.mark.usefixtures("no_fallback")

PROGRAMS = 200


@pytest.mark.parametrize("read", ["at the end", "in the middle", "every step"])
def test_random_programs_of_views_and_in_place_calls_equal_eager(read: str) -> None:
    for seed in range(PROGRAMS):
        run_on_device(seed, read)


@pytest.mark.parametrize("read", ["at the end", "in the middle"])
@pytest.mark.usefixtures("any_fingerprints")
def test_compiled_random_programs_equal_eager(read: str) -> None:
    # From the second run on the program is compiled.
    with settings.scope(backend="torchscript"):
        for seed in range(0, PROGRAMS, 6):
            for _ in range(3):
                run_on_device(seed, read)


def test_the_generator_of_programs_makes_views_and_writes_that_matter() -> None:
    aliased = changed = 0
    for seed in range(50):
        _, pool, _ = grow(seed)
        addresses = [tensor.untyped_storage().data_ptr() for tensor in pool]
        aliased += len(addresses) - len(set(addresses))
        changed += not torch.equal(pool[0], torch.arange(24.0).view(2, 3, 4))
    assert aliased > 100
    assert changed > 25


def test_each_of_many_views_is_found_again() -> None:
    def run(device: str) -> list[Tensor]:
        x = torch.arange(300.0).view(100, 3).to(device)
        rows, starts = list(x.unbind(0)), [x[:, :k] for k in (1, 2, 3)]
        for place in (70, 3, 99, 3):
            rows[place].mul_(2)
        starts[1].add_(1)
        return [x, rows[3] + rows[99], rows[70], starts[0] * 2]

    for _ in range(3):
        assert_like_eager(run)
    with observe() as seen:
        run("ltc")
        torch_ltc.sync()
    # The input, the views, four products, a sum in place, a sum and a product: no view is recorded anew.
    assert seen.syncs[-1].instructions <= 1 + 1 + 3 * 2 + 4 + 1 + 2
