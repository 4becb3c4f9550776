"""A backend of torch_ltc in NumPy. docs/writing_a_backend.md builds it piece by piece."""

from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from torch_ltc import Backend, Form
from torch_ltc.program.instruction import Call, Program, Value

aten = torch.ops.aten
DTYPES = {getattr(torch, name): np.dtype(name) for name in "bool uint8 int8 int16 int32 int64 float32 float64".split()}


class NumpyBackend(Backend):
    name = "numpy"
    form = Form.FUNCTIONAL

    def compile(self, program: Program) -> Any:
        dtypes = {number: DTYPES[spec.dtype] for number, spec in program.specs().items()}
        taken = [instruction.number for instruction in (*program.inputs, *program.numbers)]

        @np.errstate(all="ignore")
        def run(*given: torch.Tensor) -> list[torch.Tensor]:
            values = {number: tensor.numpy() for number, tensor in zip(taken, given, strict=True)}
            for call in program.calls:
                templates = (call.args, call.kwargs)
                args, kwargs = pytree.tree_map(lambda x: values[x.number] if isinstance(x, Value) else x, templates)
                out = RULES[call.op](*args, **kwargs)
                for number, result in zip(call.numbers, out if isinstance(out, tuple) else (out,), strict=True):
                    if number >= 0:
                        values[number] = np.asarray(result, dtypes[number])
            return [torch.from_numpy(np.array(values[number])) for number in program.results]

        return run

    def supports(self, call: Call) -> bool:
        known = call.op in RULES and all(item.spec is None or item.spec.dtype in DTYPES for item in call.flat_returns)
        return known and LIMITS.get(call.op, bool)(call)


RULES = {
    aten.add.Tensor: lambda x, y, alpha: x + alpha * y,
    aten.add.Scalar: lambda x, y, alpha: x + alpha * y,
    aten.sub.Tensor: lambda x, y, alpha: x - alpha * y,
    aten.relu.default: lambda x: np.maximum(x, 0),
    aten.where.self: np.where,
    aten._log_softmax.default: lambda x, dim, half_to_float: x - np.logaddexp.reduce(x, dim, keepdims=True),
    aten.mean.default: lambda x, dtype: np.mean(x),
    aten.sum.dim_IntList: lambda x, dims, keep, dtype: np.sum(x, tuple(dims or ()) or None, keepdims=keep),
    aten.argmax.default: lambda x, dim, keep: np.argmax(x, dim, keepdims=keep),
    aten.gather.default: lambda x, dim, index, sparse_grad: np.take_along_axis(x, index, dim),
    aten.scatter.value: lambda x, dim, index, value: scatter(x.copy(), dim, index, value),
    aten.squeeze.dims: lambda x, dims: np.squeeze(x, tuple(dim for dim in dims if x.shape[dim] == 1)),
    aten._to_copy.default: lambda x, **options: x,
    aten.scalar_tensor.default: lambda value, **options: value,
    aten.full_like.default: lambda x, value, **options: np.full(x.shape, value),
    aten.empty_strided.default: lambda size, stride, **options: np.empty(size),
}
for pair in "neg:negative mm:matmul view:reshape permute:transpose unsqueeze:expand_dims exp:exp sqrt:sqrt".split():
    RULES[getattr(aten, pair.split(":")[0]).default] = getattr(np, pair.split(":")[1])
for pair in "mul:multiply div:divide eq:equal ne:not_equal lt:less le:less_equal gt:greater ge:greater_equal".split():
    theirs, ours = getattr(aten, pair.split(":")[0]), getattr(np, pair.split(":")[1])
    RULES[theirs.Tensor] = RULES[theirs.Scalar] = ours


def places(shape: Any, kernel: Any, stride: Any, padding: Any, dilation: Any) -> np.ndarray:
    """The position in an image's memory of each element of each patch: [..., row, column, kernel row, kernel column]."""
    size = int(np.prod(shape))
    around = [*[(0, 0)] * (len(shape) - 2), *zip(padding, padding, strict=True)]
    grid = np.pad(np.arange(size).reshape(shape), around, constant_values=size)
    span = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    patches = np.lib.stride_tricks.sliding_window_view(grid, span, (-2, -1))
    return patches[..., :: stride[0], :: stride[1], :: dilation[0], :: dilation[1]]


def convolution(x: Any, weight: Any, bias: Any, *geometry: Any) -> Any:
    patches = np.pad(x.ravel(), (0, 1))[places(x.shape, weight.shape[2:], *geometry[:3])]
    out = np.einsum("bihwkl,oikl->bohw", patches, weight, optimize=True)
    return out if bias is None else out + bias[:, None, None]


def convolution_backward(grad: Any, x: Any, weight: Any, bias_size: Any, *geometry: Any) -> tuple[Any, ...]:
    where = places(x.shape, weight.shape[2:], *geometry[:3])
    patches = np.pad(x.ravel(), (0, 1))[where]
    shares = np.einsum("bohw,oikl->bihwkl", grad, weight, optimize=True)
    for_x = np.bincount(where.ravel(), shares.ravel(), x.size + 1)[:-1].reshape(x.shape)
    return for_x, np.einsum("bohw,bihwkl->oikl", grad, patches, optimize=True), grad.sum((0, 2, 3))


def max_pool(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> tuple[Any, Any]:
    where = places(x.shape, kernel, stride or kernel, padding, dilation)
    where = where.reshape(*where.shape[:-2], -1)
    best = np.pad(x.ravel(), (0, 1), constant_values=-np.inf)[where].argmax(-1)
    found = np.take_along_axis(where, best[..., None], -1)[..., 0]
    return x.ravel()[found], found % (x.shape[-2] * x.shape[-1])


def max_pool_backward(grad: Any, x: Any, *geometry_and_index: Any) -> Any:
    index = geometry_and_index[-1]
    plane = x.shape[-2] * x.shape[-1]
    where = index.reshape(x.size // plane, -1) + plane * np.arange(x.size // plane)[:, None]
    return np.bincount(where.ravel(), grad.ravel(), x.size).reshape(x.shape)


RULES |= {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
}
LIMITS = {
    aten.convolution.default: lambda call: len(call.args[3]) == 2 and call.args[6:] == (False, (0, 0), 1),
    aten.convolution_backward.default: lambda call: len(call.args[4]) == 2 and call.args[7:10] == (False, (0, 0), 1),
    aten.max_pool2d_with_indices.default: lambda call: not call.args[5],
}
