"""Seeing inside: what was recorded, why it was compiled, where the program waited.

Everything here reads what `events` tells and what the runtime keeps; nothing here is needed to run a program.
"""

from torch_ltc.debug.dump import compilations, dump_ir, dump_passes, program_form, render_ir_graph

__all__ = ["compilations", "dump_ir", "dump_passes", "program_form", "render_ir_graph"]
