"""`flex_attention` in Inductor's graph: its own kernels where it has them, else the calls of PyTorch's eager form.

Nodes are calls of the functions here, which PyTorch traces when it makes the graph that Inductor gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_ltc.backends.inductor.private import has_cpu_template
from torch_ltc.lowering.flex_attention import BACKWARD, FORWARD, attend, attend_backward, functions
from torch_ltc.program.instruction import Call, Program
from torch_ltc.pytorch.flex_attention import attend_operator, attend_operator_backward

__all__ = ["FlexAttention"]

_CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class FlexAttention:
    """The attentions of one program."""

    def __init__(self, program: Program, by_kernel: bool) -> None:
        self._program = program
        self._specs = program.specs()
        self._by_kernel = by_kernel
        self._used = {number for call in program.calls for number in call.operands} | set(program.results)

    def function(self, call: Call) -> Any:
        """What to call in place of an operator; another operator itself."""
        if call.op is FORWARD:
            return attend_by_kernel if self._has_forward(call) else attend
        if call.op is BACKWARD:
            return attend_backward_by_kernel if self._has_backward(call) else attend_backward
        return call.op

    def _has_forward(self, call: Call) -> bool:
        """True if Inductor has a kernel for it. That for the CPU gives nothing but the result."""
        if not self._by_kernel or self._program.device.type != "cpu":
            return self._by_kernel
        dtypes = {self._specs[number].dtype for number in call.operands[:3]}
        sums = any(number in self._used for number in call.numbers[1:])
        return has_cpu_template() and not sums and len(dtypes) == 1 and dtypes <= set(_CPU_DTYPES)

    def _has_backward(self, call: Call) -> bool:
        wanted = functions(str(call.args[-2]), self._program.device).wanted
        return self._by_kernel and self._program.device.type != "cpu" and call.args[5] is not None and not any(wanted)


def attend_by_kernel(query: Any, key: Any, value: Any, others: Sequence[Any], form: str, may_fail: bool) -> Any:
    """As `attend`, by Inductor's kernel."""
    del may_fail
    given = functions(form, query.device)
    sums = query.device.type != "cpu"
    options = {**given.options, "OUTPUT_LOGSUMEXP": sums, "OUTPUT_MAX": sums}
    block = given.block_mask(query, key, others)
    return attend_operator(
        query, key, value, given.score, block, given.scale, options, given.of_score(others), given.of_mask(others)
    )


def attend_backward_by_kernel(
    query: Any, key: Any, value: Any, out: Any, sums: Any, grad: Any, grad_sums: Any, others: Sequence[Any], form: str,
    may_fail: bool,
) -> list[Tensor]:  # fmt: skip
    """As `attend_backward`, by Inductor's kernel."""
    del may_fail
    given = functions(form, query.device)
    *gradients, _ = attend_operator_backward(
        query, key, value, out, sums, grad, grad_sums, given.score, given.joint, given.block_mask(query, key, others),
        given.scale, given.options, given.of_score(others), given.of_mask(others),
    )  # fmt: skip
    return list(gradients)
