"""`flex_attention` on the device: recorded as one call, with its backward as another.

PyTorch's operator takes functions. Dynamo, through which `flex_attention` always goes, has made graphs of them, and
arguments of the tensors that they use; they are traced once more, and written down as text. What has no text, as a
function that holds a tensor of its own, is recorded call by call in PyTorch's eager form.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.fx import GraphModule

from torch_ltc.lowering.flex_attention import BACKWARD, FORWARD, block_mask_template, text_of
from torch_ltc.lowering.score_graphs import Graph, UnwritableError, may_fail, written
from torch_ltc.program.spec import spec_of
from torch_ltc.pytorch.flex_attention import (
    attend_densely,
    attend_operator,
    attend_with_autograd,
    joint_graph,
    traced,
)
from torch_ltc.pytorch.higher_order import implement
from torch_ltc.pytorch.patches import registers, replaces
from torch_ltc.pytorch.private import AUTOCAST, below_autograd, dispatch_modes, without_keys
from torch_ltc.pytorch.table import FLEX_ATTENTION

__all__: list[str] = []


@replaces("torch.nn.attention.flex_attention._validate_device")
def _validate_device(original: Callable[[Tensor, Tensor, Tensor], None]) -> Callable[[Tensor, Tensor, Tensor], None]:
    def validate(query: Tensor, key: Tensor, value: Tensor) -> None:
        # The list of devices is of those that Inductor has kernels for.
        if query.device.type != "ltc":
            original(query, key, value)

    return validate


class _Attention(torch.autograd.Function):
    """`flex_attention` with gradients: one call forward, one backward."""

    @staticmethod
    def forward(ctx: Any, forms: _Forms, *tensors: Tensor) -> Any:
        """The result, and the logarithms of the sums and the largest scores."""
        ctx.set_materialize_grads(False)
        query, key, value, *others = tensors
        out, sums, largest = FORWARD(query, key, value, others, forms.forward, forms.may_fail)
        ctx.mark_non_differentiable(largest)
        ctx.save_for_backward(*tensors, out, sums)
        ctx.forms = forms
        return out, sums, largest

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None, *rest: Any) -> Any:
        """Gradients of all tensors that have one."""
        query, key, value, *others, out, sums = ctx.saved_tensors
        forms = ctx.forms
        found = iter(BACKWARD(query, key, value, out, sums, grad, grad_sums, others, forms.backward, forms.may_fail))
        gradients = [next(found) for _ in range(3)]
        return (None, *gradients, *[next(found) if wanted else None for wanted in forms.wanted])


@dataclass(frozen=True, slots=True)
class _Forms:
    """Text of an attention and of its backward, and which of the tensors in its list have a gradient."""

    forward: str
    backward: str
    may_fail: bool
    wanted: tuple[bool, ...]


# By the function of scores, which is the graph that Dynamo has made of it, and lives as long.
_forms: weakref.WeakKeyDictionary[GraphModule, dict[Any, tuple[GraphModule, _Forms | None]]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of PyTorch's operator."""

    query: Tensor
    key: Tensor
    value: Tensor
    score: Any
    block_mask: tuple[Any, ...]
    scale: float
    options: dict[str, Any]
    of_score: tuple[Any, ...] = ()
    of_mask: tuple[Any, ...] = ()

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among them, in the order of the operator's list."""
        _, blocks = block_mask_template(self.block_mask)
        captured = [part for part in (*self.of_score, *self.of_mask) if isinstance(part, Tensor)]
        return [self.query, self.key, self.value, *blocks, *captured]

    def is_plain(self) -> bool:
        """True for tensors of the device, and functions that Dynamo has made graphs of: what they have captured is
        among the arguments."""
        graphs = isinstance(self.score, GraphModule) and isinstance(self.block_mask[-1], GraphModule)
        plain = all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type == "ltc" for t in self.tensors)
        return graphs and plain and not dispatch_modes()

    def wants_gradients(self) -> bool:
        """True when autograd has to see the call."""
        operands = (self.query, self.key, self.value, *self.of_score)
        return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in operands)

    def forms(self, gradients: bool) -> _Forms | None:
        """The text of this attention; None when it has none."""
        known = _forms.setdefault(self.score, {})
        mask = self.block_mask[-1]
        captured = [spec_of(t) if isinstance(t, Tensor) else t for t in (*self.of_score, *self.of_mask)]
        wanted = tuple([gradients and isinstance(t, Tensor) and t.requires_grad for t in self.of_score])
        parts = tuple([isinstance(part, Tensor) or part for part in self.block_mask[2:-1]])
        lengths = (self.query.size(0), self.query.size(1), self.query.size(2), self.key.size(2))
        options = tuple(self.options.items())
        kind = (id(mask), self.query.dtype, lengths, *captured, wanted, parts, self.scale, options, gradients)
        if kind not in known:
            known[kind] = (mask, _forms_of(self, gradients, wanted))
        return known[kind][1]


