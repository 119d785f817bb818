"""What is freed one by one: all that is held by nobody else, and nothing of what is."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from anabranch.runtime.freeing import free_one_by_one


@dataclass(slots=True, weakref_slot=True)
class Node:
    """A node of a tree."""

    name: str
    within: list[Any] = field(default_factory=list)
    by_name: Mapping[str, Any] | None = None
    others: tuple[Any, ...] = ()


def test_all_is_freed_that_nobody_else_holds() -> None:
    leaf, kept = Node("leaf"), Node("kept", [Node("below what is kept")])
    tree = Node("root", [[leaf], Node("b")], {"c": Node("c"), "kept": kept}, ((Node("d"), frozenset(["e"])), kept))
    gone = [weakref.ref(each) for each in (leaf, tree, tree.within[1], tree.by_name["c"], tree.others[0][0])]  # type: ignore[index]
    held: list[object] = [tree, "text", 7, None, Node, sys]
    del leaf, tree
    free_one_by_one(held)
    assert held == []
    assert [it() for it in gone] == [None] * 5
    assert kept.within[0].name == "below what is kept"
    assert sys.modules["sys"] is sys


def test_what_holds_itself_does_not_last() -> None:
    node = Node("a")
    node.within.append(node)
    held: list[object] = [node]
    del node
    free_one_by_one(held)
    assert held == []


def test_no_object_is_freed_with_many_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter frees what a list holds in one go: another thread has no turn between the first and the last."""
    turns: list[int] = []
    done = threading.Event()

    class Counted:
        __slots__ = ("below",)

        def __init__(self, below: list[object]) -> None:
            self.below = below

    def turn() -> None:
        while not done.is_set():
            turns.append(len(held))
            time.sleep(0)

    held: list[object] = [[Counted([str(number)]) for number in range(200_000)]]
    beside = threading.Thread(target=turn)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        beside.start()
        free_one_by_one(held)
    finally:
        done.set()
        beside.join()
        sys.setswitchinterval(before)
    assert len({length for length in turns if 0 < length < 200_000}) > 3
