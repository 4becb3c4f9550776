"""Shape rules: each answer is exactly what the CPU kernel gives."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import torch_ltc
from torch_ltc.program.instruction import Returns
from torch_ltc.program.spec import Spec, spec_of
from torch_ltc.record.operator import Kind, Operator
from torch_ltc.record.recorder import Recorder
from torch_ltc.shapes.inference import Inferred, OperandIndex, ShapeCall, _infer, run_on
from torch_ltc.shapes.rules import apply_rule, rule_of, rules
from torch_ltc.shapes.table import rule
from torch_ltc.testing.database import OPERATORS

aten = torch.ops.aten

# What the programs of the benchmarks are made of.
BENCHMARKED = """
    view add.Tensor mul.Tensor addmm transpose.int t cat native_layer_norm slice.Tensor mm tanh clone slice_backward
    split.Tensor _scaled_dot_product_flash_attention_for_cpu pow.Tensor_Scalar sum.dim_IntList sigmoid sigmoid_backward
    _unsafe_view empty_strided zero_ tanh_backward select.int embedding full bmm unsqueeze eq.Scalar arange _to_copy
    argmax bitwise_or.Tensor bitwise_not bitwise_and.Tensor max expand relu native_layer_norm_backward
    threshold_backward sub.Tensor convolution add_.Tensor native_batch_norm native_batch_norm_backward
    convolution_backward _softmax gelu gelu_backward _softmax_backward_data _reshape_alias fill_.Scalar div.Scalar sum
    mean gt.Scalar _foreach_add_.List _foreach_lerp_.Scalar _foreach_mul_.Scalar _foreach_addcmul_.Scalar _foreach_sqrt
    _foreach_div_.ScalarList _foreach_add_.Scalar _foreach_addcdiv_.ScalarList mean.dim _log_softmax nll_loss_forward
    nll_loss_backward _log_softmax_backward_data cumsum masked_fill.Scalar all lt.Scalar any ones linear
    linear_backward matmul matmul_backward
"""


eager = partial(run_on, "cpu")


class Question:
    """One call, as rules and as the CPU kernel see it."""

    def __init__(self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operator = Operator(op)
        self.specs: list[Spec] = []
        self.groups: list[int] = []
        self._storages: dict[int, int] = {}
        self._placed = [self._place(value) for value in self.operator.values(args, kwargs)]

    def _place(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()._cdata
            self.specs.append(spec_of(value))
            self.groups.append(self._storages.setdefault(storage, len(self.groups)))
            return OperandIndex(len(self.specs) - 1)
        return [self._place(item) for item in value] if isinstance(value, (list, tuple)) else value

    def _seen(self, value: Any) -> Any:
        if isinstance(value, OperandIndex):
            return self.specs[value]
        return [self._seen(item) for item in value] if isinstance(value, list) else value

    @property
    def text(self) -> str:
        return f"{self.operator.name}{[self._seen(value) for value in self._placed]} {self.groups}"

    def by_rule(self) -> Returns | None:
        assert self.operator.rule is not None
        shape_args = [self._seen(value) for value in self._placed]
        return apply_rule(self.operator.rule, shape_args, self.specs, self.groups if self.operator.written else None)

    def by(self, infer: Callable[[ShapeCall], Inferred]) -> Any:
        split = self.operator.positional
        arguments = self.operator.arguments
        named = {
            argument.name: None if argument.kind is Kind.DROPPED else value
            for argument, value in zip(arguments[split:], self._placed[split:], strict=True)
        }
        try:
            # From torch 2.15 on, kernels warn in Python of what they are given, and a warning is no refusal.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                inferred = infer(ShapeCall(self.operator.op, self._placed[:split], named, self.specs, self.groups))
        except Exception as error:
            return error
        return inferred.returns if not inferred.resized else inferred


class Comparison(TorchDispatchMode):
    """Compares the rule with the CPU kernel for every call that runs, once per spec."""

    def __init__(self, oracle: Callable[[ShapeCall], Inferred] = eager) -> None:
        super().__init__()
        self._oracle = oracle
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if rule_of(func.name()) is not None and all(value.layout is torch.strided for value in tensors):
            with _disable_current_modes():
                self.compare(func, *args, **kwargs)
        return func(*args, **kwargs)

    def compare(self, op: OpOverload, *args: Any, **kwargs: Any) -> None:
        question = Question(op, args, kwargs)
        text = question.text
        if text in self._seen:
            return
        self._seen.add(text)
        answer = question.by_rule()
        if answer is None:
            return
        self.answers[question.operator.name] += 1
        expected = question.by(self._oracle)
        if answer != expected:
            self.wrong.append(f"{text}\n  rule      {answer}\n  eager     {expected!r}")

    def check(self) -> None:
        assert not self.wrong, "\n".join(self.wrong[:5])


def turned(value: Any) -> Any:
    """Matrices laid out by columns, whatever they are in."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.layout is torch.strided:
        other = value.detach().transpose(-1, -2).contiguous().transpose(-1, -2)
        return other.requires_grad_(value.requires_grad)
    return type(value)(turned(item) for item in value) if type(value) in (list, tuple) else value


