"""The Python state that a function can reach: found by walking it, compared before and after a call.

What is walked: closures, globals that the code names, `self`, modules, optimizers, schedulers, containers, and of plain
objects the attributes that the code names. What PyTorch and the standard library keep for themselves is not.
"""

from __future__ import annotations

import dis
import functools
import io
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_ltc.program.spec import spec_of

__all__ = ["MISSING", "Place", "State", "TooMuchState", "is_host_tensor", "is_lazy", "token"]

_MOST_PLACES = 200_000
# CPU tensors of at most this many elements are compared by value.
_SMALL = 64
_SCALARS = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
# A stream is no state of the function: what is printed is noticed by itself, and a stream leads to whoever made it.
_OPAQUE = (type, types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.FrameType, io.IOBase)
# Objects of PyTorch whose own code looks at all that they have.
_WHOLE = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
# Names by which code gets at attributes that it does not name.
_LOOKS = (
    "getattr setattr delattr hasattr vars dir eval exec globals locals __dict__ __getattribute__ attrgetter "
    "methodcaller asdict astuple fields replace copy deepcopy getmembers getattr_static"
)
_DYNAMIC = frozenset(_LOOKS.split())
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
        """The value in it; `MISSING` where an entry of a dict is gone."""
        if isinstance(self.holder, types.CellType):
            return self.holder.cell_contents
        if isinstance(self.holder, torch.Tensor):
            return self.holder.grad
        if isinstance(self.holder, type):
            return vars(self.holder)[self.key]
        if isinstance(self.holder, dict):
            # Looking must not make an entry, as that of a `defaultdict` does.
            return dict.get(self.holder, self.key, MISSING)
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


