"""Programs by hash, under the names of `torch._lazy.computation`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_ltc.execute.pending import pending_entry_for, pending_inputs, publish, run_published


def get_graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    """Bytes that stand for the pending program with these tensors as outputs, in this process."""
    return publish(tensors)


def run_cached_graph(hash_str: bytes, graph_inputs: Sequence[object]) -> list[torch.Tensor]:
    """Run the program behind `hash_str` on physical inputs, in the order of `get_tensors_ts_device_data_node`."""
    return run_published(hash_str, graph_inputs)


def get_tensors_ts_device_data_node(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[object]]:
    """Identities and values of the pending program's inputs: tensors, then numbers under identity -1."""
    pending_entry_for(tensors)
    return pending_inputs()
