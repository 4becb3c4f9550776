"""Calls of PyTorch's operators into every kind of `out=` target, on eager CPU and on the device.

A target is a window into a larger base tensor: what a call writes beside its window is seen too.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from torch_ltc.testing.database import OPERATORS
from torch_ltc.testing.placement import Arguments, place

_FILL = 7


@dataclass(frozen=True, slots=True)
class Written:
    """What a call left behind: the error, or targets as their user sees them and all of their memory."""

    error: str | None
    text: str = ""
    targets: tuple[tuple[Any, ...], ...] = ()
    memory: tuple[torch.Tensor, ...] = ()
    identical: bool = True

    def difference(self, other: "Written") -> str | None:
        """A sentence on the first difference from what eager left behind."""
        if self.error != other.error:
            return f"{other.error}: {other.text} instead of {self.error}: {self.text}"
        if self.targets != other.targets or self.identical != other.identical:
            return f"{other.targets} instead of {self.targets}"
        for wanted, got in zip(self.memory, other.memory, strict=True):
            if wanted.size() != got.size() or not torch.allclose(wanted, got, rtol=0, atol=0, equal_nan=True):
                return f"memory {got.tolist()} instead of {wanted.tolist()}"
        return None


def _filled(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(size, _FILL, dtype=torch.float32).to(dtype)


def _same(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled(size, dtype)


def _stepped(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled((*(2 * length for length in size), 2), dtype)[(*(slice(None, None, 2) for _ in size), 1)]


def _turned(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled(size[::-1], dtype).permute(tuple(reversed(range(len(size)))))


def _narrowed(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled(tuple(length + 2 for length in size), dtype)[tuple(slice(1, length + 1) for length in size)]


def _flat(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """As many elements in another shape, with holes between them."""
    count = torch.Size(size).numel()
    return _filled((count, 1, 2), dtype)[:, :, 1]


def _empty(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(0, dtype=dtype)


def _too_small(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled((1,) * (len(size) + 1), dtype)


def _overlapping(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled((), dtype).expand(size)


def _other_float(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled(size, torch.float64)


def _integral(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled(size, torch.int16)


def _complex(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return _filled(size, torch.complex64)


KINDS: dict[str, Callable[[tuple[int, ...], torch.dtype], torch.Tensor]] = {
    "same": _same,
    "stepped": _stepped,
    "turned": _turned,
    "narrowed": _narrowed,
    "flat": _flat,
    "empty": _empty,
    "too small": _too_small,
    "overlapping": _overlapping,
    "other float": _other_float,
    "integral": _integral,
    "complex": _complex,
}


# Eager's own kernels write past the end of some targets, or write nothing.
_UNCHECKED = ("native_batch_norm", "_batch_norm_with_update", "nn.functional.avg_pool3d", "narrow_copy", "empty")


def operators() -> list[str]:
    """The operators of the database that take `out=`."""
    return [name for name, op in OPERATORS.items() if op.supports_out and name not in _UNCHECKED]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of the samples: float32 where the operator takes it."""
    op = OPERATORS[name]
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        if op.supports_dtype(dtype, "cpu"):
            return dtype
    raise LookupError(name)


