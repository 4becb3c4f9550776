"""PyTorch's own database of operators: which there are, and in which groups the coverage table counts them.

Imported by worker processes alone: it brings in PyTorch's test modules, which take seconds and need other packages.
"""

from __future__ import annotations

import fnmatch
import warnings
from typing import Any

import torch

from torch_ltc.errors import LtcError
from torch_ltc.testing.records import DTYPES, Operator

try:
    # PyTorch's test modules warn about optional packages when they are imported.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import numpy

        from torch_ltc.pytorch.operator_database import module_db, op_db
except ModuleNotFoundError as error:
    raise LtcError(
        f"PyTorch's database of operators needs the package {error.name!r}",
        hint="pip install 'torch-ltc[test]', or test the semantics alone: --semantics-only",
    ) from error

_GROUPS = (
    ("nn.functional", "nn.functional.*"),
    ("special", "special.*"),
    ("fft", "fft.* stft istft"),
    ("masked", "masked.*"),
    ("signal", "signal.*"),
    ("random", "bernoulli cauchy exponential geometric log_normal multinomial normal* rand* uniform"),
    (
        "linear algebra",
        "linalg.* *mm *mm.* *mv *bmm addr cholesky* cross dot vdot einsum geqrf inner kron lu* matmul __rmatmul__ "
        "matrix_exp norm* ormqr outer pinverse qr svd* pca_lowrank tensordot trace triangular_solve logdet "
        "torch._scaled*",
    ),
    (
        "indexing",
        "index_* __getitem__ gather scatter* take* put masked_* where nonzero* argwhere _unsafe_masked* searchsorted "
        "bucketize *_scatter topk sort msort argsort kthvalue unique* isin histo* histc bincount",
    ),
)
"""Groups by name, first match; what none of them names goes by its class in the database."""
_GROUP_OF_CLASS = {
    "UnaryUfuncInfo": "unary",
    "BinaryUfuncInfo": "binary",
    "ReductionOpInfo": "reductions",
}
OTHERS = "views, shapes, others"

OPERATORS: dict[str, Any] = {op.full_name: op for op in op_db}
MODULES: list[Any] = list(module_db)


def supported() -> list[Operator]:
    """The operators in the order of the database."""
    return [
        Operator(name, _group_of(op), tuple(each for each in DTYPES if op.supports_dtype(getattr(torch, each), "cpu")))
        for name, op in OPERATORS.items()
    ]


def seeded(name: str) -> Any:
    """The operator of this name, about to make the same samples whatever was made before."""
    numpy.random.seed(0)
    return OPERATORS[name]


def _group_of(op: Any) -> str:
    for group, patterns in _GROUPS:
        if any(fnmatch.fnmatchcase(op.full_name, pattern) for pattern in patterns.split()):
            return group
    return _GROUP_OF_CLASS.get(type(op).__name__, OTHERS)
