"""A backend in NumPy. docs/writing_a_backend.md builds it piece by piece."""

from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_ltc import Backend, Form
from torch_ltc.program.instruction import Call, Program, Value

aten, row = torch.ops.aten, np.atleast_1d


class NumpyBackend(Backend):
    name = "numpy"
    form = Form.FUNCTIONAL

    def compile(self, program: Program) -> Any:
        dtypes = {number: torch.empty(0, dtype=spec.dtype).numpy().dtype for number, spec in program.specs().items()}

        @np.errstate(all="ignore")
        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            values = {i.number: tensor.numpy() for i, tensor in zip([*program.inputs, *program.numbers], given)}
            for call in program.calls:
                args, named = pytree.tree_map_only(Value, lambda v: values[v.number], (call.args, call.kwargs))
                made = zip(call.numbers, pytree.tree_leaves(RULES[call.op](*args, **named)))
                values.update((number, np.asarray(array, dtypes[number])) for number, array in made if number >= 0)
            return [torch.from_numpy(np.array(values[number])) for number in program.results]

        return run

    def supports(self, call: Call) -> bool:
        named = dict(zip((argument.name for argument in call.op._schema.arguments), call.args))
        return call.op in RULES and all(named.get(name, value) == value for name, value in PLAIN.items())


RULES: dict[Any, Any] = {
    aten.add.Tensor: lambda x, y, alpha: x + alpha * y,
    aten.add.Scalar: lambda x, y, alpha: x + alpha * y,
    aten.sub.Tensor: lambda x, y, alpha: x - alpha * y,
    aten.relu.default: lambda x: np.maximum(x, 0),
    aten.exp.default: lambda x: np.exp(1.0 * x),
    aten.where.self: np.where,
    aten.mean.default: lambda x, dtype: np.mean(x),
    aten.sum.dim_IntList: lambda x, dims, keep, dtype: x.sum(tuple(dims) if dims and x.ndim else None, keepdims=keep),
    aten.argmax.default: lambda x, dim, keep: np.argmax(x, dim, keepdims=keep),
    aten._log_softmax.default: lambda x, dim, half: x - np.logaddexp.reduce(x, dim if x.ndim else None, keepdims=True),
    aten.squeeze.dims: lambda x, dims: np.squeeze(x, tuple(dim for dim in dims if x.ndim and x.shape[dim] == 1)),
    aten.gather.default: lambda x, d, i, **_: np.take_along_axis(row(x), row(i), d).reshape(i.shape) if i.size else i,
    aten.scatter.value: lambda x, dim, i, value: (y := x.copy(), np.put_along_axis(row(y), row(i), value, dim))[0],
    aten._to_copy.default: lambda x, **options: x,
    aten.scalar_tensor.default: lambda value, **options: value,
    aten.full_like.default: lambda x, value, **options: np.full(x.shape, value),
    aten.empty_strided.default: lambda size, stride, **options: np.empty(size),
}
NAMES = "neg:negative log:log sqrt:sqrt abs:abs mm:matmul bmm:matmul view:reshape permute:transpose maximum:maximum"
NAMES += " unsqueeze:expand_dims mul:multiply div:divide eq:equal ne:not_equal lt:less le:less_equal gt:greater"
for theirs, ours in (pair.split(":") for pair in NAMES.split()):
    for overload in {"default", "Tensor", "Scalar"} & set(getattr(aten, theirs).overloads()):
        RULES[getattr(getattr(aten, theirs), overload)] = getattr(np, ours)


def patches(x: Any, kernel: Any, stride: Any, padding: Any, outside: float = 0) -> tuple[Any, Any]:
    """The patches of x under a moving kernel, [..., row, column, kernel row, kernel column], and their places in x."""
    around = [(0, 0)] * (x.ndim - 2) + [(pad, pad) for pad in padding]
    grid = np.pad(np.arange(x.size).reshape(x.shape), around, constant_values=x.size)
    where = np.lib.stride_tricks.sliding_window_view(grid, kernel, (-2, -1))[..., :: stride[0], :: stride[1], :, :]
    return np.pad(1.0 * x.ravel(), (0, 1), constant_values=outside)[where], where


def convolution(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    out = np.einsum("bihwkl,oikl->bohw", patches(x, weight.shape[2:], stride, padding)[0], weight, optimize=True)
    return out if bias is None else out + bias[:, None, None]


def convolution_backward(grad: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    seen, where = patches(x, weight.shape[2:], stride, padding)
    shares = np.einsum("bohw,oikl->bihwkl", grad, weight, optimize=True)
    for_x = np.bincount(where.ravel(), shares.ravel(), x.size + 1)[:-1].reshape(x.shape)
    return for_x, np.einsum("bohw,bihwkl->oikl", grad, seen, optimize=True), grad.sum((0, 2, 3))


def max_pool(x: Any, kernel: Any, stride: Any, padding: Any, *rest: Any) -> Any:
    seen, where = patches(x, kernel, stride or kernel, padding, outside=-np.inf)
    best = seen.reshape(*seen.shape[:-2], -1).argmax(-1)[..., None]
    found = np.take_along_axis(where.reshape(*seen.shape[:-2], -1), best, -1)[..., 0]
    return x.ravel()[found], found % (x.shape[-2] * x.shape[-1])


def max_pool_backward(grad: Any, x: Any, *window: Any) -> Any:
    where = window[-1] + np.arange(x.size).reshape(x.shape)[..., :1, :1]
    return np.bincount(where.ravel(), grad.ravel(), x.size).reshape(x.shape)


RULES[aten.convolution.default], RULES[aten.convolution_backward.default] = convolution, convolution_backward
RULES[aten.max_pool2d_with_indices.default] = max_pool
RULES[aten.max_pool2d_with_indices_backward.default] = max_pool_backward
PLAIN = {"dilation": (1, 1), "transposed": False, "output_padding": (0, 0), "groups": 1, "ceil_mode": False}
