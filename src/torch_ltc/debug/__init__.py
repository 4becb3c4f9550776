"""Seeing inside: what was recorded, why it was compiled, where the program waited.

Everything here reads what `events` tells and what the runtime keeps; nothing here is needed to run a program.
"""

from torch_ltc.debug.dump import compilations, diff, dump_ir, dump_passes, program_form, render_ir_graph
from torch_ltc.debug.explain import Text, explain
from torch_ltc.debug.finders import NonFinite, dump_repro, find_nan
from torch_ltc.debug.history import history
from torch_ltc.debug.ledger import ledger_text
from torch_ltc.debug.profiler import profile
from torch_ltc.debug.recompiles import recompiled
from torch_ltc.debug.timeline import export_trace

__all__ = [
    "NonFinite",
    "compilations",
    "diff",
    "dump_ir",
    "dump_passes",
    "dump_repro",
    "explain",
    "export_trace",
    "find_nan",
    "history",
    "profile",
    "program_form",
    "render_ir_graph",
    "sync_ledger",
]


def sync_ledger() -> Text:
    """Each line that synced or read in this process, why, how often, and how long it waited there."""
    return Text(ledger_text(history.recording(texts=False)))


history.listen()
history.on_recompile.append(recompiled)
