"""Gradients, first and higher, reverse and forward, are those of eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import torch_ltc
from tests.semantics.support import assert_like_eager, assert_same, lazy
from torch_ltc.config import settings

pytestmark = pytest.mark.usefixtures("no_fallback")


def leaf(device: str, *size: int, seed: int = 0) -> Tensor:
    """A leaf of random numbers that wants a gradient."""
    values = torch.randn(*size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(device).requires_grad_()


GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "std": lambda x: x.std(0).sum(),
    "std correction": lambda x: x.std(1, correction=0).sum(),
    "var": lambda x: x.var(0).square().sum(),
    "var_mean": lambda x: torch.stack(torch.var_mean(x, 1)).sum(),
    "svd values": lambda x: torch.linalg.svd(x, full_matrices=False)[1].sum(),
    "svdvals": lambda x: torch.linalg.svdvals(x).square().sum(),
    "svd reconstruction": lambda x: (lambda u, s, v: (u * s) @ v.mT)(*torch.svd(x)).square().sum(),
    "norm": lambda x: torch.linalg.norm(x),
    "cumprod": lambda x: x.cumprod(1).sum(),
    "split": lambda x: sum((part * i).sum() for i, part in enumerate(x.split(1, 0))),
    "chunk": lambda x: (x.chunk(2, 1)[0] * x.chunk(2, 1)[1]).sum(),
    "unbind": lambda x: (x.unbind(1)[0] * x.unbind(1)[2]).sum(),
    "index": lambda x: x[torch.tensor([0, 0, 2], device=x.device)].square().sum(),
    "where": lambda x: torch.where(x > 0, x, x * 0.1).sum(),
    "max": lambda x: x.max(1).values.sum(),
    "sort": lambda x: (x.sort(1).values * torch.arange(4.0, device=x.device)).sum(),
    "logsumexp": lambda x: x.logsumexp(1).sum(),
    "softmax": lambda x: x.softmax(0)[0].sum(),
    "solve": lambda x: torch.linalg.solve(x.mT @ x + torch.eye(4, device=x.device, dtype=x.dtype), x[0]).sum(),
    "inverse": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(3, device=x.device, dtype=x.dtype)).sum(),
    "eigh": lambda x: torch.linalg.eigh(x @ x.mT)[0].square().sum(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x).square().sum(),
    "in place": lambda x: (x * 1).mul_(2).add_(x).sigmoid_().sum(),
    "in place on a view": lambda x: (lambda y: (y[1].mul_(3), y.sum())[1])(x * 1),
    "pad": lambda x: nn.functional.pad(x, (1, 2), value=3).square().sum(),
    "stack of iteration": lambda x: torch.stack([row * row for row in x]).sum(),
}


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.usefixtures("backend")
def test_gradient_is_eagers(name: str) -> None:
    # std(dim) and svd, and others that composed operators lose.
    def compute(device: str) -> list[Tensor]:
        x = leaf(device, 3, 4)
        value = GRADIENTS[name](x)
        value.backward()
        assert x.grad is not None
        return [value, x.grad]

    for _ in range(3):
        assert_like_eager(compute, exact=False)
    assert compute("ltc")[1].abs().sum().item() > 0


def test_double_backward() -> None:
    def compute(device: str) -> list[Tensor]:
        x = leaf(device, 4)
        (first,) = torch.autograd.grad(x.pow(3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sin().sum(), x)
        return [first, second]

    assert_like_eager(compute, exact=False)


def test_gradcheck_passes_on_the_device() -> None:
    x = leaf("ltc", 3)
    # It compares with allclose, whose answer is data.
    with settings.scope(fallback="allow"):
        assert torch.autograd.gradcheck(lambda x: (x * x).sin(), (x,), eps=1e-6)


def test_forward_mode_gives_tangents() -> None:
    # Forward-mode AD must not kill the process.
    def compute(device: str) -> tuple[Tensor, Tensor]:
        primal = torch.linspace(0, 1, 5).to(device)
        tangent = torch.ones(5).to(device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(primal, tangent)
            out = (dual * dual).sin() + dual.exp()
            value, derivative = forward_ad.unpack_dual(out)
        return value, derivative

    assert_like_eager(compute, exact=False)


def test_forward_mode_through_a_module_and_in_place() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4))

    def compute(device: str) -> Any:
        moved = copy.deepcopy(model).to(device)
        parameters = dict(moved.named_parameters())
        inputs = torch.linspace(-1, 1, 6).view(2, 3).to(device)

        def run(values: Tensor) -> Tensor:
            return functional_call(moved, parameters, (values,)).mul(2).add_(1)

        return jvp(run, (inputs,), (torch.ones_like(inputs),))

    assert_like_eager(compute, exact=False)


@pytest.mark.parametrize("source", ["cpu", "ltc"])
@pytest.mark.parametrize("turned", [False, True])
def test_forward_mode_through_a_copy_between_devices(source: str, turned: bool) -> None:
    def compute(source: str, target: str) -> tuple[Tensor, ...]:
        primal = torch.linspace(0, 1, 6, device="cpu").view(2, 3).to(source)
        tangent = torch.arange(6.0, device="cpu").view(3, 2).t().to(source)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(primal.t() if turned else primal, tangent.t() if turned else tangent)
            written = torch.zeros(tuple(dual.shape), device=target).copy_(dual)
            moved = dual.to(target) * 2
            return (*forward_ad.unpack_dual(written), *forward_ad.unpack_dual(moved))

    target = "cpu" if source == "ltc" else "ltc"
    results = compute(source, target)
    # PyTorch leaves the tangent of what is written to where it was, on any two devices.
    assert [results[place].device.type for place in (0, 2, 3)] == [target] * 3
    assert_same([result.cpu() for result in results], list(compute("cpu", "cpu")))


def test_asking_a_cpu_tensor_for_its_identity_is_a_clear_error() -> None:
    with pytest.raises(torch_ltc.errors.LtcError, match="takes tensors on ltc, got one on cpu"):
        torch_ltc.get_tensor_id(torch.ones(2))
    x = lazy(torch.ones(2))
    assert torch_ltc.get_tensor_id(x) == torch_ltc.get_tensor_id(x[1:]) == torch_ltc.get_tensor_id(x.detach())
    assert torch_ltc.get_tensor_id(x) != torch_ltc.get_tensor_id(lazy(torch.ones(2)))


def test_deepcopy_of_tensors_and_modules_copies_values_and_keeps_aliases() -> None:
    # Must not kill the process.
    base = torch.arange(6.0, device="ltc").view(2, 3)
    copied_base, copied_view = copy.deepcopy([base, base.t()[1:]])
    assert copied_view.stride() == base.t()[1:].stride()
    copied_base.add_(10)
    assert copied_view.tolist() == [[11.0, 14.0], [12.0, 15.0]]
    assert base.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    model = nn.Linear(2, 2).to("ltc")
    twin = copy.deepcopy(model)
    assert_same(list(twin.parameters()), [p.detach().cpu() for p in model.parameters()])
    with torch.no_grad():
        twin.weight.zero_()
    assert model.weight.abs().sum().item() > 0


def test_deepcopy_of_a_leaf_copies_its_gradient() -> None:
    x = torch.ones(3, device="ltc", requires_grad=True)
    (x * 2).sum().backward()
    twin = copy.deepcopy(x)
    assert twin.grad is not x.grad
    assert twin.grad.tolist() == [2.0, 2.0, 2.0]
    assert twin.requires_grad


def test_shallow_copy_shares_the_memory() -> None:
    x = torch.ones(2, device="ltc") * 3
    y = copy.copy(x)
    y.add_(1)
    assert x.tolist() == [4.0, 4.0]


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: grad(lambda v: v.sin().sum())(x),
    "vmap": lambda x: vmap(lambda row: row.dot(row))(x),
    "vmap of grad": lambda x: vmap(grad(lambda row: row.pow(3).sum()))(x),
    "vmap in_dims": lambda x: vmap(lambda a, b: a * b + 1, in_dims=(0, None))(x, x[0]),
    "vmap with in-place": lambda x: vmap(lambda row: row.clone().add_(1).mul_(2))(x),
    "vjp": lambda x: vjp(torch.sin, x)[1](torch.ones_like(x)),
    "jvp": lambda x: jvp(torch.sin, (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: jacrev(lambda v: v.square())(x[0]),
    "jacfwd": lambda x: jacfwd(lambda v: v.square())(x[0]),
    "hessian": lambda x: hessian(lambda v: v.pow(3).sum())(x[0]),
    "vmap of linear": lambda x: vmap(lambda w: nn.functional.linear(x, w))(x.expand(2, 3, 4)),
    "grad of linear": lambda x: grad(lambda w: nn.functional.linear(x, w).square().sum())(x),
    "grad of matmul": lambda x: grad(lambda v: (v @ v.mT).square().sum())(x.expand(2, 3, 4)),
    "jvp of matmul": lambda x: jvp(lambda v: v @ v.mT, (x.expand(2, 3, 4),), (x.expand(2, 3, 4),)),
    "grad of attention": lambda x: grad(lambda v: nn.functional.scaled_dot_product_attention(v, v, v).sum())(
        x.expand(2, 1, 3, 4)
    ),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transform_gives_what_eager_gives(name: str) -> None:
    # vmap, jvp, grad.
    for _ in range(2):
        assert_like_eager(lambda device: TRANSFORMS[name](torch.linspace(-1, 1, 12).view(3, 4).to(device)), exact=False)


NETWORKS = {
    "RNN": lambda: nn.RNN(4, 2),
    "RNN, relu": lambda: nn.RNN(4, 2, num_layers=2, nonlinearity="relu", bias=False),
    "GRU": lambda: nn.GRU(4, 2, bidirectional=True, batch_first=True),
    "LSTM": lambda: nn.LSTM(4, 2),
    "LSTM, double": lambda: nn.LSTM(4, 2).double(),
    "GRUCell": lambda: nn.GRUCell(4, 2),
    "LSTMCell": lambda: nn.LSTMCell(4, 2),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_recurrent_networks_inside_of_function_transforms_give_what_eager_gives(name: str) -> None:
    def transformed(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = NETWORKS[name]().to(device)
        parameters = {key: value.detach() for key, value in model.named_parameters()}
        x = torch.linspace(-1, 1, 12, dtype=next(model.parameters()).dtype).view(3, 4).to(device)

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            made = functional_call(model, parameters, (x,))
            return (made[0] if isinstance(made, tuple) else made).square().sum()

        with torch.no_grad():
            found = list(grad(loss)(parameters, x).values())
        found += [grad(loss, argnums=1)(parameters, x), jacrev(loss, argnums=1)(parameters, x)]
        if "LSTM" not in name:
            # On the CPU oneDNN has no derivative of these forwards, nor one of its derivative.
            found += [jvp(lambda v: loss(parameters, v), (x,), (x,))[1]]
            found += [grad(lambda v: grad(loss, argnums=1)(parameters, v).sum())(x)]
        return found

    for ours, theirs in zip(transformed("ltc"), transformed("cpu"), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)


def test_calls_on_lists_refuse_tensors_of_inference_mode_as_eager_does() -> None:
    def run(device: str) -> list[Any]:
        first, last = torch.ones(2, device=device), torch.ones(2, device=device)
        with torch.inference_mode():
            frozen = first + 1
        versions = []
        # What is known is recorded in another way.
        for _ in range(3):
            with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside InferenceMode"):
                torch._foreach_mul_([first, frozen, last], [last, first, frozen])
            versions += [first._version, last._version]
        with torch.inference_mode():
            torch._foreach_add_([frozen], 1.0)
        torch._foreach_add_([first, last], 2.0)
        return [*versions, first.tolist(), frozen.tolist(), last.tolist()]

    assert run("ltc") == run("cpu")


REFUSED_LISTS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sizes": lambda large, small: torch._foreach_add_([large, small, large], [small, large, small], alpha=2),
    "sizes of three": lambda large, small: torch._foreach_addcmul_([large, small], [small, large], [large, large]),
    "copies": lambda large, small: torch._foreach_copy_([large, small], [small, large]),
    "dtypes": lambda large, small: torch._foreach_sqrt_([large, small.long()]),
    "numbers": lambda large, small: torch._foreach_div_([large, small.long()], [2.0, 3.0]),
    "overlaps": lambda large, small: torch._foreach_exp_([large, small.expand(3)]),
    "the first": lambda large, small: torch._foreach_mul_([small, large], [large, small]),
    "lengths": lambda large, small: torch._foreach_mul_([large, small], [large]),
    "numbers of another length": lambda large, small: torch._foreach_mul_([large, small], [2.0]),
}


@pytest.mark.parametrize("name", REFUSED_LISTS)
def test_a_call_on_lists_that_is_refused_has_written_to_the_first_of_them_as_in_eager(name: str) -> None:
    def run(device: str) -> list[Any]:
        large, small = torch.ones(2, 2, device=device), torch.tensor(0.5, device=device)
        found: list[Any] = []
        for _ in range(3):
            with pytest.raises(RuntimeError) as refused:
                REFUSED_LISTS[name](large, small)
            found += [large._version, small._version, str(refused.value)]
        return [*found, large.tolist(), small.tolist()]

    assert run("ltc") == run("cpu")


def test_hooks_see_gradients_on_the_device() -> None:
    seen: list[list[float]] = []
    x = torch.ones(2, device="ltc", requires_grad=True)
    x.register_hook(lambda gradient: seen.append(gradient.tolist()))
    y = x * 3
    y.retain_grad()
    y.sum().backward()
    assert seen == [[3.0, 3.0]]
    assert y.grad.tolist() == [1.0, 1.0]


def test_custom_autograd_function() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return gradient * x

    def compute(device: str) -> list[Tensor]:
        x = leaf(device, 3)
        out = Double.apply(x)
        out.sum().backward()
        return [out, x.grad]

    assert_like_eager(compute)


def test_modifying_a_saved_tensor_in_place_is_refused() -> None:
    x = torch.ones(3, device="ltc", requires_grad=True)
    y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_gradients_accumulate_over_several_backwards() -> None:
    def compute(device: str) -> list[Tensor]:
        x = leaf(device, 3)
        for power in (1, 2, 3):
            x.pow(power).sum().backward()
        return [x.grad]

    assert_like_eager(compute)


FIRST_LAYERS: dict[str, Callable[[Tensor], nn.Module]] = {
    "batch norm": lambda x: nn.BatchNorm2d(4, dtype=x.dtype),
    "batch norm in evaluation": lambda x: nn.BatchNorm2d(4, dtype=x.dtype).eval(),
    "batch norm of channels last": lambda x: nn.BatchNorm2d(4, dtype=x.dtype).to(memory_format=torch.channels_last),
    "instance norm": lambda x: nn.InstanceNorm2d(4, affine=True, dtype=x.dtype),
    "group norm": lambda x: nn.GroupNorm(2, 4, dtype=x.dtype),
    "layer norm": lambda x: nn.LayerNorm(5, dtype=x.dtype),
    "convolution": lambda x: nn.Conv2d(4, 2, 3, dtype=x.dtype),
    "linear": lambda x: nn.Linear(5, 2, dtype=x.dtype),
}


@pytest.mark.parametrize("name", FIRST_LAYERS)
@pytest.mark.usefixtures("backend")
def test_a_first_layer_has_gradients_without_those_of_its_input(name: str) -> None:
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    layer = FIRST_LAYERS[name](x)
    copied = copy.deepcopy(layer).to("ltc")
    for _ in range(3):
        layer(x).sum().backward()
        copied(lazy(x)).sum().backward()
    for ours, theirs in zip(copied.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad)  # type: ignore[union-attr]


class _Undefined(torch.autograd.Function):
    """The identity, with an undefined gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


