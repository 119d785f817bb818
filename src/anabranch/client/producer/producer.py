"""The producer: carries out on sockets what `batcher` decides.

Every record has an outcome: delivered, or failed with the error that says why, on its own future; `flush` and `close`
raise when something was lost that was not yet told. Records wait in memory of at most `buffer.memory` bytes; a sender
that is faster waits for room.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from anabranch.base.errors import AnabranchError, ApiError, DecodeError, ErrorCode
from anabranch.client.cluster.connection import Connection, DisconnectedError, LaneSettings
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.group import GroupMetadata
from anabranch.client.consumer.offsets import OffsetsByPartition, offsets_of
from anabranch.client.producer.rows import (
    ColumnNames,
    EncodeSettings,
    Header,
    Outgoing,
    Promise,
    RecordMetadata,
    Records,
    encode_rows,
    record_size,
)
from anabranch.client.producer.transactions import MAY, Phase, Transactions, group_of
from anabranch.client.settings import as_keywords
from anabranch.machines.clients.sending import (
    Batcher,
    BatcherSettings,
    Delivered,
    Encode,
    Failed,
    InitProducer,
    Placement,
    ProduceResult,
    Refused,
    Send,
)
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from anabranch.records.batch import stamp_producer
from anabranch.records.compression import Compression

if TYPE_CHECKING:
    import pyarrow as pa

PURPOSE = "produce"
NAMED_TOPIC_VERSION_MAX = 12
"""Up to this version, Produce names topics by their names."""
ADDED_PARTITION_VERSION_MAX = 11
"""Up to this version, a transaction holds only partitions that were added to it (KIP-890)."""
WAITING_MAX = 10_000
"""Records that another thread may have handed over without their being taken."""
SLICE_SIZE = 15 * 512 * 1024
"""Columns are placed and encoded in slices of about this size, so that what comes of one stays below 8 MiB."""
ACKS = {"all": -1, "-1": -1, -1: -1, "0": 0, 0: 0, "1": 1, 1: 1}


class DeliveryError(AnabranchError):
    """Some records were not delivered; `first` says why the first of them was not."""

    def __init__(self, record_count: int, first: Exception) -> None:
        records = "1 record was" if record_count == 1 else f"{record_count} records were"
        super().__init__(f"{records} not delivered: {first}")
        self.record_count = record_count
        self.first = first


@dataclass(slots=True)
class ColumnsMetadata:
    """Where columns went."""

    topic: str
    record_count: int = 0
    offsets: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Partition to the first and the last offset there."""


class _Ticket:
    """The outcome of columns that is still being put together."""

    __slots__ = ("error", "failed", "generation", "metadata", "open_count", "promise")

    def __init__(self, topic: str, promise: Any, generation: int) -> None:
        self.generation = generation
        self.metadata = ColumnsMetadata(topic)
        self.promise = promise
        self.open_count = 0
        self.failed = 0
        self.error: Exception | None = None

    def delivered(self, partition: int, base_offset: int, count: int) -> None:
        metadata = self.metadata
        metadata.record_count += count
        if base_offset >= 0:
            first, last = metadata.offsets.get(partition, (base_offset, base_offset))
            metadata.offsets[partition] = (min(first, base_offset), max(last, base_offset + count - 1))
        self._settle(count)

    def fail(self, error: Exception, count: int) -> None:
        self.error = self.error or error
        self.failed += count
        self._settle(count)

    def _settle(self, count: int) -> None:
        self.open_count -= count
        if self.open_count == 0 and not self.promise.done():
            if self.error is None:
                self.promise.set_result(self.metadata)
            else:
                self.promise.set_exception(DeliveryError(self.failed, self.error))


