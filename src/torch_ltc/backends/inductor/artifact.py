"""Serialized programs of Inductor: the Python code, and the machine code of its kernels.

Loading compiles nothing and looks for nothing on disk: the kernels come with the code. Inductor's own way back would
ask the C++ compiler for its version and precompile headers before it finds that the kernels are there.
"""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import io
import marshal
import os
import pickle
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, ModuleType
from typing import Any

import torch

from torch_ltc.backends.inductor.private import (
    AsyncCompile,
    CompiledFxGraph,
    CppPythonBindingsCodeCache,
    OrderedSet,
    PyCodeCache,
    align_inputs_from_check_idxs,
    cache_dir,
    data_pointer_function,
)
from torch_ltc.errors import LtcError
from torch_ltc.lowering.gil import yield_gil
from torch_ltc.private_files import is_private_folder

__all__ = ["Artifact", "direct_call", "dump", "load"]

Boxed = Callable[[list[Any]], Sequence[Any]]

# The line of Inductor's code that makes what compiles or finds the kernels.
_MAKER = "async_compile = AsyncCompile()"
_FINDER = "async_compile = prebuilt"
_POINTER_VARIABLE = "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"


@dataclass(frozen=True, slots=True)
class Artifact:
    """Inductor's code as text and ready for Python, its constants as `torch.save` writes them, the shared library of
    each C++ kernel by the name that the code has for it, and which inputs must be aligned."""

    source: str
    code: bytes
    constants: bytes
    kernels: dict[str, bytes]
    checked: tuple[int, ...]
    mutated: tuple[int, ...]


def direct_call(graph: object) -> Boxed | None:
    """The compiled code itself, below everything that PyTorch wraps around it; it empties the list that it is given."""
    if not isinstance(graph, CompiledFxGraph) or graph.current_callable is None:
        return None
    return graph.current_callable


def dump(graph: object) -> bytes | None:
    """The compiled graph as bytes; None when it holds what cannot be written down."""
    if not isinstance(graph, CompiledFxGraph) or graph.source_code.count(_MAKER) != 1:
        return None
    if graph.torchbind_constants or graph.frozen_param_names or getattr(graph, "opaque_value_type_classes", None):
        return None
    module = next((made for made in reversed(PyCodeCache.modules) if _key(made) == graph.cache_key), None)
    if module is None:
        return None
    kernels: dict[str, bytes] = {}
    for name, path in _libraries(module):
        with open(path, "rb") as file:
            kernels[name] = file.read()
    mutated = tuple(graph.mutated_input_idxs)
    checked = tuple(graph.inputs_to_check)
    if getattr(graph, "_defers_input_alignment", False):
        # The code aligns the others itself.
        checked = tuple(position for position in checked if position in mutated)
    code = marshal.dumps(compile(graph.source_code.replace(_MAKER, _FINDER), "<inductor>", "exec"))
    artifact = Artifact(graph.source_code, code, _dump_constants(graph.constants), kernels, checked, mutated)
    return pickle.dumps(artifact, protocol=5)


def _dump_constants(constants: dict[str, torch.Tensor] | None) -> bytes:
    file = io.BytesIO()
    if constants:
        torch.save(dict(constants), file)
    return file.getvalue()


def _load_constants(data: bytes) -> dict[str, torch.Tensor]:
    return torch.load(io.BytesIO(data), weights_only=True) if data else {}


def _key(module: object) -> object:
    return getattr(module, "key", None)


def _libraries(module: ModuleType) -> Iterator[tuple[str, str]]:
    """The kernels of a module of Inductor: their names and the files that they were loaded from."""
    for name, value in vars(module).items():
        if isinstance(value, BuiltinFunctionType) and value.__name__ == CppPythonBindingsCodeCache.entry_function:
            path = getattr(value.__self__, "__file__", None)
            if isinstance(path, str):
                yield name, path


def load(data: bytes) -> tuple[Boxed, str]:
    """The code behind the bytes, ready to be called, and its text."""
    artifact = _ArtifactUnpickler(io.BytesIO(data)).load()
    assert isinstance(artifact, Artifact)
    functions = {name: _kernel(library) for name, library in artifact.kernels.items()}
    digest = hashlib.blake2b(data, digest_size=12).hexdigest()
    module = ModuleType(f"torch_ltc_inductor_{digest}")
    module.__dict__.update(_load_constants(artifact.constants), prebuilt=_Prebuilt(functions))
    yield_gil()
    exec(marshal.loads(artifact.code), module.__dict__)
    call: Boxed = module.__dict__["call"]
    if artifact.checked:
        aligned: Any = align_inputs_from_check_idxs(call, artifact.checked, OrderedSet(artifact.mutated))
        call = aligned
    return call, artifact.source


class _ArtifactUnpickler(pickle.Unpickler):
    """Knows the class of an artifact alone."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (Artifact.__module__, Artifact.__name__):
            return Artifact
        raise pickle.UnpicklingError(f"an artifact of Inductor has no {module}.{name}")


class _Prebuilt:
    """Stands where Inductor's code expects its compiler: gives it the kernels that came with it."""

    def __init__(self, functions: dict[str, Any]) -> None:
        self._functions = functions
        self._compiler: Any = None

    def cpp_pybinding(self, *described: object) -> None:
        """A kernel; its function is put in place by `wait`."""
        del described

    def wait(self, scope: dict[str, Any]) -> None:
        """Give every kernel its function."""
        scope.update(self._functions)
        if self._compiler is not None:
            self._compiler.wait(scope)

    def __getattr__(self, name: str) -> Any:
        # Kernels for other devices: PyTorch's compiler finds them in its own files, or makes them.
        if self._compiler is None:
            self._compiler = AsyncCompile()
        return getattr(self._compiler, name)


def _kernel(library: bytes) -> Any:
    """The function of a shared library."""
    entry = CppPythonBindingsCodeCache.entry_function
    # Python keeps extension modules by name: the same bytes may be the same module, other bytes must not.
    name = f"torch_ltc_{hashlib.blake2b(library, digest_size=16).hexdigest()}.{entry}"
    yield_gil()
    known = _loaded.get(name)
    if known is None:
        # The library asks for this function of PyTorch when it is loaded.
        os.putenv(_POINTER_VARIABLE, str(data_pointer_function))
        with _file(library) as path:
            spec = importlib.util.spec_from_loader(name, importlib.machinery.ExtensionFileLoader(name, path))
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        known = _loaded[name] = getattr(module, entry)
    return known


_loaded: dict[str, Any] = {}


@contextmanager
def _file(library: bytes) -> Iterator[str]:
    """A path from which the library can be loaded, which nobody else can replace meanwhile."""
    with _folder() as folder:
        # A new name each time: the system takes a known name for the library that it loaded from there before.
        descriptor, path = tempfile.mkstemp(prefix="torch_ltc", suffix=".so", dir=folder)
        try:
            with open(descriptor, "wb") as file:
                file.write(library)
            yield path
        finally:
            os.remove(path)


@contextmanager
def _folder() -> Iterator[str]:
    """The folder where Inductor loads its own libraries from, if it is ours alone: it has a known name in the temporary
    folder, and anybody may have made it first. Else a new one."""
    known = cache_dir()
    if is_private_folder(known):
        yield known
        return
    with tempfile.TemporaryDirectory(prefix="torch_ltc") as made:
        if not is_private_folder(made):
            raise LtcError(
                f"compiled code is not loaded from {made}: others may write to a folder above it",
                hint="set TMPDIR to a folder of your own",
            )
        yield made