UNDEFINED: dict[str, Callable[[Tensor], Tensor]] = {
    "matmul": lambda x: x @ x.mT,
    "linear": lambda x: nn.functional.linear(x, x[0]),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], x[None], x[None]),
    "batch norm": lambda x: nn.functional.batch_norm(x, None, None, training=True),
    "lstm": lambda x: torch.lstm(
        x, (x[:1, :, :1],) * 2, [x.new_ones(4, 4), x.new_ones(4, 1)], False, 1, 0.0, True, False, False
    )[0],
}


@pytest.mark.parametrize("name", UNDEFINED)
@pytest.mark.usefixtures("backend")
def test_an_undefined_gradient_passes_through(name: str) -> None:
    for device in ("cpu", "ltc"):
        x = torch.randn(3, 4, 4).to(device).requires_grad_()
        for _ in range(3):
            _Undefined.apply(UNDEFINED[name](x)).sum().backward()  # type: ignore[no-untyped-call]
        torch_ltc.sync(wait=True)
        assert x.grad is None


def test_operators_on_lists_count_versions_up_as_in_eager() -> None:
    counts = {}
    for device in ("cpu", "ltc"):
        tensors = [torch.ones(2, device=device) for _ in range(3)]
        torch._foreach_add_(tensors, 1.0)
        torch._foreach_mul_(tensors[:2], tensors[1:])
        torch._foreach_zero_(tensors[2:])
        torch._foreach_addcmul_(tensors, tensors, tensors, torch.tensor([1.0, 2.0, 3.0]))
        states = [[torch.ones(2, device=device)] for _ in range(4)]
        step = [torch.ones((), device=device)]
        options = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False}
        torch._fused_adam_(*states, [], step, maximize=False, **options)
        counts[device] = [t._version for t in (*tensors, *(state[0] for state in states))]
    assert counts["ltc"] == counts["cpu"]


