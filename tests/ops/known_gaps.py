"""The cases of the operator sweep that are known to differ from eager, each with the reason.

The key is (operator with its variant, dtype or None for all, backend or None for both, what differs: a value of
`tests.ops.records.What`). A gap that no longer shows in a full run is an error: remove its line.
"""

Gap = tuple[str, str | None, str | None, str]

_SPARSE = (
    "a sparse tensor lives on the physical device, and autograd refuses its gradient for a tensor of another device"
)

KNOWN_GAPS: dict[Gap, str] = {
    ("to_sparse", None, None, "raises"): _SPARSE,
    ("sparse.sampled_addmm", None, None, "raises"): _SPARSE,
    ("normal", "float32", None, "silent"): "eager refuses an empty out= target here, where other operators resize it",
    ("normal", "bfloat16", None, "silent"): "eager refuses an empty out= target here, where other operators resize it",
    ("tensordot", "bfloat16", None, "stride"): (
        "mul of two tensors whose strides are ambiguous (a size of 1): the CPU kernel and the meta kernel break the "
        "tie in different ways"
    ),
}


def gap_for(operator: str, dtype: str, backend: str, what: str) -> Gap | None:
    """The entry that covers a failure, if there is one."""
    for wanted_dtype in (dtype, None):
        for wanted_backend in (backend, None):
            gap = (operator, wanted_dtype, wanted_backend, what)
            if gap in KNOWN_GAPS:
                return gap
    return None
