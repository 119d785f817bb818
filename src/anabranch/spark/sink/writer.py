"""What Spark sees of the sink: writers of batch and of streaming queries.

Spark makes a writer on the driver, sends copies of it to the executors for `write`, and calls `commit` or `abort` in a
process beside the driver, with what the tasks have returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from anabranch.client import PreparedTransaction
from anabranch.client.sync import Admin
from anabranch.spark.sink import decision, rows
from anabranch.spark.sink.options import SinkOptions
from anabranch.spark.sink.task import Attempt, SinkError, Written, decide, decided_in, ended, group_of, write
from anabranch.spark.workers import Sent

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties of a streaming query's tasks: the query's id is in its checkpoint, and lasts as long."""
ENDS_AT_A_TIME = 16
ONLY_BATCH = 0


@dataclass
class TaskWritten(WriterCommitMessage):
    """What a task has written, on its way to the driver."""

    written: Written


class _Writer(Sent):
    """The common part of both writers."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self.options = options
        self.names = rows.check(schema, options.topic)

    def finish(self, admin: Admin, messages: Sequence[TaskWritten | None], batch_id: int) -> None:
        """Decide that a micro-batch becomes visible, and commit the transactions of its tasks. Repeat it at will."""
        written = [message.written for message in messages if message is not None]
        if not self.options.exactly_once or not written:
            return
        query = written[0].attempt.query
        prepared = {one.attempt.task: one.prepared for one in written if one.prepared is not None}
        made, left = decision.next_decision(decided_in(admin, self.options, query), batch_id, prepared)
        if prepared:
            topic = next(one.topic for one in written if one.prepared is not None)
            self.decide(admin, query, topic, made)
        self._end_all(admin, left, commit=True)
        late = self._end_all(admin, list(prepared.values()), commit=True)
        if late:
            raise SinkError(
                f"{len(late)} of {len(prepared)} transactions of micro-batch {batch_id} were aborted before they could "
                f"be committed, the first of {late[0].transactional_id}: by their timeout "
                "(kafka.transaction.timeout.ms), by another run of the same query, or by a second attempt of a task "
                "(spark.speculation). Start the query again: it writes what is missing, and nothing twice."
            )

    def give_up(self, admin: Admin, messages: Sequence[TaskWritten | None], batch_id: int) -> None:
        """Abort the transactions of a micro-batch, unless it was decided to commit them."""
        written = [message.written for message in messages if message is not None]
        if not self.options.exactly_once or not written:
            return
        if not decision.is_decided(decided_in(admin, self.options, written[0].attempt.query), batch_id):
            self._end_all(admin, [one.prepared for one in written if one.prepared is not None], commit=False)

    def _end_all(
        self, admin: Admin, prepared: Sequence[PreparedTransaction], *, commit: bool
    ) -> list[PreparedTransaction]:
        """End transactions; return those that others have ended otherwise."""
        with ThreadPoolExecutor(ENDS_AT_A_TIME) as pool:
            done = list(pool.map(lambda each: self.end(admin, each, commit=commit), prepared))
        return [each for each, is_done in zip(prepared, done, strict=True) if not is_done]

    # The two steps that change what readers see.

    def decide(self, admin: Admin, query: str, topic: str, made: decision.Decision) -> None:
        """Write the decision."""
        decide(admin, self.options, query, topic, made)

    def end(self, admin: Admin, prepared: PreparedTransaction, *, commit: bool) -> bool:
        """End one transaction."""
        return ended(admin, prepared, commit=commit)

    def admin(self) -> Admin:
        """An admin client; the caller closes it."""
        return Admin(self.options.servers, client_id="anabranch-spark")


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes the micro-batches of a streaming query."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write the rows of one task of a micro-batch."""
        context = _context()
        query, batch_id = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if query is None or batch_id is None:
            raise SinkError("Spark does not say which query and micro-batch a task is of; the sink cannot write once")
        attempt = Attempt(query, int(batch_id), context.partitionId())
        return TaskWritten(write(self.options, self.names, attempt, iterator))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Make a micro-batch visible."""
        with self.admin() as admin:
            self.finish(admin, messages, batchId)  # type: ignore[arg-type]

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Drop a micro-batch."""
        with self.admin() as admin:
            self.give_up(admin, messages, batchId)  # type: ignore[arg-type]


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes the rows of a batch query."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.id = uuid4().hex

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write the rows of one task."""
        attempt = Attempt(self.id, ONLY_BATCH, _context().partitionId())
        return TaskWritten(write(self.options, self.names, attempt, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the rows visible."""
        with self.admin() as admin:
            self.finish(admin, messages, ONLY_BATCH)  # type: ignore[arg-type]
            if self.options.exactly_once:
                self._forget(admin, messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the rows."""
        with self.admin() as admin:
            self.give_up(admin, messages, ONLY_BATCH)  # type: ignore[arg-type]

    def _forget(self, admin: Admin, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Delete the groups of this write: nobody will ask for it again."""
        group = group_of(self.options, self.id)
        named = [message.written for message in messages if isinstance(message, TaskWritten)]
        tasks = [one.attempt.transactional_id(self.options) for one in named if one.prepared is not None]
        for name in (group, *tasks) if tasks else ():
            admin.delete_groups(name)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise SinkError("a task of a write runs in Spark only")
    return context