def test_a_list_operator_that_spoils_what_backward_needs_is_found() -> None:
    x = torch.ones(2, device="ltc", requires_grad=True)
    y = x.exp()
    with torch.no_grad():
        torch._foreach_add_([y], 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        torch._foreach_add_([torch.ones(2, device="ltc")], 1.0)


@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("size", [(2, 6, 5, 7), (2, 6, 4, 5, 3)])
@pytest.mark.parametrize("again", [False, True])
def test_gradients_of_group_norm_in_channels_last(size: tuple[int, ...], affine: bool, again: bool) -> None:
    memory_format = torch.channels_last if len(size) == 4 else torch.channels_last_3d
    module = nn.GroupNorm(3, 6, affine=affine)
    images = torch.randn(size).contiguous(memory_format=memory_format)
    weights = torch.randn(size)

    def gradients(device: str) -> list[Tensor]:
        moved, x = copy.deepcopy(module).to(device), images.to(device).requires_grad_()
        out = moved(x)
        made = torch.autograd.grad(out, [x, *moved.parameters()], weights.to(device), create_graph=again)
        return [out, *made, *(torch.autograd.grad(made[0].square().sum(), x) if again else ())]

    for ours, expected in zip(gradients("ltc"), gradients("cpu"), strict=True):
        assert_same(ours, expected)
        assert ours.stride() == expected.stride()


def test_group_norm_in_channels_last_below_function_transforms() -> None:
    images = torch.randn(2, 4, 3, 3).contiguous(memory_format=torch.channels_last)

    def loss(x: Tensor) -> Tensor:
        return nn.functional.group_norm(x, 2).square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(lazy(images)).cpu(), torch.func.grad(loss)(images))


def test_gradients_that_autograd_knows_to_be_zero_are_added_to() -> None:
    def second(device: str) -> Tensor:
        x = torch.tensor([-2.0, 0.5, 3.0], device=device, requires_grad=True)
        (first,) = torch.autograd.grad((x / (1 + x.abs())).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    for _ in range(3):
        assert torch.equal(second("ltc").cpu(), second("cpu"))


@pytest.mark.parametrize("view", [lambda t: t[:, ::2], lambda t: t[:, 1::2], Tensor.t])
def test_forward_derivatives_of_tensors_that_are_not_contiguous(view: Callable[[Tensor], Tensor]) -> None:
    def compute(device: str) -> list[Tensor]:
        primal = view(torch.arange(12.0).view(2, 6).to(device))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(primal, torch.ones_like(primal) * 3)
            written = view(torch.zeros(2, 6).to(device)).clone().t()
            written.copy_(dual.t())
            return [
                *forward_ad.unpack_dual(dual),
                *forward_ad.unpack_dual(dual.sin()),
                forward_ad.unpack_dual(written)[1],
            ]

    assert_like_eager(compute, exact=False)
