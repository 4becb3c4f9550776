"""`linear` and `matmul` are recorded whole, and their gradients too; what comes of them has the bits of eager."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import torch_ltc
from tests.semantics.support import assert_like_eager
from torch_ltc.config import settings
from torch_ltc.execute.pending import pending_program
from torch_ltc.lowering.decompose import decompose_composites
from torch_ltc.record.recorder import recorder

pytestmark = pytest.mark.usefixtures("no_fallback")


def layouts(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The same values, laid out in memory in several ways."""
    yield "contiguous", tensor
    yield "transposed", tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if tensor.dim() > 2:
        yield "swapped", tensor.transpose(0, 1).contiguous().transpose(0, 1)
        yield "sliced", torch.cat([tensor, tensor], 1)[:, : tensor.size(1)]
    yield "expanded", tensor[:1].expand(tensor.shape)


def on_both(compute: Callable[..., Any], *tensors: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """What `compute` gives on the CPU and on the device."""
    found = []
    for device in ("cpu", "ltc"):
        # `to` keeps the layout of dense tensors; others are laid out again.
        given = [_moved(tensor, device) for tensor in tensors]
        out = compute(*given)
        found.append(list(out) if isinstance(out, (list, tuple)) else [out])
    return found[0], found[1]


def _moved(tensor: Tensor, device: str) -> Tensor:
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride()))
    base = torch.as_strided(tensor, (extent,), (1,)).clone().to(device)
    return base.as_strided(tensor.size(), tensor.stride()).detach()


def assert_equal_bits(expected: list[Tensor], got: list[Tensor]) -> None:
    """Values and strides."""
    assert len(expected) == len(got)
    for one, other in zip(expected, got):
        assert one.stride() == other.stride()
        assert torch.equal(one.detach(), other.detach().cpu())


def recorded() -> list[str]:
    """Names of the pending calls."""
    names = [node.instruction for node in recorder.tree.path(recorder.node)]
    return [i.name for i in names if i is not None and hasattr(i, "name")]


