"""CUDA graphs on a stand-in for PyTorch's interface: errors, and the memory of pools."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torch_ltc.execute.cuda_graphs import CudaGraphs


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A GPU whose captures fail at their end when they failed before, and then leave their stream in place. The streams
    that were the present one, in order."""
    streams: list[Any] = ["programs"]

    @contextlib.contextmanager
    def graph(made: Any, pool: Any, stream: Any, **kwargs: Any) -> Iterator[None]:
        before = streams[-1]
        streams.append(stream)
        try:
            yield
        except Exception as error:
            raise RuntimeError("operation failed due to a previous error during capture") from error
        streams.append(before)

    segments = [
        {"segment_pool_id": (0, 1), "total_size": 100},
        {"segment_pool_id": (0, 0), "total_size": 7},
        {"segment_pool_id": (0, 1), "total_size": 20},
    ]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    return streams


@pytest.mark.usefixtures("cuda")
def test_a_failing_capture_raises_what_the_call_raised() -> None:
    def launch() -> None:
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        CudaGraphs().capture(launch, None, (0, 1))


def test_programs_after_a_failing_capture_are_launched_where_they_were_before(cuda: list[Any]) -> None:
    def launch() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        CudaGraphs().capture(launch, None, (0, 1))
    assert cuda[-1] == "programs"


@pytest.mark.usefixtures("cuda")
def test_the_bytes_of_a_pool_are_those_of_its_segments() -> None:
    assert CudaGraphs().size_bytes((0, 1)) == 120
    assert CudaGraphs().total_bytes() == 1000
