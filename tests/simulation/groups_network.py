"""Connections as TCP gives them, out of one source of chance.

Within one connection requests, and answers, keep their order, however long they take. A client that waits too long
closes the connection and opens another one, which has a higher number; requests sent on the old one may still arrive,
even after requests sent on the new one; their responses are lost. So requests come twice, late, and in another order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from anabranch.client.cluster.connection import DisconnectedError
from anabranch.codec import decode, encode
from anabranch.protocol.registry import Api, api_of
from anabranch.server.context import CloseConnectionError

if TYPE_CHECKING:
    from tests.simulation.groups_shard import Broker
    from tests.simulation.groups_world import World

Noted = Callable[[Any, Any], None]
"""Called with a reply, and with the note of the rules to its receiver, before the future is done."""


@dataclass(slots=True, eq=False)
class Call:
    """A request at the coordinator."""

    connection: Connection
    correlation: int
    api: Api
    version: int
    request: Any
    answer: bytes | None = None
    task: asyncio.Task[Any] | None = None
    """Of a handler that waits."""
    note: Any = None
    """The note of the rules to the receiver of the answer."""


class Connection:
    """One connection of one client to a broker."""

    def __init__(self, world: World, client_id: str, broker: Broker) -> None:
        self.world = world
        self.client_id = client_id
        self.broker = broker
        self.number = world.next_connection()
        self.life = broker.lives
        self.is_open = True
        self._flights: dict[int, tuple[asyncio.Future[Any], Noted]] = {}
        self._correlations = self._arrived = 0
        self._up_at = self._down_at = 0
        self._last_heard = 1 << 60
        """The last request that still arrives after the client has closed."""
        self._calls: deque[Call] = deque()
        world.connections.append(self)

    # -- the client's end ----------------------------------------------------------------------------------------------

    def send(self, request: Any, version: int, timeout_ms: int, noted: Noted) -> asyncio.Future[Any]:
        """Send; the future is the answer, or fails."""
        world = self.world
        future = world.loop.create_future()
        future.add_done_callback(_consume, context=world.loop.outside)
        if not self.is_open:
            future.set_exception(DisconnectedError("the connection has ended"))
            return future
        self._correlations += 1
        correlation = self._correlations
        self._flights[correlation] = future, noted
        data = b"".join(bytes(part) for part in encode(request, version))
        self._up_at = max(self._up_at, world.now_ms + world.delay_ms())
        world.at(self._up_at, self._arrive, correlation, api_of(type(request)), version, data)
        world.after(timeout_ms, self._too_late, correlation)
        return future

    def _too_late(self, correlation: int) -> None:
        if correlation in self._flights:
            self.close("no answer in time")

    def close(self, reason: str) -> None:
        """Give up the connection, and all that waits on it."""
        if not self.is_open:
            return
        self.is_open = False
        self.world.connections.remove(self)
        chance = self.world.chance
        self._last_heard = chance.randint(self._arrived, self._correlations)
        if chance.random() < 0.7:  # otherwise the broker learns of the close much later
            self.world.at(max(self._up_at, self.world.now_ms) + self.world.delay_ms(), self._hung_up)
        self.world.say("%s closes connection %d: %s", self.client_id, self.number, reason)
        flights, self._flights = self._flights, {}
        for future, _ in flights.values():
            if not future.done():
                future.set_exception(DisconnectedError(reason))

    def stall(self, ms: int, *, up: bool) -> None:
        """Nothing passes for a while in one direction; then all of it comes."""
        if up:
            self._up_at = max(self._up_at, self.world.now_ms + ms)
        else:
            self._down_at = max(self._down_at, self.world.now_ms + ms)

    @property
    def stalled_until_ms(self) -> int:
        """When everything passes again."""
        return max(self._up_at, self._down_at)

    def _hear(self, correlation: int, api: Api, version: int, data: bytes, note: Any) -> None:
        future, noted = self._flights.pop(correlation, (None, None))
        if future is not None and noted is not None and not future.done():
            reply = decode(api.response, data, version)
            noted(reply, note)
            future.set_result(reply)

    # -- the broker's end ----------------------------------------------------------------------------------------------

    def _arrive(self, correlation: int, api: Api, version: int, data: bytes) -> None:
        if correlation > self._last_heard or self.life != self.broker.lives:
            return
        world = self.world
        self._arrived = correlation
        world.rules.counts["late"] += not self.is_open
        request = decode(api.request, data, version)
        call = Call(self, correlation, api, version, request)
        self._calls.append(call)
        world.say(
            "%s v%d from %s on %d%s", request, version, self.client_id, self.number, "" if self.is_open else " (late)"
        )
        try:
            call.task = self.broker.handle(
                request, version, self.client_id, self.number, lambda reply: self._answered(call, reply)
            )
        except CloseConnectionError as error:
            self.close(str(error))

    def _hung_up(self) -> None:
        """The broker learns that the connection is closed, and forgets the requests in progress.

        It cancels them one loop turn later, as the shell that ships does: a task that has not begun would drop its
        handler's coroutine unawaited.
        """
        if self.life == self.broker.lives:
            self.world.loop.call_soon(self._cancel, context=self.world.loop.outside.copy())

    def _cancel(self) -> None:
        for call in self._calls if self.life == self.broker.lives else ():
            if call.task is not None:
                call.task.cancel()

    def _answered(self, call: Call, reply: Any) -> None:
        """Answers go out in the order of the requests."""
        world = self.world
        world.say("  answer to %s: %s", self.client_id, reply)
        call.answer = b"".join(bytes(part) for part in encode(reply, call.version))
        call.note = world.rules.told(reply)
        while self._calls and self._calls[0].answer is not None:
            first = self._calls.popleft()
            self._down_at = max(self._down_at, world.now_ms + world.delay_ms())
            world.at(self._down_at, self._hear, first.correlation, first.api, first.version, first.answer, first.note)


def _consume(future: asyncio.Future[Any]) -> None:
    """Mark the error as seen: the task that waited for the answer may have ended."""
    if not future.cancelled():
        future.exception()
