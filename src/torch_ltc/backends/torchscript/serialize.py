"""TorchScript functions as bytes: the text of their graphs, which PyTorch can read again.

What PyTorch reads is not always what it wrote. So a graph is read back and compared before its text is used.
"""

from __future__ import annotations

import re
from typing import Any

from torch_ltc.backends.torchscript.private import create_function, parse_ir
from torch_ltc.lowering.gil import yield_gil

__all__ = ["dump_function", "load_function"]

# A node without results is written with an equals sign that the reader does not take.
_NO_RESULT = re.compile(r"^( +) = (?=\w)", re.MULTILINE)
_PLAIN = "program"


def dump_function(function: Any) -> bytes | None:
    """The function as bytes; None when PyTorch would not read it back as it is."""
    graph = function.graph
    text = _NO_RESULT.sub(r"\1", graph.str(False))
    yield_gil()
    try:
        read = parse_ir(text, True)
    except RuntimeError:
        return None
    yield_gil()
    same = _same(graph, read) and len(list(graph.outputs())) == len(list(read.outputs()))
    return text.encode() if same else None


def load_function(data: bytes) -> Any:
    """The function that `dump_function` wrote. Its nodes stand on no lines of the user's."""
    graph = parse_ir(data.decode(), True)
    yield_gil()
    return create_function(_PLAIN, graph)


def _same(first: Any, second: Any) -> bool:
    """True for graphs with the same nodes, types and constants; names do not matter."""
    # By hand: PyTorch's own way to compare, by renaming and printing, holds the GIL all the time.
    names: dict[str, str] = {}
    if not _bound(list(first.inputs()), list(second.inputs()), names):
        return False
    ones, others = list(first.nodes()), list(second.nodes())
    return len(ones) == len(others) and all(
        _same_node(one, other, names) for one, other in zip(ones, others, strict=True)
    )


def _same_node(one: Any, other: Any, names: dict[str, str]) -> bool:
    yield_gil()
    if one.kind() != other.kind() or one.schema() != other.schema():
        return False
    if one.kind() == "prim::Constant" and repr(one.output().toIValue()) != repr(other.output().toIValue()):
        return False
    given = [names.get(value.debugName()) for value in one.inputs()]
    if given != [value.debugName() for value in other.inputs()]:
        return False
    return _bound(list(one.outputs()), list(other.outputs()), names)


def _bound(ones: list[Any], others: list[Any], names: dict[str, str]) -> bool:
    """Remember which value of the one graph is which of the other. False if their types differ."""
    if [str(value.type()) for value in ones] != [str(value.type()) for value in others]:
        return False
    names.update((one.debugName(), other.debugName()) for one, other in zip(ones, others, strict=True))
    return True
