"""The graph that Inductor is given: what it writes, what it returns, and what it does with data that is out of order.

Nothing is compiled here: the graph runs with PyTorch's kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import torch_ltc
from tests.support.backends import record
from torch_ltc.backends.inductor import InductorBackend
from torch_ltc.backends.inductor import flex_attention as kernels
from torch_ltc.backends.inductor.graph import Built, build
from torch_ltc.config import settings
from torch_ltc.errors import CompileError
from torch_ltc.lowering.flex_attention import FORWARD
from torch_ltc.lowering.flex_attention import attend as eager_form
from torch_ltc.lowering.functional_computation import CompiledPart, inputs_at_risk
from torch_ltc.lowering.lower import functional_form
from torch_ltc.lowering.partition import partition
from torch_ltc.program.instruction import Call, Program

pytestmark = pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")

aten = torch.ops.aten
X = torch.arange(6.0).view(2, 3)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


def functional(function: Callable[..., Any], *inputs: Tensor) -> Program:
    """The program of a function that touches its inputs in their order."""
    program, numbers = record(function, *inputs)
    return functional_form(InductorBackend(), program, numbers, set()).program


def graph_of(function: Callable[..., Any], *inputs: Tensor) -> Built:
    return build(functional(function, *inputs))


# ---- writes and results -------------------------------------------------------------------------------------------


def test_updated_inputs_are_written_in_place() -> None:
    def step(weight: Tensor, gradient: Tensor) -> Tensor:
        weight.sub_(gradient, alpha=0.5)
        return weight.sum()

    weight, gradient = torch.ones(3), torch.arange(3.0)
    built = graph_of(step, weight, gradient)
    (total,) = built.module(weight, gradient)
    torch.testing.assert_close(weight, 1 - 0.5 * gradient)
    torch.testing.assert_close(total, weight.sum())


def test_inputs_that_take_each_others_values_are_read_before_they_are_written() -> None:
    def swap(left: Tensor, right: Tensor) -> None:
        kept = left.clone()
        left.copy_(right)
        right.copy_(kept)

    left, right = torch.zeros(2), torch.ones(2)
    graph_of(swap, left, right).module(left, right)
    assert left.tolist() == [1.0, 1.0]
    assert right.tolist() == [0.0, 0.0]


def test_an_input_that_takes_a_view_of_itself_is_read_before_it_is_written() -> None:
    def transpose(square: Tensor) -> None:
        square.copy_(square.t().clone())

    square = torch.arange(4.0).view(2, 2)
    graph_of(transpose, square).module(square)
    assert square.tolist() == [[0.0, 2.0], [1.0, 3.0]]


def test_calls_on_lists_with_a_tensor_more_than_once_write_one_after_the_other() -> None:
    def step(x: Tensor, y: Tensor) -> None:
        torch._foreach_add_([x, x], 1.0)
        torch._foreach_mul_([x, y], [y, x])
        torch._foreach_sub_([x.view(-1), x[0]], [y.view(-1), y[1]])

    ours = torch.arange(6.0).view(2, 3), torch.full((2, 3), 2.0)
    theirs = [tensor.clone() for tensor in ours]
    step(*theirs)
    graph_of(step, *ours).module(*ours)
    assert [tensor.tolist() for tensor in ours] == [tensor.tolist() for tensor in theirs]


def test_a_result_that_was_an_input_keeps_the_old_value() -> None:
    def step(weight: Tensor) -> tuple[Tensor, Tensor]:
        before, turned = weight.clone(), weight.t().clone()
        weight.add_(1)
        return before, turned

    weight = torch.arange(6.0).view(2, 3)
    expected = weight.clone()
    before, turned = graph_of(step, weight).module(weight)
    torch.testing.assert_close(before, expected)
    torch.testing.assert_close(turned, expected.t())
    torch.testing.assert_close(weight, expected + 1)


def test_each_value_is_returned_once() -> None:
    program = functional(lambda x: (x.sin(), x.sin()), torch.rand(3))
    assert len(set(program.outputs)) == 1
    assert len(build(program).returned) == 1


def test_results_of_one_call_are_told_apart() -> None:
    x = torch.rand(4, 6)

    def several(x: Tensor) -> list[Tensor]:
        values, places = x.sort(1)
        return [values, places, *(part + 1 for part in x.split(2, 1)), *torch._foreach_mul([x, x.exp()], 2.0)]

    made = graph_of(several, x).module(x)
    assert len(made) == 7
    for ours, theirs in zip(made, several(x), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_product_with_zero_is_computed() -> None:
    x = torch.tensor([1.0, float("inf"), float("nan")])
    code = graph_of(lambda x: x * 0, x).module.code
    assert "mul.Tensor(v0, 0.0)" in code


# ---- demands on data ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Demanding:
    """A function whose call demands something, its inputs when a value of them is `value`, and the values it takes."""

    name: str
    function: Callable[..., Any]
    inputs: Callable[[Any], tuple[Tensor, ...]]
    good: tuple[Any, ...]
    bad: tuple[Any, ...]
    # Whether eager refuses the bad values; where it does not, it reads what is not its own.
    eager_refuses: bool = True


NO_NEGATIVE = {"good": (0, 4), "bad": (5, 100, -1, -5)}
BOTH_ENDS = {"good": (0, 4, -1, -5), "bad": (5, 100, -6)}


def row(value: int) -> Tensor:
    return torch.tensor([0, 4, value])


def rows_of(value: int) -> tuple[Tensor, ...]:
    return torch.rand(5, 3), row(value)


def written(value: int) -> tuple[Tensor, ...]:
    return torch.rand(5, 3), row(value), torch.rand(3, 3)


def written_along(value: int) -> tuple[Tensor, ...]:
    return torch.rand(5, 3), row(value)[:, None].repeat(1, 3), torch.rand(3, 3)


def scores(value: int) -> tuple[Tensor, ...]:
    return torch.rand(3, 5).log_softmax(1), row(value)


DEMANDING = [
    Demanding("embedding", lambda w, i: F.embedding(i, w), rows_of, **NO_NEGATIVE),
    Demanding("gather", lambda x, i: x.gather(0, i), lambda v: (torch.rand(5), row(v)), **NO_NEGATIVE),
    Demanding("gather_scalar", lambda x, i: x.gather(0, i), lambda v: (torch.rand(()), torch.tensor(v)), (0,), (1, -1)),
    Demanding("index", lambda x, i: x[i], rows_of, **BOTH_ENDS),
    Demanding("index_second", lambda x, i: x.t()[:, i], rows_of, **BOTH_ENDS),
    Demanding(
        "index_both",
        lambda x, i, j: x[i, j],
        lambda v: (torch.rand(3, 5), torch.tensor([0, 1, 2]), row(v)),
        **BOTH_ENDS,
    ),
    Demanding("index_int32", lambda x, i: x[i], lambda v: (torch.rand(5), row(v).int()), **BOTH_ENDS),
    Demanding("index_put", lambda x, i, y: x.index_put((i,), y), written, **BOTH_ENDS),
    Demanding("index_select", lambda x, i: x.index_select(0, i), rows_of, **NO_NEGATIVE),
    Demanding("index_add", lambda x, i, y: x.index_add(0, i, y), written, **NO_NEGATIVE),
    Demanding("index_copy", lambda x, i, y: x.index_copy(0, i, y), written, **NO_NEGATIVE),
    Demanding("index_reduce", lambda x, i, y: x.index_reduce(0, i, y, "amax"), written, **NO_NEGATIVE),
    Demanding("index_fill", lambda x, i: x.index_fill(0, i, 2.0), rows_of, **BOTH_ENDS),
    Demanding("scatter", lambda x, i, y: x.scatter(0, i, y), written_along, **NO_NEGATIVE),
    Demanding("scatter_value", lambda x, i: x.scatter(0, i, 2.0), lambda v: written_along(v)[:2], **NO_NEGATIVE),
    Demanding("scatter_add", lambda x, i, y: x.scatter_add(0, i, y), written_along, **NO_NEGATIVE),
    Demanding("scatter_reduce", lambda x, i, y: x.scatter_reduce(0, i, y, "prod"), written_along, **NO_NEGATIVE),
    Demanding("take", lambda x, i: x.take(i), lambda v: (torch.rand(5), row(v)), **BOTH_ENDS),
    Demanding("put", lambda x, i, y: x.put(i, y), lambda v: (torch.rand(5), row(v), torch.rand(3)), **BOTH_ENDS),
    Demanding("nll_loss", lambda x, i: F.nll_loss(x, i), scores, (0, 4, -100), (5, -1, -99)),
    Demanding("nll_loss_ignored", lambda x, i: F.nll_loss(x, i, ignore_index=7), scores, (0, 4, 7), (5, -1, -100)),
    Demanding(
        "nll_loss2d",
        lambda x, i: F.nll_loss(x, i),
        lambda v: (torch.rand(1, 5, 1, 3), row(v).view(1, 1, 3)),
        (0, 4, -100),
        (5, -1),
    ),
    Demanding(
        "nll_loss_backward",
        lambda x, i: aten.nll_loss_backward(torch.ones((), device=x.device), x, i, None, 1, -100, x.sum()),
        scores,
        (0, 4, -100),
        (5, -1),
        eager_refuses=False,
    ),
    Demanding(
        "embedding_dense_backward",
        lambda x, i: aten.embedding_dense_backward(x, i, 5, 2, False),
        lambda v: (torch.rand(3, 3), row(v)),
        (0, 4, 2),
        (5, -1),
        eager_refuses=False,
    ),
    Demanding("multi_margin_loss", lambda x, i: F.multi_margin_loss(x, i), scores, (0, 4), (5, -1)),
    Demanding(
        "multilabel_margin_loss",
        lambda x, i: F.multilabel_margin_loss(x, i),
        lambda v: (torch.rand(5), torch.tensor([0, v, -1, -1, -1])),
        (0, 4, -1),
        (5, -2),
    ),
    Demanding(
        "max_unpool2d",
        lambda x, i: F.max_unpool2d(x, i, 2),
        lambda v: (torch.rand(1, 1, 1, 2), torch.tensor([0, v]).view(1, 1, 1, 2)),
        (0, 7),
        (8, -1),
    ),
    Demanding(
        "max_pool2d_backward",
        lambda g, x, i: aten.max_pool2d_with_indices_backward(g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i),
        lambda v: (torch.rand(1, 1, 2, 2), torch.rand(1, 1, 4, 4), torch.tensor([0, 2, 8, v]).view(1, 1, 2, 2)),
        (10, 15),
        (16, -1),
        eager_refuses=False,
    ),
    Demanding(
        "searchsorted",
        lambda s, x, o: torch.searchsorted(s, x, sorter=o),
        lambda v: (torch.rand(5), torch.rand(2), torch.tensor([0, 1, 2, 3, v])),
        (0, 4),
        (5, -1),
    ),
    Demanding(
        "binary_cross_entropy",
        lambda x, y: F.binary_cross_entropy(x, y),
        lambda v: (torch.tensor([0.5, v]), torch.tensor([0.0, 1.0])),
        (0.0, 1.0),
        (-0.1, 1.1, float("nan")),
    ),
    *(
        Demanding(name, function, lambda v: (torch.tensor([7, -7]), torch.tensor([2, v])), (3, -1), (0,))
        for name, function in {
            "floor_divide": lambda x, y: x // y,
            "remainder": lambda x, y: x % y,
            "remainder_of_number": lambda x, y: (x + 1) + 7 % y,
            "fmod": torch.fmod,
            "trunc_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
        }.items()
    ),
]
each_demanding = pytest.mark.parametrize("case", DEMANDING, ids=lambda case: case.name)


def refused_by_eager(function: Callable[..., Any], inputs: tuple[Tensor, ...]) -> bool:
    try:
        function(*inputs)
    except (IndexError, RuntimeError):
        return True
    return False


@each_demanding
def test_wrong_data_is_noted_and_harmless(case: Demanding) -> None:
    built = graph_of(case.function, *case.inputs(case.good[0]))
    assert built.checked
    for value in case.good:
        inputs = case.inputs(value)
        *results, wrong = built.module(*(tensor.clone() for tensor in inputs))
        assert not wrong, value
        torch.testing.assert_close(results[0], case.function(*inputs))
    for value in case.bad:
        *_, wrong = built.module(*case.inputs(value))
        assert wrong, value


@each_demanding
def test_what_is_wrong_is_what_eager_refuses(case: Demanding) -> None:
    assert not any(refused_by_eager(case.function, case.inputs(value)) for value in case.good)
    if case.eager_refuses:
        assert all(refused_by_eager(case.function, case.inputs(value)) for value in case.bad)


def test_nothing_is_written_when_the_data_is_wrong() -> None:
    def step(table: Tensor, tokens: Tensor, total: Tensor) -> Tensor:
        rows = table[tokens]
        table.mul_(2)
        total.add_(rows.sum())
        return rows

    table, total = torch.rand(5, 3), torch.zeros(())
    built = graph_of(step, table, row(1), total)
    before = table.clone()
    *_, wrong = built.module(table, row(5), total)
    assert wrong
    assert total == 0
    torch.testing.assert_close(table, before, rtol=0, atol=0)
    *_, wrong = built.module(table, row(1), total)
    assert not wrong
    torch.testing.assert_close(table, before * 2)


def test_the_least_integer_is_not_divided_by_minus_one() -> None:
    built = graph_of(lambda x, y: x // y, torch.tensor([8, 8]), torch.tensor([2, 2]))
    least = torch.tensor([8, torch.iinfo(torch.int64).min])
    *_, wrong = built.module(least, torch.tensor([2, -1]))
    assert wrong


def test_one_index_that_is_used_twice_is_checked_once() -> None:
    code = graph_of(lambda x, i: (x[i], (x + 1)[i]), *rows_of(1)).module.code
    assert code.count("aten.any.default") == 1


@pytest.mark.parametrize(
    "function",
    [lambda x, i: x + i, lambda x, i: x.select(0, 1), lambda x, i: x / i, lambda x, i: i // 2, lambda x, i: x // 2],
    ids=["sum", "select", "division", "integers_by_a_constant", "floats_by_a_constant"],
)
def test_calls_that_demand_nothing_are_not_checked(function: Callable[..., Any]) -> None:
    assert not graph_of(function, torch.rand(3), torch.tensor([1, 2, 3])).checked


def test_programs_of_another_device_report_wrong_data_as_eager_does_there() -> None:
    program = functional(lambda x, i: x[i], *rows_of(1))
    object.__setattr__(program, "device", torch.device("cuda"))
    assert not build(program).checked


def test_indices_into_nothing_are_refused() -> None:
    program = functional(lambda x, i: x[i], torch.rand(5), row(1))
    first = program.inputs[0]
    object.__setattr__(first, "spec", functional(lambda x: x + 1, torch.rand(0)).inputs[0].spec)
    with pytest.raises(CompileError, match=r"aten::index.Tensor has indices into nothing"):
        build(program)


# ---- calls that are left to PyTorch's kernels ----------------------------------------------------------------------


def only_call(function: Callable[..., Any], *inputs: Tensor) -> Call:
    (call,) = functional(function, *inputs).calls
    return call


def test_division_by_a_constant_zero_is_left_to_pytorch() -> None:
    backend = InductorBackend()
    by_two = only_call(lambda x: x // 2, torch.tensor([1, 2]))
    object.__setattr__(by_two, "args", (by_two.args[0], 0))
    assert not backend.supports(by_two)
    floats = only_call(lambda x: x // 0, torch.tensor([1.0, 2.0]))
    assert backend.supports(floats)


def test_indices_that_nothing_is_known_about_are_left_to_pytorch() -> None:
    x, mask, places = torch.rand(4), torch.tensor([True, False]), torch.tensor([3, 9])
    masked = only_call(lambda x, m, i: aten._unsafe_masked_index(x, m, [i], 0.0), x, mask, places)
    assert not InductorBackend().supports(masked)


def test_operators_that_inductor_leaves_to_pytorch_are_supported_whatever_they_index() -> None:
    table, tokens, offsets = torch.rand(5, 3), torch.tensor([0, 1, 4]), torch.tensor([0, 2])
    calls = functional(lambda w, i, o: F.embedding_bag(i, w, o), table, tokens, offsets).calls
    assert any("embedding_bag" in call.name for call in calls)
    assert all(InductorBackend().supports(call) for call in calls)


def test_operators_on_lists_that_inductor_leaves_to_a_kernel_are_given_in_a_form_that_it_fuses() -> None:
    def names(scalars: list[float]) -> list[str]:
        return [call.name for call in functional(lambda x, y: torch._foreach_div([x, y], scalars), X, X).calls]

    assert names([2.0, 2.0]) == ["aten::_foreach_div.Scalar"]
    assert names([2.0, 3.0]) == ["aten::div.Scalar"] * 2
    assert names([0.0, -0.0]) == ["aten::div.Scalar"] * 2
    norms = functional(lambda x, y: torch._foreach_norm([x, y]), X, X).calls
    assert not any(call.name.startswith("aten::_foreach") for call in norms)
    kept = functional(lambda x, y: torch._foreach_mul([x, y], 2.0), X, X).calls
    assert [call.name for call in kept] == ["aten::_foreach_mul.Scalar"]


# ---- what is saved before a run -----------------------------------------------------------------------------------


def at_risk(function: Callable[..., Any], *inputs: Tensor) -> tuple[int, ...]:
    """Positions of the inputs that would be saved before each run of the function's program."""
    backend = InductorBackend()
    program, numbers = record(function, *inputs)
    form = functional_form(backend, program, numbers, set())
    parts = partition(form.program, backend.supports)
    return inputs_at_risk(backend, form, [CompiledPart(part, None, "") for part in parts])


