"""Inspection of the running process: recorded programs, causes of compilations, waits, NaN, wrong results.

Everything here reads events and what the runtime caches; nothing here is needed to run a program.
"""

from torch_ltc.compile.hooks import around_run as _around_run
from torch_ltc.compile.hooks import backend_failed as _backend_failed
from torch_ltc.debug.causes import recompiled as _recompiled
from torch_ltc.debug.dump import compilations, diff, dump_ir, dump_passes, program_form, render_ir_graph
from torch_ltc.debug.entry_points import profile, sync_ledger
from torch_ltc.debug.history import history as _history
from torch_ltc.debug.history import recompiled as _recompiled_hook
from torch_ltc.debug.invariants import invariants as _invariants
from torch_ltc.debug.nan import NonFinite, find_nan
from torch_ltc.debug.nan import finder as _finder
from torch_ltc.debug.repro import dump_repro
from torch_ltc.debug.repro import policy as _policy
from torch_ltc.debug.timeline import export_trace
from torch_ltc.debug.validate import watch as _validate

__all__ = [
    "NonFinite",
    "compilations",
    "diff",
    "dump_ir",
    "dump_passes",
    "dump_repro",
    "export_trace",
    "find_nan",
    "profile",
    "program_form",
    "render_ir_graph",
    "sync_ledger",
]

_history.listen()
_invariants.apply_setting()
_recompiled_hook.add(_recompiled)
# The last to be entered is the first to look at a run: what `validate` corrects is what `nan` sees, and `repro` still
# has the inputs when either of them fails.
for _check in (_policy.watch, _finder.watch, _validate):
    _around_run.add(_check)
_backend_failed.add(_policy.failed)
