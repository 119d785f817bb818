"""What follows from decisions: all of it, in steps, and the last order for each timer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from anabranch.machines.outcome import CancelTimer, ParkedReply, SetTimer
from anabranch.server.coordinators.follow_ups import AT_A_TIME, FollowUps, TimerOrder

MANY = 3 * AT_A_TIME


class Rig:
    def __init__(self) -> None:
        self.timers: dict[object, int] = {}
        self.answered: list[object] = []
        self.follow_ups = FollowUps(self._order, lambda answer: self.answered.append(answer.ticket))

    def _order(self, order: TimerOrder) -> None:
        if isinstance(order, SetTimer):
            self.timers[order.key] = order.at_ms
        else:
            self.timers.pop(order.key, None)


def play(story: Callable[[Rig], Awaitable[None]]) -> None:
    async def played() -> None:
        await story(Rig())

    asyncio.run(played())


ORDERS = [SetTimer(number, number) for number in range(MANY)]
ANSWERS = [ParkedReply(number, None) for number in range(MANY)]


def test_little_is_done_at_once_and_much_with_other_work_in_between() -> None:
    async def story(rig: Rig) -> None:
        rig.follow_ups.carry_out(ORDERS[:AT_A_TIME], ANSWERS[:AT_A_TIME])
        assert (len(rig.timers), len(rig.answered)) == (AT_A_TIME, AT_A_TIME)
        rig = Rig()
        rig.follow_ups.carry_out(ORDERS, ANSWERS)
        done = []
        while len(rig.answered) < MANY:
            done.append((len(rig.timers), len(rig.answered)))
            await asyncio.sleep(0)
        assert done == [(AT_A_TIME, AT_A_TIME), (2 * AT_A_TIME, 2 * AT_A_TIME)]
        assert rig.timers == {number: number for number in range(MANY)}
        assert rig.answered == [*range(MANY)]

    play(story)


def test_a_later_order_replaces_one_that_is_still_to_be_carried_out() -> None:
    async def story(rig: Rig) -> None:
        rig.follow_ups.carry_out(ORDERS, ())
        last = MANY - 1
        assert rig.follow_ups.holds(last) and not rig.follow_ups.holds(0)
        rig.follow_ups.carry_out([SetTimer(last, 7), CancelTimer(last - 1)], ())
        assert rig.timers[last] == 7 and not rig.follow_ups.holds(last)
        for _ in range(4):
            await asyncio.sleep(0)
        assert rig.timers[last] == 7 and last - 1 not in rig.timers
        assert len(rig.timers) == MANY - 1

    play(story)


def test_two_large_decisions_follow_each_other() -> None:
    async def story(rig: Rig) -> None:
        rig.follow_ups.carry_out(ORDERS, ANSWERS)
        rig.follow_ups.carry_out([SetTimer(number, -number) for number in range(MANY)], ())
        for _ in range(6):
            await asyncio.sleep(0)
        assert rig.timers == {number: -number for number in range(MANY)}
        assert sorted(rig.answered) == [*range(MANY)]

    play(story)


def test_a_shard_that_stops_carries_out_nothing_more() -> None:
    async def story(rig: Rig) -> None:
        rig.follow_ups.carry_out(ORDERS, ANSWERS)
        rig.follow_ups.drop()
        for _ in range(4):
            await asyncio.sleep(0)
        assert (len(rig.timers), len(rig.answered)) == (AT_A_TIME, AT_A_TIME)
        assert not rig.follow_ups.holds(MANY - 1)

    play(story)
