"""Puts the user's file and line on nodes of a graph, as TorchScript does for code that it compiles itself.

PyTorch lets Python read where a node comes from and copy that from another node, but not set it. So there are nodes to
copy from: those of functions that TorchScript's own compiler makes of syntax trees which say that they stand on the
user's lines. They are never run.
"""

from __future__ import annotations

import linecache
import threading
from collections.abc import Iterable
from typing import Any

from torch_ltc.backends.torchscript.private import compile_syntax, syntax
from torch_ltc.lowering.gil import yield_gil
from torch_ltc.source import Source

# What TorchScript compiles it keeps until the process ends, some 2 kB a line.
_MOST_LINES = 20_000
_MOST_CHARACTERS = 200
# TorchScript's compiler holds the GIL.
_LINES_AT_ONCE = 8

Place = tuple[str, int]


class Lines:
    """Nodes that stand on lines of user code, by file and line."""

    def __init__(self, most: int = _MOST_LINES) -> None:
        self._most = most
        self._nodes: dict[Place, Any] = {}
        # A node lives as long as its graph.
        self._graphs: list[Any] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._nodes)

    def of(self, sources: Iterable[Source]) -> dict[Place, Any]:
        """A node to copy from for each of these lines. Unknown lines, and new ones past the bound, have none."""
        wanted = {(source.file, source.line): source for source in sources if source.file}
        with self._lock:
            missing = [source for place, source in wanted.items() if place not in self._nodes]
            missing = missing[: self._most - len(self._nodes)]
            for start in range(0, len(missing), _LINES_AT_ONCE):
                some = missing[start : start + _LINES_AT_ONCE]
                graph = _compiled(some)
                self._graphs.append(graph)
                self._nodes.update(
                    ((source.file, source.line), node) for source, node in zip(some, graph.nodes(), strict=True)
                )
                yield_gil()
            return {place: self._nodes[place] for place in wanted if place in self._nodes}


def _compiled(sources: list[Source]) -> Any:
    """The graph of a function with one call, and so one node, for each line."""
    ranges = [_range(source) for source in sources]
    statements: list[Any] = []
    for place in ranges:
        method = syntax.Select(_name(place), syntax.Ident(place, "alias"))
        statements.append(syntax.Assign([_name(place)], syntax.Apply(method, [], [])))
    place = ranges[0]
    statements.append(syntax.Return(place, _name(place)))
    tensor = syntax.Var(syntax.Ident(place, "Tensor"))
    parameter = syntax.Param(tensor, syntax.Ident(place, "x"), False)
    declaration = syntax.Decl(place, [parameter], None)
    definition = syntax.Def(syntax.Ident(place, "lines"), declaration, statements)
    # No name in it is left to be looked up.
    return compile_syntax("torch_ltc.lines", definition, lambda name: None, {}).graph


def _name(place: Any) -> Any:
    return syntax.Var(syntax.Ident(place, "x"))


def _range(source: Source) -> Any:
    """The whole line, without its indentation. A file that cannot be read has the name of the function instead."""
    text = linecache.getline(source.file, source.line).rstrip()[:_MOST_CHARACTERS] or source.function
    encoded = text.encode("utf-8", "replace")
    file = source.file.encode("utf-8", "replace").decode()
    factory = syntax.SourceRangeFactory(encoded.decode(), file, source.line, 0)
    # Counted in bytes.
    return factory.make_raw_range(len(encoded) - len(encoded.lstrip()), len(encoded))


lines = Lines()
