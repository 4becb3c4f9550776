"""Metrics of real programs: bytes, cache hits and misses, times by reason, and what a reset forgets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torch_ltc
from torch_ltc import metrics
from torch_ltc.config import settings


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Nothing is counted yet, and programs are compiled when they are due."""
    torch_ltc.wait_device_ops()
    metrics.reset()
    with settings.scope(tiers="blocking"):
        yield
    torch_ltc.wait_device_ops()
    metrics.reset()


def test_a_block_of_two_equal_steps() -> None:
    with metrics.recorded() as block:
        x = torch.ones(4, 8).to("ltc")
        for _ in range(3):
            y = (x * 3 + 1).relu()
            torch_ltc.sync()
        y.cpu()
        torch_ltc.wait_device_ops()
    counters = block.counters
    assert (counters["UncachedCompile"], counters["CachedCompile"], counters["MarkStep"]) == (1, 2, 3)
    assert (counters["Compile"], counters["Execute::interpreter"], counters["Execute::torchscript"]) == (1, 1, 2)
    assert counters["lazy::relu"] == 3
    samples = {name: value["total_samples"] for name, value in block.metrics.items()}
    assert samples == {
        "CompileTime": 1,
        "ExecuteTime": 3,
        "InboundData": 1,
        "OutboundData": 1,
        "ReadTime": 1,
        "RecordTime": 3,
        "SyncTime::explicit": 3,
        "TensorsGraphSize": 3,
        "UploadTime": 1,
        "WaitTime": 1,
    }
    moved = [block.metrics[name]["accumulator"] for name in ("InboundData", "OutboundData")]
    assert moved == [4 * 8 * 4, 4 * 8 * 4]


def test_what_the_disk_cache_did_not_have_is_counted(tmp_path: Path) -> None:
    with settings.scope(cache_dir=str(tmp_path)), metrics.recorded() as block:
        x = torch.ones(5, 7).to("ltc")
        for _ in range(2):
            y = (x * 5 - 1).tanh()
            torch_ltc.sync()
        torch_ltc.wait_for_compiles()
        del y
    assert (block.counters["CompileNotOnDisk"], block.counters["Compile"]) == (1, 1)


def test_without_a_disk_cache_there_are_no_misses() -> None:
    x = torch.ones(5, 9).to("ltc")
    for _ in range(2):
        y = (x * 5 - 1).sigmoid()
        torch_ltc.sync()
    torch_ltc.wait_device_ops()
    del y
    assert metrics.counter_value("Compile") == 1
    assert metrics.counter_value("CompileNotOnDisk") is None


def test_a_reset_forgets_forks_that_were_not_handed_over_yet() -> None:
    x = torch.ones(3, 11).to("ltc")
    y = x + 1
    torch_ltc.sync()
    y = x * 2
    metrics.reset()
    torch_ltc.sync()
    del y
    assert metrics.counter_value("TrieForked") is None
    assert metrics.counter_value("MarkStep") == 1
