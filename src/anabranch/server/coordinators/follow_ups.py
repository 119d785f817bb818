"""What follows from a shard's decision, timers and answers to parked requests, carried out so many in a step.

When a classic group of thousands has joined, each member is answered, and its session begins anew. The rules:
- of several orders for one timer the last one counts, whether earlier ones have been carried out or not;
- a timer of which an order is still to be carried out does not ring: by that order it has another time, or none;
- a parked request is answered once, so that its answer may come after those of later decisions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import islice

from anabranch.machines.outcome import CancelTimer, ParkedReply, SetTimer
from anabranch.runtime.loop_steps import timed

AT_A_TIME = 200
"""Timers, and answers, that are carried out before other work has its turn: 1 ms."""
TimerOrder = SetTimer | CancelTimer


class FollowUps:
    """The timers and answers of one shard's decisions; used within a running event loop only."""

    def __init__(self, order: Callable[[TimerOrder], None], answer: Callable[[ParkedReply], None]) -> None:
        """`order` sets or cancels a timer, `answer` answers a parked request, if that still waits."""
        self._order = order
        self._answer = answer
        self._orders: dict[Hashable, TimerOrder] = {}
        self._answers: deque[ParkedReply] = deque()
        self._going_on: asyncio.Handle | None = None

    def carry_out(self, orders: Sequence[TimerOrder], answers: Sequence[ParkedReply]) -> None:
        """Carry out what a decision has ordered: at once if it is little, else the rest of it in later steps."""
        if self._orders:
            for order in orders:
                self._orders.pop(order.key, None)
        for order in orders[:AT_A_TIME]:
            self._order(order)
        for answer in answers[:AT_A_TIME]:
            self._answer(answer)
        if len(orders) > AT_A_TIME or len(answers) > AT_A_TIME:
            self._orders.update((order.key, order) for order in orders[AT_A_TIME:])
            self._answers.extend(answers[AT_A_TIME:])
            self._go_on()

    def holds(self, key: Hashable) -> bool:
        """Whether an order for this timer is still to be carried out."""
        return key in self._orders

    def drop(self) -> None:
        """Forget what is still to be carried out."""
        self._orders.clear()
        self._answers.clear()
        if self._going_on is not None:
            self._going_on.cancel()
            self._going_on = None

    def _go_on(self) -> None:
        if self._going_on is None:
            loop = asyncio.get_running_loop()
            self._going_on = loop.call_soon(timed(loop, "coordinator", self._more))

    def _more(self) -> None:
        self._going_on = None
        for key in list(islice(self._orders, AT_A_TIME)):
            self._order(self._orders.pop(key))
        for _ in range(min(AT_A_TIME, len(self._answers))):
            self._answer(self._answers.popleft())
        if self._orders or self._answers:
            self._go_on()
