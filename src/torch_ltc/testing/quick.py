"""The fixed part of the operator sweep that a quick run takes: a few of each kind, the ones that models are made of."""

from __future__ import annotations

QUICK_DTYPES = ("float32", "int64")
QUICK_SAMPLES = 2
_NAMES = """
abs exp neg reciprocal sigmoid tanh to clone
add mul sub div.no_rounding_mode pow maximum where lerp clamp
eq lt logical_and bitwise_and floor_divide remainder
sum mean amax argmax var any cumsum norm
matmul mm bmm addmm linalg.inv
cat stack split permute reshape expand transpose select slice flip
index_select gather scatter_add index_put masked_fill sort topk __getitem__
zeros_like full_like arange
nn.functional.conv2d nn.functional.linear nn.functional.relu nn.functional.gelu softmax
nn.functional.layer_norm nn.functional.batch_norm nn.functional.embedding nn.functional.cross_entropy
nn.functional.dropout nn.functional.max_pool2d nn.functional.pad.constant
"""
QUICK_OPERATORS = frozenset(_NAMES.split())
