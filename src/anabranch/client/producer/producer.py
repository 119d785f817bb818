"""The producer: sends records to topics, keeping the order of each key through every resize.

Every record has an outcome on its own future: delivered, or failed with an error. `flush` and `close` raise the
failures not raised before. Records wait in a buffer of at most `buffer.memory` bytes; a faster sender waits for room.
The machine in `machines.clients.sending` decides; `driver` carries out its decisions on sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.listeners import GroupMetadata
from anabranch.client.consumer.offsets import OffsetsByPartition, offsets_of
from anabranch.client.producer.delivery import ColumnsMetadata, TableDelivery, mark_retrieved
from anabranch.client.producer.driver import SendingDriver, given_up
from anabranch.client.producer.intake import RECORDS_MAX, WIDTH, Intake
from anabranch.client.producer.outcome import News
from anabranch.client.producer.records import NO_NAME, Options, Outgoing, is_name
from anabranch.client.producer.rows import NOT_CHOSEN, ColumnNames, Header, RecordMetadata
from anabranch.client.producer.transactions import MAY, Phase, PreparedTransaction, Transactions, group_of
from anabranch.client.settings import ProducerSettings, as_keywords, configured_by

if TYPE_CHECKING:
    import pyarrow as pa

WAITING_SHARE = 4
"""The records that another thread has handed over wait in at most this part of the buffer, if they are as the last."""
SLICE_SIZE = 15 * 512 * 1024
"""The approximate size of the slices in which columns are placed and encoded, so that batches stay below 8 MiB."""


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
        """For reading only: `is_full` is read for every record."""
        self._intake: Intake | None = None
        self._buffer_memory = settings.buffer_memory
        self._max_block_ms = settings.max_block_ms
        self._column_order: dict[str, asyncio.Lock] = {}
        self._closed = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Return a producer for settings by Kafka's dotted names, as in `{"bootstrap.servers": "..."}`."""
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
        """Append one record to the buffer; the returned future is its outcome. Waits while the buffer is full.

        Text is sent as UTF-8; `timestamp` is in ms since 1970, by default now. A record without a value is a
        tombstone in a compacted topic. Without `partition`, records of one key keep their order through every resize.
        """
        self._check_open()
        self.check_transaction()
        _check_name(topic)
        promise: asyncio.Future[RecordMetadata] = asyncio.get_running_loop().create_future()
        if type(key) is not bytes and key is not None:
            key = as_bytes(key, "key")
        if type(value) is not bytes and value is not None:
            value = as_bytes(value, "value")
        now_ms = time.time_ns() // 1_000_000
        record: Outgoing = topic, key, value, now_ms, (), NOT_CHOSEN, promise
        if timestamp is not None or partition is not None or headers:
            options = Options(now_ms if timestamp is None else timestamp, headers, partition)
            record = topic, key, value, options.timestamp, options.headers, options.partition, promise
        if self.is_full:
            await self.wait_for_room()
        self._driver.append(record)
        return promise

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
        """Append the rows of a table as records; the returned future is the outcome of all of them.

        `key`, `value`, `headers` and `timestamp` name columns: keys and values are binary or text; headers are lists of
        (key, value) structs; timestamps are Arrow timestamps or int64 ms. Keys or values are null if the name is None,
        or if `key` names no column of the table. Waits while the buffer is full.
        """
        promise: asyncio.Future[ColumnsMetadata] = asyncio.get_running_loop().create_future()
        await self.take_columns(topic, table, ColumnNames(key, value, headers, timestamp), partition, promise)
        return promise

    async def take_columns(
        self, topic: str, table: pa.Table | pa.RecordBatch, columns: ColumnNames, partition: int | None, promise: Any
    ) -> None:
        """Append the rows of a table, and complete `promise` with their outcome."""
        from anabranch.client.producer.columns import columns_of

        self._check_open()
        if self._transactions is not None:
            self._transactions.check("send")
        _check_name(topic)
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
        """Wait until every record so far has an outcome. Raises `DeliveryError` if any of them failed."""
        loop = self._driver.start()
        self.take_waiting()
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
        """Flush, then close. After `timeout_s` the remaining records fail, and the error gives their number.

        An open transaction is aborted.
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

    def take_in(self, wake: Callable[[], object], news: News) -> Intake:
        """Return an intake for records of other threads; `wake` has the loop call `take_waiting` soon."""
        self._intake = Intake(wake, news)
        return self._intake

    def take_waiting(self) -> None:
        """Append the records that other threads have sent."""
        intake = self._intake
        tray = intake.take() if intake is not None else None
        if intake is not None and tray is not None:
            count = tray.taken // WIDTH
            size = self._driver.append_tray(tray)
            share = self._buffer_memory // WAITING_SHARE
            intake.limit = WIDTH * min(RECORDS_MAX, 1 + share * count // max(size, 1))

    async def take_now(self) -> None:
        """Append the records that other threads have sent, for one that waits for this."""
        self.take_waiting()

    @property
    def is_full(self) -> bool:
        """Whether the sender of the next record should wait for room."""
        return self._sending.buffered_size >= self._buffer_memory

    @property
    def buffered_size(self) -> int:
        """The size of all records without an outcome, in bytes."""
        return self._sending.buffered_size

    @property
    def transactional(self) -> bool:
        """Whether every record is part of a transaction."""
        return self._transactions is not None

    def check_transaction(self) -> None:
        """Raise if no record may be sent because of the state of the transaction."""
        if self._transactions is not None:
            self._transactions.check("send")

    def _check_open(self) -> None:
        if self._closed:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this producer is closed; make a new one")
        if self._driver.batcher.fatal is not None:
            raise self._driver.batcher.fatal

    async def wait_for_room(self) -> None:
        """Wait while the buffer is full, at most `max.block.ms`. Raises if the transaction has ended meanwhile."""
        try:
            async with asyncio.timeout(self._max_block_ms / 1000):
                await self._driver.wait_for_room(self._check_open)
        except TimeoutError:
            text = (
                f"the buffer of {self._buffer_memory} bytes (buffer.memory) stayed full for {self._max_block_ms} ms "
                "(max.block.ms); the brokers take records more slowly than they come, or not at all"
            )
            raise ApiError(ErrorCode.REQUEST_TIMED_OUT, text) from None
        if self._transactions is not None:
            self._transactions.check("take")

    # -- transactions -------------------------------------------------------------------------------------------------

    async def init_transactions(self) -> None:
        """Acquire `transactional.id`: an older producer is fenced, and its open transaction aborted."""
        transactions = self._transactional("init")
        self._driver.start()
        self._driver.batcher.producer_known(*await transactions.init())
        transactions.phase = Phase.READY

    async def begin_transaction(self) -> None:
        """Begin a transaction: the records sent from now on become visible together, at the commit, or never."""
        self._transactional("begin").phase = Phase.OPEN

    async def send_offsets_to_transaction(self, offsets: OffsetsByPartition, group: GroupMetadata | str) -> None:
        """Add a group's offsets to the transaction: the next offsets to read, by partition.

        `group` is the consumer's `group_metadata()`, so that a replaced member cannot commit. Of work that is finished
        out of order, `OffsetAndMetadata(offset, ranges=...)` says what is done at and above the committed `offset`, and
        nothing of what lies between: where the group has not done that, or another transaction has and is open, this
        call waits for it, at most for `max.block.ms`.
        """
        transactions = self._transactional("send")
        try:
            await transactions.commit_offsets(offsets_of(offsets), group_of(group))
        except BaseException as error:
            self._driver.spoil(error)
            raise

    async def commit_transaction(self) -> None:
        """Flush, and commit. Raises `DeliveryError` if a record was not delivered; then abort the transaction.

        If `max.block.ms` pass without a response, the commit can be repeated.
        """
        transactions = self._transactional("commit")
        await self._flush_all(transactions)
        transactions.check("commit")
        transactions.phase = Phase.COMMITTING
        try:
            await self._ended(transactions, commit=True)
        except ApiError as error:
            if error.code is not ErrorCode.REQUEST_TIMED_OUT:
                transactions.spoil(error)
            raise

    async def prepare_transaction(self) -> PreparedTransaction | None:
        """Flush, and leave the transaction open for `Admin.end_transaction`, by any process; None if it holds nothing.

        This producer can only be closed then. Raises `DeliveryError` if a record was not delivered; then abort.
        """
        transactions = self._transactional("commit")
        await self._flush_all(transactions)
        transactions.check("commit")
        return transactions.prepare()

    async def abort_transaction(self) -> None:
        """Abort the open transaction: its records are never visible under read_committed, and unsent ones fail."""
        transactions = self._transactional("abort")
        self.take_waiting()
        transactions.spoil(ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "it is being aborted"))
        self._driver.batcher.abandon(ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "the transaction was aborted"))
        self._driver.pump()
        self._open.forget_failures()
        if self._driver.adding:
            await asyncio.gather(*self._driver.adding, return_exceptions=True)
        transactions.check("abort")
        await self._ended(transactions, commit=False)

    @contextlib.asynccontextmanager
    async def transaction(self) -> AsyncIterator[Self]:
        """`async with producer.transaction():` begins, and commits at the end, or aborts after an exception."""
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
        """Whether a transaction is open or must be aborted."""
        return self._transactions is not None and self._transactions.phase in MAY["abort"]

    def _transactional(self, action: str) -> Transactions:
        self._check_open()
        if self._transactions is None:
            raise ApiError(ErrorCode.INVALID_TXN_STATE, "this producer has no transactional.id: make one that has")
        self._transactions.check(action)
        return self._transactions

    async def _flush_all(self, transactions: Transactions) -> None:
        """Wait until no record of the open transaction is without an outcome; `send` refuses more."""
        if transactions.phase is Phase.OPEN:
            transactions.phase = Phase.FLUSHING
        try:
            await self.flush()
            self.take_waiting()
            while self._open.count:
                await self.flush()
                self.take_waiting()
            self._open.raise_failures()
        except BaseException:
            if transactions.phase is Phase.FLUSHING:
                transactions.phase = Phase.OPEN
            raise

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


def _check_name(topic: object) -> None:
    if not (type(topic) is str and topic.isascii()) and not is_name(topic):
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, NO_NAME)


def as_bytes(content: object, role: str) -> bytes:
    """Return a key or value as it is sent. Raises `TypeError` for what is neither bytes nor text."""
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, bytes | bytearray | memoryview):
        return bytes(content)
    raise TypeError(f"a {role} is bytes or text, not {type(content).__name__}: serialise it first")