def run_sample(comparison: Comparison, op: Any, sample: Any, arrange: Any) -> None:
    """Forward, backward and in place; calls that fail are compared as far as they come."""
    given, rest = arrange(sample.input), arrange(tuple(sample.args))
    with comparison, suppress(Exception):
        out = op(given, *rest, **sample.kwargs)
        outs = [each for each in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(each, Tensor)]
        outs = [each for each in outs if each.requires_grad]
        torch.autograd.backward(outs, [torch.ones(each.shape, dtype=each.dtype) for each in outs])
    if op.inplace_variant is not None and isinstance(given, Tensor):
        with comparison, suppress(Exception):
            op.inplace_variant(given.detach().clone(), *rest, **sample.kwargs)


def sweep(dtype: torch.dtype, every: int, samples: int | None) -> Comparison:
    comparison = Comparison()
    for op in list(OPERATORS.values())[::every]:
        if dtype not in op.supported_dtypes("cpu"):
            continue
        random.seed(0)
        torch.manual_seed(0)
        differentiable = dtype.is_floating_point and dtype in op.supported_backward_dtypes("cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=differentiable), samples):
                run_sample(comparison, op, sample, lambda value: value)
                run_sample(comparison, op, sample, turned)
    return comparison


# The rules that must have answered, so that the comparison does not shrink without notice.
@pytest.mark.parametrize(
    ("dtype", "every", "answered"),
    [(torch.float32, 2, 180), (torch.int64, 4, 55), (torch.bool, 6, 25), (torch.bfloat16, 6, 90)],
    ids=["float32", "int64", "bool", "bfloat16"],
)
def test_rules_agree_with_eager_on_the_operator_database(dtype: torch.dtype, every: int, answered: int) -> None:
    comparison = sweep(dtype, every, samples=2)
    comparison.check()
    assert len(comparison.answers) >= answered, len(comparison.answers)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float64], ids=str)
def test_rules_agree_with_eager_on_every_sample(dtype: torch.dtype) -> None:
    sweep(dtype, every=1, samples=None).check()


LAYOUTS = [
    ((1, 4, 8, 64), (6144, 64, 768, 1)),
    ((1, 1), (8, 1)),
    ((3, 3, 1), (3, 1, 3)),
    ((1, 5), (1, 2)),
    ((1, 5), (1, 5)),
    ((5, 1, 3), (1, 7, 20)),
    ((2, 3, 4), (0, 0, 0)),
    ((4, 1, 1), (1, 0, 0)),
    ((4, 6, 2, 2), (6, 1, 0, 0)),
    ((16, 12), (50, 1)),
    ((4, 6), (1, 4)),
    ((2, 3, 4, 5), (60, 1, 15, 3)),
    ((2, 3, 4), (1, 2, 6)),
    ((1, 3, 4), (12, 1, 3)),
    ((), ()),
    ((7,), (1,)),
    ((7,), (3,)),
    ((1,), (5,)),
    ((2, 3, 4, 5), (60, 20, 5, 1)),
    ((2, 1, 4, 5), (20, 1, 5, 1)),
]
DTYPES = (torch.float32, torch.int64, torch.bfloat16)


