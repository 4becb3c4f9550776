"""Guards: the quick check that the Python state which a replay relies on is as it was when it was recorded.

Containers are compared by the identity of what they hold; only where that differs, by value. A dict that was not
written to since the last check, which its version says, is not looked into at all.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from types import CellType
from typing import Any

import torch

from torch_ltc.native.library import extension
from torch_ltc.pytorch.private import TensorGuards, dict_version, get_gradient
from torch_ltc.replay.state import MISSING, Place, State, is_host_tensor, is_lazy, token

__all__ = ["Guard", "shape_guard"]

_cell_contents = operator.attrgetter("cell_contents")
# Checks that find a dict written to, after which its contents are compared each time instead of its version.
_BUSY = 4


class _Contents:
    """What a dict or list held, as far as a replay relies on it."""

    __slots__ = ("holder", "writes", "_names", "_known", "_length", "_get", "_keys", "_expected", "_missing", "_paths")

    def __init__(self, holder: Any, places: list[Place], values: list[Any], names: set[str] | None) -> None:
        self.holder = holder
        # Checks that found the dict written to.
        self.writes = 0
        # Where only some names count, those; and which of them are there.
        self._names = names
        self._known = None if names is None else names & holder.keys()
        self._length = len(holder)
        self._keys = [place.key for place in places]
        self._get = _getter(self._keys, type(holder))
        self._expected = values
        self._missing = [] if names is None else sorted(names - holder.keys())
        self._paths = [place.path for place in places]

    @property
    def is_plain(self) -> bool:
        """True where the extension can compare it: a list, or a dict of which only some names count."""
        return type(self.holder) is list or (type(self.holder) is dict and self._names is not None)

    def add_to(self, unchanged: Any) -> None:
        """Have the extension compare a list, or the entries of a dict that count, by identity."""
        if type(self.holder) is list:
            unchanged.add_list(self.holder, self._keys, self._expected)
        else:
            unchanged.add_entries(self.holder, self._keys, self._expected, self._missing)

    def change(self) -> str:
        """The path of a value that is another one, or an empty text."""
        try:
            current = self._get(self.holder)
        except (KeyError, IndexError):
            return "something that the function names"
        if self._names is not None:
            if self._names & self.holder.keys() != self._known:
                return "something that the function names"
        elif len(self.holder) != self._length:
            return f"the length of {self._paths[0].rpartition('.')[0] if self._paths else 'a list'}"
        if all(map(operator.is_, current, self._expected)):
            return ""
        for path, value, known in zip(self._paths, current, self._expected, strict=True):
            if value is not known and token(value) != token(known):
                return path
        return ""


class _Cells:
    """What the cells of closures held."""

    __slots__ = ("_cells", "_expected", "_paths")

    def __init__(self, places: list[tuple[Place, Any]]) -> None:
        self._cells = [place.holder for place, _ in places]
        self._expected = [value for _, value in places]
        self._paths = [place.path for place, _ in places]

    def add_to(self, unchanged: Any) -> None:
        """Have the extension compare them by identity."""
        for cell, value in zip(self._cells, self._expected, strict=True):
            unchanged.add_cell(cell, value)

    def change(self) -> str:
        """The path of a value that is another one, or an empty text."""
        try:
            current = list(map(_cell_contents, self._cells))
        except ValueError:
            return "a variable of the function"
        if all(map(operator.is_, current, self._expected)):
            return ""
        values = zip(self._paths, current, self._expected, strict=True)
        return next((path for path, value, known in values if value is not known and token(value) != token(known)), "")


def shape_guard(tensors: list[Any]) -> Callable[..., bool]:
    """A quick check that tensors have the shapes, dtypes and `requires_grad` that these have now."""
    if not tensors:
        return lambda: True
    sizes = [list(tensor.size()) for tensor in tensors]
    strides = [list(tensor.stride()) for tensor in tensors]
    check: Callable[..., bool] = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    return check


class _Tensors:
    """Shape, dtype and `requires_grad` of tensors that can be reached."""

    __slots__ = ("_tensors", "_paths", "_expected", "_have_shapes")

    def __init__(self, places: Iterable[tuple[Place, Any]]) -> None:
        found = {id(value): (place.path, value) for place, value in places}
        self._paths = [path for path, _ in found.values()]
        self._tensors: list[torch.Tensor] = [value for _, value in found.values()]
        self._expected = [token(tensor) for tensor in self._tensors]
        self._have_shapes = shape_guard(self._tensors)

    def add_to(self, unchanged: Any) -> None:
        """Have the extension compare their shapes."""
        for tensor in self._tensors:
            unchanged.add_tensor(tensor)

    def change(self) -> str:
        """The path of a tensor that is no longer as it was, or an empty text."""
        if self._have_shapes(*self._tensors):
            return ""
        pairs = zip(self._paths, self._tensors, self._expected, strict=True)
        return next((path for path, tensor, known in pairs if token(tensor) != known), "")


class _Gradients:
    """The gradients of tensors, or what `look` makes of them."""

    __slots__ = ("_owners", "_expected", "_paths", "_look")

    def __init__(self, places: list[tuple[Place, Any]], look: Callable[[list[Any]], list[Any]]) -> None:
        self._owners = [place.holder for place, _ in places]
        self._expected = [expected for _, expected in places]
        self._paths = [place.path for place, _ in places]
        self._look = look

    def add_to(self, unchanged: Any) -> None:
        """Have the extension compare them: with a tensor, or whether there is one."""
        for owner, expected in zip(self._owners, self._expected, strict=True):
            unchanged.add_gradient(owner, expected)

    def change(self) -> str:
        """The path of a gradient that has changed, or an empty text."""
        current = self._look(list(map(get_gradient, self._owners)))
        if all(map(operator.is_, current, self._expected)):
            return ""
        pairs = zip(self._paths, current, self._expected, strict=True)
        return next(path for path, now, then in pairs if now is not then)


class Guard:
    """Everything that a replay relies on."""

    def __init__(
        self,
        state: State,
        skip: set[tuple[int, Any]],
        taken: Iterable[torch.Tensor],
        changed: set[int] | frozenset[int] = frozenset(),
        counted: set[int] | frozenset[int] = frozenset(),
    ) -> None:
        """Guard everything that can be reached, as it is in `state`, but for the places to `skip`, the shapes of
        tensors whose identities are in `changed`, and the values of tensors on the host whose identities are in
        `counted`. The program takes the tensors `taken` as its inputs."""
        inputs = {id(tensor) for tensor in taken}
        self._places = state.places
        self._single: list[tuple[Place, Any]] = []
        empty: dict[int, Any] = {}
        holders: dict[int, tuple[Any, list[Place], list[Any]]] = {}
        for holder, _ in state.partial.values():
            holders[id(holder)] = (holder, [], [])
        cells: list[tuple[Place, Any]] = []
        classes: dict[int, tuple[Any, list[Place], list[Any]]] = {}
        gradients: list[tuple[Place, Any]] = []
        others: list[tuple[Place, bool]] = []
        tensors: list[tuple[Place, Any]] = []
        for identity, place in state.places.items():
            value = state.values[identity]
            if isinstance(value, (dict, list, set)) and not value:
                empty[id(value)] = value
            elif isinstance(value, (dict, list)):
                holders.setdefault(id(value), (value, [], []))
            if identity in skip:
                continue
            if is_lazy(value) and id(value) not in changed:
                tensors.append((place, value))
            if isinstance(place.holder, torch.Tensor) and id(value) in inputs:
                gradients.append((place, value))
            elif isinstance(place.holder, torch.Tensor):
                # The program does not read it: another one is as good.
                others.append((place, value is not None))
            elif (
                (is_host_tensor(value) and id(value) not in counted)
                or (isinstance(value, set) and value)
                or not isinstance(place.holder, (dict, list, type, CellType))
            ):
                self._single.append((place, state.tokens[identity]))
            elif isinstance(place.holder, CellType):
                cells.append((place, value))
            elif isinstance(place.holder, type):
                held = classes.setdefault(id(place.holder), (vars(place.holder), [], []))
                held[1].append(place)
                held[2].append(value)
            else:
                held = holders.setdefault(id(place.holder), (place.holder, [], []))
                held[1].append(place)
                held[2].append(value)
        self._empty = list(empty.values())
        self._cells = _Cells(cells)
        self._gradients = _Gradients(gradients, lambda current: current)
        self._present = _Gradients(others, lambda current: [gradient is not None for gradient in current])
        self._tensors = _Tensors(tensors)
        named = {id(holder): names for holder, names in state.partial.values()}
        contents = [_Contents(*held, named.get(id(held[0]))) for held in holders.values()]
        # Compared by their version, and each time.
        self._dicts = [each for each in contents if isinstance(each.holder, dict)]
        self._others = [each for each in contents if not isinstance(each.holder, dict)]
        # Of a class only these attributes count, whatever others it gets.
        self._others += [_Contents(*held, set()) for held in classes.values()]
        # The extension compares all of it at once, and by identity; where that differs, it is looked at below.
        self._unchanged: Any = None
        if extension is not None and extension.has_dict_versions:
            self._unchanged = unchanged = extension.Unchanged()
            for each in self._others:
                if type(each.holder) is list:
                    each.add_to(unchanged)
            for container in self._empty:
                unchanged.add_empty(container)
            for part in (self._cells, self._gradients, self._present, self._tensors):
                part.add_to(unchanged)
        self._note_versions()

    def watch(self, taken: Iterable[torch.Tensor], gradients: Iterable[tuple[torch.Tensor, bool]]) -> None:
        """Let `holds` see also that the tensors `taken`, which the caller keeps alive with their storages, stay where
        they are, and which tensors have a gradient."""
        if self._unchanged is not None:
            for tensor in taken:
                self._unchanged.add_memory(tensor)
            for owner, there in gradients:
                self._unchanged.add_gradient(owner, there)

    def _note_versions(self) -> None:
        self._holders = [each.holder for each in self._dicts]
        # Those that the extension does not compare.
        self._slow = [each for each in self._others if self._unchanged is None or not each.is_plain]
        if self._unchanged is None:
            self._versions = list(map(dict_version, self._holders))
        else:
            self._unchanged.forget_dicts()
            for holder in self._holders:
                self._unchanged.add_dict(holder)
            for each in self._others:
                if each.is_plain and type(each.holder) is dict:
                    each.add_to(self._unchanged)

    @property
    def unchanged(self) -> Any:
        """The check in C++, where it is all that there is to check; else None."""
        return None if self._slow or self._single else self._unchanged

    def holds(self) -> bool:
        """A quick yes where nothing was touched; else `change` says more."""
        unchanged = self._unchanged
        if unchanged is None or not unchanged.holds():
            return False
        return not (self._slow or self._single) or not self._slow_change()

    def change(self) -> str:
        """The path of something that has changed, or an empty text."""
        written = self._written_change()
        if written:
            return written
        for contents in self._others:
            changed = contents.change()
            if changed:
                return changed
        if any(self._empty):
            grown = next(each for each in self._empty if each)
            return next((place.path for place in self._places.values() if place.get() is grown), "a container")
        return (
            self._slow_change()
            or self._cells.change()
            or self._gradients.change()
            or self._present.change()
            or self._tensors.change()
        )

    def _slow_change(self) -> str:
        """As `change`, for what the extension does not compare."""
        for contents in self._slow:
            changed = contents.change()
            if changed:
                return changed
        for place, known in self._single:
            if token(place.get()) != known:
                return place.path
        return ""

    def _written_change(self) -> str:
        """As `change`, for the dicts that were written to."""
        if self._unchanged is not None:
            places: list[int] = self._unchanged.written()
            written = [self._dicts[place] for place in places]
        else:
            versions = list(map(dict_version, self._holders))
            pairs = zip(self._dicts, versions, self._versions, strict=True)
            written = [each for each, now, then in pairs if now != then]
        for contents in written:
            changed: str = contents.change()
            if changed:
                return changed
            contents.writes += 1
            if contents.writes == _BUSY:
                self._dicts.remove(contents)
                self._others.append(contents)
        if written:
            self._note_versions()
        return ""


def _getter(keys: list[Any], kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """A function that gets the values of these keys from a container of this kind."""
    if not keys:
        return lambda holder: ()
    if hasattr(kind, "__missing__"):
        # Looking must not make an entry, as that of a `defaultdict` does.
        return lambda holder: tuple([dict.get(holder, key, MISSING) for key in keys])
    if len(keys) == 1:
        key = keys[0]
        return lambda holder: (holder[key],)
    get: Callable[[Any], tuple[Any, ...]] = operator.itemgetter(*keys)
    return get
