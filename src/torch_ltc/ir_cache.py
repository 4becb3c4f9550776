"""The prefix tree of programs, under the names of `torch._lazy.ir_cache`."""

from __future__ import annotations

from torch_ltc.compile.program_cache import executables
from torch_ltc.compile.specialization_cache import specializations
from torch_ltc.events import SyncReason
from torch_ltc.execute.graph_cache import graph_cache
from torch_ltc.execute.sync import cut
from torch_ltc.program.instruction import Call
from torch_ltc.record.recorder import recorder


def dump(dot_file_name: str) -> None:
    """Write the tree as a dot graph: a node per known instruction."""
    with recorder.lock:
        nodes = list(recorder.tree.nodes())
    names = {id(node): i for i, node in enumerate(nodes, 1)}
    lines = ['  0 [label="root"]']
    for node in nodes:
        label = node.instruction.name if isinstance(node.instruction, Call) else "input"
        lines.append(f'  {names[id(node)]} [label="{label}, {len(node.programs)} programs"]')
        lines.append(f"  {names.get(id(node.parent), 0)} -> {names[id(node)]}")
    with open(dot_file_name, "w", encoding="utf-8") as file:
        file.write("digraph G {\n" + "\n".join(lines) + "\n}\n")


def reset() -> None:
    """Sync, then forget every known program and everything compiled."""
    cut(SyncReason.EXPLICIT, then=_forget)


def _forget() -> None:
    recorder.tree.clear()
    recorder.reset()
    executables.clear()
    graph_cache.clear()
    specializations.clear()
