"""Comparing two outcomes of the same case: CPU eager's and the device's.

Owns the definition of a difference and its text. Each difference is a `Difference` with one `What`; a case passes
when there are none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc.lowering.tolerance import Tolerance, default_tolerance
from torch_ltc.pytorch.private import pytree
from torch_ltc.testing.outcome import Outcome, Snapshot
from torch_ltc.testing.records import Difference, What

PLAIN_VALUES = (bool, int, float, complex, str, torch.dtype)


@dataclass(frozen=True, slots=True)
class Rules:
    """The strictness of a comparison."""

    exact: bool
    """Values must be equal bit by bit, not only close."""
    device: str
    """The device of tensors that are on the CPU in eager."""
    uninitialized: bool = False
    """The operator leaves memory as it finds it: values say nothing."""
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    """Relative and absolute tolerance, for dtypes where it is not that of `torch.testing`."""


def differences(expected: Outcome, actual: Outcome, rules: Rules) -> list[Difference]:
    """All that differs between eager's outcome and the device's."""
    forward = _errors("forward", expected.forward_error, actual.forward_error)
    if forward or expected.forward_error is not None:
        return forward
    found = list(_trees("result", expected.result, actual.result, rules))
    # An argument stays where the caller put it, and some are wanted on the CPU: only what the operator made is judged.
    found += _snapshots("argument after the call", expected.arguments, actual.arguments, rules)
    backward = _errors("backward", expected.backward_error, actual.backward_error)
    if not backward and expected.backward_error is None:
        found += _snapshots("gradient", expected.gradients, actual.gradients, rules)
    return found + backward


def _errors(stage: str, expected: str | None, actual: str | None) -> list[Difference]:
    if expected is None and actual is not None:
        return [Difference(What.RAISES, f"{stage} raised {actual}")]
    if expected is not None and actual is None:
        return [Difference(What.SILENT, f"{stage} did not raise, eager: {expected}")]
    return []


def _snapshots(where: str, expected: list[Any], actual: list[Any], rules: Rules) -> Iterator[Difference]:
    if len(expected) != len(actual):
        yield Difference(What.SHAPE, f"{where}: {len(actual)} of them instead of {len(expected)}")
        return
    for position, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
        if (wanted is None) != (got is None):
            yield Difference(What.REQUIRES_GRAD, f"{where} {position}: {_kind(got)} instead of {_kind(wanted)}")
        elif wanted is not None:
            yield from _tensors(f"{where} {position}", wanted, got, rules)


def _trees(where: str, expected: Any, actual: Any, rules: Rules) -> Iterator[Difference]:
    wanted, nesting = pytree.tree_flatten_with_path(expected)
    got, other = pytree.tree_flatten(actual)
    if nesting != other:
        yield Difference(What.SHAPE, f"{where}: {_kind(actual)} instead of {_kind(expected)}, or another nesting of it")
        return
    for (path, value), found in zip(wanted, got, strict=True):
        place = f"{where}{pytree.keystr(path)}"
        if type(value) is not type(found):
            yield Difference(What.SHAPE, f"{place}: {_kind(found)} instead of {_kind(value)}")
        elif isinstance(value, Snapshot):
            yield from _tensors(place, value, found, rules)
        elif isinstance(value, PLAIN_VALUES) and not rules.uninitialized and not _same_number(value, found, rules):
            yield Difference(What.VALUE, f"{place}: number or text differs\n{found!r} instead of {value!r}")


def _same_number(expected: Any, actual: Any, rules: Rules) -> bool:
    if isinstance(expected, (float, complex)):
        return _value_difference(torch.tensor(expected), torch.tensor(actual), rules) is None
    return bool(expected == actual)


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    return "a tensor" if isinstance(value, Snapshot) else f"a value of type {type(value).__name__}"


def _tensors(where: str, expected: Snapshot, actual: Snapshot, rules: Rules) -> Iterator[Difference]:
    """Differences between two tensors, from the outside in; values are compared last and only if they can be."""
    if actual.device != rules.device and expected.layout is torch.strided and not where.startswith("argument"):
        yield Difference(What.DEVICE, f"{where}: on device {actual.device} instead of {rules.device}")
    checks = (
        (What.STRIDE, "layout", expected.layout, actual.layout),
        (What.STRIDE, "stride", expected.stride, actual.stride),
        (What.STRIDE, "conjugate bit", expected.conjugate, actual.conjugate),
        (What.STRIDE, "negative bit", expected.negative, actual.negative),
        (What.OFFSET, "storage offset", expected.offset, actual.offset),
        (What.ALIAS, "argument it shares memory with", expected.alias, actual.alias),
        (What.REQUIRES_GRAD, "requires_grad", expected.requires_grad, actual.requires_grad),
    )
    if expected.dtype != actual.dtype:
        yield Difference(What.DTYPE, f"{where}: {actual.dtype} instead of {expected.dtype}")
    elif expected.shape != actual.shape:
        yield Difference(What.SHAPE, f"{where}: shape differs\n{actual.shape} instead of {expected.shape}")
    else:
        for what, name, wanted, got in checks:
            if wanted != got:
                yield Difference(what, f"{where}: {name} differs\n{got} instead of {wanted}, shape {expected.shape}")
        if expected.layout == actual.layout and not rules.uninitialized:
            message = _value_difference(expected.values, actual.values, rules)
            if message is not None:
                yield Difference(What.VALUE, f"{where}: values differ\n{message}")


def _value_difference(expected: torch.Tensor, actual: torch.Tensor, rules: Rules) -> str | None:
    """A sentence on how the values differ, or None if they are equal as far as the rules ask."""
    if expected.layout is not torch.strided:
        expected, actual = expected.to_dense(), actual.to_dense()
    if expected.dtype.is_complex and rules.exact:
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    wanted, got = expected.reshape(-1), actual.reshape(-1)
    if rules.exact:
        same = _same_bits(wanted, got)
    else:
        relative, absolute = rules.tolerances.get(expected.dtype, default_tolerance(expected.dtype))
        same = torch.isclose(got, wanted, rtol=relative, atol=absolute, equal_nan=True)
    if bool(same.all()):
        return None
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    # A NaN or an infinity on one side only is apart by a NaN: the worst there is.
    apart = (got.to(wide) - wanted.to(wide)).abs().nan_to_num(nan=torch.inf)
    worst = int(torch.where(same, -1.0, apart).argmax())
    count = f"{int((~same).sum())} of {same.numel()} differ"
    return f"{count}, the worst ({worst}) is {got[worst].item()!r} instead of {wanted[worst].item()!r}"


def _same_bits(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """Per element, equal bit by bit, except that a NaN equals any NaN: processors do not promise its bits."""
    if expected.numel() == 0:
        return torch.ones(0, dtype=torch.bool)
    # Not contiguous(): a tensor of one element keeps whatever stride it has, and cannot be seen as bytes then.
    copies = (each.clone(memory_format=torch.contiguous_format) for each in (expected, actual))
    left, right = (each.view(torch.uint8).view(len(each), -1) for each in copies)
    same = (left == right).all(dim=1)
    return same | (expected.isnan() & actual.isnan()) if expected.dtype.is_floating_point else same
