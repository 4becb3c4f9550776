"""Which backends exist, by name."""

from __future__ import annotations

from torch_ltc.errors import BackendError, UnknownBackendError
from torch_ltc.lowering.interface import Backend


class Registry:
    """Backends by name. The first one registered as reference runs programs seen for the first time."""

    def __init__(self) -> None:
        self._backends: dict[str, Backend] = {}
        self._reference: Backend | None = None

    def register(self, backend: Backend, *, reference: bool = False) -> None:
        """Add a backend; a second one of the same name is an error."""
        if backend.name in self._backends:
            raise BackendError(
                f"a backend named {backend.name!r} is registered already", hint="give yours another name"
            )
        self._backends[backend.name] = backend
        if reference:
            self._reference = backend

    def get(self, name: str) -> Backend:
        """The backend of this name."""
        try:
            return self._backends[name]
        except KeyError:
            known = ", ".join(sorted(self._backends))
            raise UnknownBackendError(f"there is no backend named {name!r}", hint=f"one of: {known}") from None

    def check(self, name: str) -> None:
        """Raise unless a backend of this name exists."""
        self.get(name)

    @property
    def reference(self) -> Backend:
        """The backend whose results are right by definition."""
        if self._reference is None:
            raise BackendError("no reference backend is registered", hint="import torch_ltc, which registers its own")
        return self._reference

    def names(self) -> list[str]:
        """Names of all backends."""
        return sorted(self._backends)


registry = Registry()
