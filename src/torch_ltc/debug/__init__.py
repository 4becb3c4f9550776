"""Seeing inside: what was recorded, why it was compiled, where the program waited.

Everything here reads what `events` tells and what the runtime keeps; nothing here is needed to run a program.
"""

from torch_ltc.debug.checks import NonFinite, dump_repro, find_nan
from torch_ltc.debug.dump import compilations, diff, dump_ir, dump_passes, program_form, render_ir_graph
from torch_ltc.debug.entry_points import sync_ledger
from torch_ltc.debug.history import history as _history
from torch_ltc.debug.history import recompiled as _recompiled_hook
from torch_ltc.debug.profiler import profile
from torch_ltc.debug.recompiles import recompiled as _recompiled
from torch_ltc.debug.timeline import export_trace

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
_recompiled_hook.add(_recompiled)
