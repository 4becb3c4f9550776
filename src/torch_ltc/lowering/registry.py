"""Backends by name: built-in, registered by hand, or installed by packages."""

from __future__ import annotations

import importlib
import importlib.metadata
import warnings
from collections.abc import Callable
from typing import Literal

from torch_ltc.errors import BackendError, LtcWarning, UnknownBackendError
from torch_ltc.lowering.interface import Backend

ENTRY_POINTS = "torch_ltc.backends"
# In the place of a backend's name: those that are measured against each other.
AUTO = "auto"

Numerics = Literal["equal", "close"]


class Registry:
    """Backends by name. The first one registered as reference runs programs seen for the first time.

    A backend that a package installs is imported when its name is first asked for.
    """

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._origins: dict[str, str] = {}
        self._promised: dict[str, Callable[[], object]] = {}
        self._reference: Backend | None = None
        self._installed: dict[str, importlib.metadata.EntryPoint] | None = None
        self._ready: set[str] = set()
        self._measured: dict[str, Numerics] = {}

    def register(
        self,
        backend: Backend | type[Backend],
        *,
        reference: bool = False,
        origin: str = "registered",
        measured: Numerics | None = None,
    ) -> Backend:
        """Add a backend, or a class of which one is made; a second one of the same name is an error. With `measured`,
        "auto" takes it into account: its results are "equal" to eager's to the bit, or "close" to them."""
        made = _made(backend, "register()")
        if made.name in self._backends or made.name in self._promised or made.name == AUTO:
            raise BackendError(f"a backend named {made.name!r} is registered already", hint="give yours another name")
        self._backends[made.name] = made
        self._origins[made.name] = origin
        if measured is not None:
            self._measured[made.name] = measured
        if reference:
            self._reference = made
        return made

    def promise(self, name: str, path: str, *, measured: Numerics | None = None) -> None:
        """Add a backend that is imported when it is first asked for, from "package.module:Class"."""
        self._promised[name] = lambda: _imported(path)
        self._origins[name] = "built-in"
        if measured is not None:
            self._measured[name] = measured

    def numerics(self, name: str) -> Numerics | None:
        """How near the results of a backend that "auto" measures are to eager's; None for one that it does not."""
        return self._measured.get(name)

    def measured(self, numerics: str) -> list[Backend]:
        """The backends that "auto" measures: those whose results are equal to eager's, with "close" all."""
        return [self.get(name) for name, kind in self._measured.items() if kind == "equal" or numerics == "close"]

    def unregister(self, name: str) -> None:
        """Forget a backend. Programs that it compiled go on."""
        self.get(name)
        del self._backends[name]
        self._origins.pop(name, None)
        self._measured.pop(name, None)
        self._ready.discard(name)

    def get(self, name: str) -> Backend:
        """The backend of this name, ready for use; of "auto" the first that is measured."""
        if name == AUTO:
            return next(iter(self.measured("equal")), self.reference)
        backend = self._backends.get(name)
        if backend is None:
            backend = self._loaded(name)
        if name not in self._ready:
            backend.initialize_aten_bindings()
            self._ready.add(name)
        return backend

    def _loaded(self, name: str) -> Backend:
        load = self._promised.get(name)
        if load is None:
            entry = self._entry_points().get(name)
            if entry is None:
                known = ", ".join(self.names())
                raise UnknownBackendError(f"there is no backend named {name!r}", hint=f"one of: {known}")
            load = entry.load
        try:
            found = load()
        except Exception as error:
            raise BackendError(f"the backend {name!r} cannot be loaded: {error}", hint="see the error above") from error
        backend = _made(found, f"the entry point {name!r}")
        if backend.name != name:
            raise BackendError(f"the entry point {name!r} gives a backend named {backend.name!r}")
        self._promised.pop(name, None)
        self._backends[name] = backend
        return backend

    def _entry_points(self) -> dict[str, importlib.metadata.EntryPoint]:
        if self._installed is None:
            self._installed = {entry.name: entry for entry in importlib.metadata.entry_points(group=ENTRY_POINTS)}
        return self._installed

    def check(self, name: str, numerics: str = "equal") -> None:
        """Raise unless a backend of this name exists and can be used, and those that are measured with `numerics`."""
        self.get(name)
        self.measured(numerics)

    def origin(self, name: str) -> str:
        """The origin of a backend, in words."""
        entry = self._entry_points().get(name)
        return self._origins.get(name) or (f"installed: {entry.value}" if entry is not None else "unknown")

    @property
    def reference(self) -> Backend:
        """The backend whose results are right by definition."""
        if self._reference is None:
            raise BackendError("no reference backend is registered", hint="import torch_ltc, which registers its own")
        return self._reference

    def names(self) -> list[str]:
        """Names of all backends."""
        return sorted({*self._backends, *self._promised, *self._entry_points()})

    def used(self) -> list[Backend]:
        """The backends that were asked for."""
        return [self._backends[name] for name in sorted(self._ready) if name in self._backends]


def _imported(path: str) -> object:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _made(found: object, what: str) -> Backend:
    if isinstance(found, type) and issubclass(found, Backend):
        found = found()
    if not isinstance(found, Backend):
        raise BackendError(
            f"{what} got {found!r}, which is no Backend", hint="derive your class from torch_ltc.Backend"
        )
    if not getattr(found, "name", ""):
        raise BackendError(f"{type(found).__name__} has no name", hint="set the class attribute `name`")
    _rename_attribute(found)
    return found


def _rename_attribute(backend: Backend) -> None:
    """Let a backend that sets the old name of `compiles_out_of_process` work as before, with a warning."""
    old = getattr(backend, "compiles_elsewhere", None)
    if old is not None:
        warnings.warn(
            f"{type(backend).__name__}.compiles_elsewhere is now compiles_out_of_process: rename it",
            LtcWarning,
            stacklevel=4,
        )
        backend.compiles_out_of_process = bool(old)


registry = Registry()
