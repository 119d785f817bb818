"""The tables of one consumer: loads before records are handed out, and one transaction for offsets and changes.

A transaction writes the changes to the changelogs, then commits the offsets as the group's member with its epoch. The
coordinator refuses an old epoch, and then nothing of the transaction counts. After any other failure the changes stay,
and the next commit writes them again; if the end of the transaction is not known, by a new producer that takes over the
transactional id. Writing twice does no harm, since nobody else can have changed these keys.

A consumer without a group commits its ranges of keys to the offsets of `progress`, where nobody is a member: it is
fenced by its transactional id alone, which its successor takes over before it reads anything, and which it never takes
back: where the end of a transaction is not known, it stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import uuid4

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.consumer import Consumer
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.consumer.record import Record
from anabranch.client.consumer.state import always
from anabranch.client.producer.delivery import DeliveryError
from anabranch.client.producer.producer import Producer
from anabranch.client.producer.transactions import group_of
from anabranch.client.table.changelog import connection_of
from anabranch.client.table.kept import Kept
from anabranch.client.table.progress import Progress
from anabranch.machines.clients.fetching import Deliverable
from anabranch.machines.keyspace import Interval

ABORT_S = 5.0
"""How long the end of a failed transaction is waited for."""

_log = logging.getLogger("anabranch.client")


class Keeper:
    """The tables of one consumer (`client.consumer.state.KeptState`)."""

    def __init__(
        self, consumer: Consumer, transactional_id: str | None, transaction_timeout_ms: int, progress: str | None
    ) -> None:
        self.driver = consumer.driver
        self.settings = consumer.settings
        self.progress = progress
        self.transactional_id = transactional_id
        self._transaction_timeout_ms = transaction_timeout_ms
        self._tables: list[Kept] = []
        self._standalone = None if progress is None else Progress(consumer, progress)
        self._producer: Producer | None = None
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._error: AnabranchError | None = None
        self._fenced: ApiError | None = None
        self._due_ms = consumer.driver.now_ms() + consumer.settings.auto_commit_interval_ms

    @property
    def group(self) -> str | None:
        """The group whose offsets tell what is processed."""
        return self.settings.group_id or self.progress

    def add(self, table: Kept) -> None:
        """Keep another table."""
        self._tables.append(table)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a load; its error is raised by the next poll."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not task.cancelled() and (error := task.exception()) is not None:
                self._error = error if isinstance(error, AnabranchError) else AnabranchError(repr(error))
                self._error.__cause__ = error
            self.driver.happened()

        task.add_done_callback(ended)

    # -- for the consumer ---------------------------------------------------------------------------------------------

    def admit(self, parts: list[Deliverable]) -> list[Deliverable]:
        """Return the parts whose keys' state is in memory, and begin to load that of others. Raises its errors."""
        if self._fenced is not None:
            raise self._fenced
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        group = self.driver.group
        if self.transactional_id is None and (group is None or group.subscription is None):
            text = "nothing but a transactional_id keeps an old owner from writing where there is no group to join"
            raise ApiError(ErrorCode.INVALID_REQUEST, f"{text}: give the table one, or subscribe the consumer")
        if self._standalone is not None and not self._standalone.is_known(self.run, self._take_over, self.released):
            return []
        processed = self.driver.consumed()
        refused: set[TopicPartition] = set()
        for table in self._tables:
            refused |= table.prepare(parts, processed, self.run)
        return [part for part in parts if (part.topic, part.partition) not in refused]

    def is_of(self, topic: str) -> bool:
        """Whether some table is of the keys of a topic."""
        return any(table.source == topic for table in self._tables)

    def released(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the state of partitions that were revoked or lost, and what is not flushed of it."""
        names = tuple(partitions)
        for table in self._tables:
            table.release(names)

    def narrowed(self, tp: TopicPartition, keys: Sequence[Interval]) -> None:
        """Drop the state of ranges of a partition's keys that were revoked, and what is not flushed of it."""
        for table in self._tables:
            table.part(tp, keys)

    def undo(self, record: Record) -> None:
        """Undo the changes that were made for a record that is not finished."""
        for table in self._tables:
            table.undo(record)

    @property
    def is_due(self) -> bool:
        """Whether state waits for a commit."""
        return any(table.is_due for table in self._tables)

    def unflushed(self) -> set[TopicPartition]:
        """Return the partitions with changes that are not flushed."""
        return {tp for table in self._tables for tp in table.unflushed()}

    async def attend(self) -> None:
        """Commit when due, for a consumer without a group; called while the application polls."""
        if self.settings.enable_auto_commit and (self.is_due or self.driver.now_ms() >= self._due_ms):
            self._due_ms = self.driver.now_ms() + self.settings.auto_commit_interval_ms
            await self.flush()

    async def flush(self) -> None:
        """Commit what was processed by a consumer without a group."""
        if self._standalone is None:
            return
        positions = self._standalone.changed(self.driver.consumed(), self.unflushed())
        if positions:
            offsets, group = self._standalone.commit_of(positions), group_of(self._standalone.name)
            await self.commit(offsets, group, partial(self._standalone.check_held, positions))
            self._standalone.committed(positions)

    async def close(self) -> None:
        """End all loads, and close connections."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._producer is not None:
            await self._producer.close(ABORT_S)

    # -- transactions -------------------------------------------------------------------------------------------------

    async def commit(
        self,
        offsets: Mapping[TopicPartition, OffsetAndMetadata],
        group: GroupMetadata,
        check_held: Callable[[], None] = always,
    ) -> None:
        """Commit offsets with the changes of the records before them, in one transaction; raise if it was refused.

        `check_held` raises if keys were dropped since these offsets were said. Their changes are gone, and the offsets
        without them would be accepted until the coordinator hears that the keys have left.
        """
        async with self._lock:
            if self._fenced is not None:
                raise self._fenced
            producer = await self._ready()
            flushed = False
            try:
                await producer.begin_transaction()
                await self._write(producer, {tp: _upto(at) for tp, at in offsets.items()})
                check_held()
                await producer.send_offsets_to_transaction(offsets, group)
                await producer.commit_transaction()
                flushed = True
            except DeliveryError as error:
                await self._give_up(producer, error)
                text = f"changes cannot be written to the changelog: {error}"
                raise ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, text) from error
            except BaseException as error:
                await self._give_up(producer, error)
                raise
            finally:
                if not flushed:
                    for table in self._tables:
                        table.not_flushed()
            for table in self._tables:
                await table.flushed()

    async def _write(
        self, producer: Producer, offsets: Mapping[TopicPartition, int | Sequence[tuple[int, int, int]]]
    ) -> None:
        for table in self._tables:
            for writes in table.writes(offsets):
                for write in writes:
                    await producer.send(table.changelog, write.value, key=write.key)
                await asyncio.sleep(0)

    async def _take_over(self) -> None:
        """Put out an older user of the transactional id, before anything is read that it could still change."""
        async with self._lock:
            await self._ready()

    async def _ready(self) -> Producer:
        if self._producer is None:
            if self.transactional_id is None:
                self.transactional_id = f"{self.group}-{self._tables[0].changelog}-{uuid4()}"
            producer = Producer(
                **connection_of(self.settings),
                transactional_id=self.transactional_id,
                transaction_timeout_ms=self._transaction_timeout_ms,
                allow_auto_create_topics=False,
            )
            try:
                await producer.init_transactions()
            except BaseException:
                await producer.close(0)
                raise
            self._producer = producer
        return self._producer

    async def _give_up(self, producer: Producer, error: BaseException) -> None:
        """Abort a transaction. Keep the producer only if that is known to be done."""
        if producer.abortable:
            with suppress(AnabranchError, OSError, TimeoutError):
                async with asyncio.timeout(ABORT_S):
                    await producer.abort_transaction()
                return
        if self._standalone is not None:
            # Another producer of this transactional id would put out one that has taken this one's place.
            text = f"how the last commit of transactional id '{self.transactional_id}' ended is not known"
            if isinstance(error, ApiError) and error.code in FENCED:
                text = f"transactional id '{self.transactional_id}' has another user, who reads these ranges now"
            self._fenced = ApiError(ErrorCode.PRODUCER_FENCED, f"{text}; start this consumer again, or leave it")
        self._producer = None
        with suppress(AnabranchError, OSError, TimeoutError):
            await producer.close(ABORT_S)


FENCED = frozenset({ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH})


def _upto(at: OffsetAndMetadata) -> int | Sequence[tuple[int, int, int]]:
    return at.shares or at.offset
