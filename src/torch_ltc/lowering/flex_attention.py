"""`flex_attention` as one instruction, and its backward as another.

PyTorch's operator takes functions of scores and positions. `torch_ltc::flex_attention` takes them as text
(`score_graphs.py`), with the tensors that they have captured, and those of the block mask, in one list. On physical
tensors it is PyTorch's eager form; a backend that has a kernel for it takes the text apart.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from torch_ltc.lowering.own_operators import define
from torch_ltc.lowering.score_graphs import read
from torch_ltc.pytorch.flex_attention import attend_backward_with_scores, attend_with_scores
from torch_ltc.pytorch.private import OpOverload

__all__ = [
    "BACKWARD",
    "FORWARD",
    "Functions",
    "attend",
    "attend_backward",
    "block_mask_template",
    "functions",
    "text_of",
]

# Functions of forms that were in use; one model has a few.
_FORMS = 256
# In place of the lengths of queries and keys, with which a block mask begins.
_LENGTHS = 2


@dataclass(frozen=True, slots=True)
class Functions:
    """What one `flex_attention` has that another has not: functions, scale, block mask and options."""

    score: fx.GraphModule
    mask: fx.GraphModule
    # Of the backward: gradients of scores and of captured tensors; `wanted` says which of these have one.
    joint: fx.GraphModule | None
    wanted: tuple[bool, ...]
    scale: float
    options: dict[str, Any]
    # Places in the list of tensors, or numbers.
    block: list[Any]
    captured_by_score: list[Any]
    captured_by_mask: list[Any]

    def block_mask(self, query: Any, key: Any, others: Sequence[Any]) -> tuple[Any, ...]:
        """The block mask as PyTorch's operator takes it."""
        return query.size(-2), key.size(-2), *[_picked(part, others) for part in self.block], self.mask

    def of_score(self, others: Sequence[Any]) -> tuple[Any, ...]:
        """What the function of scores has captured."""
        return tuple([_picked(part, others) for part in self.captured_by_score])

    def of_mask(self, others: Sequence[Any]) -> tuple[Any, ...]:
        """What the function of the mask has captured."""
        return tuple([_picked(part, others) for part in self.captured_by_mask])


def _picked(part: Any, others: Sequence[Any]) -> Any:
    return others[part["tensor"]] if isinstance(part, dict) else part


# ---- text -----------------------------------------------------------------------------------------------------------


def text_of(**parts: Any) -> str:
    """The form of an attention as text; its parts are those of `Functions`, of the backward `joint` and `wanted` too.
    `functions` reads it."""
    return json.dumps(parts, separators=(",", ":"))


def block_mask_template(block_mask: Sequence[Any]) -> tuple[list[Any], list[Tensor]]:
    """The block mask without lengths and function, with places in a list instead of its tensors, and this list."""
    tensors: list[Tensor] = []
    parts: list[Any] = []
    for part in block_mask[_LENGTHS:-1]:
        if isinstance(part, Tensor):
            parts.append({"tensor": len(tensors)})
            tensors.append(part)
        else:
            parts.append(part)
    return parts, tensors


@lru_cache(_FORMS)
def functions(form: str, device: torch.device) -> Functions:
    """The functions of a form, for tensors on `device`."""
    parts = json.loads(form)
    joint = parts.get("joint")
    return Functions(
        read(parts["score"], device),
        read(parts["mask"], device),
        None if joint is None else read(joint, device),
        tuple(parts.get("wanted", ())),
        parts["scale"],
        parts["options"],
        parts["block"],
        parts["of_score"],
        parts["of_mask"],
    )


# ---- the operators --------------------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, others: Sequence[Tensor], form: str, may_fail: bool) -> Any:
    """PyTorch's eager form: the result, the logarithms of the sums, to base 2, and the largest scores."""
    del may_fail
    given = functions(form, query.device)
    block = given.block_mask(query, key, others)
    out, sums, largest = attend_with_scores(
        query, key, value, given.score, block, given.scale, {}, given.of_score(others), given.of_mask(others)
    )
    return _like_query(query, out).copy_(out), sums, largest


def _like_query(query: Tensor, out: Tensor) -> Tensor:
    """Memory for a tensor of the size of `out`, its dimensions in the order of those of the query, and the last one
    dense."""
    last = query.dim() - 1
    order = sorted(range(query.dim()), key=lambda dim: (query.stride(dim), -dim))
    strides = _dense(order, out)
    if strides[last] != 1:
        strides = _dense([last, *[dim for dim in order if dim != last]], out)
    return out.new_empty_strided(out.size(), strides)


def _dense(order: Sequence[int], like: Tensor) -> list[int]:
    strides, step = [0] * like.dim(), 1
    for dim in order:
        strides[dim] = step
        step = step * like.size(dim)
    return strides


def attend_backward(
    query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor, grad: Tensor | None,
    grad_sums: Tensor | None, others: Sequence[Tensor], form: str, may_fail: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of query, key, value, and of the captured tensors that have one, by PyTorch's eager form."""
    del may_fail
    given = functions(form, query.device)
    captured = [
        part.detach().requires_grad_(wanted) if isinstance(part, Tensor) else part
        for part, wanted in zip(given.of_score(others), given.wanted, strict=True)
    ]
    *gradients, of_captured = attend_backward_with_scores(
        query, key, value, out, sums, grad, grad_sums, given.score, given.joint,
        given.block_mask(query, key, others), given.scale, {}, tuple(captured), given.of_mask(others),
    )  # fmt: skip
    return [*gradients, *[gradient for gradient in of_captured if isinstance(gradient, Tensor)]]


def _infer(query: Tensor, key: Tensor, value: Tensor, others: Sequence[Tensor], form: str, may_fail: bool) -> Any:
    rows = query.size()[:-1]
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    out = _like_query(query, query.new_empty((*rows, value.size(-1))))
    return out, query.new_empty(rows, dtype=dtype), query.new_empty(rows, dtype=dtype)


def _infer_backward(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> list[Tensor]:
    *_, others, form, _ = rest
    given = functions(form, torch.device("cpu"))
    batches = query.size(0)
    gradients = [_like_query(query, query)]
    for tensor in (key, value):
        broadcast = tensor.new_empty((batches, *tensor.size()[1:]))
        summed = batches > 1 and tensor.size(0) == 1
        gradients.append(torch.empty_like(tensor) if summed else _like_query(tensor, broadcast))
    captured = zip(given.of_score(others), given.wanted, strict=True)
    gradients += [torch.empty_like(t, memory_format=torch.contiguous_format) for t, wanted in captured if wanted]
    return gradients


_OPERANDS = "Tensor query, Tensor key, Tensor value"
_FORM = "Tensor[] others, str form, bool may_fail"


def _define() -> tuple[OpOverload, OpOverload]:
    keys = ("CPU", "CUDA")
    define(f"flex_attention({_OPERANDS}, {_FORM}) -> (Tensor, Tensor, Tensor)", attend, _infer, keys)
    backward = f"{_OPERANDS}, Tensor out, Tensor sums, Tensor? grad, Tensor? grad_sums, {_FORM}"
    define(f"flex_attention_backward({backward}) -> Tensor[]", attend_backward, _infer_backward, keys)
    operators: Any = torch.ops.torch_ltc
    return operators.flex_attention.default, operators.flex_attention_backward.default


FORWARD, BACKWARD = _define()
