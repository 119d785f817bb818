"""Keyed timers, on a loop whose time is virtual and on the real ones."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Hashable
from contextvars import Context
from typing import TypeVarTuple

import pytest
import uvloop

from anabranch.runtime import timers as timers_module
from anabranch.runtime.clock import Clock, SteadyTime
from anabranch.runtime.timers import Timers
from tests.simulation.virtual_time import VirtualLoop

Ts = TypeVarTuple("Ts")


class CountingLoop(VirtualLoop):
    """An event loop on virtual time that counts the timers it is given."""

    def __init__(self) -> None:
        self.scheduled = 0
        super().__init__(seed=1)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self.scheduled += 1
        return super().call_at(when, callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self.scheduled += 1
        return super().call_later(delay, callback, *args, context=context)

    def clock_ms(self) -> int:
        return round(self.time() * 1000)


class World:
    """Timers on a virtual loop, and what came due: (milliseconds since the start, key)."""

    def __init__(self, loop: CountingLoop) -> None:
        self.loop = loop
        self.began_ms = loop.clock_ms()
        self.due: list[tuple[int, Hashable]] = []
        self.on_due: Callable[[Hashable], None] = lambda key: None
        self.timers = Timers(loop.clock_ms, self._note)

    def _note(self, key: Hashable) -> None:
        self.due.append((self.loop.clock_ms() - self.began_ms, key))
        self.on_due(key)

    def set(self, key: Hashable, delay_ms: int) -> None:
        self.timers.set(key, self.loop.clock_ms() + delay_ms)


def play(story: Callable[[World], list[tuple[int, Callable[[], None]]]]) -> World:
    """Do each act of a story at its time, and let an hour pass after the last."""

    async def run() -> World:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, CountingLoop)
        world = World(loop)
        for at_ms, act in story(world):
            await asyncio.sleep((at_ms - (loop.clock_ms() - world.began_ms)) / 1000)
            act()
        await asyncio.sleep(3_600)
        return world

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        return runner.run(run())


def test_a_timer_comes_due_once_at_its_time() -> None:
    world = play(lambda world: [(0, lambda: world.set("a", 500)), (100, lambda: world.set("b", 100))])
    assert world.due == [(200, "b"), (500, "a")]
    assert len(world.timers) == 0


def test_a_time_that_has_passed_is_due_at_the_next_turn_of_the_loop() -> None:
    world = play(lambda world: [(10, lambda: world.set("late", -7))])
    assert world.due == [(10, "late")]


def test_a_timer_set_again_comes_due_at_the_new_time_only() -> None:
    def story(world: World) -> list[tuple[int, Callable[[], None]]]:
        return [
            (0, lambda: world.set("later", 500)),
            (0, lambda: world.set("earlier", 500)),
            (100, lambda: world.set("later", 600)),
            (100, lambda: world.set("earlier", 50)),
            (120, lambda: world.set("earlier", 80)),
        ]

    assert play(story).due == [(200, "earlier"), (700, "later")]


def test_a_timer_that_is_moved_later_many_times_is_not_scheduled_each_time() -> None:
    def story(world: World) -> list[tuple[int, Callable[[], None]]]:
        def prolong() -> None:
            before = world.loop.scheduled
            for delay_ms in range(1_000, 2_001):
                world.set("session", delay_ms)
            assert world.loop.scheduled == before + 1

        return [(0, prolong)]

    assert play(story).due == [(2_000, "session")]


def test_a_cancelled_timer_does_not_come_due_and_an_unknown_one_may_be_cancelled() -> None:
    def story(world: World) -> list[tuple[int, Callable[[], None]]]:
        return [
            (0, lambda: world.set("a", 100)),
            (0, lambda: world.set("b", 100)),
            (50, lambda: world.timers.cancel("a")),
            (50, lambda: world.timers.cancel("never set")),
        ]

    assert play(story).due == [(100, "b")]


def test_all_timers_are_cancelled_at_once_and_may_be_set_again() -> None:
    def story(world: World) -> list[tuple[int, Callable[[], None]]]:
        return [
            (0, lambda: world.set("a", 100)),
            (0, lambda: world.set("b", 100)),
            (50, world.timers.cancel_all),
            (60, lambda: world.set("a", 100)),
        ]

    assert play(story).due == [(160, "a")]


def test_a_timer_may_be_set_again_and_others_cancelled_while_it_comes_due() -> None:
    def story(world: World) -> list[tuple[int, Callable[[], None]]]:
        def on_due(key: Hashable) -> None:
            world.timers.cancel("b")
            if len(world.due) < 3:
                world.set(key, 100)

        world.on_due = on_due
        return [(0, lambda: world.set("a", 100)), (0, lambda: world.set("b", 101))]

    assert play(story).due == [(100, "a"), (200, "a"), (300, "a")]


def test_a_loop_that_wakes_before_the_clock_has_reached_the_time_waits_on() -> None:
    async def run() -> None:
        loop, due = asyncio.get_running_loop(), asyncio.Event()
        assert isinstance(loop, CountingLoop)
        began = loop.clock_ms()
        slow = Timers(lambda: began + (loop.clock_ms() - began) // 2, lambda key: due.set())
        slow.set("a", began + 1_000)
        await due.wait()
        assert 2_000 <= loop.clock_ms() - began <= 2_010

    with asyncio.Runner(loop_factory=CountingLoop) as runner:
        runner.run(run())


def stand_still(seconds: float) -> None:
    """Do nothing, as a process that is stopped."""
    time.sleep(seconds)


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_what_arrived_while_the_loop_stood_still_is_read_before_a_timer_is_due(
    factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers_module, "STANDSTILL_S", 0.1)
    monkeypatch.setattr(timers_module, "AFTER_STANDSTILL_S", 0.2)

    async def run() -> None:
        clock, due = SteadyTime(Clock()), []
        timers = Timers(clock.now_ms, due.append)
        began = clock.now_ms()
        reader, writer = socket.socketpair()
        reader.setblocking(False)
        with reader, writer:
            asyncio.get_running_loop().add_reader(reader, lambda: timers.set(reader.recv(1), began + 3_600_000))
            for key in (b"a", b"b", b"c"):
                timers.set(key, began + 50)
            timers.set(b"later", began + 450)
            writer.send(b"b")
            stand_still(0.4)
            await asyncio.sleep(0.05)
            assert due == []
            writer.send(b"a")
            async with asyncio.timeout(10):  # The process may be made to stand still again: it has the lowest priority.
                while len(due) < 2:
                    await asyncio.sleep(0.05)
            assert {*due} == {b"c", b"later"}, "the others were told of in time"
            timers.cancel_all()
            asyncio.get_running_loop().remove_reader(reader)

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())


@pytest.mark.parametrize("factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_timers_run_on_the_loops_that_ship(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        clock, due = SteadyTime(Clock()), asyncio.Event()
        timers = Timers(clock.now_ms, lambda key: due.set())
        for delay_ms in (5, 0, -5):  # A loop may take what is due at once for no timer.
            at_ms = clock.now_ms() + delay_ms
            timers.set("a", at_ms)
            async with asyncio.timeout(30):
                await due.wait()
            assert clock.now_ms() >= at_ms
            due.clear()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(run())
