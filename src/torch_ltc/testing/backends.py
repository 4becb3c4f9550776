"""Finding the backend to test: by name, as a class somewhere, or as an object.

Owns the forms in which a backend may be named, and the form in which a worker process finds the same one again.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch_ltc.errors import BackendError, UnknownBackendError
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.registry import registry

PACKAGE = __name__.partition(".")[0]
FORMS = "a name from `python -m torch_ltc backends`, package.module:ClassName or path/to/file.py:ClassName"


def find(reference: str) -> Backend:
    """The backend behind a name, `package.module:ClassName` or `path/to/file.py:ClassName`; it is registered."""
    place, colon, class_name = reference.rpartition(":")
    if not colon:
        return registry.get(reference)
    return adopt(_class_of(_module_of(place), class_name, reference))


def adopt(given: Backend | type[Backend]) -> Backend:
    """The registered backend that `given` stands for: itself, or an object of it; registered if it was not."""
    kind = given if isinstance(given, type) else type(given)
    name = getattr(given, "name", None)
    if not isinstance(name, str):
        raise BackendError(f"{kind.__name__} has no name", hint="give the class an attribute: name = 'mine'")
    known = registry.get(name) if name in registry.names() else None
    if known is not None and (known is given or (given is kind and type(known) is kind)):
        return known
    backend = kind() if given is kind else given
    assert isinstance(backend, Backend)
    registry.register(backend)
    return backend


def portable(given: Backend | type[Backend] | str) -> str | None:
    """A text by which another process finds the same backend, or None where there is none.

    A name that only this process registered is none, nor is an object: another process cannot make its like.
    """
    if isinstance(given, str):
        if ":" in given:
            return given
        given = registry.get(given)
    if isinstance(given, type):
        return _reference_to(given)
    return given.name if _everywhere(given) else None


def _everywhere(backend: Backend) -> bool:
    """True when every process that imports the package has this backend."""
    if type(backend).__module__.startswith(f"{PACKAGE}."):
        return True
    return backend.name in {each.name for each in importlib.metadata.entry_points(group=f"{PACKAGE}.backends")}


def _reference_to(kind: type[Backend]) -> str | None:
    """`module:Class` or `file.py:Class` for a class at the top of a module."""
    if "." in kind.__qualname__:
        return None
    if kind.__module__ != "__main__":
        return f"{kind.__module__}:{kind.__qualname__}"
    path = getattr(sys.modules["__main__"], "__file__", None)
    return None if path is None else f"{Path(path).resolve()}:{kind.__qualname__}"


def _module_of(place: str) -> ModuleType:
    if place.endswith(".py"):
        return _module_in(Path(place))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{place}.".startswith(f"{error.name}."):
            raise
        raise UnknownBackendError(f"there is no module {place!r}", hint=f"give {FORMS}") from error


def _module_in(path: Path) -> ModuleType:
    """The module in a file, loaded once, with its folder on the path as when it is run."""
    if not path.is_file():
        raise UnknownBackendError(f"there is no file {str(path)!r}", hint=f"give {FORMS}")
    path = path.resolve()
    name = f"_conformance_{path.stem}_{abs(hash(str(path))):x}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        sys.path.insert(0, str(path.parent))
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            sys.path.remove(str(path.parent))
    return sys.modules[name]


def _class_of(module: ModuleType, class_name: str, reference: str) -> type[Backend]:
    found: Any = getattr(module, class_name, None)
    if isinstance(found, type) and issubclass(found, Backend):
        return found
    classes = [
        name
        for name, each in vars(module).items()
        if isinstance(each, type) and issubclass(each, Backend) and each is not Backend
    ]
    what = "has no such name" if found is None else "does not hold a subclass of Backend under that name"
    known = f"the backends there are: {', '.join(classes) or 'none'}"
    raise UnknownBackendError(f"{reference!r}: the module {what}", hint=known)
