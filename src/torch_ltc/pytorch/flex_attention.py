"""Private interfaces behind `flex_attention`: the operator with functions among its arguments, and its eager form."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.flex_attention import (
    create_fw_bw_graph,
    flex_attention,
    flex_attention_autograd,
    flex_attention_backward,
    math_attention,
    sdpa_dense,
    sdpa_dense_backward,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

__all__ = [
    "attend_backward_with_scores", "attend_densely", "attend_operator", "attend_operator_backward",
    "attend_with_autograd", "attend_with_scores", "joint_graph", "traced",
]  # fmt: skip

# The operator and its backward: functions of scores and of positions are among their arguments.
attend_operator: Any = flex_attention
attend_operator_backward: Any = flex_attention_backward
# Its kernel for autograd.
attend_with_autograd: Callable[..., Any] = flex_attention_autograd
# The eager forms: without and with the layout of the query for the result.
attend_with_scores: Callable[..., Any] = math_attention
attend_densely: Callable[..., Any] = sdpa_dense
attend_backward_with_scores: Callable[..., Any] = sdpa_dense_backward


def _indexing_by_tensors() -> Any:
    """A context in which `x[i]` with tensors is a call on tensors alone. Loads Dynamo, as `flex_attention` does."""
    module: Any = importlib.import_module("torch._dynamo._trace_wrapped_higher_order_op")
    return module.TransformGetItemToIndex()


def traced(function: Callable[..., Any], captured: list[Any], scores: torch.dtype | None) -> fx.GraphModule:
    """The calls of a function of a score and its positions, or without `scores` of positions alone. `captured` are the
    tensors and numbers that it takes besides."""
    with torch.no_grad(), FakeTensorMode(), _indexing_by_tensors():
        positions, held = _examples(captured, scores or torch.float32)
        module: fx.GraphModule = make_fx(function)(*positions[scores is None :], *held)
    return module


def joint_graph(function: Callable[..., Any], captured: list[Any], scores: torch.dtype) -> fx.GraphModule:
    """The calls of the backward of a function of a score: a gradient for each of its arguments that has one."""
    with torch.enable_grad(), FakeTensorMode(), _indexing_by_tensors():
        positions, held = _examples(captured, scores)
        positions[0].requires_grad_()
        for tensor, one in zip(held, captured, strict=True):
            if isinstance(one, torch.Tensor):
                tensor.requires_grad_(one.requires_grad)
        module: Any = create_fw_bw_graph(function, tuple(positions), tuple(held))[1]
    made: fx.GraphModule = module
    return made


def _examples(like: list[Any], scores: torch.dtype) -> tuple[list[Any], list[Any]]:
    """Fake tensors of the device: of one score and its four positions, and of what a function of them has captured."""
    with torch.device("ltc"):
        positions = [torch.empty((), dtype=scores), *[torch.empty((), dtype=torch.int) for _ in range(4)]]
        captured = [
            torch.empty_strided(one.size(), one.stride(), dtype=one.dtype) if isinstance(one, torch.Tensor) else one
            for one in like
        ]
    return positions, captured