@functools.lru_cache(maxsize=10_000)
def _names(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Names of global variables, and of attributes, that the code, or a function in it, uses."""
    variables: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            of_variables = instruction.opname.endswith(("_GLOBAL", "_NAME"))
            name = str(instruction.argval)
            # Other names are those of tools that rewrite code, as pytest does with assertions.
            if name.isidentifier():
                (variables if of_variables else attributes).add(name)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names(constant)
            variables |= inner[0]
            attributes |= inner[1]
    return frozenset(variables), frozenset(attributes)


class _Walk:
    """A walk over everything that can be reached. Of an object that is no module or optimizer only those attributes
    count, and those methods, that some code which was reached names."""

    def __init__(self, roots: dict[str, Any]) -> None:
        self.found: dict[tuple[int, Any], Place] = {}
        # Dicts that count in part only, by identity, with the names that do.
        self.partial: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._attributes: set[str] = set()
        # Code that looks at attributes by other means: then all of them count.
        self._everything = False
        self._objects: list[tuple[Any, str]] = []
        # Kept alive: another value would get the identity of one that is gone.
        self._seen: dict[int, Any] = {}
        waiting = [place for name, value in roots.items() for place in self._children(value, name)]
        known = -1
        while waiting or known != len(self._attributes) + self._everything:
            self._visit(waiting)
            # What was reached may name attributes of objects that were met before.
            known = len(self._attributes) + self._everything
            waiting = [place for value, path in list(self._objects) for place in self._of_object(value, path)]
            waiting = [place for place in waiting if place.identity not in self.found]

    def _visit(self, waiting: list[Place]) -> None:
        while waiting:
            place = waiting.pop()
            if place.identity in self.found:
                continue
            self.found[place.identity] = place
            if len(self.found) > _MOST_PLACES:
                raise TooMuchState(f"more than {_MOST_PLACES:,} values can be reached from the function")
            waiting.extend(self._children(place.get(), place.path))

    def _children(self, value: Any, path: str) -> Iterator[Place]:
        """The places that a value consists of."""
        if isinstance(value, _SCALARS) or id(value) in self._seen:
            return
        if not isinstance(value, types.MethodType):
            # A method is made anew each time.
            self._seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            if value.is_leaf and (value.requires_grad or isinstance(value, torch.nn.Parameter)):
                yield Place(value, "grad", f"{path}.grad")
                for hooks in (value._backward_hooks, value._post_accumulate_grad_hooks):
                    if hooks:
                        yield from self._children(hooks, f"{path}.hooks")
        elif isinstance(value, dict):
            # A mapping that makes its values at each access has no places.
            for key in list(value) if type(value).__getitem__ is dict.__getitem__ else ():
                name = key if isinstance(key, str) else "..." if isinstance(key, torch.Tensor) else repr(key)
                yield Place(value, key, f"{path}.{name}" if path else str(name))
            yield from self._children(type(value), path)
        elif isinstance(value, list):
            for index in range(len(value)):
                yield Place(value, index, f"{path}[{index}]")
        elif isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from self._children(item, f"{path}[{index}]")
        elif isinstance(value, types.MethodType):
            yield from self._children(value.__func__, path)
            yield from self._children(value.__self__, f"{path}.self" if path else "self")
        elif isinstance(value, types.FunctionType):
            yield from self._of_function(value, path)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                yield from self._children(part, path)
        elif isinstance(value, type):
            if not _is_standard(value.__module__):
                yield from self._of_class(value, path, everything=True)
        elif _is_walked(value):
            self._objects.append((value, path))
            yield from self._of_object(value, path)
        elif callable(value) and not isinstance(value, _OPAQUE):
            wrapped = getattr(value, "__wrapped__", None)
            if wrapped is not None:
                yield from self._children(wrapped, path)
            elif not _is_standard(type(value).__module__):
                self._everything = True

    def _of_function(self, function: types.FunctionType, path: str) -> Iterator[Place]:
        """The variables of other scopes that a function uses, and attributes of modules."""
        if _is_standard(function.__module__):
            return
        variables, attributes = _names(function.__code__)
        self._attributes |= attributes
        self._everything |= not _DYNAMIC.isdisjoint(variables | attributes)
        places = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                cell.cell_contents  # noqa: B018  empty until it is assigned
            except ValueError:
                continue
            places.append(Place(cell, None, name))
        self._take_part(function.__globals__, variables)
        places += [Place(function.__globals__, name, name) for name in variables if name in function.__globals__]
        for place in places:
            yield place
            module = place.get()
            if isinstance(module, types.ModuleType) and not _is_standard(module.__name__):
                self._take_part(vars(module), attributes)
                for attribute in attributes & vars(module).keys():
                    yield Place(vars(module), attribute, f"{place.path}.{attribute}")
        yield from self._children(function.__defaults__ or (), f"{path} defaults")
        yield from self._children(function.__kwdefaults__ or {}, f"{path} defaults")

    def _take_part(self, variables: dict[str, Any], names: frozenset[str]) -> None:
        self.partial.setdefault(id(variables), (variables, set()))[1].update(names)

    def _of_object(self, value: Any, path: str) -> Iterator[Place]:
        """The attributes of an object, and what its methods use."""
        everything = self._everything or isinstance(value, _WHOLE)
        held = vars(value)
        if everything:
            self.partial.pop(id(held), None)
            yield from self._children(held, path)
        else:
            self.partial[id(held)] = (held, self._attributes)
            for key in self._attributes & held.keys():
                yield Place(held, key, f"{path}.{key}" if path else key)
        for owner in type(value).__mro__:
            if not _is_library(owner.__module__):
                yield from self._of_class(owner, path, everything)

    def _of_class(self, owner: type, path: str, everything: bool) -> Iterator[Place]:
        """Attributes of a class, and what its methods use."""
        for key, value in list(vars(owner).items()):
            implicit = key.startswith("__") and key not in ("__init__", "__new__")
            if not (everything or implicit or key in self._attributes):
                continue
            if isinstance(value, property):
                for function in (value.fget, value.fset, value.fdel):
                    yield from self._children(function, f"{path}.{key}")
            elif isinstance(getattr(value, "__func__", value), types.FunctionType):
                yield from self._children(getattr(value, "__func__", value), f"{path}.{key}")
            elif not key.startswith("__") and not isinstance(value, _OPAQUE):
                yield Place(owner, key, f"{path}.{key}")


def _is_walked(value: Any) -> bool:
    """True for objects whose attributes count."""
    if isinstance(value, _WHOLE):
        return True
    if isinstance(value, _OPAQUE) or not hasattr(value, "__dict__"):
        return False
    return not _is_library(type(value).__module__)


def is_lazy(value: Any) -> bool:
    """True for a tensor of the device with memory of its own; a sparse one consists of others."""
    return isinstance(value, torch.Tensor) and value.device.type == "ltc" and value.layout is torch.strided


def is_host_tensor(value: Any) -> bool:
    """True for a tensor of another device, and for a sparse one."""
    return isinstance(value, torch.Tensor) and not is_lazy(value)


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
    # Dicts in which only some names count, by identity, with these.
    partial: dict[int, tuple[dict[str, Any], set[str]]]
    tokens: dict[tuple[int, Any], Any] = field(default_factory=dict)
    # Keeps alive what the tokens name by identity.
    values: dict[tuple[int, Any], Any] = field(default_factory=dict)

    @classmethod
    def now(cls, roots: dict[str, Any]) -> State:
        """As it is."""
        walk = _Walk(roots)
        made = cls(walk.found, walk.partial)
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
