"""What the usual calls return, said by rules in microseconds: PyTorch's meta kernels take hundreds of them.

A rule answers only when it is sure. Whatever is unusual (empty or conjugated operands, mixed devices, wrong arguments)
it leaves to `shapes/inference.py`, which asks PyTorch itself and raises what eager would raise. An answer is exactly what
that inference would give.
"""

from torch_ltc.shapes.rules import (
    copies,
    layers,
    lists,
    matrices,
    movement,
    pointwise,
    reductions,
    views,
)
from torch_ltc.shapes.table import Rule, quick, rule_of, rules

__all__ = [
    "Rule",
    "copies",
    "layers",
    "lists",
    "matrices",
    "movement",
    "pointwise",
    "quick",
    "reductions",
    "rule_of",
    "rules",
    "views",
]
