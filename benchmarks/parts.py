"""What one recorded addition is made of: the same chain of additions with kernels that do less and less.

Each row adds one thing to the row above it; the last is the kernel as it is.

    python -m benchmarks.parts
"""

from __future__ import annotations

import statistics
import time
from types import FunctionType
from typing import Any

import torch

import torch_ltc
from torch_ltc.device import kernels

CHAIN = 200
ROUNDS = 150
_HEAD = "def kernel(a, b, *, alpha=1):\n"
_MADE = "    made = create((16,), float32)\n"
_GUARDED = _MADE + "    refuse(made)\n"
_STORED = _GUARDED + "    storage_of(made).handle = buffer = Buffer()\n    buffer.number = 7\n    buffer.spec = None\n"
PARTS = {
    "the dispatcher calls Python and gets a tensor back": "    return ready\n",
    "a new device tensor": _MADE + "    return made\n",
    "reading its data pointer raises": _GUARDED + "    return made\n",
    "its buffer, on the storage": _STORED + "    return made\n",
    "its value number": _STORED + "    made._ltc = 7\n    return made\n",
}


def _time_us(x: torch.Tensor) -> float:
    """Microseconds per addition: the quartile of the faster rounds."""
    spans = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        y = x
        for _ in range(CHAIN):
            y = y + x
        spans.append((time.perf_counter() - began) / CHAIN * 1e6)
        del y
        torch_ltc.sync(wait=True)
    return statistics.quantiles(spans, n=4)[0]


def measure() -> dict[str, float]:
    """Each part with what a chain costs per addition up to it."""
    torch_ltc.use_backend("null")
    x = torch.ones(16).to("ltc")
    whole = _time_us(x)
    stub: FunctionType = kernels._stubs["aten::add.Tensor"][0]
    ready = x + x
    torch_ltc.sync(wait=True)
    stub.__globals__.update(ready=ready, float32=torch.float32)
    kept = stub.__code__
    found: dict[str, float] = {}
    for name, body in PARTS.items():
        namespace: dict[str, Any] = {}
        exec(_HEAD + body, namespace)
        stub.__code__ = namespace["kernel"].__code__
        found[name] = _time_us(x)
    stub.__code__ = kept
    found["operands, key and step down the tree"] = whole
    return found


def main() -> None:
    """Print the table."""
    before = 0.0
    print(f"{'us':>6} {'more':>6}")
    for name, value in measure().items():
        print(f"{value:6.2f} {value - before:+6.2f}  {name}")
        before = value


if __name__ == "__main__":
    main()
