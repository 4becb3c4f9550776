"""Process groups of one rank, which need no second process: recording, backends, refusals."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.nn.parallel import DistributedDataParallel

import torch_ltc
from tests.support.graphs import StandInGraphs, graphs_on_the_cpu
from torch_ltc import events
from torch_ltc.config import settings
from torch_ltc.debug.history import history
from torch_ltc.distributed.operators import _on_host
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


def test_a_barrier_of_a_group_for_other_devices_is_theirs(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        dist.barrier(device_ids=[0])
        work = dist.barrier(device_ids=[0], async_op=True)
        assert work is not None
        work.wait()
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


@pytest.fixture
def graphs() -> Iterator[StandInGraphs]:
    """The CPU has graphs."""
    with graphs_on_the_cpu() as made:
        yield made


def _train(device: str, steps: int = 14, **options: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    model = DistributedDataParallel(plain.to(device), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8).to(device)).square().sum().backward()
        optimizer.step()
    return {name: value.cpu() for name, value in plain.state_dict().items()}


def test_collectives_run_between_captured_graphs_with_the_reason_shown(group: None, graphs: StandInGraphs) -> None:
    with settings.scope(backend="interpreter"):
        expected, found = _train("cpu"), _train("ltc")
        torch_ltc.sync(wait=True)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    recording = history.recording()
    rows = [row for row in recording.programs if row.replays]
    assert rows
    for shown in (str(torch_ltc.explain()), rows[0].capture):
        assert re.search(r"captured as 2 graphs: .* 1 calls? between graphs, the first .*allreduce_ at \S+", shown)
        assert "1 of them wait for other ranks, which may not capture at the same step" in shown


@pytest.mark.compilers
def test_compiled_code_around_collectives_is_not_captured_and_says_so(group: None, graphs: StandInGraphs) -> None:
    seen: list[events.CaptureEvent] = []
    unsubscribe = events.subscribe(seen.append, events.CaptureEvent)
    with settings.scope(backend="inductor", tiers="blocking"):
        _train("ltc")
        torch_ltc.sync(wait=True)
    unsubscribe()
    refusals = [event.refusal for event in seen if event.refusal]
    assert any("compiled code cannot be captured around calls that talk to other ranks" in text for text in refusals)
    assert any("not captured: " in line and "allreduce_" in line for line in str(torch_ltc.explain()).splitlines())


def test_jit_replays_a_step_with_collectives(group: None) -> None:
    def run(device: str) -> tuple[torch.Tensor, Any]:
        weight = torch.ones(4, 4, device=device)

        def step(x: torch.Tensor) -> torch.Tensor:
            y = (x @ weight).relu()
            dist.all_reduce(y, op=dist.ReduceOp.SUM)
            weight.sub_(y.mean(0) * 0.1)
            return y.sum()

        function = torch_ltc.jit(step) if device == "ltc" else step
        torch.manual_seed(0)
        return torch.stack([function(torch.randn(2, 4).to(device)) for _ in range(8)]).cpu(), function

    expected, _ = run("cpu")
    found, function = run("ltc")
    assert torch.equal(found, expected)
    assert re.search(r"[1-9]\d* replayed", function.explain()), function.explain()


def test_jit_of_a_step_of_ddp_records_each_time_and_says_why(group: None) -> None:
    def run(device: str) -> tuple[dict[str, torch.Tensor], Any]:
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        model = DistributedDataParallel(plain.to(device))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        # DDP makes its buckets in the first two steps.
        for _ in range(3):
            step(torch.randn(5, 8).to(device))
        function = torch_ltc.jit(step) if device == "ltc" else step
        for _ in range(10):
            function(torch.randn(5, 8).to(device))
        return {name: value.cpu() for name, value in plain.state_dict().items()}, function

    expected, _ = run("cpu")
    found, function = run("ltc")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    # The buckets are tensors of the reducer, in C++.
    assert "0 replayed" in function.explain()
    assert "it reads a tensor that is no argument, and that jit cannot find" in function.explain()


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


def test_what_lies_elsewhere_is_copied_to_the_host_for_gloo() -> None:
    copied: list[tuple[torch.Tensor, torch.Tensor]] = []
    elsewhere, here = torch.arange(3.0, device="ltc"), torch.ones(2)
    first, second, number = _on_host([[elsewhere], here, 4], copied)
    assert (first[0].device.type, first[0].tolist()) == ("cpu", [0.0, 1.0, 2.0])
    assert second is here
    assert number == 4
    assert [(tensor is elsewhere, copy is first[0]) for tensor, copy in copied] == [(True, True)]
