"""Comparing two outcomes of the same case: CPU eager's and the device's.

Owns what counts as different and the words for it. Each difference is a `Difference` with one `What`; a case passes
when there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc.lowering.tolerance import Tolerance
from torch_ltc.testing.outcome import Outcome, Snapshot
from torch_ltc.testing.records import Difference, What

PLAIN_VALUES = (bool, int, float, complex, str, torch.dtype)


@dataclass(frozen=True, slots=True)
class Rules:
    """How strictly to compare."""

    exact: bool
    """Values must be equal bit by bit, not only close."""
    device: str
    """Where tensors must be that are on the CPU in eager."""
    uninitialized: bool = False
    """The operator leaves memory as it finds it: values say nothing."""
    tolerances: Mapping[torch.dtype, Tolerance] = field(default_factory=dict)
    """How far values may be apart, for dtypes where it is not what `torch.testing` takes."""


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
    if type(expected) is not type(actual):
        yield Difference(What.SHAPE, f"{where}: {_kind(actual)} instead of {_kind(expected)}")
    elif isinstance(expected, Snapshot):
        yield from _tensors(where, expected, actual, rules)
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(actual):
            yield Difference(What.SHAPE, f"{where}: {len(actual)} items instead of {len(expected)}")
            return
        for position, (wanted, got) in enumerate(zip(expected, actual, strict=True)):
            yield from _trees(f"{where}[{position}]", wanted, got, rules)
    elif isinstance(expected, dict):
        if expected.keys() != actual.keys():
            yield Difference(What.SHAPE, f"{where}: keys {sorted(actual)} instead of {sorted(expected)}")
            return
        for key, wanted in expected.items():
            yield from _trees(f"{where}[{key!r}]", wanted, actual[key], rules)
    elif isinstance(expected, PLAIN_VALUES) and not rules.uninitialized and not _same_number(expected, actual, rules):
        yield Difference(What.VALUE, f"{where}: number or text differs\n{actual!r} instead of {expected!r}")


def _same_number(expected: Any, actual: Any, rules: Rules) -> bool:
    if isinstance(expected, (float, complex)):
        wanted, got = torch.tensor(expected), torch.tensor(actual)
        return _value_difference(wanted, got, rules) is None
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
    if _bits_equal(expected, actual):
        return None
    if rules.exact:
        return _first_difference(expected, actual)
    relative, absolute = rules.tolerances.get(expected.dtype, (None, None))
    try:
        torch.testing.assert_close(actual, expected, rtol=relative, atol=absolute, equal_nan=True)
    except AssertionError as error:
        return _worst_difference(expected, actual, str(error))
    return None


def _bits_equal(expected: torch.Tensor, actual: torch.Tensor) -> bool:
    """Equal bit by bit, except that a NaN equals any NaN: processors do not promise its bits."""
    if expected.numel() == 0:
        return True
    return bool(torch.equal(_bytes(expected), _bytes(actual))) or bool(_equal_mask(expected, actual).all())


def _equal_mask(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """For each real number of the flat values, whether it is the same."""
    if expected.dtype.is_complex:
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    size_bytes = expected.element_size()
    same = (_bytes(expected).view(-1, size_bytes) == _bytes(actual).view(-1, size_bytes)).all(dim=1)
    if expected.dtype.is_floating_point:
        same |= expected.reshape(-1).isnan() & actual.reshape(-1).isnan()
    return same


def _bytes(values: torch.Tensor) -> torch.Tensor:
    # Not reshape: a tensor of one element keeps whatever stride it has, and cannot be seen as bytes then.
    return values.contiguous().as_strided((values.numel(),), (1,)).view(torch.uint8)


def _worst_difference(expected: torch.Tensor, actual: torch.Tensor, message: str) -> str:
    """One line on values that are not close: the largest difference, and how many there are."""
    counted = re.search(r"Mismatched elements: (\d+) / (\d+)", message)
    wanted, got = expected.reshape(-1), actual.reshape(-1)
    kind = torch.complex128 if expected.dtype.is_complex else torch.float64
    apart = (got.to(kind) - wanted.to(kind)).abs()
    # A NaN or an infinity on one side only is apart by a NaN: the worst there is.
    one_sided = apart.isnan() & ~(got.isnan() & wanted.isnan()) & (got != wanted)
    position = int(torch.where(one_sided, torch.inf, apart.nan_to_num(nan=0.0, posinf=0.0)).argmax())
    count = f"{counted[1]} of {counted[2]} differ, the worst ({position}) is " if counted else ""
    return f"{count}{got[position].item()!r} instead of {wanted[position].item()!r}"


def _first_difference(expected: torch.Tensor, actual: torch.Tensor) -> str:
    same = _equal_mask(expected, actual)
    if expected.dtype.is_complex:
        expected, actual = torch.view_as_real(expected), torch.view_as_real(actual)
    position = int((~same).nonzero()[0])
    wanted, got = expected.reshape(-1)[position].item(), actual.reshape(-1)[position].item()
    return f"{int((~same).sum())} of {same.numel()} differ, the first ({position}) is {got!r} instead of {wanted!r}"
