"""The prefix tree: every program ever recorded is a path from the root, of which there is one for each state of
PyTorch's global switches.

Recording compares one small tuple with the child that came next last time. Keys are compared in full, always; a hash
only finds the bucket. The tree is bounded: past the bound, the branches that were used least recently are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

from torch_ltc.program.instruction import Instruction

Key = tuple[Any, ...]
# Read only.
_NO_CHILDREN: Any = MappingProxyType({})
_NO_PROGRAMS: Any = MappingProxyType({})


class Node:
    """One position in the tree: the instruction that leads here and what may follow.

    `size` and `dtype` repeat those of a single contiguous fresh result, so that the hot path reads two slots;
    `plan` says how to make other common results: see `record/result_specs.py`.
    `programs` maps the set of live outputs to what the runtime keeps for a program that was cut here.
    `native` is the node in C++, for a node that was `known` when recording came here: see `record/native_nodes.py`.
    """

    # A plain slots class: one is built per new instruction, and the hot path reads its slots.
    __slots__ = (
        "key",
        "parent",
        "children",
        "next",
        "depth",
        "instruction",
        "made",
        "size",
        "dtype",
        "spec",
        "plan",
        "checked",
        "programs",
        "last_used",
        "known",
        "located",
        "native",
    )

    def __init__(self, key: Key, parent: Node | None, instruction: Instruction | None) -> None:
        self.key = key
        self.parent = parent
        # Shared until there is a first one: most nodes are made once, and each dictionary is work for the collector.
        self.children: dict[Key, Node] = _NO_CHILDREN
        self.next: Node = _NOWHERE
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.instruction = instruction
        # How many values the instruction makes.
        self.made = 0
        self.size: Any = None
        self.dtype: Any = None
        self.spec: Any = None
        self.plan: Any = None
        # Run-time numbers that the call was tried with, while they are still looked at.
        self.checked: set[tuple[Any, ...]] | None = None
        self.programs: dict[tuple[int, ...], Any] = _NO_PROGRAMS
        self.last_used = 0
        self.known = False
        # Each recording notes its line: the call may fail.
        self.located = False
        self.native: Any = None


_NOWHERE: Any = None
_NOWHERE = Node((), None, None)
_NOWHERE.next = _NOWHERE
_NOWHERE.key = ("nowhere",)


class Tree:
    """All programs. Not locked: its user holds the recorder's lock."""

    def __init__(self) -> None:
        self.root = Node((), None, None)
        self.size = 1
        self.forks = 0
        self._clock = 0
        # Roots by the state of PyTorch's global switches, the latest last; `root` is that of the present one.
        self._roots: dict[Any, Node] = {None: self.root}

    def select(self, state: Any) -> None:
        """Make `root` that of the programs that are recorded in this state of PyTorch's global switches."""
        root = self._roots.pop(state) if state in self._roots else Node((), None, None)
        self.root = self._roots[state] = root

    def find(self, node: Node, key: Key) -> Node | None:
        """The known child of `node` with exactly this key; it becomes the one expected next."""
        child = node.children.get(key)
        # Nothing is expected after the root: the first call of a program takes the slow path, where it is timed.
        if child is not None and node is not self.root:
            node.next = child
        return child

    def add(self, child: Node) -> Node:
        """The child, which its parent has from now on. It is complete: an interrupt may come right after."""
        node, key = child.parent, child.key
        assert node is not None
        if node.children is _NO_CHILDREN:
            node.children = {key: child}
        else:
            self.forks += bool(node.children)
            node.children[key] = child
        if node is not self.root:
            node.next = child
        self.size += 1
        return child

    def keep_program(self, leaf: Node, live: tuple[int, ...], program: Any) -> None:
        """Keep a program that ends at `leaf` with these live outputs."""
        if leaf.programs is _NO_PROGRAMS:
            leaf.programs = {}
        leaf.programs[live] = program

    def touch(self, leaf: Node) -> None:
        """Mark the program that ends at `leaf` as just used."""
        self._clock += 1
        leaf.last_used = self._clock

    def path(self, leaf: Node) -> list[Node]:
        """Nodes from the first instruction to `leaf`."""
        nodes: list[Node] = []
        node: Node | None = leaf
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def nodes(self) -> Iterator[Node]:
        """Every node but the roots, in no particular order."""
        waiting = [node for root in self._roots.values() for node in root.children.values()]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def prune(self, keep: int, dropped: Callable[[Node], None]) -> None:
        """Drop least recently used programs until at most `keep` nodes are left; `dropped` sees each dropped node."""
        ends = sorted((n for n in self.nodes() if n.programs), key=lambda n: n.last_used, reverse=True)
        kept: set[int] = set()
        for end in ends:
            node: Node | None = end
            added: list[int] = []
            while node is not None and node.parent is not None and id(node) not in kept:
                added.append(id(node))
                node = node.parent
            if len(kept) + len(added) > keep:
                continue
            kept.update(added)
        for node in list(self.nodes()):
            if id(node) not in kept:
                dropped(node)
        self._sweep(kept)
        self.size = 1 + len(kept)

    def _sweep(self, kept: set[int]) -> None:
        waiting = list(self._roots.values())
        while waiting:
            node = waiting.pop()
            if node.native is not None:
                node.native.forget_children()
            for key, child in list(node.children.items()):
                if id(child) in kept:
                    waiting.append(child)
                else:
                    del node.children[key]
                    # Cut the way up, so that a dropped branch is freed by reference counts and not by the collector.
                    child.parent = None
            if node.next is not _NOWHERE and id(node.next) not in kept:
                node.next = _NOWHERE
        self._roots = {state: root for state, root in self._roots.items() if root.children or root is self.root}

    def clear(self) -> None:
        """Forget every program."""
        self._roots = {state: Node((), None, None) for state, root in self._roots.items() if root is self.root}
        self.root = next(iter(self._roots.values()))
        self.size = 1
