"""The backend: what the registry knows of it. Imports no JAX; that happens when the backend is first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torch_ltc.backends.xla.conformance_spec import KNOWN_GAPS, TOLERANCES
from torch_ltc.backends.xla.decompositions import decompositions
from torch_ltc.errors import BackendError
from torch_ltc.lowering.interface import Backend, BackendData, Form, ProgramFunction
from torch_ltc.program.instruction import Call, Program
from torch_ltc.pytorch.private import OpOverload


class XlaBackend(Backend):
    """Functional programs as jitted JAX functions. Data stays in JAX arrays between steps."""

    name = "xla"
    form = Form.FUNCTIONAL
    # A program that fails gives every input that it updates its old value: see `checks.py`.
    keeps_inputs = True
    tolerances = TOLERANCES
    known_gaps = KNOWN_GAPS

    def initialize_aten_bindings(self) -> None:
        """Import JAX and the rules."""
        _compiler()

    def compile(self, program: Program) -> ProgramFunction:
        """A function compiled by XLA for the program's device."""
        function: ProgramFunction = _compiler().Executable(program)
        return function

    def dump(self, compiled: Any) -> bytes:
        """The machine code that XLA made."""
        data: bytes = compiled.dump()
        return data

    def load(self, program: Program, data: bytes) -> ProgramFunction:
        """A function with machine code from before."""
        del program
        function: ProgramFunction = _compiler().Executable.load(data)
        return function

    def version(self) -> str:
        """JAX, and the flags that XLA takes from the environment."""
        version: str = _compiler().version_text()
        return version

    def adopt(self, tensor: torch.Tensor) -> BackendData:
        """A handle on an array that shares the tensor's memory."""
        handle: BackendData = _compiler().JaxData.sharing(tensor)
        return handle

    def supports(self, call: Call) -> bool:
        """True when the call's operator has a rule."""
        supported: bool = _compiler().has_rule(call)
        return supported

    def decompositions(self) -> Mapping[OpOverload, Callable[..., Any]]:
        """Decompositions of operators without a rule."""
        return decompositions()


def _compiler() -> Any:
    """The module that needs JAX."""
    try:
        return importlib.import_module("torch_ltc.backends.xla.executable")
    except ImportError as error:
        raise BackendError(
            f"the backend 'xla' needs JAX, which cannot be imported: {error}", hint="pip install 'torch-ltc[xla]'"
        ) from error
