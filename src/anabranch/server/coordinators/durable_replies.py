"""Replies that wait until what they were decided upon is durable: in a shard's log, and in a second one beside it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from anabranch.runtime.loop_steps import timed
from anabranch.server.partitions.partition import Partition

Reply = TypeVar("Reply")


class AppendedLog:
    """A log that the shard appends to."""

    __slots__ = ("committing", "is_replaced", "partition", "written")

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.written = 0
        """The end of the log after this shard's last append: the machine's state is based on the records below."""
        self.committing: asyncio.Future[None] | None = None
        self.is_replaced = False
        """Whether its topic was made anew, so that nobody waits for this log."""

    @property
    def is_durable(self) -> bool:
        """Whether all that was appended is."""
        return self.partition.log.high_watermark >= self.written

    @property
    def has_lost(self) -> bool:
        """Whether records that were appended are not in the log any more."""
        return self.partition.log.end < self.written


class _Waiting(NamedTuple):
    """A reply that may be given when the log is durable up to `end`, and the log beside it up to its end."""

    end: int
    beside: AppendedLog | None
    beside_end: int
    future: asyncio.Future[Any]
    reply: Any


class DurableReplies:
    """The replies of one shard, in the order of its decisions."""

    def __init__(
        self,
        log: AppendedLog,
        commit: Callable[[Partition], asyncio.Future[None]],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`commit` makes a partition's records durable; `on_failure` is told where that fails."""
        self.log = log
        self.beside: AppendedLog | None = None
        self._commit = commit
        self._on_failure = on_failure
        self._waiting: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def is_durable(self) -> bool:
        """Whether all that was appended is."""
        return self.log.is_durable and (self.beside is None or self.beside.is_durable)

    def when(self, reply: Reply) -> Reply | asyncio.Future[Reply]:
        """The reply, or a future of it where something is not durable yet."""
        if self.is_durable:
            return reply
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._wait(future, reply)
        return future

    def give(self, future: asyncio.Future[Any], reply: Any) -> None:
        """Set the result of a future when everything is durable."""
        if self.is_durable:
            future.set_result(reply)
        else:
            self._wait(future, reply)

    def _wait(self, future: asyncio.Future[Any], reply: Any) -> None:
        beside = self.beside
        end = 0 if beside is None else beside.written
        self._waiting.append(_Waiting(self.log.written, beside, end, future, reply))

    def hasten(self, log: AppendedLog) -> None:
        """Make a log durable."""
        if log.committing is None:
            log.committing = self._commit(log.partition)
            loop = asyncio.get_running_loop()
            log.committing.add_done_callback(timed(loop, "coordinator", partial(self._on_committed, log)))

    def drop(self) -> list[asyncio.Future[Any]]:
        """Forget all replies; return their futures."""
        for log in filter(None, (self.log, self.beside)):
            log.committing = None
        waiting, self._waiting = self._waiting, deque()
        return [waited.future for waited in waiting]

    def _on_committed(self, log: AppendedLog, commit: asyncio.Future[None]) -> None:
        error = commit.exception()
        if commit is not log.committing:
            return  # A commit from before the shard failed: its waiters have been refused.
        log.committing = None
        if error is not None:
            self._on_failure(error)
            return
        waiting = self._waiting
        while waiting and self._is_reached(waiting[0]):
            waited = waiting.popleft()
            if not waited.future.done():
                waited.future.set_result(waited.reply)
        if not log.is_durable:
            self.hasten(log)

    def _is_reached(self, waited: _Waiting) -> bool:
        """Whether all that a reply waits for is durable."""
        if self.log.partition.log.high_watermark < waited.end:
            return False
        beside = waited.beside
        return beside is None or beside.is_replaced or beside.partition.log.high_watermark >= waited.beside_end


def refuse(future: asyncio.Future[Any], error: BaseException) -> None:
    """Fail a reply, unless it was given, or its request was canceled."""
    if not future.done():
        future.set_exception(error)
        future.add_done_callback(_consume)


def _consume(future: asyncio.Future[Any]) -> None:
    """Retrieve the error of a canceled request's reply, so that asyncio does not report it."""
    if not future.cancelled():
        future.exception()
