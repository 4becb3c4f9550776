"""The Python state that a function can reach: found by walking it, compared before and after a call.

What is walked: closures, globals that the code names, `self`, modules, optimizers, schedulers, plain objects and
containers. What PyTorch and the standard library keep for themselves is not.
"""

from __future__ import annotations

import io
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc.program.spec import spec_of

__all__ = ["MISSING", "Place", "State", "TooMuchState", "is_host_tensor", "is_lazy", "token", "walk"]

_MOST_PLACES = 200_000
# CPU tensors of at most this many elements are compared by value.
_SMALL = 64
_SCALARS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
# A stream is no state of the function: what is printed is noticed by itself, and a stream leads to whoever made it.
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, io.IOBase)
_LIBRARIES = ("torch", "torch_ltc", "numpy", "builtins", "functools", "collections", "logging", "threading", "weakref")


class TooMuchState(Exception):
    """A function reaches more than can be compared."""


@dataclass(frozen=True, slots=True)
class Place:
    """Something that holds a value: an entry of a dict or list, a closure's cell, an attribute of a class, the gradient
    of a tensor."""

    holder: Any
    key: Any
    path: str

    @property
    def identity(self) -> tuple[int, Any]:
        """Equal for the same place."""
        return (id(self.holder), id(self.key) if isinstance(self.key, torch.Tensor) else self.key)

    def get(self) -> Any:
        """The value in it."""
        if isinstance(self.holder, types.CellType):
            return self.holder.cell_contents
        if isinstance(self.holder, torch.Tensor):
            return self.holder.grad
        if isinstance(self.holder, type):
            return vars(self.holder)[self.key]
        return self.holder[self.key]

    def put(self, value: Any) -> None:
        """Have it hold something else."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, torch.Tensor):
            self.holder.grad = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.key, value)
        else:
            self.holder[self.key] = value


def _is_library(module: str | None) -> bool:
    return module is None or module.partition(".")[0] in _LIBRARIES


def _is_standard(module: str | None) -> bool:
    """True for code of PyTorch and of the standard library."""
    return _is_library(module) or str(module).partition(".")[0] in sys.stdlib_module_names


def _names(code: types.CodeType) -> set[str]:
    """Global names that the code, or a function in it, uses."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _names(constant)
    return found


def _children(value: Any, path: str) -> Iterator[Place]:
    """The places that a value consists of."""
    if isinstance(value, torch.Tensor):
        if value.requires_grad and value.is_leaf:
            yield Place(value, "grad", f"{path}.grad")
    elif isinstance(value, dict):
        # A mapping that makes its values at each access has no places.
        for key in list(value) if type(value).__getitem__ is dict.__getitem__ else ():
            name = key if isinstance(key, str) else "..." if isinstance(key, torch.Tensor) else repr(key)
            yield Place(value, key, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list):
        for index in range(len(value)):
            yield Place(value, index, f"{path}[{index}]")
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _children(item, f"{path}[{index}]")
    elif isinstance(value, types.MethodType):
        yield from _children(value.__func__, path)
        yield from _children(value.__self__, f"{path}.self" if path else "self")
    elif isinstance(value, types.FunctionType):
        if not _is_standard(value.__module__):
            names = _names(value.__code__)
            for place in _variables(value, names):
                yield place
                module = place.get()
                if isinstance(module, types.ModuleType) and not _is_standard(module.__name__):
                    for attribute in names & vars(module).keys():
                        yield Place(vars(module), attribute, f"{place.path}.{attribute}")
            yield from _children(value.__defaults__ or (), f"{path} defaults")
    elif _is_walked(value):
        yield from _children(vars(value), path)
        for owner in type(value).__mro__:
            if not _is_library(owner.__module__):
                yield from _of_class(owner, path)


