"""What Spark sees of the sink: writers of batch and of streaming queries.

Spark makes a writer on the driver, sends copies of it to the executors for `write`, and calls `commit` or `abort` in a
process beside the driver, with what the tasks have returned.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar
from uuid import uuid4

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.client import PreparedTransaction
from anabranch.client.sync import Admin
from anabranch.spark.sink import decision, rows
from anabranch.spark.sink.options import SinkOptions
from anabranch.spark.sink.planned import planned_ms
from anabranch.spark.sink.task import (
    Attempt,
    SinkError,
    Written,
    decide,
    decided_in,
    ended,
    is_written,
    naming,
    refuse_older,
    refuse_other,
    write,
)
from anabranch.spark.workers import Sent

QUERY_ID, BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
"""Local properties of a streaming query's tasks: the query's id is in its checkpoint, and lasts as long."""
AT_A_TIME = 16
ONLY_BATCH = 0
R = TypeVar("R")

log = logging.getLogger("anabranch.spark.sink")


_reached: set[str] = set()
"""The brokers that this process has reached: where they are away for a moment later, tasks wait for them."""


@dataclass
class TaskWritten(WriterCommitMessage):
    """What a task has written, on its way to the driver."""

    written: Written


class _Writer(Sent):
    """The common part of both writers."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        self.options = options
        self.names = rows.check(schema, options.topic)
        if options.servers not in _reached:
            with naming(options), self.admin() as admin:
                admin.describe_cluster()  # Whoever cannot be reached is named here, and not a minute later in tasks.
            _reached.add(options.servers)

    def finish(self, admin: Admin, messages: Sequence[TaskWritten | None], batch_id: int) -> decision.Decision | None:
        """Decide that a micro-batch becomes visible, and commit the transactions of its tasks. Repeat it at will.

        Return the decision; None if no record needed one.
        """
        written = [message.written for message in messages if message is not None]
        if not self.options.exactly_once or not written:
            return None
        query = written[0].attempt.names(self.options)
        prepared = _prepared(written)
        digests = {one.attempt.task: one.digest for one in written if one.digest.rows}
        planned = planned_ms(self.options.checkpoint, written[0].attempt.query, batch_id)
        batch = decision.MicroBatch(batch_id, digests, planned)
        before = decided_in(admin, query)
        refuse_older(query, batch_id, before)
        made, left = decision.next_decision(before, batch, prepared)
        aborted = self._end_all(admin, left, commit=True)  # They are decided, whatever this attempt has for rows.
        are_there = _for_each(aborted, lambda each: is_written(admin, query, each, batch_id))
        refuse_other(query, before, batch, prepared, missing=are_there.count(False))
        if decision.is_decided(before, batch_id) and made.digest is not None and made.digest != batch.digest:
            log.warning(
                "Micro-batch %d was decided with %d rows, and its replay has %d, or others: its sources have lost "
                "rows since, as compacted topics do, or its rows depend on more than these. All rows of the decision "
                "are written, and these are not.",
                batch_id,
                made.digest.rows,
                batch.digest.rows,
            )
        if prepared:
            self.check_open(admin, prepared)
            self.decide(admin, query, next(one.topic for one in written if one.prepared is not None), made)
        late = self._end_all(admin, list(prepared.values()), commit=True)
        if late:
            raise SinkError(self.why_late(late, len(prepared), batch_id))
        return made if prepared else None

    def give_up(self, admin: Admin, messages: Sequence[TaskWritten | None], batch_id: int) -> None:
        """Abort the transactions of a micro-batch, unless it was decided to commit them."""
        written = [message.written for message in messages if message is not None]
        if not self.options.exactly_once or not written:
            return
        decided = decided_in(admin, written[0].attempt.names(self.options))
        self._end_all(admin, decision.undecided(decided, batch_id, _prepared(written)), commit=False)

    def _end_all(
        self, admin: Admin, prepared: Sequence[PreparedTransaction], *, commit: bool
    ) -> list[PreparedTransaction]:
        """End transactions; return those that others have ended otherwise."""
        done = _for_each(prepared, lambda each: self.end(admin, each, commit=commit))
        return [each for each, is_done in zip(prepared, done, strict=True) if not is_done]

    # What streams and batches differ in.

    def check_open(self, admin: Admin, prepared: Mapping[int, PreparedTransaction]) -> None:
        """Raise `SinkError` before the decision if it could not be carried out, where no replay would finish it."""

    def why_late(self, late: Sequence[PreparedTransaction], count: int, batch_id: int) -> str:
        """Say what it means that of `count` decided transactions some could not be committed."""
        return (
            f"{len(late)} of {count} transactions of micro-batch {batch_id} were aborted before they could "
            f"be committed, the first of {late[0].transactional_id}: by their timeout "
            "(kafka.transaction.timeout.ms), by another run of the same query, or by a second attempt of a task "
            "(spark.speculation). Start the query again, with its rows divided into tasks as they are: it writes what "
            "is missing, and nothing twice."
        )

    # The two steps that change what readers see.

    def decide(self, admin: Admin, query: decision.Names, topic: str, made: decision.Decision) -> None:
        """Write the decision."""
        decide(admin, query, topic, made)

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
        with naming(self.options), self.admin() as admin:
            self.finish(admin, messages, batchId)  # type: ignore[arg-type]

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Drop a micro-batch."""
        with naming(self.options), self.admin() as admin:
            self.give_up(admin, messages, batchId)  # type: ignore[arg-type]


class BatchWriter(_Writer, DataSourceArrowWriter):
    """Writes the rows of a batch query."""

    def __init__(self, options: SinkOptions, schema: StructType) -> None:
        super().__init__(options, schema)
        self.id = uuid4().hex
        self.commits_end = math.inf
        """When the last of the transactions will have timed out, in s of this machine's clock."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskWritten:
        """Write the rows of one task."""
        attempt = Attempt(self.id, ONLY_BATCH, _context().partitionId())
        return TaskWritten(write(self.options, self.names, attempt, iterator))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make the rows visible."""
        with naming(self.options), self.admin() as admin:
            made = self.finish(admin, messages, ONLY_BATCH)  # type: ignore[arg-type]
            if made is not None:
                self._forget(admin, made)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Drop the rows."""
        with naming(self.options), self.admin() as admin:
            self.give_up(admin, messages, ONLY_BATCH)  # type: ignore[arg-type]

    def check_open(self, admin: Admin, prepared: Mapping[int, PreparedTransaction]) -> None:
        """Raise `SinkError` while nothing is visible if a transaction is not open any more, or close to its timeout."""
        open_ = _for_each(list(prepared.values()), lambda each: _is_open(admin, each))
        late = [each for each, is_open in zip(prepared.values(), open_, strict=True) if not is_open]
        timeout_ms = self.options.producer["transaction_timeout_ms"]
        self.commits_end = time.monotonic() + timeout_ms / 1000
        if late:
            raise SinkError(
                f"Nothing was written: of {len(prepared)} transactions {len(late)} were no longer open, or close to "
                f"their timeout, when all tasks had ended, the first of {late[0].transactional_id}. Each is open until "
                f"the last task ends: set kafka.transaction.timeout.ms (now {timeout_ms}) to more than the write takes "
                "(brokers have a limit, transaction.max.timeout.ms), leave spark.speculation off, and write again."
            )

    def end(self, admin: Admin, prepared: PreparedTransaction, *, commit: bool) -> bool:
        """End one transaction; a commit that fails keeps no other from being tried, while they may be open."""
        if commit and time.monotonic() > self.commits_end:
            return False
        try:
            return super().end(admin, prepared, commit=commit)
        except (AnabranchError, OSError) as error:
            if not commit:
                raise
            log.error("The transaction of %s was not committed: %s", prepared.transactional_id, error)
            return False

    def why_late(self, late: Sequence[PreparedTransaction], count: int, batch_id: int) -> str:
        """Say which rows are missing."""
        del batch_id
        return (
            f"The rows of {len(late)} of {count} tasks are missing: their transactions could not be committed, the "
            f"first of {late[0].transactional_id}, though all were open when the commits began. The rows of the other "
            f"{count - len(late)} tasks are in the topic: to write again doubles them."
        )

    def _forget(self, admin: Admin, made: decision.Decision) -> None:
        """Delete the groups of this write: nobody will ask for them again. All rows are visible, so nothing fails."""
        query = decision.Names(self.options.prefix, self.id, self.options.topic)
        pieces = len(decision.to_metadata(made, query))
        names = [*(query.decision(at, made.write) for at in range(pieces)), *map(query.task, made.transactions)]
        for done, name in enumerate(names):
            try:
                admin.delete_groups(name)
            except (AnabranchError, OSError) as error:
                if isinstance(error, ApiError) and error.code is ErrorCode.GROUP_ID_NOT_FOUND:
                    continue  # As after a request that was sent again, for its answer was lost.
                left = len(names) - done
                log.warning("%d groups of a write that is complete were not deleted, from %s on: %s", left, name, error)
                return


def _prepared(written: Sequence[Written]) -> dict[int, PreparedTransaction]:
    return {one.attempt.task: one.prepared for one in written if one.prepared is not None}


def _for_each(prepared: Sequence[PreparedTransaction], what: Callable[[PreparedTransaction], R]) -> list[R]:
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return list(pool.map(what, prepared))


def _is_open(admin: Admin, prepared: PreparedTransaction) -> bool:
    name = prepared.transactional_id
    try:
        found = admin.describe_transactions(name).get(name)
    except ApiError as error:
        if error.code is ErrorCode.UNSUPPORTED_VERSION:  # A broker that cannot be asked: the commits will tell.
            return True
        raise
    return decision.is_open(prepared, found, int(time.time() * 1000))


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise SinkError("a task of a write runs in Spark only")
    return context
