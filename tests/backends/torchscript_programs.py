"""Programs that use each kind of argument, result and effect that TorchScript must take as it was recorded.

Each takes a device and returns tensors. On the CPU it is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Make = Callable[[str], Any]
Change = Callable[[Tensor], object]

aten = torch.ops.aten


def ramp(device: str, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers from -2 to 3; complex ones with an imaginary part that falls."""
    values = torch.linspace(-2, 3, torch.Size(size).numel(), dtype=torch.float64)
    if dtype.is_complex:
        values = torch.complex(values, values.flip(0) * 0.5)
    return values.view(size).to(dtype).to(device)


def matrix(device: str) -> Tensor:
    """A ramp of three rows and four columns."""
    return ramp(device, 3, 4)


def image(device: str, side: int = 4, channels: int = 1) -> Tensor:
    """A batch of one image."""
    return ramp(device, 1, channels, side, side)


def index(device: str | torch.device, *values: int) -> Tensor:
    """An index tensor."""
    return torch.tensor(values).to(device)


def empty(device: str, *size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A target for `out=`."""
    return torch.empty(size, dtype=dtype, device=device)


def changed(change: Change, *size: int, dtype: torch.dtype = torch.float32) -> Make:
    """A program that changes a tensor from outside, and returns it."""

    def program(device: str) -> Tensor:
        x = ramp(device, *size, dtype=dtype)
        change(x)
        return x

    return program


# ---- numbers handed in when the program runs ----------------------------------------------------------------------

NUMBERS = (2, 1.5, True)
NUMBER_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool)
WITH_NUMBER: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "add": lambda x, n: x + n,
    "add_": lambda x, n: x.float().add_(n),
    "mul": lambda x, n: n * x,
    # Eager refuses True here, and takes 1.
    "rsub": lambda x, n: 1 * n - x.float(),
    "div": lambda x, n: x / n,
    "reciprocal": lambda x, n: n / (x + 10),
    "floor_divide": lambda x, n: x.float() // n,
    "remainder": lambda x, n: x.float() % n,
    "pow": lambda x, n: x.float() ** n,
    "power of a number": lambda x, n: n ** x.float(),
    "eq": lambda x, n: x == n,
    "lt": lambda x, n: x < n,
    "clamp": lambda x, n: x.float().clamp(max=n),
    "where, first": lambda x, n: torch.where(x > 0, n, x),
    "where, second": lambda x, n: torch.where(x > 0, x, n),
    "fill_": lambda x, n: x.clone().fill_(n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "index_fill": lambda x, n: x.index_fill(0, index(x.device, 0), n),
    "full": lambda x, n: torch.full((2,), n, device=x.device),
    "full_like": lambda x, n: torch.full_like(x, n),
    "assignment": lambda x, n: aten.index_put(x, [index(x.device, 0)], torch.scalar_tensor(n, device=x.device).to(x)),
    "xlogy": lambda x, n: torch.xlogy(x + 5, n),
    "copysign": lambda x, n: torch.copysign(x, n),
    "alpha": lambda x, n: torch.add(x.float(), x.float(), alpha=1 * n),
    "foreach": lambda x, n: torch._foreach_mul([x.float()], n)[0],
    "foreach with a list": lambda x, n: torch._foreach_add([x.float(), x.float()], [n, 1])[0],
}

COMPLEX_DTYPES = (torch.complex64, torch.complex128)
WITH_COMPLEX: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda z: z + (1 + 2j),
    "add_": lambda z: z.clone().add_(1 + 2j),
    "add with alpha": lambda z: torch.add(z, z, alpha=1 + 2j),
    "sub with alpha": lambda z: torch.sub(z, 1j, alpha=0.5 - 2j),
    "rsub": lambda z: (1 + 2j) - z,
    "mul": lambda z: z * (0.3 - 2j),
    "div": lambda z: z / (0.3 - 2j),
    "reciprocal": lambda z: (0.3 - 2j) / z,
    "pow": lambda z: z ** (0.3 - 2j),
    "pow_": lambda z: z.clone().pow_(1j),
    "power of a number": lambda z: (0.3 - 2j) ** z,
    "real power": lambda z: z**2,
    "full": lambda z: torch.full((2, 3), 1 - 2j, dtype=z.dtype, device=z.device),
    "full of its own dtype": lambda z: torch.full((2, 3), 1 - 2j, device=z.device),
    "full_like": lambda z: torch.full_like(z, 1 - 2j),
    "fill_": lambda z: z.clone().fill_(2j),
    "fill": lambda z: aten.fill.Scalar(z, 2j),
    "eq": lambda z: z == (-2 + 1.5j),
    "masked_fill": lambda z: z.masked_fill(z.real > 0, 3j),
    "where": lambda z: torch.where(z.real > 0, z, 3j),
    "where of two numbers": lambda z: torch.where(z.real > 0, 2 - 1j, 3j),
    "addcmul": lambda z: torch.addcmul(z, z, z, value=1 + 1j),
    "addcdiv_": lambda z: z.clone().addcdiv_(z, z + 1, value=1 + 1j),
    "addmm": lambda z: torch.addmm(z[:, :3], z, z.t(), beta=1j, alpha=2 - 1j),
    "lerp": lambda z: torch.lerp(z, z + 1, 0.5 + 1j),
    "pad": lambda z: torch.constant_pad_nd(z, (1, 2), 2j),
    "index_fill": lambda z: z.index_fill(0, index(z.device, 1), 2j),
    "scatter": lambda z: z.scatter(0, index(z.device, 1, 1).view(1, 2), 2j),
    "foreach": lambda z: torch._foreach_mul([z, z], 2j),
    "foreach with a list": lambda z: torch._foreach_mul([z, z], [2j, 1.5]),
    "on real numbers": lambda z: (z.real * (1 + 2j), (z.real + 5) ** (1 + 2j), (1 + 2j) ** z.real, z.imag.long() + 2j),
    "on conjugates": lambda z: z.conj() * 2j,
    "out": lambda z: torch.mul(z, 2j, out=torch.empty_like(z)),
    "scalar_tensor": lambda z: torch.scalar_tensor(1j, dtype=z.dtype, device=z.device),
}

# ---- effects ------------------------------------------------------------------------------------------------------

IN_PLACE: dict[str, Change] = {
    "itself": lambda x: x.add_(x, alpha=2),
    "slice": lambda x: x[1:].add_(1),
    "transposed column": lambda x: x.t()[0].mul_(2),
    "diagonal": lambda x: x.diagonal().fill_(7),
    "copy between views": lambda x: x[:2].copy_(x.t()[2:]),
    "copy from another dtype": lambda x: x.copy_(index(x.device, 1, 2, 3, 4)),
    "rows by index": lambda x: x.index_put_((index(x.device, 0, 2),), torch.ones((), device=x.device)),
    "columns by index": lambda x: aten.index_put_(x, [None, index(x.device, 0, 2)], torch.ones((), device=x.device)),
    "accumulated by index": lambda x: x.index_put_((index(x.device, 1, 1),), x[:2].clone(), accumulate=True),
    "mask": lambda x: x.masked_fill_(x > 0, -1),
    "scatter_": lambda x: x.scatter_(0, index(x.device, 0, 1).view(1, 2), 5.0),
    "scatter_ with a reduction": lambda x: x.scatter_(0, index(x.device, 0, 1).view(1, 2), 5.0, reduce="add"),
    "index_add_": lambda x: x.index_add_(0, index(x.device, 1, 1), x[:2].clone(), alpha=0.5),
    "index_copy_": lambda x: x.index_copy_(0, index(x.device, 1), x[:1].clone()),
    "from an expanded row": lambda x: x.add_(x[0].clone().expand(4, 4)),
    "addmm_": lambda x: x.addmm_(x.clone(), x.clone(), beta=0.5, alpha=2),
    "lerp_": lambda x: x.lerp_(x.clone() + 1, 0.3),
    "clamp_": lambda x: x.clamp_(-1, 1),
    "unfolded": lambda x: x[0].unfold(0, 2, 2).mul_(3),
    "as_strided": lambda x: x.as_strided((2, 2), (1, 4), 3).mul_(2),
    "squeeze_ and unsqueeze_": lambda x: x.unsqueeze_(0).squeeze_(0).mul_(2),
    "split": lambda x: [part.mul_(i + 2) for i, part in enumerate(x.split([1, 3]))],
    "unbind": lambda x: [part.add_(i) for i, part in enumerate(x.unbind(1))],
    "chunk": lambda x: x.chunk(2, 1)[1].neg_(),
    "division with a mode": lambda x: x.div_(0.7, rounding_mode="trunc"),
    "fill_ with a tensor": lambda x: x.fill_(x[1, 1].clone()),
    "cumsum_": lambda x: x.cumsum_(0),
    "foreach": lambda x: torch._foreach_mul_(list(x.unbind()), 2.0),
    "foreach with a list of numbers": lambda x: torch._foreach_add_(list(x.unbind()), [1.0, 2, True, 4.5]),
    "foreach with lists of tensors": lambda x: torch._foreach_addcmul_(
        list(x.unbind()), list(x.clone().unbind()), list(x.clone().unbind()), 0.5
    ),
    "foreach of one": lambda x: torch._foreach_neg_([x]),
    "foreach zero": lambda x: torch._foreach_zero_(list(x[:2].unbind())),
    "foreach copy": lambda x: torch._foreach_copy_(list(x[:2].unbind()), list(x[2:].unbind())),
    "fused Adam": lambda x: torch._fused_adam_(
        *([part] for part in x.unbind()),
        [],
        [torch.ones((), device=x.device)],
        lr=0.1,
        beta1=0.9,
        beta2=0.99,
        weight_decay=0.01,
        eps=1e-8,
        amsgrad=False,
        maximize=False,
    ),
}

RANDOM: dict[str, Make] = {
    "rand": lambda d: torch.rand(3, 4, device=d),
    "randn": lambda d: torch.randn(3, dtype=torch.float64, device=d),
    "randint": lambda d: torch.randint(3, 10, (5,), device=d),
    "randperm": lambda d: torch.randperm(9, device=d),
    "like another": lambda d: (torch.rand_like(matrix(d)), torch.randn_like(matrix(d), dtype=torch.float64)),
    "bernoulli": lambda d: torch.bernoulli(matrix(d).sigmoid()),
    "multinomial": lambda d: torch.multinomial(torch.ones(5, device=d), 3),
    "normal": lambda d: (
        torch.normal(matrix(d), 0.5),
        torch.normal(0.5, matrix(d).abs()),
        torch.normal(0.5, 2.0, (3,), device=d),
    ),
    "poisson": lambda d: torch.poisson(matrix(d).abs()),
    "dropout": lambda d: (F.dropout(matrix(d), 0.3), torch.native_dropout(matrix(d), 0.5, True)),
    "rrelu": lambda d: F.rrelu(matrix(d), training=True),
    "attention with dropout": lambda d: F.scaled_dot_product_attention(*[image(d)] * 3, dropout_p=0.5),
    "in place": changed(
        lambda x: (x[0].normal_(1, 2), x[1].uniform_(-1, 1), x[2].exponential_(), x[3].random_()), 4, 4
    ),
    "in place, more": changed(
        lambda x: (x[0].bernoulli_(0.3), x[1].geometric_(0.3), x[2].log_normal_(), x[3].random_(3, 10)), 4, 4
    ),
    "out": lambda d: torch.normal(matrix(d), 1.0, out=empty(d, 3, 4)),
    "several in one program": lambda d: torch.rand(3, device=d) * torch.randn(3, device=d) + torch.rand(3, device=d),
}

# ---- arguments ----------------------------------------------------------------------------------------------------

ARGUMENTS: dict[str, Make] = {
    "optional index lists": lambda d: (
        matrix(d)[:, index(d, 1, 0)],
        ramp(d, 2, 3, 4)[:, None, index(d, 0, 1), :, None],
        ramp(d, 2, 3, 4)[index(d, 0, 1), :, index(d, 1, 2)],
    ),
    "index from the CPU": lambda d: matrix(d)[:, torch.tensor([0, 1])],
    "int[]? given and not": lambda d: (
        matrix(d).sum(),
        torch.mean(matrix(d), None),
        matrix(d).sum((0, 1), keepdim=True),
    ),
    "int[]? of norms": lambda d: (torch.linalg.vector_norm(matrix(d)), torch.linalg.vector_norm(matrix(d), 3, (0,))),
    "int[]? of a window": lambda d: F.avg_pool2d(image(d, 6), 2, stride=None, divisor_override=3),
    "float[]? given and not": lambda d: (
        F.interpolate(image(d), size=(7, 5), mode="bilinear"),
        F.interpolate(image(d), scale_factor=(2.0, 1.5)),
        F.interpolate(image(d), scale_factor=1.7, mode="bicubic", align_corners=True),
        torch.histogram(matrix(d), 4, range=(-3.0, 3.0))[0],
        torch.histogram(matrix(d), 4)[0],
    ),
    "Scalar? given and not": lambda d: (
        matrix(d).clamp(max=1),
        matrix(d).clamp(-1, 1.5),
        torch.var(matrix(d), 0, correction=0),
        torch.var_mean(matrix(d), (0, 1), correction=2),
        torch.norm(matrix(d)),
    ),
    "float? given and not": lambda d: (
        torch.nan_to_num(matrix(d) / 0),
        torch.nan_to_num(matrix(d) / 0, nan=1.0, posinf=2.0),
        torch.logit(matrix(d).sigmoid()),
        torch.logit(matrix(d).sigmoid(), 1e-3),
        F.rms_norm(matrix(d), (4,)),
        F.scaled_dot_product_attention(*[image(d)] * 3, is_causal=True, scale=0.3),
    ),
    "Tensor? given and not": lambda d: (
        torch.clamp(matrix(d), max=matrix(d) * 0.5),
        F.layer_norm(matrix(d), (4,)),
        F.layer_norm(matrix(d), (4,), ramp(d, 4), None, 1e-3),
        F.batch_norm(matrix(d), None, None, training=True),
        torch.linalg.pinv(matrix(d)),
    ),
    "bool? given and not": lambda d: (
        torch.sort(matrix(d), stable=True, dim=1),
        torch.sort(matrix(d), dim=1),
        matrix(d).argsort(dim=0, stable=True, descending=True),
    ),
    "int? given and not": lambda d: (
        matrix(d).argmax(),
        matrix(d).argmax(1),
        aten.slice.Tensor(matrix(d), 1, None, None, 2),
    ),
    "str? given and not": lambda d: (
        torch.div(matrix(d), 0.7, rounding_mode=None),
        torch.div(matrix(d), matrix(d).flip(0), rounding_mode="floor"),
        torch.searchsorted(ramp(d, 6), matrix(d), side="right"),
        torch.searchsorted(ramp(d, 6), matrix(d)),
    ),
    "str": lambda d: (
        F.gelu(matrix(d), approximate="tanh"),
        matrix(d).scatter_reduce(0, index(d, 0, 1, 2, 0).view(1, 4), matrix(d), "amax", include_self=False),
        torch.linalg.qr(matrix(d), mode="complete"),
    ),
    "bool[]": lambda d: aten.native_layer_norm_backward(
        matrix(d), matrix(d), [4], ramp(d, 3, 1), ramp(d, 3, 1).abs(), ramp(d, 4), None, [True, True, False]
    )[0],
    "dtype": lambda d: (
        matrix(d).to(torch.float64),
        matrix(d).sum(0, dtype=torch.float64),
        index(d, 1, 2).softmax(0, dtype=torch.float32),
        torch.arange(3, dtype=torch.float64, device=d),
        torch.zeros_like(matrix(d), dtype=torch.int8),
    ),
    "memory format": lambda d: (
        image(d, 3, 2).clone(memory_format=torch.channels_last),
        ramp(d, 1, 2, 3, 3, 3).contiguous(memory_format=torch.channels_last_3d),
        image(d, 3, 2).to(torch.float64, memory_format=torch.channels_last),
        torch.ones_like(image(d, 3, 2), memory_format=torch.channels_last),
        matrix(d).t().clone(memory_format=torch.contiguous_format),
        torch.zeros_like(image(d, 3, 2).contiguous(memory_format=torch.channels_last)),
    ),
    "layout": lambda d: (
        torch.zeros(2, layout=torch.strided, device=d),
        torch.zeros_like(matrix(d), layout=torch.strided),
        torch.empty_strided((2, 3), (1, 2), device=d).fill_(1),
    ),
    "device": lambda d: (
        torch.zeros(2, device=d, dtype=torch.int8),
        torch.arange(2, 9, 3, device=d),
        torch.arange(0.5, 3, 0.5, device=d),
        torch.linspace(0, 1, 5, device=d),
        torch.eye(3, 4, device=d),
        torch.tril_indices(3, 3, device=d),
        matrix(d).new_empty_strided((2, 2), (1, 2)).fill_(1),
    ),
    "empty lists": lambda d: (ramp(d, 1).view(()), ramp(d, 1).view(()).expand(()), torch.ones((), device=d) + 1),
    "numbers that are not finite": lambda d: (matrix(d) + float("nan"), matrix(d).clamp(max=float("inf"))),
    "large integers": lambda d: index(d, 1, 2) + 2**40,
}

# ---- results ------------------------------------------------------------------------------------------------------

VIEWS: dict[str, Make] = {
    "narrow": lambda d: matrix(d).narrow(1, 1, 2),
    "select": lambda d: matrix(d).select(1, -1),
    "slice": lambda d: matrix(d)[:, ::2],
    "transpose": lambda d: (
        matrix(d).t(),
        matrix(d).mT,
        ramp(d, 2, 3, 4).permute(2, 0, 1),
        ramp(d, 2, 3, 4).movedim(0, 2),
    ),
    "expand": lambda d: ramp(d, 3, 1).expand(3, 4),
    "diagonal": lambda d: matrix(d).diagonal(1),
    "unfold": lambda d: matrix(d).unfold(1, 2, 1),
    "squeeze": lambda d: (ramp(d, 1, 3, 1).squeeze(), ramp(d, 1, 3, 1).squeeze((0, 2)), matrix(d).unsqueeze(-1)),
    "reshape": lambda d: (matrix(d).reshape(-1, 2), matrix(d).t().reshape(-1), matrix(d).unflatten(1, (2, 2))),
    "as_strided": lambda d: matrix(d).as_strided((2, 2), (1, 3), 2),
    "view of a view": lambda d: matrix(d)[1:].t()[1:3] + 1,
    "real and imaginary parts": lambda d: (
        torch.view_as_real(ramp(d, 3, dtype=torch.complex64)) + 1,
        ramp(d, 3, dtype=torch.complex64).imag,
    ),
    "view_as_complex": lambda d: torch.view_as_complex(matrix(d).view(3, 2, 2)) * 2j,
    "negative view": lambda d: ramp(d, 3, dtype=torch.complex64).conj().imag * 2,
    "dtype": lambda d: matrix(d).view(torch.int32) + 1,
    "smaller dtype": lambda d: (matrix(d) + 1).view(torch.uint8).long().sum(),
    "written dtype": changed(lambda x: x.view(torch.int32).bitwise_and_(7), 4, 4),
}

LISTS: dict[str, Make] = {
    "split": lambda d: [part * 2 for part in matrix(d).split(1)],
    "one part": lambda d: matrix(d).split(3),
    "split by sizes": lambda d: matrix(d).split([1, 2]),
    "tensor_split": lambda d: (torch.tensor_split(ramp(d, 7), 3), torch.tensor_split(ramp(d, 7), (1, 4))),
    "chunk": lambda d: matrix(d).chunk(3, 1),
    "unbind": lambda d: matrix(d).unbind(1),
    "copies": lambda d: (torch.split_copy(matrix(d), 2), torch.unbind_copy(matrix(d))),
    "meshgrid": lambda d: torch.meshgrid(ramp(d, 2), ramp(d, 3), indexing="ij"),
    "foreach": lambda d: torch._foreach_mul([matrix(d), ramp(d, 2)], [2.0, 3.0]),
    "foreach of one": lambda d: torch._foreach_sqrt([matrix(d).abs()]),
    "foreach norm": lambda d: torch._foreach_norm([matrix(d), ramp(d, 2)], 1, dtype=torch.float64),
    "foreach power of a number": lambda d: torch._foreach_pow(2.0, [matrix(d), ramp(d, 2)]),
    "empty tensor in a list": lambda d: torch.cat([torch.empty(0, device=d), ramp(d, 3)]),
    "list of a tuple": lambda d: torch.histogramdd(matrix(d)[:, :2], [2, 3]),
    "list of a tuple, by tensors": lambda d: torch.histogramdd(matrix(d)[:, :2], [ramp(d, 3), ramp(d, 4)]),
    "two lists": lambda d: aten._amp_foreach_non_finite_check_and_unscale(
        [matrix(d), ramp(d, 2)], torch.zeros(1, device=d), torch.ones(1, device=d)
    ),
    "three lists": lambda d: aten._fused_sgd(
        [matrix(d)],
        [matrix(d)],
        [matrix(d) * 0],
        weight_decay=0.1,
        momentum=0.9,
        lr=0.1,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
    ),
    "tuples": lambda d: (matrix(d).topk(2), torch.frexp(matrix(d)), torch.aminmax(matrix(d)), matrix(d).cummax(1)),
    "no result": lambda d: (torch._assert_async(torch.ones((), device=d), "never"), matrix(d) + 1)[1],
}

OUT: dict[str, Make] = {
    "one": lambda d: torch.add(matrix(d), 1, out=empty(d, 3, 4)),
    "one that is a view": lambda d: torch.mul(matrix(d), 2, out=torch.zeros(5, 4, device=d)[1:4]),
    "one for a reduction": lambda d: torch.sum(matrix(d), (0,), out=empty(d, 4)),
    "one for a list": lambda d: torch.cat([matrix(d), matrix(d)], out=empty(d, 6, 4)),
    "one taken for another argument": lambda d: (
        torch.max(matrix(d), out=empty(d)),
        torch.min(matrix(d), out=empty(d)),
    ),
    "one of two arguments": lambda d: torch.max(matrix(d), matrix(d).flip(0), out=empty(d, 3, 4)),
    "two": lambda d: torch.max(matrix(d), 1, out=(empty(d, 3), empty(d, 3, dtype=torch.int64))),
    "two for sort": lambda d: torch.sort(matrix(d), out=(empty(d, 3, 4), empty(d, 3, 4, dtype=torch.int64))),
    "two for a decomposition": lambda d: torch.linalg.qr(matrix(d), out=(empty(d, 3, 3), empty(d, 3, 4))),
    "two of different dtypes": lambda d: torch.frexp(
        matrix(d), out=(empty(d, 3, 4), empty(d, 3, 4, dtype=torch.int32))
    ),
    "with an optional string": lambda d: torch.div(matrix(d), 2.0, rounding_mode="floor", out=empty(d, 3, 4)),
    "of a factory": lambda d: torch.full((3,), 2.0, out=empty(d, 3)),
}


def _with_numbers(call: Callable[[Tensor, Any], Tensor], dtype: torch.dtype) -> Make:
    return lambda device: [call(torch.tensor([0, 1, 2, 3]).to(dtype).to(device), number) for number in NUMBERS]


def _with_complex(call: Callable[[Tensor], Any], dtype: torch.dtype) -> Make:
    return lambda device: call(ramp(device, 3, 4, dtype=dtype))


def all_programs() -> dict[str, Make]:
    """Every program by name."""
    tables = {"random": RANDOM, "argument": ARGUMENTS, "view": VIEWS, "list": LISTS, "out": OUT}
    programs = {f"{kind}: {name}": make for kind, table in tables.items() for name, make in table.items()}
    programs |= {f"in place: {name}": changed(change, 4, 4) for name, change in IN_PLACE.items()}
    for name, of_number in WITH_NUMBER.items():
        for dtype in NUMBER_DTYPES:
            programs[f"numbers: {name} on {dtype}"] = _with_numbers(of_number, dtype)
    for name, of_complex in WITH_COMPLEX.items():
        for dtype in COMPLEX_DTYPES:
            programs[f"complex: {name} on {dtype}"] = _with_complex(of_complex, dtype)
    return programs
