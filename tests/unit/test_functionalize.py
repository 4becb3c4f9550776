"""The functional form of recorded programs computes what eager computes, whatever views and writes they have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import torch_ltc
from tests.support.backends import FunctionalBackend, record, registered
from torch_ltc.config import settings
from torch_ltc.errors import BackendWarning
from torch_ltc.lowering.decomposition_tables import core_aten
from torch_ltc.lowering.functionalize import functionalize
from torch_ltc.program.instruction import Input


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    torch_ltc.sync(wait=True)
    yield
    torch_ltc.sync(wait=True)


@pytest.fixture
def backend() -> Iterator[FunctionalBackend]:
    """A functional backend that is not allowed to refuse a program; it compiles each when it comes a second time."""
    made = FunctionalBackend()
    with registered(made), settings.scope(hot_after=2, backend_failure="error"), torch_ltc.use_backend(made.name):
        yield made
        torch_ltc.sync(wait=True)


def assert_same(actual: Any, expected: Any) -> None:
    left, right = pytree.tree_leaves(actual), pytree.tree_leaves(expected)
    assert len(left) == len(right)
    for ours, theirs in zip(left, right, strict=True):
        assert ours.stride() == theirs.stride()
        torch.testing.assert_close(ours.cpu(), theirs, equal_nan=True)


def both(function: Callable[..., Any], *inputs: Tensor) -> tuple[Any, Any]:
    """What the function gives on the device once it is compiled, and on CPU, each with the inputs after it."""
    return on_device(lambda *given: (function(*given), given), *inputs), (function(*inputs), inputs)


def on_device(function: Callable[..., Any], *inputs: Tensor) -> Any:
    """What the function gives on copies of the inputs the third time, when the backend runs it for the second time."""
    for _ in range(3):
        torch.manual_seed(0)
        ours = [value.to("ltc") for value in inputs]
        torch_ltc.sync(wait=True)
        made = function(*ours)
        torch_ltc.sync(wait=True)
    return made


X = torch.arange(12.0).view(3, 4)


def write_through_transpose(x: Tensor) -> Tensor:
    x.t()[1:3].mul_(2)
    return x + 1


def write_through_diagonal(x: Tensor) -> Tensor:
    x.diagonal().fill_(9)
    return x.sum(0)


def write_through_chain(x: Tensor) -> Tensor:
    view = x.view(2, 6)[:, 1:5].unflatten(1, (2, 2)).transpose(0, 1)
    view.add_(100)
    return view.contiguous()


def write_to_base_seen_through_view(x: Tensor) -> tuple[Tensor, Tensor]:
    row = x[1]
    x.mul_(3)
    return row + 0, row.sum()


def writes_from_both_sides(x: Tensor) -> Tensor:
    row = x[1]
    row.add_(1)
    x.mul_(2)
    row.sub_(x[0])
    x[:, 0].copy_(row[:3])
    return x * row


def set_item(x: Tensor) -> Tensor:
    x[0] = 5
    x[1, 2] = x[2, 3]
    x[:, 3] = torch.arange(3.0, device=x.device)
    x[x > 8] = 0
    return x


def index_put(x: Tensor) -> Tensor:
    x[torch.tensor([0, 0, 2], device=x.device), torch.tensor([1, 1, 2], device=x.device)] += 10
    return x.clone()


def scatter_in_place(x: Tensor) -> Tensor:
    return x.scatter_add_(1, torch.zeros(3, 2, dtype=torch.int64, device=x.device), x[:, 2:].clone())


def strided(x: Tensor) -> Tensor:
    window = x.as_strided((3, 2), (3, 1), 2)
    window.add_(10)
    return window * 2


def strided_with_overlap(x: Tensor) -> Tensor:
    return x.as_strided((5, 4), (2, 1)).clone() + x.as_strided((2, 2), (1, 1), 3).sum()


def expand_and_reduce(x: Tensor) -> Tensor:
    wide = x[:, :1].expand(3, 5)
    return wide + torch.zeros(5, device=x.device), wide.sum(1)


def new_tensor_written_through_views(x: Tensor) -> Tensor:
    made = torch.zeros(4, 4, device=x.device)
    made[:3] = x
    made[:, 1:].t().add_(x[0, 1])
    return made


def out_argument(x: Tensor) -> tuple[Tensor, Tensor]:
    out = torch.empty(3, 4, device=x.device)
    torch.add(x, x, out=out)
    torch.mul(x, 2, out=x)
    return out, x + 0


def lists(x: Tensor) -> Any:
    first, second = x.split(2, dim=1)
    first.add_(1)
    a, b, c = x.unbind(0)
    b.mul_(c)
    values, order = x.sort(1, descending=True)
    return second + 0, a + b, values, order, torch.stack([a, c]), [part + 0 for part in x.chunk(3)]


def foreach(x: Tensor) -> Any:
    rows = [x[0], x[1].clone(), x[2]]
    torch._foreach_add_(rows, 1.5)
    torch._foreach_mul_(rows, [2.0, 3.0, 4.0])
    torch._foreach_addcdiv_(rows, [row + 1 for row in rows], rows, 0.5)
    return torch._foreach_sqrt(rows), torch._foreach_norm(rows), x + 0


def casts(x: Tensor) -> Any:
    whole = x.to(torch.int64)
    whole.copy_(x / 3)
    half = torch.empty(3, 4, dtype=torch.float16, device=x.device)
    half.t().copy_(x.t())
    return whole, half, x.double(), x.bool()


def empty_and_single(x: Tensor) -> Any:
    nothing = x[3:]
    nothing.add_(1)
    one = x[1, 1]
    one.mul_(7)
    return nothing + 1, one + 0, x.sum(), torch.zeros(0, device=x.device), x[:, :0].sum(1)


def strides_that_matter(x: Tensor) -> Any:
    turned = x.t().contiguous().t()
    return turned, turned.clone(), torch.empty_like(turned).copy_(x), turned.flatten(), (x.t() @ x).t()


def value_unused(x: Tensor) -> Tensor:
    x.exp().sum()
    return x.cos()


def zeroed_and_refilled(x: Tensor) -> Any:
    y = x.clone()
    x.zero_()
    x.add_(y, alpha=2)
    return y, x.clone()


FUNCTIONS = [
    write_through_transpose,
    write_through_diagonal,
    write_through_chain,
    write_to_base_seen_through_view,
    writes_from_both_sides,
    set_item,
    index_put,
    scatter_in_place,
    strided,
    strided_with_overlap,
    expand_and_reduce,
    new_tensor_written_through_views,
    out_argument,
    lists,
    foreach,
    casts,
    empty_and_single,
    strides_that_matter,
    value_unused,
    zeroed_and_refilled,
]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_functional_form_gives_what_eager_gives(function: Callable[..., Any], backend: FunctionalBackend) -> None:
    assert_same(*both(function, X.clone()))
    assert backend.runs > 0
    assert not any(call.mutated for program in backend.programs for call in program.calls)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_input_that_is_a_transposed_part_of_larger_memory(
    function: Callable[..., Any], backend: FunctionalBackend
) -> None:
    def inside(whole: Tensor) -> Any:
        return function(whole[:, 1:4].t()[:, :4])

    if function in (write_through_chain, strided, strided_with_overlap):
        pytest.skip("eager refuses the view, or the function addresses the storage on purpose")
    assert_same(*both(inside, torch.arange(20.0).view(4, 5)))
    assert backend.runs > 0


def with_views(function: Callable[..., Any], *views: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    """The function on views of one tensor that exist before its program begins."""

    def run(base: Tensor) -> Any:
        made = [view(base) for view in views]
        torch_ltc.sync(wait=True)
        return function(*made)

    return run


OVERLAPS = [
    (lambda x: x[:2], lambda x: x[1:]),
    (lambda x: x, lambda x: x[1]),
    (lambda x: x.t(), lambda x: x[:, 1:3]),
    (lambda x: x.view(-1)[2:9], lambda x: x.view(-1)[::2]),
    (lambda x: x[0], lambda x: x[2]),
    (lambda x: x.view(-1)[:9].view(3, 3), lambda x: x.view(-1)[3:].view(3, 3).t()),
]


@pytest.mark.parametrize("views", OVERLAPS)
def test_inputs_that_share_one_buffer(views: Any, backend: FunctionalBackend) -> None:
    def function(first: Tensor, second: Tensor) -> Any:
        first.add_(1)
        made = second * 2
        second.mul_(3)
        return made, first.sum(), first + 0

    assert_same(*both(with_views(function, *views), X.clone()))
    assert backend.runs > 0


def test_a_call_that_addresses_the_storage_behind_a_part_of_it(backend: FunctionalBackend) -> None:
    def function(row: Tensor) -> Any:
        row.add_(100)
        return row + 0, row.as_strided((3,), (2,), 1) * 10

    assert_same(*both(with_views(function, lambda x: x[1]), X.clone()))
    assert backend.runs > 0


def test_one_input_per_buffer_of_the_outside() -> None:
    base = X.clone().to("ltc")
    row, whole = base[1], base
    torch_ltc.sync(wait=True)
    program, numbers = record(lambda: row + whole)
    assert len(program.inputs) == 2
    functional = functionalize(program, numbers, set(), core_aten())
    (parameter,) = functional.parameters
    assert parameter.flat
    assert parameter.spec.size == (12,)
    (given,) = functional.program.inputs
    assert isinstance(given, Input)
    assert given.spec is parameter.spec


def test_an_input_that_is_part_of_its_memory_stays_a_part() -> None:
    base = X.clone().to("ltc")
    row = base[1]
    torch_ltc.sync(wait=True)
    program, numbers = record(lambda: row.mul_(2) + 1)
    (parameter,) = functionalize(program, numbers, set(), core_aten()).parameters
    assert not parameter.flat
    assert (parameter.spec.size, parameter.spec.offset) == ((4,), 4)


COMPLEX = torch.tensor([1 + 2j, 3 - 1j, -2 + 0.5j])


def conjugate(z: Tensor) -> Any:
    bar = z.conj()
    bar.mul_(2j)
    return bar + 1, z * bar, z.conj().resolve_conj()


def real_and_imaginary(z: Tensor) -> Any:
    z.real.add_(10)
    z.imag.mul_(-1)
    torch.view_as_real(z)[0, 1] = 4
    return z + 0, z.real.sum(), z.abs(), z.angle()


@pytest.mark.parametrize("function", [conjugate, real_and_imaginary], ids=lambda f: f.__name__)
def test_complex_views(function: Callable[..., Any], backend: FunctionalBackend) -> None:
    assert_same(*both(function, COMPLEX.clone()))
    assert backend.runs > 0


@pytest.mark.parametrize("view", [lambda z: z.conj(), lambda z: z.real], ids=["conj", "real"])
def test_inputs_with_lazy_bits(view: Callable[[Tensor], Tensor], backend: FunctionalBackend) -> None:
    def function(seen: Tensor) -> Any:
        made = seen * 2
        seen.add_(1)
        return made, seen.abs()

    assert_same(*both(with_views(function, view), COMPLEX.clone()))
    assert backend.runs > 0


@pytest.mark.filterwarnings("ignore::torch_ltc.errors.BackendWarning")
def test_negative_views_of_complex_memory_are_right_compiled_or_not() -> None:
    def function(seen: Tensor) -> Any:
        made = seen * 2
        seen.add_(1)
        return made, seen.abs()

    with registered(FunctionalBackend()), torch_ltc.use_backend("functional"):
        assert_same(*both(lambda z: (z.conj().imag + 1, z.conj().imag.abs()), COMPLEX.clone()))
        assert_same(*both(with_views(function, lambda z: z.conj().imag), COMPLEX.clone()))


def test_memory_seen_with_two_dtypes_runs_in_the_interpreter_with_right_results() -> None:
    def function(bits: Tensor, row: Tensor) -> Tensor:
        row.add_(1)
        return bits.sum()

    seen = with_views(function, lambda x: x.view(torch.int32), lambda x: x[0])
    with registered(FunctionalBackend()), torch_ltc.use_backend("functional"):
        with pytest.warns(BackendWarning, match="several dtypes have no functional form"):
            total = on_device(seen, X.clone())
        assert total.item() == seen(X.clone()).item()


def add_at_one_row(x: Tensor) -> Tensor:
    seen = x.as_strided((2, 2), (1, 1))
    return seen.index_put_((torch.tensor([0, 0], device=x.device),), seen.new_tensor(1), accumulate=True)


def scatter_into_windows(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (1, 1)).scatter_(0, torch.tensor([[0, 0]], device=x.device), 9.0)


def fill_with_random_numbers(x: Tensor) -> Tensor:
    return x.as_strided((2, 2), (1, 1)).uniform_()


SHARING: list[tuple[Callable[[Tensor], Any], str]] = [
    (add_at_one_row, "writes to elements that share memory"),
    (scatter_into_windows, "writes to elements that share memory"),
    (fill_with_random_numbers, "writes to elements that share memory"),
    (lambda x: x.as_strided((2, 2), (1, 1)).add_(1), "writes to elements that share memory"),
    (lambda x: x.as_strided((2, 2), (1, 1))[0].add_(1), "writes to elements that share memory"),
    (with_views(lambda seen: seen.add_(1), lambda x: x.as_strided((2, 2), (1, 1))), "elements that share memory"),
    (with_views(lambda seen: seen[1].add_(1), lambda x: x.view(-1).expand(4, 12)), "elements that share memory"),
    (with_views(lambda seen: seen[1].add_(1), lambda x: x.view(-1).unfold(0, 2, 1)), "elements that share memory"),
    (lambda x: torch._foreach_add_([x.as_strided((2, 2), (1, 1))], 1.0), "writes to elements that share memory"),
    (lambda x: x.view(-1).unfold(0, 2, 3)[1].add_(1), "writes to windows of aten::unfold"),
    (lambda x: x[:, 1:].add_(x[:, :-1]), "reads elements that it has written to"),
    (lambda x: x[:3, :3].add_(x[:3, :3].t()), "reads elements that it has written to"),
    (lambda x: torch._foreach_add_([x[:, 1:]], [x[:, :-1]]), "reads elements that it has written to"),
]


@pytest.mark.parametrize("place", range(len(SHARING)))
def test_elements_that_share_memory_are_written_by_the_interpreter(place: int) -> None:
    function, message = SHARING[place]
    with registered(FunctionalBackend()), torch_ltc.use_backend("functional"):
        with pytest.warns(BackendWarning, match=message):
            got = on_device(lambda x: (function(x), x)[1], X.clone())
        torch.manual_seed(0)
        wanted = X.clone()
        function(wanted)
        assert torch.equal(got.cpu(), wanted)


APART: list[Callable[[Tensor], Any]] = [
    lambda x: x[:, :2].add_(x[:, 2:4]),
    lambda x: x[:, ::2].add_(x[:, 1::2].sum(1, keepdim=True)),
    lambda x: x[::2, ::2].mul_(x[1::2, 1:2]),
    lambda x: x[1:3].mul_(x[0]),
    lambda x: x.t()[1:].add_(x.t()[0]),
    lambda x: x.diagonal().add_(1),
    lambda x: x[:, :-1].add_(x[:, 1:]),
    lambda x: x[:, :-1].copy_(x[:, 1:]),
    lambda x: x.add_(x),
]


@pytest.mark.parametrize("place", range(len(APART)))
def test_writes_to_some_elements_that_read_others_are_compiled(backend: FunctionalBackend, place: int) -> None:
    assert_same(*both(APART[place], X.clone()))
    assert backend.runs > 0


def test_statistics_of_batch_norm_are_updated(backend: FunctionalBackend) -> None:
    def function(x: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
        return F.batch_norm(x, mean, variance, training=True, momentum=0.3)

    assert_same(*both(function, torch.rand(5, 3), torch.zeros(3), torch.ones(3)))
    assert backend.runs > 0


def test_random_numbers_are_those_of_eager(backend: FunctionalBackend) -> None:
    def function(x: Tensor) -> Any:
        noise = torch.empty_like(x).normal_(2.0, 0.5)
        x.uniform_(-1, 1)
        return F.dropout(x, 0.4), noise, torch.rand(3, device=x.device), torch.randint(0, 9, (4,), device=x.device)

    ours = on_device(function, X.clone())
    torch.manual_seed(0)
    assert_same(ours, function(X.clone()))
    assert backend.runs > 0


def test_gradients_and_an_optimizer_step(backend: FunctionalBackend) -> None:
    def train(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2)).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=True)
        for _ in range(4):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X.to(device)), torch.tensor([0, 1, 0]).to(device))
            loss.backward()
            optimizer.step()
        return loss.detach(), [parameter.detach() for parameter in model.parameters()]

    assert_same(train("ltc"), train("cpu"))
    assert backend.runs > 0
