"""Operators of this package, and what they are made of: what is exported runs without the package."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torch_ltc.pytorch.private import OpOverload

__all__ = ["composition", "define", "differentiate", "uses_nested_tensors"]

Function = Callable[..., Any]

_library = torch.library.Library("torch_ltc", "FRAGMENT")
_compositions: dict[str, Function] = {}
_nested: set[str] = set()


def define(schema: str, kernel: Function, infer: Function, keys: Sequence[str] = ("CPU",), nested: bool = False) -> str:
    """Define the operator `torch_ltc::schema`. `kernel` runs it on physical tensors with operators of PyTorch, under
    the dispatch keys, `nested` if by way of nested tensors; `infer` makes results without data. Returns its name."""
    name = schema.partition("(")[0]
    _library.define(schema)
    for key in keys:
        _library.impl(name, kernel, key)
    _library.impl(name, infer, "Meta")
    _compositions[f"torch_ltc::{name}"] = kernel
    if nested:
        _nested.add(f"torch_ltc::{name}")
    return f"torch_ltc::{name}"


def differentiate(name: str, backward: Function, save: Function) -> None:
    """Give an operator of `define` a derivative."""
    torch.library.register_autograd(name, backward, setup_context=save, lib=_library)


def composition(op: OpOverload) -> Function | None:
    """The calls that an operator of this package is made of; None for other operators."""
    return _compositions.get(op._schema.name)


def uses_nested_tensors(op: OpOverload) -> bool:
    """True for an operator of this package that computes in nested tensors."""
    return op._schema.name in _nested
