"""Whom a change wakes of the fetches that wait for slices of a partition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.slice_waits import SliceWaits, Waiter


class Watched:
    """A partition that tells of its changes."""

    def __init__(self) -> None:
        self.watchers: dict[Callable[[], None], None] = {}

    def watch(self, watcher: Callable[[], None]) -> None:
        self.watchers[watcher] = None

    def unwatch(self, watcher: Callable[[], None]) -> None:
        del self.watchers[watcher]

    def append(self) -> None:
        for watcher in list(self.watchers):
            watcher()


class World:
    """Waiting fetches of one group."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.waits = SliceWaits()
        self.first, self.second = Watched(), Watched()
        self.parked: dict[str, tuple[Waiter, asyncio.Future[None]]] = {}

    def park(self, name: str, *partitions: Watched, began: int | None = None) -> None:
        done = self.loop.create_future()
        began = self.waits.changes if began is None else began
        waiter = Waiter(name, cast("list[Partition]", partitions or [self.first]), began, done)
        self.parked[name] = waiter, done
        self.waits.park("g", waiter)

    def woken(self) -> list[str]:
        return [name for name, (_, done) in self.parked.items() if done.done()]

    def leave(self, name: str) -> None:
        self.waits.leave("g", self.parked.pop(name)[0])

    def pass_on(self, partition: Watched) -> None:
        self.waits.pass_on("g", [cast(Partition, partition)])


@pytest.fixture
def world() -> Iterator[World]:
    loop = asyncio.new_event_loop()
    yield World(loop)
    loop.close()


def test_a_change_wakes_the_one_that_waits_for_the_longest_time_and_the_next_change_the_next_one(world: World) -> None:
    for name in "abc":
        world.park(name)
    world.first.append()
    assert world.woken() == ["a"]
    world.first.append()
    assert world.woken() == ["a", "b"]
    world.leave("a")
    world.park("a")
    world.first.append()
    assert world.woken() == ["b", "c"], "who has just looked is the last"


def test_what_is_passed_on_wakes_each_once_that_has_not_looked_since(world: World) -> None:
    for name in "abc":
        world.park(name)
    world.first.append()
    for name in "abc":
        assert world.woken() == [name]
        began = world.waits.changes
        world.leave(name)
        world.pass_on(world.first)
        world.park(name, began=began)
    assert world.woken() == [], "all have looked"


def test_what_is_left_wakes_one_that_has_looked_already(world: World) -> None:
    world.park("a")
    world.waits.changed("g", cast(Partition, world.first))
    assert world.woken() == ["a"]


def test_one_whose_request_is_cancelled_is_passed_over(world: World) -> None:
    for name in "ab":
        world.park(name)
    world.parked["a"][1].cancel()
    world.first.append()
    assert world.parked["b"][1].done() and not world.parked["b"][1].cancelled()


def test_a_fetch_of_several_partitions_waits_for_all_and_leaves_no_watcher(world: World) -> None:
    world.park("a", world.first, world.second, world.second)
    world.park("b", world.second)
    world.second.append()
    assert world.woken() == ["a"]
    world.leave("a")
    assert not world.first.watchers and len(world.second.watchers) == 1
    world.waits.freed("g")
    assert world.woken() == ["b"]
    world.leave("b")
    assert not world.second.watchers
    world.waits.freed("g")


def test_a_member_that_ends_its_session_waits_no_more(world: World) -> None:
    for name in "abc":
        world.park(name)
    world.waits.end("g", "b", cast(Partition, world.first))
    assert world.woken() == ["b"] and world.parked["b"][0].has_ended
    assert not world.parked["a"][0].has_ended


def test_a_fetch_that_began_its_look_before_a_change_and_waits_after_it_is_woken_at_once(world: World) -> None:
    world.park("a")
    began = world.waits.changes
    world.first.append()
    world.park("b", world.second, world.first, began=began)
    assert world.woken() == ["a", "b"]
    world.park("c")
    assert world.woken() == ["a", "b"], "it began its look after the change"
