"""Whether operators give the same bits for a number and for a tensor without dimensions that holds it.

    python -m benchmarks.number_overloads

A captured program could read a changing number from device memory where they do. Prints a table for the GPU, or for the
CPU where there is none: there a tensor without dimensions is taken for a number, which a GPU does only for one on the
host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

VALUES = (0.1, 1e-3, 0.999, -0.0316, 1 / 3, 7e-9, 1.2345e5)
SIZE = 4099
_aten = torch.ops.aten
# The call of an optimizer with a number, and the overload that takes a tensor in its place.
OPERATORS: dict[str, Callable[[Tensor, Tensor, Tensor, Any], Tensor]] = {
    "mul": lambda x, y, z, v: x * v,
    "div": lambda x, y, z, v: x / v,
    "add": lambda x, y, z, v: x + v,
    "sub": lambda x, y, z, v: x - v,
    "lerp": lambda x, y, z, v: torch.lerp(x, y, v),
    "add, alpha": lambda x, y, z, v: torch.add(x, y, alpha=v) if isinstance(v, float) else x + y * v,
    "addcmul, value": lambda x, y, z, v: torch.addcmul(x, y, z, value=v) if isinstance(v, float) else x + v * y * z,
    "addcdiv, value": lambda x, y, z, v: torch.addcdiv(x, y, z, value=v) if isinstance(v, float) else x + v * y / z,
    "_foreach_mul": lambda x, y, z, v: _aten._foreach_mul([x, y], v)[0],
    "_foreach_add": lambda x, y, z, v: _aten._foreach_add([x, y], v)[0],
    "_foreach_div": lambda x, y, z, v: _aten._foreach_div([x, y], v)[0],
}


def same(operator: Callable[..., Tensor], operands: list[Tensor], dtype: torch.dtype) -> str:
    """ "equal", how many elements differ at most, or the error."""
    most = 0
    for value in VALUES:
        number = torch.tensor(value, dtype=dtype, device=operands[0].device)
        expected = operator(*operands, value)
        try:
            got = operator(*operands, number)
        except (RuntimeError, TypeError) as error:
            return type(error).__name__
        if got.dtype is not expected.dtype:
            return f"gives {got.dtype}"
        most = max(most, int((got != expected).sum()))
    return f"{most} of {SIZE} differ" if most else "equal"


def main() -> None:
    """Print the table."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    kinds = (torch.float32, torch.float64)
    print(f"| {device}: operator | tensors | number as float32 | number as float64 |\n|---|---|---|---|")
    for name, operator in OPERATORS.items():
        for dtype in (torch.float32, torch.bfloat16):
            torch.manual_seed(0)
            operands = [t.to(dtype).to(device) for t in (torch.randn(SIZE), torch.randn(SIZE), torch.rand(SIZE) + 0.1)]
            cells = " | ".join(same(operator, operands, kind) for kind in kinds)
            print(f"| {name} | {str(dtype).removeprefix('torch.')} | {cells} |")


if __name__ == "__main__":
    main()
