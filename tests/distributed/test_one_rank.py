"""Process groups of one rank, which need no second process: recording, backends, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel

import torch_ltc
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.errors import GroupError


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A group of one rank for both devices."""
    dist.init_process_group("cpu:gloo,ltc:ltc", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_collectives_are_instructions_of_the_pending_program(group: None) -> None:
    syncs: list[events.SyncEvent] = []
    unsubscribe = events.subscribe(syncs.append, events.SyncEvent)
    x = torch.ones(3, device="ltc") * 2
    dist.all_reduce(x)
    work = dist.broadcast(x, 0, async_op=True)
    assert work is not None
    assert work.wait()
    gathered = [torch.empty(3, device="ltc")]
    dist.all_gather(gathered, x)
    y = all_reduce(gathered[0] + x, "sum", dist.group.WORLD) + 1
    assert not syncs
    text = torch_ltc.debug.dump_ir([y])
    assert [line.split("(")[0].strip() for line in text.splitlines() if "ltc_distributed" in line] == [
        "ltc_distributed::allreduce_",
        "ltc_distributed::broadcast_",
        "ltc_distributed::allgather_",
        "ltc_distributed::allreduce_",
    ]
    assert y.tolist() == [5.0, 5.0, 5.0]
    unsubscribe()
    assert [event.reason.name for event in syncs] == ["READ"]


def test_a_collective_of_what_nobody_holds_runs(group: None) -> None:
    # Another rank would wait for it.
    dist.all_reduce(torch.ones(3, device="ltc"))
    executed: list[events.ExecuteEvent] = []
    unsubscribe = events.subscribe(executed.append, events.ExecuteEvent)
    torch_ltc.sync(wait=True)
    unsubscribe()
    assert len(executed) == 1


def test_a_group_for_other_devices_is_refused_with_the_way_out(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(GroupError, match=r'made for other devices than ltc(?s:.*)init_process_group\("ltc"\)'):
            dist.all_reduce(torch.ones(3, device="ltc"))
    finally:
        dist.destroy_process_group()


def test_destroying_a_group_runs_what_was_recorded(tmp_path: Path) -> None:
    dist.init_process_group("ltc", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    x = torch.ones(3, device="ltc")
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_receiving_from_anyone_is_refused(group: None) -> None:
    with pytest.raises(GroupError, match=r"recv\(\) from any rank"):
        dist.recv(torch.ones(3, device="ltc"))


@pytest.mark.compilers
def test_inductor_runs_collectives_between_its_parts_in_order(group: None) -> None:
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to("ltc"))
    reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    reference.load_state_dict({name: value.cpu() for name, value in model.module.state_dict().items()})
    executed: list[events.ExecuteEvent] = []
    unsubscribe = events.subscribe(executed.append, events.ExecuteEvent)
    with settings.scope(backend="inductor", tiers="blocking"):
        for device, network in (("cpu", reference), ("ltc", model)):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
            torch.manual_seed(0)
            for _ in range(6):
                optimizer.zero_grad()
                network(torch.randn(5, 8).to(device)).square().sum().backward()
                optimizer.step()
        torch_ltc.sync(wait=True)
    unsubscribe()
    assert "inductor" in {event.backend for event in executed}
    for name, value in model.module.state_dict().items():
        torch.testing.assert_close(value.cpu(), reference.state_dict()[name])


def test_events_take_the_time_of_the_program() -> None:
    start, end = torch.ltc.Event(enable_timing=True), torch.ltc.Event(enable_timing=True)
    start.record()
    torch.ones(100, device="ltc").sum()
    end.record()
    end.synchronize()
    assert end.query()
    assert start.elapsed_time(end) > 0
    with pytest.raises(ValueError, match="enable_timing"):
        start.elapsed_time(torch.ltc.Event())


def test_a_storage_can_be_emptied_and_filled_again() -> None:
    x = torch.ones(4, device="ltc")
    storage = x.untyped_storage()
    assert storage.resize_(0) is storage
    storage.resize_(16)
    assert x.fill_(3).tolist() == [3.0] * 4
