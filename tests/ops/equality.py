"""Equality of trees of tensors, of eager and of the device: values bit by bit, dtypes, shapes and strides."""

from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree


def differences(what: str, expected: object, actual: object, *, atol: float = 0.0) -> Iterator[str]:
    """A line for each leaf that differs."""
    theirs, structure = pytree.tree_flatten(expected)
    ours, our_structure = pytree.tree_flatten(actual)
    if structure != our_structure:
        yield f"{what}: {our_structure} instead of {structure}"
        return
    for number, (one, other) in enumerate(zip(theirs, ours)):
        found = _difference(one, other, atol)
        if found:
            yield f"{what}[{number}]: {found}"


def _difference(expected: object, actual: object, atol: float) -> str:
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return "" if expected == actual or expected is actual else f"{actual} instead of {expected}"
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return f"{actual.dtype} {tuple(actual.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if expected.layout is torch.strided and actual.stride() != expected.stride():
        return f"strides {actual.stride()} instead of {expected.stride()}"
    values = actual.detach().cpu()
    if not torch.allclose(values, expected.detach(), rtol=0.0, atol=atol, equal_nan=True):
        worst = (values.double() - expected.detach().double()).abs().nan_to_num().max().item()
        return f"values differ by up to {worst}"
    return ""