@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", [(5,), (7, 5), (1, 5), (3, 7, 5), (2, 3, 4, 5), (7, 1)], ids=str)
def test_gradients_of_linear_have_the_bits_of_eager(shape: tuple[int, ...], with_bias: bool) -> None:
    torch.manual_seed(0)
    values = torch.randn(shape)
    ways = list(layouts(values)) if len(shape) > 1 else [("contiguous", values)]
    weights = list(layouts(torch.randn(6, shape[-1])))
    for (_, x), (_, weight), wanted in itertools.product(ways, weights, [(1, 1, 1), (1, 0, 0), (0, 1, 1)]):

        def gradients(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> list[Tensor]:
            given = [t.requires_grad_(bool(flag)) for t, flag in zip((x, weight, bias), wanted)]  # noqa: B023
            out = F.linear(x, weight, bias if with_bias else None)
            asked = [t for t in given[: 2 + with_bias] if t.requires_grad]
            return [out, *torch.autograd.grad(out, asked, grad)]

        grad = torch.randn(*shape[:-1], 6)
        assert_equal_bits(*on_both(gradients, x, weight, torch.randn(6), grad))


@pytest.mark.parametrize("batch", [(3,), (2, 3), (1, 3), (2, 1, 3)], ids=str)
def test_gradients_of_batched_matmul_have_the_bits_of_eager(batch: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    lefts, rights = layouts(torch.randn(*batch, 4, 5)), list(layouts(torch.randn(*batch, 5, 6)))
    for (_, left), (_, right), wanted in itertools.product(lefts, rights, [(1, 1), (1, 0), (0, 1)]):

        def gradients(left: Tensor, right: Tensor, grad: Tensor) -> list[Tensor]:
            given = [t.requires_grad_(bool(flag)) for t, flag in zip((left, right), wanted)]  # noqa: B023
            out = left @ right
            return [out, *torch.autograd.grad(out, [t for t in given if t.requires_grad], grad)]

        assert_equal_bits(*on_both(gradients, left, right, torch.randn(*batch, 4, 6)))


@pytest.mark.parametrize(
    "compute",
    [
        lambda x: torch.linalg.matrix_power(x, 3),
        lambda x: x @ x + x,
        lambda x: x + x @ x,
        lambda x: x @ (x @ x),
        lambda x: x @ x.mT + x,
        lambda x: F.scaled_dot_product_attention(x, x, x) + x,
        lambda x: F.linear(x, x[0], x[0, 0]) + x,
        lambda x: torch.einsum("bij,bjk,bkl->bil", x, x, x),
        lambda x: torch.bmm(x, x) + x,
    ],
)
def test_gradients_of_a_tensor_that_is_both_operands_are_added_in_the_order_of_eager(compute: Any) -> None:
    torch.manual_seed(0)

    def gradient(x: Tensor, grad: Tensor) -> Tensor:
        return torch.autograd.grad(compute(x.requires_grad_()), x, grad)[0]

    for _ in range(20):
        assert_equal_bits(*on_both(gradient, torch.randn(2, 3, 3) * 10, torch.randn(2, 3, 3)))


@pytest.mark.parametrize(
    "shapes",
    [((4,), (4,)), ((3, 4), (4,)), ((4,), (4, 3)), ((2, 3, 4), (4, 5)), ((3, 4), (2, 4, 5)), ((2, 1, 3, 4), (5, 4, 2))],
    ids=str,
)
def test_other_products_are_composed_as_eager_composes_them(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    torch.manual_seed(0)

    def gradients(left: Tensor, right: Tensor) -> list[Tensor]:
        out = left.requires_grad_() @ right.requires_grad_()
        return [out, *torch.autograd.grad(out.sin().sum(), [left, right])]

    assert_equal_bits(*on_both(gradients, torch.randn(shapes[0]), torch.randn(shapes[1])))


def test_a_layer_is_two_records() -> None:
    x = torch.randn(2, 3, 4, device="ltc", requires_grad=True)
    layer = torch.nn.Linear(4, 5).to("ltc")
    torch_ltc.sync()
    layer(x).backward(torch.ones(2, 3, 5, device="ltc"))
    assert [name for name in recorded() if "linear" in name] == ["aten::linear", "aten::linear_backward"]
    assert not {"aten::t", "aten::mm", "aten::addmm", "aten::view"} & set(recorded())


def test_attention_products_are_two_records_each() -> None:
    left, right = (torch.randn(2, 3, 4, 4, device="ltc", requires_grad=True) for _ in range(2))
    torch_ltc.sync()
    (left @ right).backward(torch.ones(2, 3, 4, 4, device="ltc"))
    assert [name for name in recorded() if "mm" in name or "matmul" in name] == [
        "aten::matmul",
        "aten::matmul_backward",
    ]


@pytest.mark.parametrize("backend", ["interpreter", "torchscript"])
def test_one_step_is_the_same_on_every_run(backend: str) -> None:
    torch.manual_seed(0)
    reference = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2, bias=False))
    data = torch.randn(3, 5, 4)

    def losses(device: str) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2, bias=False))
        model.load_state_dict(reference.state_dict())
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            out = model(data.to(device))
            loss = (out @ out.mT).sum()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return found

    with torch_ltc.use_backend(backend):
        assert losses("cpu") == losses("ltc")


def test_derivatives_of_derivatives_have_the_bits_of_eager() -> None:
    torch.manual_seed(0)

    def second(x: Tensor, weight: Tensor, bias: Tensor, other: Tensor) -> list[Tensor]:
        given = [t.requires_grad_() for t in (x, weight, bias, other)]
        out = F.linear(x, weight, bias).sin() @ other
        first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), given))  # type: ignore[arg-type]

    given = (torch.randn(4, 3, 5), torch.randn(6, 5), torch.randn(6), torch.randn(4, 6, 2))
    assert_equal_bits(*on_both(second, *given))


def test_forward_derivatives_go_through_the_composition() -> None:
    def tangent(x: Tensor, weight: Tensor, other: Tensor) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            found: Tensor = forward_ad.unpack_dual(F.linear(dual, weight) @ other).tangent
            return found

    assert_equal_bits(*on_both(tangent, torch.randn(4, 3, 5), torch.randn(6, 5), torch.randn(4, 6, 2)))


