"""Programs, and what was compiled of them, as bytes for another process.

Everything goes by `pickle`, but for what is one object per process (operators, specs) and what belongs to whoever
reads: the recorded program with its lines, the backend, and the functions that the backend makes, which it writes and
reads itself. Only classes that executables are made of are unpickled; still, read only bytes that this user wrote: what
backends write is code.
"""

from __future__ import annotations

import builtins
import copyreg
import io
import pickle
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from torch_ltc.errors import CompileError
from torch_ltc.lowering.functional_computation import handles_of
from torch_ltc.lowering.gil import yield_gil
from torch_ltc.lowering.interface import Backend
from torch_ltc.lowering.lower import Executable
from torch_ltc.program.instruction import Program
from torch_ltc.program.spec import Spec, make_spec
from torch_ltc.pytorch.private import OpOverload
from torch_ltc.source import Source

__all__ = ["NotSerializableError", "dump_data", "dump_executable", "load_data", "load_executable", "load_own_data"]

_PROTOCOL = 5


class NotSerializableError(CompileError):
    """A program, or what was compiled of it, cannot be written down for another process.

    When: never raised to users; such a program is compiled in this process, and not kept on disk.
    """


def dump_data(value: object) -> bytes:
    """Plain data with operators and specs in it, as bytes."""
    return _dumped(_Pickler, value)


def load_data(data: bytes) -> Any:
    """Read what `dump_data` wrote, of any class: from a process of ours, never from a file. Raises
    `NotSerializableError` when an operator in it is unknown here."""
    return pickle.loads(data)


def load_own_data(data: bytes, owner: type) -> Any:
    """As `load_data`, for bytes from a file: only classes that executables are made of, and those of the package that
    `owner` is defined in, are unpickled."""
    return _AllowedUnpickler(io.BytesIO(data), owner).load()


def dump_executable(backend: Backend, program: Program, executable: Executable) -> bytes | None:
    """The executable of `program` as bytes; None when the backend cannot write its functions down."""
    functions = executable.computation.functions
    texts = [backend.dump(function) for function in functions]
    written = [text for text in texts if text is not None]
    if len(written) != len(texts):
        return None

    def pickler(file: io.BytesIO) -> _Pickler:
        return _ExecutablePickler(file, backend, program, functions)

    return pickle.dumps((written, _dumped(pickler, executable)), protocol=_PROTOCOL)


def load_executable(backend: Backend, program: Program, data: bytes) -> Executable:
    """Read what `dump_executable` wrote, for this program and backend of this process."""
    written, outer = _PlainUnpickler(io.BytesIO(data)).load()
    functions = [backend.load(program, text) for text in written]
    executable = _ExecutableUnpickler(io.BytesIO(outer), backend, program, functions).load()
    assert isinstance(executable, Executable)
    # What the other process has learnt from its own runs, which may have been under way, is not known here.
    executable.proven = executable.dropped = executable.computation.settled = False
    return executable


def _dumped(pickler: Callable[[io.BytesIO], pickle.Pickler], value: object) -> bytes:
    file = io.BytesIO()
    try:
        pickler(file).dump(value)
    except (pickle.PicklingError, TypeError, AttributeError, ValueError) as error:
        raise NotSerializableError(f"cannot be written down: {error}") from error
    return file.getvalue()


def _operator(name: str, overload: str) -> OpOverload:
    namespace, _, plain = name.partition("::")
    try:
        found = getattr(getattr(getattr(torch.ops, namespace), plain), overload)
    except AttributeError as error:
        raise NotSerializableError(f"there is no operator {name}.{overload} here") from error
    assert isinstance(found, OpOverload)
    return found


_TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


def _torch_value(name: str) -> Any:
    """The dtype, layout or memory format of this name."""
    found = getattr(torch, name, None)
    if not isinstance(found, _TORCH_VALUES):
        raise pickle.UnpicklingError(f"torch.{name} is no part of a serialized executable")
    return found


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)

    def reducer_override(self, value: object) -> Any:
        yield_gil()
        if isinstance(value, Spec):
            return make_spec, value.key
        if isinstance(value, OpOverload):
            return _operator, (value._schema.name, value._overloadname)
        if isinstance(value, _TORCH_VALUES):
            # Python would write one down as an attribute of whichever module it finds first that imports torch.
            return _torch_value, (str(value).removeprefix("torch."),)
        return _snapshot(value)


