"""Checkpoints of a network that is sharded over ranks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed import checkpoint

from tests.distributed.cases import MLP
from tests.distributed.processes import run_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what two ranks saved."""
    folder = tmp_path_factory.mktemp("checkpoint")
    ended = run_ranks(folder, 2, "tests.distributed.checkpoint_rank", str(folder))
    assert [one.status for one in ended] == [0, 0], ended[0].errors[-3000:]
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("device", ["cpu", "ltc"])
def test_what_two_ranks_saved_loads_on_one(saved: Path, device: str) -> None:
    model = MLP.make().to(device)
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id=saved / "sharded", no_dist=True)
    model.load_state_dict(state)
    expected = torch.load(saved / "whole.pt")
    assert state.keys() == expected.keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value.cpu(), expected[name])
