"""The null backend: takes every program, looks at all of it, computes nothing.

Results have the right dtype, shape and strides and arbitrary contents. What a step costs on it is what the package
costs: recording, lookup, lowering, handing results over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_ltc.errors import CompileError
from torch_ltc.lowering.interface import Backend, Form, ProgramFunction
from torch_ltc.program.instruction import Program
from torch_ltc.program.verify import verify


class NullBackend(Backend):
    """Lowers, checks shapes, computes nothing."""

    name = "null"
    form = Form.FUNCTIONAL
    computes = False

    def compile(self, program: Program) -> ProgramFunction:
        """A function that checks what it is given and returns empty memory."""
        verify(program)
        specs = program.specs()
        expected = [i.spec for i in program.inputs] + [i.spec for i in program.numbers]
        results = [specs[number] for number in program.results]

        def run(*given: Any) -> Sequence[torch.Tensor]:
            for held, spec in zip(given, expected, strict=True):
                tensor = held if isinstance(held, torch.Tensor) else held.tensor()
                if tuple(tensor.size()) != spec.size or tensor.dtype is not spec.dtype:
                    raise CompileError(f"the program takes {spec}, got {tensor.dtype}{list(tensor.size())}")
            return [torch.empty_strided(s.size, s.stride, dtype=s.dtype, device=program.device) for s in results]

        return run
