"""A wire between clients and a broker that notes the heartbeats of the consumer protocol.

What a member says to its coordinator, and when, is seen nowhere else: libraries do not tell it. Metadata and the
answers of FindCoordinator name the tap instead of the broker, so that all connections go through it. Members are told
apart by their client ids.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import DecodeError
from anabranch.protocol.frames import RequestHeader, decode_request, decode_response, encode_response
from anabranch.protocol.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)

METADATA, FIND_COORDINATOR, HEARTBEAT = 3, 10, 68
At = tuple[str, int]
"""A topic and a partition."""
Headers = dict[int, RequestHeader]
"""By correlation id."""


class Beat(NamedTuple):
    """A heartbeat as it left its member, or its answer as it came back."""

    at_ns: int
    """By the monotonic clock: a request before the broker has it, an answer before its member has it."""
    owned: frozenset[At] | None
    """Of a request: the partitions that the member says to own; None where it says nothing of them. Of an answer: those
    that the coordinator assigns; None where nothing changes."""
    is_answer: bool


class HeartbeatTap:
    """One tap before one broker."""

    def __init__(self, host: str, port: int) -> None:
        self._broker = host, port
        self.beats: dict[str, list[Beat]] = defaultdict(list)
        """By the client id of the member."""
        self.late_s = 0.0
        """For how long the tap holds back an assignment, once it has noted it."""
        self._names: dict[UUID, str] = {}
        """Topics by id, as metadata named them to anybody."""
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    @property
    def address(self) -> str:
        """Its host and port."""
        return f"127.0.0.1:{self.port}"

    def given_ns(self, client_id: str, at: At, until_ns: int) -> int:
        """Return when the coordinator gave a member a partition that the member took at `until_ns`, as far as known."""
        since_ns = until_ns
        for beat in reversed(self.beats.get(client_id, ())):
            if not beat.is_answer or beat.owned is None or beat.at_ns > until_ns:
                continue
            if at not in beat.owned:
                break
            since_ns = beat.at_ns
        return since_ns

    def disowned(self, client_id: str, at: At, before_ns: int, until_ns: int) -> bool:
        """Whether a member told its coordinator that it does not own a partition, and was not given it again.

        That is: the last that it said of its partitions before `before_ns` lacks this one, and so does every assignment
        that it got from then to `until_ns`, or to `before_ns` if that is later.
        """
        beats = self.beats.get(client_id, ())
        said = [beat for beat in beats if not beat.is_answer and beat.owned is not None and beat.at_ns < before_ns]
        if not said or at in (said[-1].owned or ()):
            return False
        until_ns = max(before_ns, until_ns)
        given = [beat.owned for beat in beats if beat.is_answer and said[-1].at_ns < beat.at_ns <= until_ns]
        return not any(at in owned for owned in given if owned is not None)

    def close(self) -> None:
        """End it, and all connections through it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*asyncio.all_tasks(self._loop), return_exceptions=True))
        self._loop.close()

    async def _serve(self, up: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        try:
            down, forth = await asyncio.open_connection(*self._broker)
        except OSError:
            back.close()
            return
        asked: Headers = {}
        with contextlib.suppress(asyncio.CancelledError):  # The tap ends.
            await asyncio.gather(self._up(up, forth, asked), self._down(down, back, asked))

    async def _up(self, up: asyncio.StreamReader, forth: asyncio.StreamWriter, asked: Headers) -> None:
        with contextlib.closing(forth), contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                frame = await _frame(up)
                if int.from_bytes(frame[:2]) in (METADATA, FIND_COORDINATOR, HEARTBEAT):
                    with contextlib.suppress(DecodeError):
                        header, request = decode_request(frame)
                        asked[header.correlation_id] = header
                        if isinstance(request, ConsumerGroupHeartbeatRequest):
                            self._note(header, request.topic_partitions, is_answer=False)
                forth.write(len(frame).to_bytes(4) + frame)
                await forth.drain()

    async def _down(self, down: asyncio.StreamReader, back: asyncio.StreamWriter, asked: Headers) -> None:
        with contextlib.closing(back), contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                frame = await _frame(down)
                header = asked.pop(int.from_bytes(frame[:4], signed=True), None)
                parts: Sequence[Any] = [len(frame).to_bytes(4), frame]
                if header is not None:
                    correlation, answer = decode_response(frame, header.api_key, header.api_version)
                    if isinstance(answer, ConsumerGroupHeartbeatResponse):
                        assignment = None if answer.assignment is None else answer.assignment.topic_partitions
                        self._note(header, assignment, is_answer=True)
                        await asyncio.sleep(0.0 if assignment is None else self.late_s)
                    else:
                        self._rename(answer)
                        parts = encode_response(answer, header.api_key, header.api_version, correlation)
                for part in parts:
                    back.write(bytes(part))
                await back.drain()

    def _rename(self, answer: Any) -> None:
        """Put the tap in the place of the broker; learn the ids of topics."""
        for topic in getattr(answer, "topics", ()):
            self._names[topic.topic_id] = topic.name or ""
        for node in _nodes(answer):
            node.host, node.port = "127.0.0.1", self.port

    def _note(self, header: RequestHeader, topics: Any, *, is_answer: bool) -> None:
        owned = None
        if topics is not None:
            named = [(self._names.get(topic.topic_id, ""), topic.partitions) for topic in topics]
            owned = frozenset((name, number) for name, numbers in named for number in numbers)
        self.beats[header.client_id or ""].append(Beat(time.monotonic_ns(), owned, is_answer))


def _nodes(answer: Any) -> Iterator[Any]:
    yield from getattr(answer, "brokers", ())
    yield from getattr(answer, "coordinators", ())
    if hasattr(answer, "port"):
        yield answer


async def _frame(reader: asyncio.StreamReader) -> bytes:
    return await reader.readexactly(int.from_bytes(await reader.readexactly(4)))