def test_a_dispatch_mode_sees_the_composition() -> None:
    class Seen(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    x, weight = torch.randn(2, 3, 4, device="ltc"), torch.randn(5, 4, device="ltc")
    with Seen() as seen:
        F.linear(x, weight) @ torch.randn(2, 5, 3, device="ltc")
    assert {"aten::mm", "aten::bmm"} <= set(seen.names)


def test_a_bias_of_two_dimensions_has_a_gradient() -> None:
    def gradients(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        out = F.linear(x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_())
        return torch.autograd.grad(out.sin().sum(), [x, weight, bias])

    assert_equal_bits(*on_both(gradients, torch.randn(3, 4), torch.randn(5, 4), torch.randn(3, 5)))


@pytest.mark.parametrize(
    "call",
    [
        lambda device: F.linear(torch.ones(2, 3, device=device), torch.ones(4, 5, device=device)),
        lambda device: F.linear(*(torch.ones(s, device=device) for s in ((2, 3), (4, 3), (5,)))),
        lambda device: torch.ones(2, 3, 4, device=device) @ torch.ones(2, 5, 4, device=device),
        lambda device: torch.ones(2, 3, 4, device=device) @ torch.ones(3, 4, 4, device=device),
        lambda device: F.linear(torch.ones(2, 3, device=device), torch.ones(4, 3, device=device, dtype=torch.float64)),
        lambda device: torch.ones(2, 3, 4, device=device) @ torch.ones(2, 4, 4, device=device, dtype=torch.float64),
    ],
    ids=["sizes", "bias", "inner sizes", "batch sizes", "dtypes", "dtypes of batches"],
)
def test_wrong_operands_raise_what_eager_raises(call: Callable[[str], Tensor]) -> None:
    with pytest.raises(RuntimeError) as eager:
        call("cpu")
    with pytest.raises(RuntimeError) as lazy:
        call("ltc")
    assert str(lazy.value) == str(eager.value)


def test_torchscript_runs_the_gradients_without_python() -> None:
    layer = torch.nn.Linear(4, 5).to("ltc")
    x = torch.randn(2, 3, 4, device="ltc", requires_grad=True)
    torch_ltc.sync()
    out = layer(x)
    (out @ out.mT).sum().backward()
    assert x.grad is not None
    names = [call.name for call in decompose_composites(pending_program([x.grad])).calls]
    assert not {"aten::linear_backward", "aten::matmul_backward"} & set(names)
    assert names.count("aten::bmm") == 2


def test_programs_whose_gradients_are_computed_otherwise_share_no_compilation() -> None:
    torch.manual_seed(0)
    with settings.scope(backend="torchscript", tiers="blocking"):
        for _, x in layouts(torch.randn(7, 5)):
            for _, weight in layouts(torch.randn(6, 5)):

                def gradients(x: Tensor, weight: Tensor, grad: Tensor) -> list[Tensor]:
                    out = F.linear(x.requires_grad_(), weight.requires_grad_())
                    return [out, *torch.autograd.grad(out, [x, weight], grad)]

                for _ in range(3):
                    assert_equal_bits(*on_both(gradients, x, weight, torch.randn(7, 6)))


@pytest.mark.parametrize(
    ("dtypes", "sizes"),
    [
        (("float32", "float32", "float32"), ((4,), (4, 4), (4, 4))),
        (("float32", "float16", "float16"), ((4, 4), (4, 4), (4, 4))),
        (("float32", "float32", "float64"), ((4, 4), (4, 4), (4, 4))),
        (("float32", "float32", "float32", "int64"), ((4, 4), (4, 4), (4, 4), (4, 4))),
        (("float32", "float32", "float32", "float32"), ((2, 4, 4), (2, 4, 4), (2, 4, 4), (3, 4, 4))),
        (("float32", "float32", "float32"), ((2, 4, 4), (3, 4, 4), (3, 4, 4))),
    ],
)
def test_attention_refuses_what_eager_refuses_at_the_call(dtypes, sizes) -> None:
    for device in ("cpu", "ltc"):
        given = [torch.ones(size, dtype=getattr(torch, dtype), device=device) for dtype, size in zip(dtypes, sizes)]
        with pytest.raises(RuntimeError) as refused:
            torch.nn.functional.scaled_dot_product_attention(*given)
        assert type(refused.value) is RuntimeError


@pytest.mark.parametrize("shape", [(3, 3), (2, 3, 3), (2, 2, 3, 3)])
@pytest.mark.parametrize(
    "product", [torch.matmul, lambda a, b: F.linear(a, b.reshape(-1, 3)[:4])], ids=["matmul", "linear"]
)
def test_products_of_complex_numbers_have_gradients(shape: tuple[int, ...], product: Callable[..., Tensor]) -> None:
    def compute(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        first, second = (torch.randn(shape, dtype=torch.complex128).to(device).requires_grad_() for _ in range(2))
        out = product(first, second)
        grads = torch.autograd.grad(out.abs().sum(), (first, second), create_graph=True)
        return [out, *grads, *torch.autograd.grad(grads[0].abs().sum(), (first, second))]

    assert_like_eager(compute, exact=False)
