"""The producer: sends records to topics, keeping the order of each key through every resize.

Every record has an outcome: delivered, or failed with the error that is the reason, on its own future; `flush` and
`close` raise the failures that they have not raised before. Records wait in memory of at most `buffer.memory` bytes; a
faster sender waits for room. `driver` carries out on sockets what `machines.clients.sending` decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import OffsetsByPartition, offsets_of
from anabranch.client.producer.delivery import ColumnsMetadata, TableDelivery, mark_retrieved
from anabranch.client.producer.driver import SendingDriver, given_up
from anabranch.client.producer.rows import ColumnNames, Header, Outgoing, Promise, RecordMetadata
from anabranch.client.producer.transactions import MAY, Phase, Transactions, group_of
from anabranch.client.settings import ProducerSettings, as_keywords, configured_by

if TYPE_CHECKING:
    import pyarrow as pa

WAITING_MAX = 10_000
"""Records that another thread may have handed over and that were not taken yet."""
SLICE_SIZE = 15 * 512 * 1024
"""Columns are placed and encoded in slices of about this size, so that the batches of one stay below 8 MiB."""


class Producer:
    """Sends records to topics, keeping the order of each key through every resize.

    Its keyword arguments are the settings of `anabranch.client.settings.ProducerSettings` (docs/client-settings.md).
    Use as `async with Producer(bootstrap_servers=...) as producer`, or call `close` at the end.
    """

    @configured_by(ProducerSettings)
    def __init__(self, settings: ProducerSettings) -> None:
        self._cluster = Cluster(settings.bootstrap_servers, settings.connection())
        self._transactions: Transactions | None = None
        if settings.transactional_id is not None:
            self._transactions = Transactions(
                self._cluster,
                settings.transactional_id,
                timeout_ms=settings.transaction_timeout_ms,
                request_timeout_ms=settings.request_timeout_ms,
                max_block_ms=settings.max_block_ms,
            )
        self._driver = SendingDriver(settings, self._cluster, self._transactions)
        self._open = self._driver.open
        self._sending = self._driver.batcher.state
        """Read only: `is_full` is asked for every record."""
        self._buffer_memory = settings.buffer_memory
        self._max_block_ms = settings.max_block_ms
        self._column_order: dict[str, asyncio.Lock] = {}
        self._closed = False
        self.waiting: deque[Outgoing] = deque()
        """Records that another thread hands over."""

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
        return Outgoing(topic, key, value, timestamp, headers, partition, promise, self._open.generation)

    def take(self, record: Outgoing) -> None:
        """Take one record at once, room or not, and keep its promise."""
        self._driver.append(record)

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
        self._driver.start()
        delivery = TableDelivery(topic, promise, self._open.generation)
        delivery.open_count = left = table.num_rows
        slices = columns_of(
            table, columns, partition=partition, delivery=delivery, now_ms=int(time.time() * 1000), size_max=SLICE_SIZE
        )
        if left == 0:
            promise.set_result(delivery.metadata)
            return
        self._open.counts[delivery.generation] += left
        try:
            async with self._column_order.setdefault(topic, asyncio.Lock()):
                for rows, size in slices:
                    if self.is_full:
                        await self.wait_for_room()
                    self._driver.append_rows(topic, rows, size)
                    left -= rows.record_count
        except BaseException as error:
            self._open.close(delivery.generation, left)
            delivery.fail(error if isinstance(error, Exception) else given_up(left), left)
            mark_retrieved(promise)
            raise

    async def flush(self, timeout_s: float | None = None) -> None:
        """Wait until every record taken so far has an outcome; raise `DeliveryError` if any of them failed."""
        loop = self._driver.start()
        self._driver.batcher.flush()
        self._driver.schedule()
        if self._open.count:
            flushed = self._open.begin_flush(loop)
            try:
                async with asyncio.timeout(timeout_s):
                    await flushed
            except TimeoutError:
                text = f"{self._open.count} records have no outcome after {timeout_s} s; they are still being tried"
                raise ApiError(ErrorCode.REQUEST_TIMED_OUT, text) from None
        self._open.raise_failures()

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
            self._driver.batcher.abandon(error)
            self._driver.pump()
            self._open.raise_failures()
        finally:
            await self._driver.close()
            await self._cluster.close()

    def take_waiting(self) -> None:
        """Take what another thread left in `waiting`."""
        self._driver.append_waiting(self.waiting)
        if self.waiting:
            self._driver.start().call_soon(self.take_waiting)

    @property
    def is_full(self) -> bool:
        """Whether the sender of the next record should wait for room."""
        return self._sending.buffered_size >= self._buffer_memory or len(self.waiting) > WAITING_MAX

    @property
    def buffered_size(self) -> int:
        """Bytes of records that have no outcome yet."""
        return self._sending.buffered_size

    def _check_open(self) -> None:
        if self._closed:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this producer is closed; make a new one")
        if self._driver.batcher.fatal is not None:
            raise self._driver.batcher.fatal

    async def wait_for_room(self) -> None:
        """Wait while the buffer is full, at most `max.block.ms`."""
        try:
            async with asyncio.timeout(self._max_block_ms / 1000):
                await self._driver.wait_for_room(self._check_open)
        except TimeoutError:
            text = (
                f"the buffer of {self._buffer_memory} bytes (buffer.memory) stayed full for {self._max_block_ms} ms "
                "(max.block.ms); the brokers take records more slowly than they come, or not at all"
            )
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, text) from None

    # -- transactions -------------------------------------------------------------------------------------------------

    async def init_transactions(self) -> None:
        """Become the one producer of `transactional.id`: another one is fenced, and what it left open is aborted."""
        transactions = self._transactional("init")
        self._driver.start()
        self._driver.batcher.producer_known(*await transactions.init())
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
            self._driver.spoil(error)
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
        self._driver.batcher.abandon(ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "the transaction was aborted"))
        self._driver.pump()
        self._open.forget_failures()
        if self._driver.adding:
            await asyncio.gather(*self._driver.adding, return_exceptions=True)
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
            if self._driver.batcher.new_epoch_needed:
                self._driver.batcher.producer_known(*await transactions.init())
        except ApiError as error:
            if transactions.phase is Phase.FENCED:
                self._driver.batcher.stop(error)
                self._driver.schedule()
            raise
        self._driver.batcher.transaction_ended()
        transactions.phase, transactions.why = Phase.READY, None


def _bytes(content: object, role: str) -> bytes:
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    raise TypeError(f"a {role} is bytes or text, not {type(content).__name__}: serialise it first")