def _variables(function: types.FunctionType, names: set[str]) -> Iterator[Place]:
    """The variables of other scopes that a function uses."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            cell.cell_contents  # noqa: B018  empty until it is assigned
        except ValueError:
            continue
        yield Place(cell, None, name)
    for name in names & function.__globals__.keys():
        yield Place(function.__globals__, name, name)


def _of_class(owner: type, path: str) -> Iterator[Place]:
    """Attributes of a class, and what its methods use."""
    for key, value in list(vars(owner).items()):
        function = getattr(value, "__func__", value)
        if isinstance(function, types.FunctionType):
            yield from _children(function, f"{path}.{key}")
        elif not key.startswith("__") and not isinstance(value, (*_OPAQUE, property)):
            yield Place(owner, key, f"{path}.{key}")


def _is_walked(value: Any) -> bool:
    """True for objects whose attributes count."""
    kinds = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    if isinstance(value, kinds):
        return True
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return False
    return not _is_library(type(value).__module__)


def walk(roots: dict[str, Any]) -> dict[tuple[int, Any], Place]:
    """All places that can be reached from these values, by identity."""
    found: dict[tuple[int, Any], Place] = {}
    seen: set[int] = set()
    waiting = [place for name, value in roots.items() for place in _children(value, name)]
    while waiting:
        place = waiting.pop()
        if place.identity in found:
            continue
        found[place.identity] = place
        if len(found) > _MOST_PLACES:
            raise TooMuchState(f"more than {_MOST_PLACES:,} values can be reached from the function")
        value = place.get()
        if isinstance(value, _SCALARS) or id(value) in seen:
            continue
        seen.add(id(value))
        waiting.extend(_children(value, place.path))
    return found


def is_lazy(value: Any) -> bool:
    """True for a tensor of the device."""
    return isinstance(value, torch.Tensor) and value.device.type == "ltc"


def is_host_tensor(value: Any) -> bool:
    """True for a tensor of another device."""
    return isinstance(value, torch.Tensor) and value.device.type != "ltc"


def token(value: Any) -> Any:
    """Equal while the value itself is the same; what it consists of has places of its own."""
    if isinstance(value, float):
        # Zeros of both signs are equal, and no NaN is.
        return (type(value), value.hex())
    if isinstance(value, _SCALARS):
        return (type(value), value)
    if is_lazy(value):
        return (id(value), spec_of(value), value.requires_grad)
    if isinstance(value, torch.Tensor):
        small = value.numel() <= _SMALL and value.device.type == "cpu" and value.layout is torch.strided
        return (id(value), tuple(value.detach().flatten().tolist()) if small else value._version)
    if isinstance(value, tuple) and all(isinstance(item, _SCALARS) for item in value):
        return (tuple, *map(token, value))
    if isinstance(value, (set, frozenset)):
        return (id(value), frozenset(value))
    if isinstance(value, (dict, list)):
        return (id(value), len(value))
    return (id(value), None)


@dataclass(slots=True)
class State:
    """Everything that can be reached, at one moment."""

    places: dict[tuple[int, Any], Place]
    tokens: dict[tuple[int, Any], Any] = field(default_factory=dict)
    # Keeps alive what the tokens name by identity.
    values: dict[tuple[int, Any], Any] = field(default_factory=dict)

    @classmethod
    def now(cls, roots: dict[str, Any]) -> State:
        """As it is."""
        made = cls(walk(roots))
        for identity, place in made.places.items():
            value = made.values[identity] = place.get()
            made.tokens[identity] = token(value)
        return made

    def changes(self, later: State) -> list[tuple[Place, Any, Any]]:
        """Places whose value is another one later, with both; `MISSING` for a place that is not there."""
        changed = []
        for identity in {**self.tokens, **later.tokens}:
            if self.tokens.get(identity, MISSING) != later.tokens.get(identity, MISSING):
                place = self.places.get(identity) or later.places[identity]
                before, after = self.values.get(identity, MISSING), later.values.get(identity, MISSING)
                changed.append((place, before, after))
        return changed


class _Missing:
    def __repr__(self) -> str:
        return "nothing"


MISSING = _Missing()
