"""The batcher's driver: encodes batches, writes requests, completes the promises of records.

Requests to a broker are written in the order of the batcher's work: while a connection is being made, its requests wait
in a queue. A driver belongs to the event loop of its first use.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from anabranch.base.errors import AnabranchError, ApiError, DecodeError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID
from anabranch.client.cluster.connection import Connection, DisconnectedError
from anabranch.client.cluster.metadata import Cluster, TopicInfo
from anabranch.client.producer.delivery import OpenRecords
from anabranch.client.producer.intake import Tray
from anabranch.client.producer.records import NO_NAME, Gathered, Outgoing, Records, gather, record_size
from anabranch.client.producer.rows import Chance, Columns, ColumnsPart, EncodeSettings, encode_columns
from anabranch.client.producer.transactions import MAY, Phase, Transactions
from anabranch.client.settings import ProducerSettings, taken
from anabranch.machines.clients.sending import (
    Batcher,
    BatcherSettings,
    Delivered,
    Encode,
    Encoded,
    Failed,
    InitProducer,
    Placement,
    ProduceResult,
    Refused,
    Rows,
    Send,
)
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from anabranch.records.batch import stamp_producer
from anabranch.runtime.clock import Clock

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PURPOSE = "produce"
_log = logging.getLogger("anabranch.client")
NAMED_TOPIC_VERSION_MAX = 12
"""Up to this version, Produce identifies topics by name; later versions by id (KIP-516)."""
ADDED_PARTITION_VERSION_MAX = 11
"""Up to this version, a partition must be added to the transaction before a produce request (KIP-890)."""


class SendingDriver:
    """The batcher of one producer with its connections and promises."""

    def __init__(
        self,
        settings: ProducerSettings,
        cluster: Cluster,
        transactions: Transactions | None,
        clock: Clock | None = None,
    ) -> None:
        self.batcher = Batcher(
            taken(
                BatcherSettings,
                settings,
                acks=settings.acks_count,
                enable_idempotence=settings.idempotent,
                transactional=transactions is not None,
            ),
            self._records,
        )
        self.open = OpenRecords()
        self.adding: set[asyncio.Task[None]] = set()
        """Tasks that add partitions to the transaction."""
        self._settings = settings
        self._acks = settings.acks_count
        self._encode_settings = taken(EncodeSettings, settings)
        self._buffer_memory = settings.buffer_memory
        self._cluster = cluster
        self._transactions = transactions
        self._now_ms = (clock or Clock()).monotonic_ms
        """The clock of the batcher, in ms."""
        self._chance = random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = False
        self._closed = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._kernels_loaded = False
        self._encoding: set[asyncio.Future[Any]] = set()
        self._connecting: dict[int, list[Send]] = {}
        self._unanswered: dict[int, Connection] = {}
        """With acks=0: the connection over which batches were sent to each node."""
        self._lost: set[int] = set()
        """With acks=0: nodes whose connection was found to have ended since the last `drain`."""
        self._room: asyncio.Event | None = None
        self._next_refresh = 0.0
        self._topics: set[str] = set()
        """The topics whose metadata is refreshed at its age: those that were there when they were last looked at."""

    # -- for the producer ---------------------------------------------------------------------------------------------

    def start(self) -> asyncio.AbstractEventLoop:
        """Bind the driver to the running event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._room = asyncio.Event()
            self._next_refresh = self._loop.time() + self._settings.metadata_max_age_ms / 1000
        return self._loop

    def schedule(self) -> None:
        """Carry out the batcher's work in the next iteration of the event loop."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self.start().call_soon(self.pump)

    def append(self, record: Outgoing) -> None:
        """Append one record to the batcher."""
        self._append(record[0], [record], 1, record_size(record), self._now_ms())

    def append_rows(self, topic: str, rows: Rows, size: int) -> None:
        """Append a slice of a table to the batcher."""
        self.batcher.append_rows(topic, rows, size, self._now_ms())
        self.schedule()

    def append_tray(self, tray: Tray) -> int:
        """Append the records that other threads have sent; return their size."""
        if self._too_late(tray):
            return 0
        now, size_max = self._now_ms(), self._encode_settings.batch_size
        total = 0
        for topic, keys, values, times, places in tray.by_topic():
            if topic is None:
                self._refuse(tray, places, ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, NO_NAME))
                continue
            for gathered in gather(keys, values, times, tray.receipt, places):
                if not isinstance(gathered, Gathered):
                    self._refuse(tray, *gathered)
                elif self.batcher.fatal is not None or self._closed:
                    self._refuse(tray, gathered.places, self.batcher.fatal or _closed())
                else:
                    for part, size in gathered.cut(size_max):
                        self._append(topic, [part], part.record_count, size, now)
                        total += size
        return total

    def _too_late(self, tray: Tray) -> bool:
        """Whether the transaction has ended since its senders looked at it: then its records fail.

        They count as lost, but not if all records of the transaction are.
        """
        import numpy as np

        transactions = self._transactions
        try:
            if transactions is not None:
                transactions.check("take")
            return False
        except ApiError as error:
            tray.receipt.failed(np.arange(tray.receipt.count), error)
            if transactions is not None and transactions.phase is not Phase.SPOILT:
                self.open.failed(error, tray.receipt.count)
            return True

    def _refuse(self, tray: Tray, places: NDArray[np.int64], error: ApiError) -> None:
        tray.receipt.failed(places, error)
        self.open.failed(error, len(places))
        self.spoil(error)

    def _records(self, parts: list[Any]) -> Records:
        return Records(parts, self.open.generation)

    def _append(self, topic: str, records: list[Outgoing | Gathered], count: int, size: int, now_ms: int) -> None:
        """Append records of one topic."""
        self.open.counts[self.open.generation] += count
        if self.batcher.append(topic, records, size, now_ms):
            self.schedule()

    async def wait_for_room(self, check: Callable[[], None]) -> None:
        """Wait while the buffer is full; `check` raises when waiting longer cannot help."""
        self.start()
        assert self._room is not None
        while self.batcher.buffered_size >= self._buffer_memory:
            self._room.clear()
            await self._room.wait()
            check()

    async def close(self) -> None:
        """Fail the records without an outcome, cancel all tasks, and send nothing more."""
        if self._loop is not None and not self._closed:
            self.batcher.abandon(_closed())
            self.pump()
        self._closed = True
        if self._room is not None:
            self._room.set()
        if self._timer is not None:
            self._timer.cancel()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def spoil(self, error: BaseException) -> None:
        """Report the loss of a record of the open transaction: send no more records of the transaction."""
        transactions = self._transactions
        if transactions is not None and transactions.phase in MAY["take"]:
            cause = error if isinstance(error, Exception) else given_up(0)
            transactions.spoil(cause)
            text = f"the transaction must be aborted, because of an earlier error: {cause}"
            self.batcher.abandon(ApiError(ErrorCode.INVALID_TXN_STATE, text))
            self.schedule()

    # -- the batcher's work -------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Carry out the batcher's work, in the order defined by `ProducerWork`."""
        self._scheduled = False
        if self._closed:
            return
        loop = self.start()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._lost.clear()
        work = self.batcher.drain(self._now_ms())
        for outcome in work.outcomes:
            if isinstance(outcome, Delivered):
                self._deliver(outcome)
            else:
                self._fail(outcome)
        for encode in work.encodes:
            self._encode(encode)
        for send in work.sends:
            self._send(send)
        if work.refresh:
            self._run(self._refresh(work.refresh))
        elif self._topics and loop.time() >= self._next_refresh:
            self._next_refresh = loop.time() + self._settings.metadata_max_age_ms / 1000
            self._run(self._look_again())
        if work.init_producer is not None:
            self._run(self._init_producer(work.init_producer))
        if work.add_partitions:
            adding = self._run(self._add_partitions(work.add_partitions))
            self.adding.add(adding)
            adding.add_done_callback(self.adding.discard)
        if work.wake_at_ms is not None and not self._scheduled:
            delay = max(0, work.wake_at_ms - self._now_ms()) / 1000
            self._timer = loop.call_later(delay, self.pump)
        if self.batcher.buffered_size < self._buffer_memory and self._room is not None:
            self._room.set()
        self.open.end_flushes()

    def _run(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.start().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _deliver(self, outcome: Delivered) -> None:
        batch = outcome.batch
        rows: Any = batch.rows
        self.open.close(rows.generation, rows.record_count)
        rows.delivered(batch.topic, outcome.base_offset, outcome.log_append_time_ms)

    def _fail(self, outcome: Failed) -> None:
        rows: Any = outcome.rows
        self.open.close(rows.generation, rows.record_count)
        self.open.failed(outcome.error, rows.record_count)
        if self.batcher.fatal is not None and self._transactions is not None:
            self._transactions.fence(self.batcher.fatal)
        self.spoil(outcome.error)
        rows.fail(outcome.error)

    def _encode(self, encode: Encode) -> None:
        arguments = (encode.rows, encode.placement, self._encode_settings, self._any_hash)
        loop = self.start()
        encoding: asyncio.Future[Any]
        if isinstance(encode.rows, Records) and self._kernels_loaded:
            encoding = loop.create_future()
            try:
                encoding.set_result(encode_rows(*arguments))
            except Exception as error:
                encoding.set_exception(error)
            self._encoded(encode, encoding)
        else:
            # Start at once, not in a task: kernels do not hold the interpreter lock, and run while sockets are written
            # to. The first use loads the kernels, which takes a second.
            encoding = loop.run_in_executor(None, encode_rows, *arguments)
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
        self.batcher.encoded(encode.job, encode.topic, parts, refused)
        self.schedule()

    def _any_hash(self) -> int:
        return self._chance.getrandbits(31)

    # -- produce requests ---------------------------------------------------------------------------------------------

    def _send(self, send: Send) -> None:
        """Write a request, or queue it behind requests that wait for the connection: the order never changes."""
        connecting = self._connecting.get(send.node)
        if connecting is not None:
            connecting.append(send)
            return
        if self._acks == 0 and self._was_closed(send.node):
            self.batcher.not_sent(send.request_id, self._now_ms())
            self.schedule()
            return
        connection = self._cluster.open_connection(send.node, PURPOSE)
        if connection is not None:
            self._write(connection, send)
            return
        self._connecting[send.node] = [send]
        self._run(self._connect_and_send(send.node))

    def _was_closed(self, node: int) -> bool:
        """Whether a connection with unacknowledged batches has ended: then nothing decided before is sent there."""
        used = self._unanswered.get(node)
        if used is not None and not used.is_open:
            del self._unanswered[node]
            self._lost.add(node)
            self.batcher.connection_lost(node)
            text = "%s closed the connection of a producer with acks=0: records on their way there may be lost; "
            _log.warning(text + "metadata is refreshed before more are sent", used.name)
        return node in self._lost

    async def _connect_and_send(self, node: int) -> None:
        try:
            connection = await self._cluster.connection(node, PURPOSE)
        except (AnabranchError, OSError):
            connection = None
        for send in self._connecting.pop(node):
            if connection is None:
                self.batcher.not_sent(send.request_id, self._now_ms())
            else:
                self._write(connection, send)
        self.schedule()

    def _write(self, connection: Connection, send: Send) -> None:
        request = self._request(send)
        try:
            version = self._version(connection, send)
            if self._acks == 0:
                connection.send_unanswered(request, version=version)
                self._unanswered[send.node] = connection
                results = {(batch.topic, batch.partition): ProduceResult() for batch in send.batches}
                self.batcher.answered(send.request_id, results, self._now_ms())
                self.schedule()
                return
            future = connection.send(request, timeout_ms=send.timeout_ms, version=version)
        except DisconnectedError:
            self.batcher.not_sent(send.request_id, self._now_ms())
            self.schedule()
            return
        future.add_done_callback(lambda done: self._answered(send, done))

    def _version(self, connection: Connection, send: Send) -> int:
        """Return the version of a produce request: the highest that identifies topics by id, where each has one."""
        version = connection.version_of(ProduceRequest)
        if NO_TOPIC_ID in send.topic_ids.values():
            version = min(version, NAMED_TOPIC_VERSION_MAX)
        if self._transactions is not None and COUNT_NOT_SAID in send.counts.values():
            version = min(version, ADDED_PARTITION_VERSION_MAX)  # An elastic broker adds no partition by itself.
        return version

    def _request(self, send: Send) -> ProduceRequest:
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
        return ProduceRequest(
            transactional_id=None if self._transactions is None else self._transactions.transactional_id,
            acks=self._acks,
            timeout_ms=min(send.timeout_ms, self._settings.request_timeout_ms),
            topic_data=[
                TopicProduceData(
                    name=name,
                    topic_id=send.topic_ids[name],
                    partition_data=partitions,
                    undeleted_partition_count=send.counts[name],
                )
                for name, partitions in topics.items()
            ],
        )

    def _answered(self, send: Send, future: asyncio.Future[Any]) -> None:
        error = future.exception() if not future.cancelled() else DisconnectedError("cancelled")
        if error is not None:
            self.batcher.lost(send.request_id, self._now_ms())
        else:
            names = {topic_id: name for name, topic_id in send.topic_ids.items() if topic_id != NO_TOPIC_ID}
            results = {
                (names.get(topic.topic_id, topic.name), partition.index): ProduceResult(
                    ErrorCode.of(partition.error_code),
                    partition.base_offset,
                    partition.log_append_time_ms,
                    partition.error_message,
                )
                for topic in future.result().responses
                for partition in topic.partition_responses
            }
            self.batcher.answered(send.request_id, results, self._now_ms())
        self.schedule()

    # -- other requests -----------------------------------------------------------------------------------------------

    async def _refresh(self, names: Sequence[str]) -> None:
        """Find out about topics that there are records for."""
        try:
            topics = await self._cluster.topics(list(names), create=self._settings.allow_auto_create_topics)
        except (AnabranchError, OSError) as error:
            code = error.code if isinstance(error, ApiError) else ErrorCode.NETWORK_EXCEPTION
            for name in names:
                self.batcher.topic_unknown(name, ApiError(code, str(error)), self._now_ms())
        else:
            for name in names:
                topic = topics[name]
                if isinstance(topic, ApiError):
                    self.batcher.topic_unknown(name, topic, self._now_ms())
                else:
                    self._known(name, topic)
        self.schedule()

    async def _look_again(self) -> None:
        """Refresh what is known of topics; one that is deleted stays so until there is a record for it."""
        names, self._topics = sorted(self._topics), set()  # `_refresh` may add some meanwhile, and knows better.
        try:
            topics = await self._cluster.topics(names)
        except (AnabranchError, OSError):
            self._topics.update(names)
            return
        for name in names:
            topic = topics[name]
            if not isinstance(topic, ApiError):
                self._known(name, topic)
            elif topic.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self._topics.add(name)
        self.schedule()

    def _known(self, name: str, topic: TopicInfo) -> None:
        self._topics.add(name)
        placement = Placement(topic.initial_partition_count, topic.partition_count, topic.elastic, topic.topic_id)
        self.batcher.topic_known(name, placement, topic.leaders, self._now_ms())

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
            self.batcher.producer_known(response.producer_id, response.producer_epoch)
        except ApiError as error:
            self.batcher.producer_unknown(error, self._now_ms())
        except (AnabranchError, OSError, DecodeError) as error:
            self.batcher.producer_unknown(ApiError(ErrorCode.NETWORK_EXCEPTION, str(error)), self._now_ms())
        self.schedule()

    async def _add_partitions(self, partitions: Sequence[tuple[str, int]]) -> None:
        assert self._transactions is not None
        try:
            await self._transactions.add_partitions(partitions)
        except ApiError as error:
            if error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                self.batcher.partitions_missing(partitions, self._now_ms())
            elif self._transactions.phase is Phase.FENCED:
                self.batcher.stop(error)
            else:
                self.spoil(error)
        else:
            self.batcher.partitions_added(partitions)
        self.schedule()


def given_up(count: int) -> ApiError:
    """Return the error of records whose caller was cancelled while waiting for room in the buffer."""
    return ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, f"{count} records were not sent: the caller gave up waiting")


def _closed() -> ApiError:
    return ApiError(ErrorCode.OPERATION_NOT_ATTEMPTED, "the producer was closed")


def encode_rows(
    rows: Any, placement: Placement, settings: EncodeSettings, chance: Chance
) -> tuple[list[Encoded], list[Refused]]:
    """Place rows of a chunk or of a batch and encode them into batches; each partition keeps the order of its rows."""
    columns: Columns | ColumnsPart = rows.columns() if isinstance(rows, Records) else rows
    return encode_columns(columns, placement, settings, chance)