def _forms_of(asked: _Asked, gradients: bool, wanted: tuple[bool, ...]) -> _Forms | None:
    """Text of the functions, as their calls on one score; None when one cannot be written down."""
    try:
        return _written(asked, gradients, wanted)
    except (UnwritableError, RuntimeError, TypeError, ValueError):
        # If something is wrong with them, PyTorch's eager form raises it.
        return None


def _written(asked: _Asked, gradients: bool, wanted: tuple[bool, ...]) -> _Forms:
    scores = torch.float64 if asked.query.dtype is torch.float64 else torch.float32
    score = written(traced(asked.score, list(asked.of_score), scores))
    mask = written(traced(asked.block_mask[-1], list(asked.of_mask), None))
    # With scores of another dtype than PyTorch's own bits of gradients would be others.
    joint = written(joint_graph(asked.score, list(asked.of_score), asked.query.dtype)) if gradients else None
    block, blocks = block_mask_template(asked.block_mask)
    places, count = [], len(blocks)
    for part in (*asked.of_score, *asked.of_mask):
        places.append({"tensor": count} if isinstance(part, Tensor) else part)
        count += isinstance(part, Tensor)
    split = len(asked.of_score)
    common: dict[str, Any] = {
        "score": score, "mask": mask, "block": block, "of_score": places[:split], "of_mask": places[split:],
        "scale": asked.scale, "options": asked.options,
    }  # fmt: skip
    backward = "" if joint is None else text_of(**common, joint=joint, wanted=wanted)
    fails = _may_fail(asked, score, 5, asked.of_score) or _may_fail(asked, mask, 4, asked.of_mask)
    fails = fails or (joint is not None and _may_fail(asked, joint, 6, asked.of_score))
    of_score = [wants for wants, part in zip(wanted, asked.of_score, strict=True) if isinstance(part, Tensor)]
    rest = count - len(blocks) - len(of_score)
    return _Forms(text_of(**common), backward, fails, (*[False] * len(blocks), *of_score, *[False] * rest))


def _may_fail(asked: _Asked, graph: Graph, inputs: int, captured: tuple[Any, ...]) -> bool:
    """Whether a function may fail on data. Its inputs begin with a score, if it takes one, and four positions."""
    lengths = (asked.query.size(0), asked.query.size(1), asked.query.size(2), asked.key.size(2))
    first = 0 if inputs == 4 else 1
    ranges = {first + place: (0, length - 1) for place, length in enumerate(lengths)}
    sizes = {inputs + place: tuple(part.size()) for place, part in enumerate(captured) if isinstance(part, Tensor)}
    return may_fail(graph, ranges, sizes)


def _record(*args: Any) -> Any:
    """Kernel of PyTorch's operator below autograd."""
    asked = _Asked(*args)
    forms = asked.forms(False) if asked.is_plain() else None
    if forms is None:
        return attend_densely(*args, *((),) * (9 - len(args)))
    query, key, value, *others = asked.tensors
    return FORWARD(query, key, value, others, forms.forward, forms.may_fail)


def _record_with_gradients(*args: Any) -> Any:
    """Kernel of PyTorch's operator for autograd. What cannot be one call is recorded as PyTorch's eager form."""
    asked = _Asked(*args)
    gradients = asked.wants_gradients()
    # PyTorch refuses these.
    refused = gradients and (
        asked.block_mask[7] is None or any(getattr(t, "requires_grad", False) for t in asked.of_mask)
    )
    forms = asked.forms(gradients) if asked.is_plain() and not refused else None
    if forms is None:
        return attend_with_autograd(*args)
    if gradients:
        return _Attention.apply(forms, *asked.tensors)  # type: ignore[no-untyped-call]
    with below_autograd():
        return _record(*args)


def _record_with_autocast(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
    """Kernel of PyTorch's operator under autocast, which casts as on the CPU and on GPUs."""
    operands = [_cast(tensor) for tensor in (query, key, value)]
    with without_keys(AUTOCAST):
        return attend_operator(*operands, *rest)


def _cast(tensor: Tensor) -> Tensor:
    dtype = torch.get_autocast_dtype("ltc")
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not torch.float64 else tensor


@registers(FLEX_ATTENTION)
def _register() -> Callable[[], None]:
    return implement(
        attend_operator, PrivateUse1=_record, AutogradPrivateUse1=_record_with_gradients,
        AutocastPrivateUse1=_record_with_autocast,
    )  # fmt: skip
