"""Code that runs when a module of another library is imported, or now if that has happened."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

__all__ = ["when_imported"]

Adapt = Callable[[ModuleType], None]
_waiting: dict[str, Adapt] = {}


def when_imported(name: str, adapt: Adapt) -> None:
    """Call `adapt(module)` once: when the module `name` has been imported, now if it is loaded."""
    module = sys.modules.get(name)
    if module is not None:
        adapt(module)
        return
    _waiting[name] = adapt
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that somebody waits for, as the other finders do, and no others."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The spec that the other finders have, with a loader that calls whoever waits; None for other modules."""
        if fullname not in _waiting:
            return None
        adapt = _waiting.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, adapt)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader; afterwards the module has it, and nothing tells that this one was there."""

    def __init__(self, original: importlib.abc.Loader, adapt: Adapt) -> None:
        self._original = original
        self._adapt = adapt

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the module's own loader has it."""
        return self._original.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and then what waits for it."""
        module.__loader__ = self._original
        if module.__spec__ is not None:
            module.__spec__.loader = self._original
        self._original.exec_module(module)
        self._adapt(module)


_finder = _Finder()
