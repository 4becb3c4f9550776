"""The cases of the operator sweep that are known to differ from eager, each with the reason.

The key is (operator with its variant, dtype or None for all, backend or None for both, what differs: a value of
`tests.ops.records.What`). A gap that no longer shows in a full run is an error: remove its line.
"""

Gap = tuple[str, str | None, str | None, str]

KNOWN_GAPS: dict[Gap, str] = {}


def gap_for(operator: str, dtype: str, backend: str, what: str) -> Gap | None:
    """The entry that covers a failure, if there is one."""
    for wanted_dtype in (dtype, None):
        for wanted_backend in (backend, None):
            gap = (operator, wanted_dtype, wanted_backend, what)
            if gap in KNOWN_GAPS:
                return gap
    return None