def laid_out(size: Any, stride: Any, offset: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    reach = offset + 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    return torch.zeros(reach, dtype=dtype).as_strided(size, stride, offset)


def tensors() -> Iterator[Tensor]:
    for (size, stride), offset, dtype in itertools.product(LAYOUTS, (0, 3), DTYPES):
        yield laid_out(size, stride, offset, dtype)


def rules_on(*kinds: str) -> list[OpOverload]:
    """Operators with a rule whose arguments without a default are of these types."""
    found = [op for op in map(overload, rules.names()) if op is not None]
    return [op for op in found if [str(a.type) for a in op._schema.arguments if not a.has_default_value()] == [*kinds]]


def pairs() -> Iterator[tuple[Tensor, Tensor]]:
    return ((x, y) for x, y in itertools.product(tensors(), tensors()) if x.shape == y.shape)


def test_rules_agree_on_one_operand_of_any_layout() -> None:
    comparison = Comparison()
    for op, x in itertools.product(rules_on("Tensor"), tensors()):
        comparison.compare(op, x)
    for op, x, number in itertools.product(rules_on("Tensor", "number"), tensors(), (1, 2.5, True, 0, 1e30, 300)):
        comparison.compare(op, x, number)
    for x, dimension in itertools.product(tensors(), (-1, 0, 1)):
        for op in (aten.cumsum.default, aten.max.dim, aten.argmax.default, aten.sort.default, aten.unsqueeze.default):
            comparison.compare(op, x, dimension)
        for op in (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default):
            comparison.compare(op, x, [dimension], True)
        comparison.compare(aten._softmax.default, x, dimension, False)
    comparison.check()
    assert len(comparison.answers) > 30


def test_rules_agree_on_operands_of_different_layouts() -> None:
    comparison = Comparison()
    some = list(tensors())
    for op, x, y in itertools.product((aten.add.Tensor, aten.lt.Tensor, aten.add_.Tensor), some[::2], some[::3]):
        comparison.compare(op, x, y)
    for op, (x, y) in itertools.product(rules_on("Tensor", "Tensor"), pairs()):
        comparison.compare(op, x, y)
    for x, y in pairs():
        comparison.compare(aten.threshold_backward.default, x, y, 0)
        comparison.compare(aten.cat.default, [x, y], -1)
        comparison.compare(aten.cat.default, [torch.zeros(0, dtype=x.dtype), y], -1)
        comparison.compare(aten.where.self, x > 0, x, y)
        comparison.compare(aten.copy_.default, x, y)
        comparison.compare(aten.addcmul.default, x, y, y)
        comparison.compare(aten._foreach_add.List, [x, x], [y, y])
        comparison.compare(aten._foreach_sqrt.default, [x, y])
        comparison.compare(aten._foreach_lerp_.Scalar, [x], [y], 0.5)
    comparison.check()
    assert len(comparison.answers) > 15


def test_rules_agree_on_fused_optimizers() -> None:
    comparison = Comparison()
    for sizes in ([(3, 4)], [(3, 4), (5,)]):
        weights, gradients, first, second = ([torch.zeros(size) for size in sizes] for _ in range(4))
        steps = [torch.ones(()) for _ in sizes]
        numbers: dict[str, Any] = {"weight_decay": 0.0, "lr": 0.1, "maximize": False}
        sgd = {"momentum": 0.5, "dampening": 0.0, "nesterov": False, "is_first_step": False}
        comparison.compare(aten._fused_sgd_.default, weights, gradients, first, **numbers, **sgd)
        adam = {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
        for op in (aten._fused_adam_.default, aten._fused_adamw_.default):
            comparison.compare(op, weights, gradients, first, second, [], steps, **numbers, **adam)
        adagrad = {"lr_decay": 0.0, "eps": 1e-8}
        comparison.compare(aten._fused_adagrad_.default, weights, gradients, first, steps, **numbers, **adagrad)
    comparison.check()
    assert len(comparison.answers) == 4


def test_rules_agree_on_products() -> None:
    comparison = Comparison()
    rows = [torch.zeros(5, 4), torch.zeros(2, 3, 4), turned(torch.zeros(2, 3, 4)), torch.zeros(1, 1), torch.zeros(5, 1)]
    for x, width in itertools.product(rows, (1, 6)):
        for weight in (torch.zeros(width, x.shape[-1]), torch.zeros(x.shape[-1], width).t()):
            comparison.compare(aten.linear.default, x, weight, torch.zeros(width))
            gradient = torch.zeros(*x.shape[:-1], width)
            for grad, mask in itertools.product(
                (gradient, turned(gradient), laid_out(gradient.shape, [0] * gradient.dim())),
                ([True, True, True], [False, True, False], [True, False, True], [True, False, False]),
            ):
                comparison.compare(aten.linear_backward.default, x, grad, weight, mask)
    for size in ((3,), (2, 3)):
        left, right, gradient = torch.zeros(*size, 4, 5), torch.zeros(*size, 5, 6), torch.zeros(*size, 4, 6)
        for x, y in itertools.product((left, turned(left)), (right, turned(right))):
            comparison.compare(aten.matmul.default, x, y)
            for mask in ([True, True], [True, False], [False, True]):
                comparison.compare(aten.matmul_backward.default, turned(gradient), x, y, mask)
    comparison.check()
    assert len(comparison.answers) == 4


def test_rules_agree_on_attention() -> None:
    # The meta kernel is what the functional form sees too; of one query, it knows the strides better than the CPU's.
    comparison = Comparison(_infer)
    for batch, heads, length, keys, width in ((2, 3, 4, 4, 8), (1, 4, 8, 8, 16), (1, 4, 1, 9, 16), (2, 1, 4, 4, 8)):
        q, k = torch.zeros(batch, heads, length, width), torch.zeros(batch, heads, keys, width)
        packed = torch.zeros(batch, length, 3 * heads, width)[:, :, :heads].transpose(1, 2)
        for query in (q, torch.zeros(batch, length, heads, width).transpose(1, 2), packed):
            for mask in (None, torch.zeros(length, keys)):
                forward = aten._scaled_dot_product_flash_attention_for_cpu.default
                comparison.compare(forward, query, k, k, 0.0, False, attn_mask=mask, scale=0.5)
            sums = torch.zeros(batch, heads, length)
            backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
            comparison.compare(backward, q, query, k, k, q, sums, 0.0, False)
    comparison.check()
    assert len(comparison.answers) == 2


def test_memory_that_a_call_both_writes_and_reads_is_left_to_inference() -> None:
    x = torch.zeros(3, 3)
    assert Question(aten.add_.Tensor, (x, x.t()), {}).by_rule() is None
    assert Question(aten.add_.Tensor, (x, x), {}).by_rule() is not None
    assert Question(aten.mul_.Scalar, (x[0].expand(3, 3), 2), {}).by_rule() is None


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.add.Tensor, (torch.zeros(2), torch.zeros(3))),
        (aten.mm.default, (torch.zeros(2, 3), torch.zeros(2, 3))),
        (aten.addmm.default, (torch.zeros(7), torch.zeros(2, 3), torch.zeros(3, 4))),
        (aten.linear.default, (torch.zeros(2, 3), torch.zeros(4, 5), None)),
        (aten.view.default, (torch.zeros(2, 3), [4, 2])),
        (aten.view.default, (torch.zeros(2, 3).t(), [6])),
        (aten.transpose.int, (torch.zeros(2, 3), 0, 2)),
        (aten.select.int, (torch.zeros(2, 3), 0, 2)),
        (aten.expand.default, (torch.zeros(2, 3), [3, 3])),
        (aten.cat.default, ([torch.zeros(2, 3), torch.zeros(2, 4)], 0)),
        (aten.sum.dim_IntList, (torch.zeros(2, 3), [0, 0])),
        (aten.native_layer_norm.default, (torch.zeros(2, 3), [4], None, None, 1e-5)),
        (aten.embedding.default, (torch.zeros(2, 3), torch.zeros(2))),
        (aten._foreach_sub.Scalar, ([torch.zeros(2)], True)),
        (aten._foreach_sub_.ScalarList, ([torch.zeros(2)], [True])),
    ],
    ids=lambda value: value.name() if isinstance(value, OpOverload) else "",
)
def test_wrong_arguments_have_no_answer(op: OpOverload, args: tuple[Any, ...]) -> None:
    question = Question(op, args, {})
    assert question.by_rule() is None
    assert isinstance(question.by(eager), Exception)