def sample_of(name: str) -> tuple[Any, Any]:
    """Arguments of the operator on the CPU and what it returns for them, of the first sample that has elements."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    op = OPERATORS[name]
    found: tuple[Any, Any] | None = None
    for number, sample in enumerate(op.sample_inputs("cpu", dtype_of(name), requires_grad=False)):
        if number >= 12:
            break
        if "out" in sample.kwargs:
            continue
        arguments = Arguments(sample.input, sample.args, sample.kwargs)
        placed = place(arguments, "cpu")
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1)
            result = op(placed.input, *placed.args, **placed.kwargs)
        results = result if isinstance(result, (tuple, list)) else (result,)
        if not all(isinstance(each, torch.Tensor) and each.layout is torch.strided for each in results):
            continue
        if found is None or min(each.numel() for each in results) > 1:
            found = place(arguments, "cpu"), result
            if min(each.numel() for each in results) > 1 and max(each.dim() for each in results) > 1:
                break
    if found is None:
        raise LookupError(f"{name} has no sample for out=")
    return found


def targets_of(kind: str, result: Any) -> Any:
    """The `out=` argument of this kind for a call that returns `result`."""
    make = KINDS[kind]
    if isinstance(result, torch.Tensor):
        return make(tuple(result.size()), result.dtype)
    return tuple(make(tuple(each.size()), each.dtype) for each in result)


def write(name: str, arguments: Arguments, targets: Any, device: str) -> Written:
    """Call the operator into targets on a device; only what the call itself raises is an error of it."""
    op = OPERATORS[name]
    given = Arguments(arguments.input, arguments.args, {**arguments.kwargs, "out": targets})
    placed = place(given, device)
    out = placed.kwargs["out"]
    outs = (out,) if isinstance(out, torch.Tensor) else tuple(out)
    # Another tensor on the same memory: the target itself may be resized.
    bases = [each.as_strided((each.untyped_storage().nbytes() // each.element_size(),), (1,), 0) for each in outs]
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(1)
        try:
            result = op(placed.input, *placed.args, **placed.kwargs)
        except Exception as error:
            return Written(type(error).__name__, str(error).split("\n")[0][:160])
        returned = result if isinstance(result, (tuple, list)) else (result,)
        identical = all(a is b for a, b in zip(returned, outs, strict=True))
        try:
            described = tuple((each.dtype, tuple(each.size()), each.stride(), each.storage_offset()) for each in outs)
            memory = tuple(each.cpu() for each in (*bases, *outs))
        except Exception as error:
            return Written(f"late {type(error).__name__}", str(error).split("\n")[0][:160])
    return Written(None, "", described, memory, identical)


def differences(name: str) -> Iterator[tuple[str, str]]:
    """The kinds of target for which the device differs from eager, and how."""
    try:
        arguments, result = sample_of(name)
    except LookupError:
        return
    for kind in KINDS:
        targets = targets_of(kind, result)
        found = write(name, arguments, targets, "cpu").difference(write(name, arguments, targets, "ltc"))
        if found is not None:
            yield kind, found


def shared(name: str) -> Iterator[tuple[str, Arguments, torch.Tensor]]:
    """Calls of the operator whose target lies on an operand: where it lies, the arguments, the target."""
    arguments, result = sample_of(name)
    given = arguments.input
    if not (isinstance(result, torch.Tensor) and isinstance(given, torch.Tensor) and given.layout is torch.strided):
        return
    count, size, written = given.numel(), result.size(), result.numel()
    if given.dtype != result.dtype or not count or not written:
        return
    base = torch.zeros(count + 8, dtype=given.dtype)
    base[2 : count + 2] = given.reshape(-1)
    window = base[2 : count + 2]
    moved = Arguments(window.view(given.size()), arguments.args, arguments.kwargs)
    if size == given.size():
        yield "on the input", moved, window.view(size)
    else:
        yield "on the input, of another size", moved, window
    if written <= count + 5:
        yield "beside the input", moved, base[3 : written + 3].view(size)
    if size == given.size() and given.dim() > 1 and given.size(0) == given.size(1):
        yield "on the input, turned", moved, moved.input.transpose(0, 1)
    for other in arguments.args:
        if isinstance(other, torch.Tensor) and other.size() == size and other.dtype == result.dtype:
            yield "on another operand", moved, other
            return


def shared_differences(name: str) -> Iterator[tuple[str, str]]:
    """Where a target lies on an operand for which the device differs from eager, and how."""
    try:
        calls = list(shared(name))
    except LookupError:
        return
    for kind, arguments, target in calls:
        found = write(name, arguments, target, "cpu").difference(write(name, arguments, target, "ltc"))
        if found is not None:
            yield kind, found