@pytest.mark.parametrize("momentum", [True, False], ids=["SGD", "Adam"])
def test_nothing_of_a_training_step_is_saved(momentum: bool) -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(20, 8),
        torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        torch.nn.Linear(8, 5),
    ).to("ltc")
    parameters = list(model.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.Adam(parameters)
    if momentum:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    tokens, labels = torch.randint(20, (2, 4)), torch.randint(5, (8,))

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels)
        loss.backward()
        with settings.scope(sync_after_optimizer=False):
            optimizer.step()
        return loss

    step(tokens.to("ltc"), labels.to("ltc"))
    torch_ltc.sync(wait=True)
    assert at_risk(step, tokens, labels) == ()


def test_what_is_saved_beside_calls_that_the_graph_does_not_check() -> None:
    count, matrix, index = torch.zeros(3), torch.eye(3), torch.tensor([1])
    assert at_risk(lambda c, m: (c.add_(1), torch.linalg.cholesky_ex(m)[0])[1], count, matrix) == (0,)
    assert at_risk(lambda c, m, i: (c.add_(1), m[i])[1], count, matrix, index) == ()
    assert at_risk(lambda c, m, i: (c.add_(1), m.index_put((i,), c))[1], count, matrix, index) == ()
    mask = torch.tensor([True, False, True])
    values = torch.ones(2)
    assert at_risk(lambda c, k, v: (c.add_(1), c.sin().index_put((k,), v))[1], count, mask, values) == (0,)