def _snapshot(value: object) -> Any:
    """The object as Python reduces it, with a copy of its attributes: other threads run the executable meanwhile, and
    what they set would change the dictionary that is being written."""
    kind = type(value)
    plain = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    if not plain or kind in copyreg.dispatch_table or isinstance(value, (type, FunctionType, BuiltinFunctionType)):
        return NotImplemented
    function, given, state, *rest = value.__reduce_ex__(_PROTOCOL)
    if isinstance(state, tuple):
        # Attributes beside slots.
        state = tuple([dict(part) if isinstance(part, dict) else part for part in state])
    return function, given, dict(state) if isinstance(state, dict) else state, *rest


class _Identity:
    """Stands for the identity of the program that is read."""


_IDENTITY = _Identity()


def _program(identity: int, given: dict[str, Any]) -> Program:
    return Program(identity=identity, **given)


def _sources(program: Program) -> list[Source]:
    return [instruction.source for instruction in program.instructions]


class _ExecutablePickler(_Pickler):
    """Leaves out what the reader has."""

    def __init__(self, file: io.BytesIO, backend: Backend, program: Program, functions: Sequence[Any]) -> None:
        super().__init__(file)
        self._known: dict[int, tuple[str, int]] = {id(source): ("source", i) for i, source in _first(_sources(program))}
        self._known[id(program)] = ("program", 0)
        self._known[id(backend)] = ("backend", 0)
        self._known[id(handles_of(backend))] = ("handles", 0)
        self._known[id(_IDENTITY)] = ("identity", 0)
        self._known.update((id(function), ("function", i)) for i, function in enumerate(functions))

    def persistent_id(self, value: object) -> tuple[str, int] | None:
        return self._known.get(id(value))

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, Program):
            # A program that was made of the recorded one and has its identity.
            given = {field.name: getattr(value, field.name) for field in fields(Program) if field.init}
            return _program, (_IDENTITY, {name: part for name, part in given.items() if name != "identity"})
        return super().reducer_override(value)


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain data: it knows no class."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a serialized executable")


_BUILTINS = {"bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "range", "set", "slice", "str"}
_OUR_PACKAGES = ("torch_ltc.lowering", "torch_ltc.program", "torch_ltc.source")
_FUNCTIONS = (make_spec, _operator, _program, _torch_value)


class _AllowedUnpickler(_PlainUnpickler):
    """Knows the classes of this package that executables are made of, those of the package of a backend, and plain
    values of Python and PyTorch."""

    def __init__(self, file: io.BytesIO, owner: type) -> None:
        super().__init__(file)
        own = owner.__module__
        self._packages = (*_OUR_PACKAGES, own.rpartition(".")[0] or own)

    def find_class(self, module: str, name: str) -> Any:
        if module == "builtins" and name in _BUILTINS:
            return getattr(builtins, name)
        if module == "torch" and name in ("device", "Size"):
            return getattr(torch, name)
        if any(module == package or module.startswith(f"{package}.") for package in self._packages):
            found = pickle.Unpickler.find_class(self, module, name)
            if found in _FUNCTIONS or (isinstance(found, type) and found.__module__ == module):
                return found
        return super().find_class(module, name)


class _ExecutableUnpickler(_AllowedUnpickler):
    """Puts in what the reader has."""

    def __init__(self, file: io.BytesIO, backend: Backend, program: Program, functions: Sequence[Any]) -> None:
        super().__init__(file, type(backend))
        self._sources = _sources(program)
        self._known: dict[tuple[str, int], Any] = {
            ("program", 0): program,
            ("backend", 0): backend,
            ("handles", 0): handles_of(backend),
            ("identity", 0): program.identity,
        }
        self._known.update((("function", i), function) for i, function in enumerate(functions))

    def persistent_load(self, known: tuple[str, int]) -> Any:
        kind, index = known
        yield_gil()
        return self._sources[index] if kind == "source" else self._known[known]


def _first(sources: list[Source]) -> list[tuple[int, Source]]:
    """Each line with the first instruction that has it."""
    first: dict[int, tuple[int, Source]] = {}
    for index, source in enumerate(sources):
        first.setdefault(id(source), (index, source))
    return list(first.values())
