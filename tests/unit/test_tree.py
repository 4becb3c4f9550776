"""The prefix tree: exact keys, paths, pruning."""

from __future__ import annotations

import pytest
import torch

from torch_ltc.program.instruction import Input
from torch_ltc.program.spec import make_spec
from torch_ltc.program.tree import Node, Tree
from torch_ltc.source import UNKNOWN

SPEC = make_spec(torch.float32, (2,), (1,))


def instruction(number: int = 0) -> Input:
    return Input(0, SPEC, number, UNKNOWN)


def grow(tree: Tree, *keys: object, program: bool = True) -> Node:
    """Walk from the root along `keys`, adding what is missing; mark the end as a program."""
    node = tree.root
    for key in keys:
        node = tree.find(node, (key,)) or tree.add(Node((key,), node, instruction()))
    if program:
        tree.keep_program(node, (), object())
        tree.touch(node)
    return node


class SameHash:
    """Keys that all fall into one bucket."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameHash) and self.name == other.name


def test_a_path_is_found_again_and_not_added_twice() -> None:
    tree = Tree()
    end = grow(tree, "a", "b", "c")
    assert grow(tree, "a", "b", "c") is end
    assert tree.size == 4
    assert tree.forks == 0
    assert [node.key for node in tree.path(end)] == [("a",), ("b",), ("c",)]
    assert end.depth == 3


def test_keys_with_equal_hashes_are_told_apart() -> None:
    tree = Tree()
    first, second = grow(tree, SameHash("a")), grow(tree, SameHash("b"))
    assert first is not second
    assert tree.find(tree.root, (SameHash("a"),)) is first
    assert tree.find(tree.root, (SameHash("b"),)) is second
    assert tree.find(tree.root, (SameHash("c"),)) is None


def test_the_child_expected_next_is_the_one_that_came_last() -> None:
    tree = Tree()
    start = grow(tree, "start")
    a, b = grow(tree, "start", "a"), grow(tree, "start", "b")
    assert start.next is b
    assert tree.find(start, ("a",)) is a
    assert start.next is a
    assert tree.find(start, ("x",)) is None
    assert start.next is a


def test_nothing_is_expected_after_the_root() -> None:
    tree = Tree()
    nothing = tree.root.next
    a = grow(tree, "a")
    assert tree.find(tree.root, ("a",)) is a
    assert tree.root.next is nothing


def test_a_fresh_node_expects_nothing() -> None:
    node = grow(Tree(), "a")
    assert node.next.key != ()
    assert node.next.key != ("a",)
    assert node.next.next is node.next


def test_forks_are_counted() -> None:
    tree = Tree()
    grow(tree, "a", "b")
    grow(tree, "a", "c")
    grow(tree, "d")
    assert tree.forks == 2


def test_pruning_keeps_the_most_recent_programs_and_their_whole_paths() -> None:
    tree = Tree()
    old, middle, new = grow(tree, 1, 2, 3), grow(tree, 1, 2, 4), grow(tree, 5, 6)
    dropped: list[Node] = []
    tree.prune(4, dropped.append)
    kept = set(tree.nodes())
    assert new in kept
    assert middle not in kept, "its path of three does not fit beside the two that are kept"
    assert old not in kept
    assert tree.size == 1 + len(kept) == 3
    assert old in dropped
    tree = Tree()
    old, middle, new = grow(tree, 1, 2, 3), grow(tree, 1, 2, 4), grow(tree, 5, 6)
    tree.prune(5, dropped.append)
    assert {middle, new} <= set(tree.nodes())
    assert old not in set(tree.nodes())
    assert [node.key for node in tree.path(middle)] == [(1,), (2,), (4,)]


def test_using_a_program_again_saves_it_from_pruning() -> None:
    tree = Tree()
    start = grow(tree, 0)
    first, second = grow(tree, 0, 1), grow(tree, 0, 2)
    tree.touch(first)
    tree.prune(2, lambda node: None)
    assert list(tree.nodes()) == [start, first]
    assert start.next is not second
    assert tree.find(start, (2,)) is None
    assert second.parent is None


def test_paths_that_never_became_programs_are_pruned() -> None:
    tree = Tree()
    grow(tree, 1, 2, program=False)
    end = grow(tree, 3)
    tree.prune(10, lambda node: None)
    assert list(tree.nodes()) == [end]
    assert tree.size == 2


def test_pruned_paths_can_be_recorded_again() -> None:
    tree = Tree()
    grow(tree, 1, 2, 3)
    tree.prune(0, lambda node: None)
    assert tree.size == 1
    assert grow(tree, 1, 2, 3).depth == 3
    assert tree.size == 4


def test_each_state_of_the_switches_has_paths_of_its_own_and_all_are_pruned_together() -> None:
    tree = Tree()
    first = grow(tree, 1, 2)
    tree.select("other")
    assert tree.find(tree.root, (1,)) is None
    second = grow(tree, 1, 3)
    tree.select(None)
    assert tree.find(tree.root, (1,)) is first.parent
    assert len(list(tree.nodes())) == 4
    assert tree.size == 5
    tree.prune(2, lambda node: None)
    assert tree.size == 3
    assert tree.find(tree.root, (1,)) is None
    tree.select("other")
    assert tree.find(tree.root, (1,)) is second.parent
    tree.touch(second)
    tree.select(None)
    tree.prune(0, lambda node: None)
    assert list(tree.nodes()) == []
    assert len(tree._roots) == 1, "a state without programs is not kept"


def test_clearing_leaves_the_present_state_alone() -> None:
    tree = Tree()
    grow(tree, 1)
    tree.select("other")
    grow(tree, 2)
    tree.clear()
    assert tree.size == 1
    assert tree.find(tree.root, (2,)) is None
    grow(tree, 3)
    tree.select(None)
    assert tree.find(tree.root, (1,)) is None
    assert tree.find(tree.root, (3,)) is None
    tree.select("other")
    assert tree.find(tree.root, (3,)) is not None


@pytest.mark.parametrize("drop", ["prune", "clear"])
def test_a_long_path_is_walked_and_dropped_without_recursion(drop: str) -> None:
    tree = Tree()
    end = grow(tree, *range(50_000))
    assert len(tree.path(end)) == 50_000
    assert sum(1 for _ in tree.nodes()) == 50_000
    del end
    if drop == "prune":
        tree.prune(10, lambda node: None)
    else:
        tree.clear()
    assert tree.size == 1
    assert list(tree.nodes()) == []
