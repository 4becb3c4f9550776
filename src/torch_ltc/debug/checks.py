"""The finders, in the order in which they look at a run.

The last to be entered is the first to look: what `validate` corrects is what `nan` sees, and `repro` still has the
inputs when either of them fails.
"""

from torch_ltc.compile.hooks import around_run, backend_failed
from torch_ltc.debug.nan import NonFinite, find_nan, finder
from torch_ltc.debug.repro import dump_repro, policy
from torch_ltc.debug.validate import watch

__all__ = ["NonFinite", "dump_repro", "find_nan"]

for _check in (policy.watch, finder.watch, watch):
    around_run.add(_check)
backend_failed.add(policy.failed)
