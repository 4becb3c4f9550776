"""Shape rules of common operators, which take microseconds: PyTorch's meta kernels in Python take hundreds of them.

A rule answers only when it is sure. Whatever is unusual (empty or conjugated operands, mixed devices, wrong arguments)
it leaves to `shapes/inference.py`, which runs PyTorch's kernels and raises what eager would raise. An answer is exactly
what the CPU kernel gives.
"""

from torch_ltc.shapes.rules import copies, layers, lists, matrices, meta_kernels, movement, pointwise, reductions
from torch_ltc.shapes.table import Rule, apply_rule, rule_of, rules

__all__ = ["Rule", "apply_rule", "rule_of", "rules"]
__all__ += ["copies", "layers", "lists", "matrices", "meta_kernels", "movement", "pointwise", "reductions"]