def test_positions_that_pooling_has_found_itself_are_not_checked() -> None:
    def pooled(images: Tensor) -> Tensor:
        leaf = images.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.max_pool2d(leaf, 2).sum(), leaf)
        return gradient

    images = torch.randn(2, 3, 8, 8)
    built = graph_of(pooled, images)
    assert not built.checked
    torch.testing.assert_close(built.module(images)[0], pooled(images))


# ---- updates of a part of an input --------------------------------------------------------------------------------


def write_rows(cache: Tensor, index: Tensor, rows: Tensor) -> None:
    cache.index_copy_(0, index, rows)


def put_rows(cache: Tensor, index: Tensor, rows: Tensor) -> None:
    cache[index] = rows


def write_slice(cache: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    total, picked = cache.sum(), index - 4
    cache[2:4] = rows
    return rows[picked] + total


def write_and_read(cache: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    cache.index_copy_(0, index, rows)
    return rows[(index.neg() + 5) % 3 - 1] + cache.sum()


@pytest.mark.parametrize("write", [write_rows, put_rows, write_slice, write_and_read])
def test_rows_are_replaced_by_themselves_if_the_data_is_wrong(write: Callable[..., Any]) -> None:
    given = [torch.zeros(6, 3), torch.tensor([4, 5]), torch.ones(2, 3)]
    built = graph_of(write, *given)
    built.module.graph.lint()
    # The choice is between rows, not between whole caches.
    chosen = [node for node in built.module.graph.nodes if node.target is aten.where.self]
    (copied,) = [node for node in built.module.graph.nodes if node.target is aten.copy_.default]
    assert copied.args[1] not in chosen
    before, expected = given[0].clone(), given[0].clone()
    write(expected, *given[1:])
    *_, wrong = built.module(*given)
    assert not wrong
    torch.testing.assert_close(given[0], expected)
    *_, wrong = built.module(before, torch.tensor([4, 77]), given[2])
    assert wrong
    assert before.tolist() == torch.zeros(6, 3).tolist()


def test_rows_that_later_checks_depend_on_are_chosen_as_a_whole() -> None:
    def write(cache: Tensor, index: Tensor, table: Tensor) -> Tensor:
        cache[index] = 1
        return table[cache]

    cache, index, table = torch.zeros(4, dtype=torch.int64), torch.tensor([2]), torch.rand(3, 2)
    built = graph_of(write, cache, index, table)
    found, wrong = built.module(cache, index, table)
    assert not wrong
    assert cache.tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(found, table[cache])
    *_, wrong = built.module(cache, torch.tensor([9]), table)
    assert wrong
    assert cache.tolist() == [0, 0, 1, 0]


# ---- channels last ------------------------------------------------------------------------------------------------


def features_and_gradients(images: Tensor, *parameters: Tensor) -> list[Tensor]:
    """Features of a small convolutional network, and the gradients of its parameters."""
    first, scale, shift, second = leaves = [tensor.detach().requires_grad_() for tensor in parameters]
    hidden = F.batch_norm(F.conv2d(images, first, padding=1), None, None, scale, shift, training=True).relu()
    features = F.conv2d(F.max_pool2d(hidden, 2), second, padding=1).relu()
    return [features.detach(), *torch.autograd.grad(features.square().sum(), leaves)]


def channels_last_clones(built: Built) -> list[str]:
    """What the graph lays out with its channels last: placeholders or operators."""
    clones = [node for node in built.module.graph.nodes if node.target is aten.clone.default]
    found = [node.args[0] for node in clones if node.kwargs.get("memory_format") is torch.channels_last]
    return ["input" if source.op == "placeholder" else str(source.target) for source in found]


class Watched(torch.fx.Interpreter):
    """Runs a graph, and keeps the results of these operators."""

    def __init__(self, module: torch.fx.GraphModule, *ops: Any) -> None:
        super().__init__(module)
        self.ops = ops
        self.made: list[Tensor] = []

    def run_node(self, n: torch.fx.Node) -> Any:
        result = super().run_node(n)
        if n.target in self.ops:
            self.made.append(result)
        return result


def test_convolutions_have_their_channels_last_and_results_lie_as_recorded() -> None:
    torch.manual_seed(0)
    sizes = ((2, 3, 8, 8), (8, 3, 3, 3), (8,), (8,), (8, 8, 3, 3))
    given = [torch.randn(size) for size in sizes]
    form = functional(features_and_gradients, *given)
    built = build(form)
    # The images and two weights, each once for forward and backward.
    assert channels_last_clones(built) == ["input"] * 3
    run = Watched(built.module, aten.convolution.default, aten.relu.default, aten.threshold_backward.default)
    made = dict(zip(built.returned, run.run(*given)))
    assert len(run.made) == 6
    assert all(value.is_contiguous(memory_format=torch.channels_last) for value in run.made)
    for number, value in zip(form.outputs, features_and_gradients(*given), strict=True):
        torch.testing.assert_close(made[number], value, rtol=1e-4, atol=1e-4)
        assert made[number].stride() == value.stride()


def test_images_that_have_their_channels_last_are_taken_as_they_are() -> None:
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    weight = torch.randn(4, 3, 3, 3).to(memory_format=torch.channels_last)
    assert channels_last_clones(graph_of(lambda x, w: F.conv2d(x, w).relu(), images, weight)) == []


def test_layouts_stay_as_recorded_where_a_call_depends_on_them() -> None:
    def strided(images: Tensor, weight: Tensor) -> Tensor:
        return torch.as_strided(F.conv2d(images, weight), (4,), (3,))

    images, weight = torch.randn(2, 3, 8, 8), torch.randn(4, 3, 3, 3)
    assert channels_last_clones(graph_of(strided, images, weight)) == []


# ---- attention ------------------------------------------------------------------------------------------------------


def attend(*tensors: Tensor, sums: bool = False, index: Any = lambda row, column: row - column + 4) -> list[Tensor]:
    """`flex_attention` with a bias for each distance."""
    query, key, value, bias = tensors
    torch._dynamo.reset()

    def score(score: Any, batch: Any, head: Any, row: Any, column: Any) -> Any:
        return score + bias[index(row, column)]

    out, more = flex_attention(query, key, value, score_mod=score, return_aux=AuxRequest(lse=True))
    return [out, more.lse] if sums else [out]


def _operands() -> list[Tensor]:
    torch.manual_seed(0)
    return [*[torch.randn(1, 2, 5, 4) for _ in range(3)], torch.randn(9)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_inductors_kernel_computes_flex_attention_where_it_gives_all_that_is_wanted() -> None:
    def functions(built: Built) -> set[Any]:
        return {node.target for node in built.module.graph.nodes} & {kernels.attend_by_kernel, eager_form}

    if kernels.has_cpu_template():
        assert functions(graph_of(attend, *_operands())) == {kernels.attend_by_kernel}
    built = graph_of(functools.partial(attend, sums=True), *_operands())
    assert functions(built) == {eager_form}
    assert functions(build(functional(attend, *_operands()), by_kernel=False)) == {eager_form}
    with_doubles = [operand.double() for operand in _operands()]
    assert functions(graph_of(attend, *with_doubles)) == {eager_form}
    for one, other in zip(built.module(*_operands()), attend(*_operands(), sums=True)):
        torch.testing.assert_close(one, other)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_attention_that_may_index_out_of_range_is_left_to_its_kernel() -> None:
    unknown = functools.partial(attend, index=lambda row, column: (row + column).sqrt().int())
    for function, supported in ((attend, True), (unknown, False)):
        [call] = [call for call in functional(function, *_operands()).calls if call.op is FORWARD]
        assert InductorBackend().supports(call) is supported