def test_views_do_not_import_sympy() -> None:
    code = """
import sys
import torch
import torch_ltc

x = torch.ones(4, 6).to("ltc")
x.view(-1), x.t(), x[1:, 0], x.split(2, 1), x.expand(2, 4, 6), x.unsqueeze(0).squeeze(0), x.unbind(0), x.t().clone()
assert "sympy" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_an_operator_has_one_rule() -> None:
    with pytest.raises(ValueError, match="two rules for aten::mm"):
        rule("mm")(lambda: None)


def test_every_rule_is_that_of_an_operator() -> None:
    names = rules.names()
    known = {op.name() for op in map(overload, names) if op is not None}
    assert set(names) == known
    assert len(names) >= 400


def overload(name: str) -> OpOverload | None:
    packet, _, tail = name.removeprefix("aten::").partition(".")
    return getattr(getattr(aten, packet, None), tail or "default", None)


def test_the_operators_of_the_benchmarks_have_rules() -> None:
    assert [name for name in BENCHMARKED.split() if rule_of(f"aten::{name}") is None] == []


class Net(torch.nn.Module):
    """A little of everything that networks are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(3, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.embedding = torch.nn.Embedding(10, 8)
        self.head = torch.nn.Linear(8, 5)

    def forward(self, image: Tensor, words: Tensor) -> Tensor:
        pooled = F.max_pool2d(self.norm(self.convolution(image)).relu(), 2).flatten(2).mean(1)
        return self.head(self.layer(self.embedding(words)).mean(1) + pooled[:, :8])


def test_training_needs_no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net().to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01).item())
    image, words = torch.randn(2, 3, 8, 8).to("ltc"), torch.randint(0, 10, (2, 6)).to("ltc")
    target = torch.tensor([1, 3]).to("ltc")
    torch_ltc.sync(wait=True)
    asked: list[str] = []
    ask = Recorder._by_pytorch

    def noted(self: Recorder, operator: Operator, *rest: Any) -> Returns:
        asked.append(operator.name)
        return ask(self, operator, *rest)

    monkeypatch.setattr(Recorder, "_by_pytorch", noted)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(image, words), target).backward()
        optimizer.step()
    assert asked == []


@pytest.mark.parametrize("stride", [(8, 1), (1, 8), (0, 0)])
def test_strides_of_dimensions_of_length_one_do_not_matter_where_nothing_is_broadcast(stride: tuple[int, int]) -> None:
    odd = torch.arange(40.0).as_strided((1, 1), stride, 7)
    question = Question(aten.add.Tensor, (torch.ones(1, 1), odd), {})
    assert question.by_rule() is not None
    assert question.by_rule() == question.by(eager)