class Producer:
    """Sends records to topics, keeping the order of each key through every resize.

    Use as `async with Producer(bootstrap_servers=...) as producer`, or call `close` at the end.
    """

    def __init__(
        self,
        bootstrap_servers: str | Iterable[str] = "localhost:9092",
        *,
        client_id: str = "anabranch-producer",
        acks: str | int = "all",
        enable_idempotence: bool | None = None,
        transactional_id: str | None = None,
        transaction_timeout_ms: int = 60_000,
        compression_type: str = "none",
        batch_size: int = 1_000_000,
        linger_ms: int = 5,
        buffer_memory: int = 32 * 1024 * 1024,
        max_block_ms: int = 60_000,
        max_request_size: int = 1_048_576,
        max_in_flight_requests_per_connection: int = 5,
        delivery_timeout_ms: int = 120_000,
        request_timeout_ms: int = 30_000,
        retry_backoff_ms: int = 100,
        retry_backoff_max_ms: int = 1_000,
        metadata_max_age_ms: int = 300_000,
        socket_connection_setup_timeout_ms: int = 10_000,
        reconnect_backoff_ms: int = 50,
        reconnect_backoff_max_ms: int = 1_000,
        allow_auto_create_topics: bool = True,
    ) -> None:
        if acks not in ACKS:
            raise ValueError(f"acks is {acks!r}; it can be 'all', 1 or 0")
        idempotent = ACKS[acks] == -1 if enable_idempotence is None else enable_idempotence
        if idempotent and ACKS[acks] != -1:
            raise ValueError("enable.idempotence needs acks='all'; leave one of them out")
        if transactional_id is not None and (not idempotent or not transactional_id):
            raise ValueError("transactional.id must not be empty, and needs acks='all' and enable.idempotence")
        if delivery_timeout_ms < linger_ms + request_timeout_ms:
            raise ValueError("delivery.timeout.ms must be at least linger.ms + request.timeout.ms")
        try:
            compression = Compression[compression_type.upper()]
        except KeyError:
            text = f"compression.type is {compression_type!r}; it can be none, gzip, snappy, lz4 or zstd"
            raise ValueError(text) from None
        if max_in_flight_requests_per_connection < 1 or (idempotent and max_in_flight_requests_per_connection > 5):
            raise ValueError("max.in.flight.requests.per.connection must be 1 to 5")
        self._acks = ACKS[acks]
        lanes = LaneSettings(
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            socket_connection_setup_timeout_ms=socket_connection_setup_timeout_ms,
            reconnect_backoff_ms=reconnect_backoff_ms,
            reconnect_backoff_max_ms=reconnect_backoff_max_ms,
        )
        self._cluster = Cluster(bootstrap_servers, lanes)
        self._batcher = Batcher(
            BatcherSettings(
                acks=self._acks,
                enable_idempotence=idempotent,
                transactional=transactional_id is not None,
                linger_ms=linger_ms,
                batch_size=batch_size,
                max_in_flight_requests_per_connection=max_in_flight_requests_per_connection,
                delivery_timeout_ms=delivery_timeout_ms,
                request_timeout_ms=request_timeout_ms,
                max_block_ms=max_block_ms,
                retry_backoff_ms=retry_backoff_ms,
                retry_backoff_max_ms=retry_backoff_max_ms,
            ),
            Records,
        )
        self._transactions: Transactions | None = None
        if transactional_id is not None:
            self._transactions = Transactions(
                self._cluster,
                transactional_id,
                timeout_ms=transaction_timeout_ms,
                request_timeout_ms=request_timeout_ms,
                max_block_ms=max_block_ms,
            )
        self._adding: set[asyncio.Task[None]] = set()
        """Requests that let the transaction hold more partitions."""
        self._encode_settings = EncodeSettings(compression, batch_size, max_request_size)
        self._chance = random.Random()
        self._request_timeout_ms = request_timeout_ms
        self._buffer_memory = buffer_memory
        self._max_block_ms = max_block_ms
        self._metadata_max_age_ms = metadata_max_age_ms
        self._create = allow_auto_create_topics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._kernels_loaded = False
        self._encoding: set[asyncio.Future[Any]] = set()
        self._connecting: dict[int, list[Send]] = {}
        self._column_order: dict[str, asyncio.Lock] = {}
        self._room: asyncio.Event | None = None
        self._generation = 0
        """Grows with every flush."""
        self._open: dict[int, int] = {0: 0}
        """Records that have no outcome yet, by the generation they were taken in."""
        self._flushes: list[tuple[int, asyncio.Future[None]]] = []
        """(generation, who waits until no record of it or an earlier one is open)"""
        self._untold_count = 0
        self._untold: Exception | None = None
        self._closed = False
        self.waiting: deque[Outgoing] = deque()
        """Records that another thread hands over."""
        self._next_refresh = 0.0
        self._topics: set[str] = set()

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Make a producer from settings by Kafka's dotted names, as in `{"bootstrap.servers": "..."}`."""
        return cls(**as_keywords(cls, config))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    # -- sending ------------------------------------------------------------------------------------------------------

    async def send(
        self,
        topic: str,
        value: bytes | str | None = None,
        *,
        key: bytes | str | None = None,
        partition: int | None = None,
        timestamp: int | None = None,
        headers: Sequence[Header] = (),
    ) -> asyncio.Future[RecordMetadata]:
        """Take one record; the future that comes back is its outcome. Waits while the buffer is full.

        Text is sent as UTF-8; `timestamp` is in ms since 1970, now if it is left out. A record without a value is a
        tombstone in a compacted topic. Without `partition`, records of one key keep their order through every resize.
        """
        self._check_open()
        promise: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        record = self.outgoing(topic, value, key, partition, timestamp, headers, promise)
        if self.is_full:
            await self.wait_for_room()
        self.take(record)
        return promise

    def outgoing(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None,
        partition: int | None,
        timestamp: int | None,
        headers: Sequence[Header],
        promise: Promise,
    ) -> Outgoing:
        """Put a record together, in any thread; refuse one that cannot be sent."""
        if self._transactions is not None:
            self._transactions.check("send")
        if type(key) is not bytes and key is not None:
            key = _bytes(key, "key")
        if type(value) is not bytes and value is not None:
            value = _bytes(value, "value")
        if timestamp is None:
            timestamp = time.time_ns() // 1_000_000
        return Outgoing(topic, key, value, timestamp, headers, partition, promise, self._generation)

    def take(self, record: Outgoing) -> None:
        """Take one record at once, room or not, and keep its promise."""
        generation = record.generation
        self._open[generation] = self._open.get(generation, 0) + 1
        if self._batcher.append(record.topic, record, record_size(record), _now_ms()):
            self._schedule()

    async def send_arrow(
        self,
        topic: str,
        table: pa.Table | pa.RecordBatch,
        *,
        key: str | None = "key",
        value: str | None = "value",
        headers: str | None = None,
        timestamp: str | None = None,
        partition: int | None = None,
    ) -> asyncio.Future[ColumnsMetadata]:
        """Take the rows of a table as records; the future that comes back is the outcome of all of them.

        `key`, `value`, `headers` and `timestamp` name columns: key and value are binary or text; headers are lists of
        (key, value) structs; timestamps are Arrow timestamps or int64 ms. A key or value column that is None, or `key`
        where the table has no column of that name, means null. Waits while the buffer is full.
        """
        promise: asyncio.Future[ColumnsMetadata] = asyncio.get_running_loop().create_future()
        await self.take_columns(topic, table, ColumnNames(key, value, headers, timestamp), partition, promise)
        return promise

    async def take_columns(
        self, topic: str, table: pa.Table | pa.RecordBatch, columns: ColumnNames, partition: int | None, promise: Any
    ) -> None:
        """Take the rows of a table, and keep `promise` about them."""
        from anabranch.client.producer.columns import columns_of

        self._check_open()
        if self._transactions is not None:
            self._transactions.check("send")
        self._start()
        ticket = _Ticket(topic, promise, self._generation)
        ticket.open_count = left = table.num_rows
        slices = columns_of(
            table, columns, partition=partition, ticket=ticket, now_ms=int(time.time() * 1000), size_max=SLICE_SIZE
        )
        if left == 0:
            promise.set_result(ticket.metadata)
            return
        self._open[ticket.generation] += left
        try:
            async with self._column_order.setdefault(topic, asyncio.Lock()):
                for rows, size in slices:
                    if self.is_full:
                        await self.wait_for_room()
                    self._batcher.append_rows(topic, rows, size, _now_ms())
                    left -= rows.record_count
                    self._schedule()
        except BaseException as error:
            self._close_records(ticket.generation, left)
            ticket.fail(error if isinstance(error, Exception) else _abandoned(left), left)
            _retrieved(promise)
            raise

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every record taken so far has an outcome; raise `DeliveryError` if any of them failed."""
        loop = self._start()
        self._batcher.flush()
        self._schedule()
        if self._open_count:
            settled: asyncio.Future[None] = loop.create_future()
            self._flushes.append((self._generation, settled))
            self._generation += 1
            self._open[self._generation] = 0
            try:
                async with asyncio.timeout(timeout_s):
                    await settled
            except TimeoutError:
                text = f"{self._open_count} records have no outcome after {timeout_s} s; they are still being tried"
                raise ApiError(ErrorCode.REQUEST_TIMED_OUT, text) from None
        self._tell()

    async def close(self, timeout_s: float | None = None) -> None:
        """Flush, then end. What is not delivered within `timeout_s` is given up, and the error says how much.

        A transaction that is open is aborted.
        """
        if self._closed:
            return
        if self.abortable:
            with contextlib.suppress(AnabranchError, TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self.abort_transaction()
        self._closed = True
        try:
            await self.flush(timeout_s)
        except ApiError as error:
            self._batcher.abandon(error)
            self._pump()
            self._tell()
        finally:
            if self._timer is not None:
                self._timer.cancel()
            for task in tuple(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._cluster.close()

    def take_waiting(self) -> None:
        """Take what another thread left in `waiting`."""
        waiting, append, open_, now_ms = self.waiting, self._batcher.append, self._open, _now_ms()
        ready = False
        for _ in range(len(waiting)):
            record = waiting[0]
            generation = record.generation
            open_[generation] = open_.get(generation, 0) + 1
            ready |= append(record.topic, record, record_size(record), now_ms)
            waiting.popleft()
        if ready:
            self._schedule()
        if waiting:
            self._start().call_soon(self.take_waiting)

    @property
    def is_full(self) -> bool:
        """Whether who sends more should wait."""
        return self._batcher.buffered_size >= self._buffer_memory or len(self.waiting) > WAITING_MAX

    @property
    def buffered_size(self) -> int:
        """Bytes of records that have no outcome yet."""
        return self._batcher.buffered_size

    def _check_open(self) -> None:
        if self._closed:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this producer is closed; make a new one")
        if self._batcher.fatal is not None:
            raise self._batcher.fatal

    async def wait_for_room(self) -> None:
        """Wait while the buffer is full, at most `max.block.ms`."""
        self._start()
        assert self._room is not None
        try:
            async with asyncio.timeout(self._max_block_ms / 1000):
                while self._batcher.buffered_size >= self._buffer_memory:
                    self._room.clear()
                    await self._room.wait()
                    self._check_open()
        except TimeoutError:
            text = (
                f"the buffer of {self._buffer_memory} bytes (buffer.memory) stayed full for {self._max_block_ms} ms "
                "(max.block.ms); the brokers take records more slowly than they come, or not at all"
            )
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, text) from None

    def _tell(self) -> None:
        if self._untold is not None:
            error, count = self._untold, self._untold_count
            self._untold, self._untold_count = None, 0
            raise DeliveryError(count, error)

    # -- transactions -------------------------------------------------------------------------------------------------

    async def init_transactions(self) -> None:
        """Become the one producer of `transactional.id`: another one is fenced, and what it left open is aborted."""
        transactions = self._transactional("init")
        self._start()
        self._batcher.producer_known(*await transactions.init())
        transactions.phase = Phase.READY

    async def begin_transaction(self) -> None:
        """Begin: the records sent from now on are seen together, at the commit, or never."""
        self._transactional("begin").phase = Phase.OPEN

    async def send_offsets_to_transaction(self, offsets: OffsetsByPartition, group: GroupMetadata | str) -> None:
        """Let a group's progress be part of the transaction: the next offsets to read, by partition.

        `group` is what the consumer's `group_metadata` says, so that a member that was replaced cannot commit.
        """
        transactions = self._transactional("send")
        try:
            await transactions.commit_offsets(offsets_of(offsets), group_of(group))
        except BaseException as error:
            self._spoil(error)
            raise

    async def commit_transaction(self) -> None:
        """Flush, and commit. `DeliveryError` when a record was not delivered: then the transaction must be aborted.

        When `max.block.ms` are over without an answer, the commit can be asked for again.
        """
        transactions = self._transactional("commit")
        self.take_waiting()
        await self.flush()
        transactions.check("commit")
        transactions.phase = Phase.COMMITTING
        try:
            await self._ended(transactions, commit=True)
        except ApiError as error:
            if error.code is not ErrorCode.REQUEST_TIMED_OUT:
                transactions.spoil(error)
            raise

    async def abort_transaction(self) -> None:
        """Take back everything since `begin_transaction`; records that are not sent yet fail."""
        transactions = self._transactional("abort")
        transactions.spoil(ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "it is being aborted"))
        self.take_waiting()
        self._batcher.abandon(ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "the transaction was aborted"))
        self._pump()
        self._untold, self._untold_count = None, 0
        if self._adding:
            await asyncio.gather(*self._adding, return_exceptions=True)
        transactions.check("abort")
        await self._ended(transactions, commit=False)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Self]:
        """`async with producer.transaction():` begins, and commits at the end, or aborts if an exception passes."""
        await self.begin_transaction()
        try:
            yield self
            await self.commit_transaction()
        except BaseException:
            if self.abortable:
                await self.abort_transaction()
            raise

    @property
    def abortable(self) -> bool:
        """Whether there is a transaction to be aborted."""
        return self._transactions is not None and self._transactions.phase in MAY["abort"]

    def _transactional(self, action: str) -> Transactions:
        self._check_open()
        if self._transactions is None:
            raise ApiError(ErrorCode.INVALID_TXN_STATE, "this producer has no transactional.id: make one that has")
        self._transactions.check(action)
        return self._transactions

    async def _ended(self, transactions: Transactions, *, commit: bool) -> None:
        try:
            await transactions.end(commit=commit)
            if self._batcher.new_epoch_needed:
                self._batcher.producer_known(*await transactions.init())
        except ApiError as error:
            if transactions.phase is Phase.FENCED:
                self._batcher.stop(error)
                self._schedule()
            raise
        self._batcher.transaction_ended()
        transactions.phase, transactions.why = Phase.READY, None

    def _spoil(self, error: BaseException) -> None:
        """Something of the transaction is lost: nothing more of it is sent."""
        transactions = self._transactions
        if transactions is not None and transactions.phase is Phase.OPEN:
            cause = error if isinstance(error, Exception) else _abandoned(0)
            transactions.spoil(cause)
            text = f"the transaction must be aborted, because of an earlier error: {cause}"
            self._batcher.abandon(ApiError(ErrorCode.INVALID_TXN_STATE, text))
            self._schedule()

    async def _add_partitions(self, partitions: Sequence[tuple[str, int]]) -> None:
        assert self._transactions is not None
        try:
            await self._transactions.add_partitions(partitions)
        except ApiError as error:
            if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self._batcher.partitions_missing(partitions, _now_ms())
            elif self._transactions.phase is Phase.FENCED:
                self._batcher.stop(error)
            else:
                self._spoil(error)
        else:
            self._batcher.partitions_added(partitions)
        self._schedule()

    # -- carrying out -------------------------------------------------------------------------------------------------

    def _start(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._room = asyncio.Event()
            self._next_refresh = self._loop.time() + self._metadata_max_age_ms / 1000
        return self._loop

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._start().call_soon(self._pump)

    def _pump(self) -> None:
        """Do what the batcher says, until it says nothing new."""
        self._scheduled = False
        loop = self._start()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        work = self._batcher.drain(_now_ms())
        for outcome in work.outcomes:
            self._settle(outcome)
        for encode in work.encodes:
            self._encode(encode)
        for send in work.sends:
            self._send(send)
        if work.refresh:
            self._topics.update(work.refresh)
            self._run(self._refresh(work.refresh))
        elif self._topics and loop.time() >= self._next_refresh:
            self._next_refresh = loop.time() + self._metadata_max_age_ms / 1000
            self._run(self._refresh(sorted(self._topics)))
        if work.init_producer is not None:
            self._run(self._init_producer(work.init_producer))
        if work.add_partitions:
            adding = self._run(self._add_partitions(work.add_partitions))
            self._adding.add(adding)
            adding.add_done_callback(self._adding.discard)
        if work.wake_at_ms is not None and not self._scheduled:
            delay = max(0, work.wake_at_ms - _now_ms()) / 1000
            self._timer = loop.call_later(delay, self._pump)
        if self._batcher.buffered_size < self._buffer_memory and self._room is not None:
            self._room.set()
        if self._flushes:
            self._end_flushes()

    def _end_flushes(self) -> None:
        oldest = min(generation for generation, count in self._open.items() if count or generation == self._generation)
        for generation, settled in self._flushes:
            if generation < oldest and not settled.done():
                settled.set_result(None)
        self._flushes = [flush for flush in self._flushes if not flush[1].done()]
        self._open = {generation: count for generation, count in self._open.items() if generation >= oldest}

    @property
    def _open_count(self) -> int:
        return sum(self._open.values())

    def _close_records(self, generation: int, count: int) -> None:
        self._open[generation] -= count

    def _run(self, coroutine: Any) -> asyncio.Task[None]:
        task = self._start().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _settle(self, outcome: Delivered | Failed) -> None:
        if isinstance(outcome, Failed):
            rows: Any = outcome.rows
            self._close_records(_generation_of(rows), rows.record_count)
            self._untold = self._untold or outcome.error
            self._untold_count += rows.record_count
            if self._batcher.fatal is not None and self._transactions is not None:
                self._transactions.fence(self._batcher.fatal)
            self._spoil(outcome.error)
            if isinstance(rows, Records):
                for record in rows:
                    _fail(record.promise, outcome.error)
            else:
                rows.ticket.fail(outcome.error, rows.record_count)
                _retrieved(rows.ticket.promise)
            return
        batch = outcome.batch
        rows = batch.rows
        self._close_records(_generation_of(rows), rows.record_count)
        topic, partition, offset = batch.topic, batch.partition, outcome.base_offset
        if isinstance(rows, Records):
            append_time = outcome.log_append_time_ms
            step = 0 if offset < 0 else 1
            for _, _, _, timestamp, _, _, promise, _ in rows:
                if not promise.done():
                    when = timestamp if append_time < 0 else append_time
                    promise.set_result(RecordMetadata(topic, partition, offset, when))
                offset += step
        else:
            rows.ticket.delivered(partition, offset, rows.record_count)

    def _encode(self, encode: Encode) -> None:
        work = (encode.rows, encode.placement, self._encode_settings, self._any_hash)
        loop = self._start()
        encoding: asyncio.Future[Any]
        if isinstance(encode.rows, Records) and self._kernels_loaded:
            encoding = loop.create_future()
            try:
                encoding.set_result(encode_rows(*work))
            except Exception as error:
                encoding.set_exception(error)
            self._encoded(encode, encoding)
        else:
            # At once, not in a task: kernels hold no interpreter lock, and work while sockets are written to. The
            # first time they have to be loaded, which takes a second.
            encoding = loop.run_in_executor(None, encode_rows, *work)
            self._encoding.add(encoding)
            encoding.add_done_callback(lambda done: self._encoded(encode, done))

    def _encoded(self, encode: Encode, encoding: asyncio.Future[Any]) -> None:
        self._encoding.discard(encoding)
        if encoding.cancelled():
            return
        error = encoding.exception()
        self._kernels_loaded = True
        if error is None:
            parts, refused = encoding.result()
        else:
            fault = ApiError(ErrorCode.INVALID_RECORD, f"records for {encode.topic} cannot be encoded: {error}")
            parts, refused = [], [Refused(encode.rows, fault)]
        self._batcher.encoded(encode.job, encode.topic, parts, refused)
        self._schedule()

    def _any_hash(self) -> int:
        return self._chance.getrandbits(31)

    def _send(self, send: Send) -> None:
        """Write a request, or queue it behind those that wait for the connection: the order is never changed."""
        connecting = self._connecting.get(send.node)
        if connecting is not None:
            connecting.append(send)
            return
        connection = self._cluster.open_connection(send.node, PURPOSE)
        if connection is not None:
            self._write(connection, send)
            return
        self._connecting[send.node] = [send]
        self._run(self._connect_and_send(send.node))

    async def _connect_and_send(self, node: int) -> None:
        try:
            connection = await self._cluster.connection(node, PURPOSE)
        except (AnabranchError, OSError):
            connection = None
        for send in self._connecting.pop(node):
            if connection is None:
                self._batcher.not_sent(send.request_id, _now_ms())
            else:
                self._write(connection, send)
        self._schedule()

    def _write(self, connection: Connection, send: Send) -> None:
        topics: dict[str, list[PartitionProduceData]] = {}
        for batch in send.batches:
            if batch.sequence >= 0:
                stamp_producer(
                    batch.data,
                    send.producer_id,
                    send.producer_epoch,
                    batch.sequence,
                    transactional=self._transactions is not None,
                )
            data = PartitionProduceData(index=batch.partition, records=batch.data)
            topics.setdefault(batch.topic, []).append(data)
        request = ProduceRequest(
            transactional_id=None if self._transactions is None else self._transactions.transactional_id,
            acks=self._acks,
            timeout_ms=min(send.timeout_ms, self._request_timeout_ms),
            topic_data=[
                TopicProduceData(name=name, partition_data=partitions, undeleted_partition_count=send.counts[name])
                for name, partitions in topics.items()
            ],
        )
        try:
            version_max = NAMED_TOPIC_VERSION_MAX if self._transactions is None else ADDED_PARTITION_VERSION_MAX
            version = min(connection.version_of(ProduceRequest), version_max)
            if self._acks == 0:
                connection.send_unanswered(request, version=version)
                results = {(batch.topic, batch.partition): ProduceResult() for batch in send.batches}
                self._batcher.answered(send.request_id, results, _now_ms())
                self._schedule()
                return
            future = connection.send(request, timeout_ms=send.timeout_ms, version=version)
        except DisconnectedError:
            self._batcher.not_sent(send.request_id, _now_ms())
            self._schedule()
            return
        future.add_done_callback(lambda done: self._answered(send, done))

    def _answered(self, send: Send, future: asyncio.Future[Any]) -> None:
        error = future.exception() if not future.cancelled() else DisconnectedError("cancelled")
        if error is not None:
            self._batcher.lost(send.request_id, _now_ms())
        else:
            results = {
                (topic.name, partition.index): ProduceResult(
                    ErrorCode.of(partition.error_code),
                    partition.base_offset,
                    partition.log_append_time_ms,
                    partition.error_message,
                )
                for topic in future.result().responses
                for partition in topic.partition_responses
            }
            self._batcher.answered(send.request_id, results, _now_ms())
        self._schedule()

    async def _refresh(self, names: Sequence[str]) -> None:
        try:
            topics = await self._cluster.topics(list(names), create=self._create)
        except (AnabranchError, OSError) as error:
            code = error.code if isinstance(error, ApiError) else ErrorCode.NETWORK_EXCEPTION
            for name in names:
                self._batcher.topic_unknown(name, ApiError(code, str(error)), _now_ms())
        else:
            for name in names:
                topic = topics[name]
                if isinstance(topic, ApiError):
                    self._batcher.topic_unknown(name, topic, _now_ms())
                else:
                    placement = Placement(topic.initial_partition_count, topic.partition_count, topic.elastic)
                    self._batcher.topic_known(name, placement, topic.leaders, _now_ms())
        self._schedule()

    async def _init_producer(self, wanted: InitProducer) -> None:
        request = InitProducerIdRequest(
            transactional_id=None,
            transaction_timeout_ms=60_000,
            producer_id=wanted.producer_id,
            producer_epoch=wanted.producer_epoch,
        )
        try:
            response = await self._cluster.ask(request)
            if response.error_code:
                raise ApiError(ErrorCode.of(response.error_code), "the broker gave no producer id")
            self._batcher.producer_known(response.producer_id, response.producer_epoch)
        except ApiError as error:
            self._batcher.producer_unknown(error, _now_ms())
        except (AnabranchError, OSError, DecodeError) as error:
            self._batcher.producer_unknown(ApiError(ErrorCode.NETWORK_EXCEPTION, str(error)), _now_ms())
        self._schedule()


def _generation_of(rows: Any) -> int:
    """Rows that travel together were taken together."""
    generation: int = rows[0].generation if isinstance(rows, Records) else rows.ticket.generation
    return generation


def _bytes(content: object, role: str) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    raise TypeError(f"a {role} is bytes or text, not {type(content).__name__}: serialise it first")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def _abandoned(count: int) -> ApiError:
    return ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, f"{count} records were not sent: the caller gave up waiting")


def _fail(promise: Any, error: Exception) -> None:
    if not promise.done():
        promise.set_exception(error)
        _retrieved(promise)


def _retrieved(promise: Any) -> None:
    """The error is told by `flush` and `close` too: asyncio need not complain when nobody asks this future."""
    if isinstance(promise, asyncio.Future) and promise.done() and not promise.cancelled():
        promise.exception()
