"""One task: its rows, in one transaction, prepared for the driver to commit.

The producer of an earlier attempt is fenced when this one begins, and its transaction aborted, unless it was decided:
then it is committed, and the task has nothing to write (`decision`). A worker process keeps its connections to brokers
from task to task.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa

from anabranch.base.errors import AnabranchError, ApiError
from anabranch.client import OffsetAndMetadata, PreparedTransaction
from anabranch.client.producer.transactions import FENCED
from anabranch.client.sync import Admin, Producer
from anabranch.spark.sink import decision, rows
from anabranch.spark.sink.options import SinkOptions


@dataclass(frozen=True, slots=True)
class Attempt:
    """Whose rows these are."""

    query: str
    """The id of the query, or of this one write of a batch query."""
    batch_id: int
    task: int

    def transactional_id(self, options: SinkOptions) -> str:
        """The transactional id of the task, and the name of the group that keeps its mark."""
        return f"{group_of(options, self.query)}-{self.task}"


@dataclass(frozen=True, slots=True)
class Written:
    """What a task tells the driver."""

    attempt: Attempt
    topic: str = ""
    """One that was written to; empty without rows."""
    prepared: PreparedTransaction | None = None
    """None if there is nothing to commit: no rows, or they are committed."""


def group_of(options: SinkOptions, query: str) -> str:
    """The name of the group that keeps the decisions of a query."""
    return f"{options.prefix}-{query}"


def write(options: SinkOptions, names: tuple[str, ...], attempt: Attempt, batches: Iterable[pa.RecordBatch]) -> Written:
    """Write the rows of a task. After an exception nothing of them becomes visible."""
    if not options.exactly_once:
        with Producer(options.servers, **options.producer) as producer:
            _send(producer, options, names, batches)
        return Written(attempt)
    admin = admin_of(options.servers, os.getpid())
    decided = decided_in(admin, options, attempt.query)
    if decision.is_decided(decided, attempt.batch_id):
        mine = decided.transactions.get(attempt.task)
        if mine is None or ended(admin, mine, commit=True):
            return Written(attempt)
    transactional_id = attempt.transactional_id(options)
    with Producer(options.servers, transactional_id=transactional_id, **options.producer) as producer:
        producer.init_transactions()
        if decision.is_marked(_mark(admin, transactional_id), attempt.batch_id):
            return Written(attempt)
        producer.begin_transaction()
        topic = _send(producer, options, names, batches)
        if not topic:
            producer.abort_transaction()
            return Written(attempt)
        producer.send_offsets_to_transaction({(topic, 0): attempt.batch_id + 1}, transactional_id)
        return Written(attempt, topic, producer.prepare_transaction())


def _send(producer: Producer, options: SinkOptions, names: tuple[str, ...], batches: Iterable[pa.RecordBatch]) -> str:
    """Hand over all rows; return a topic of them, empty without any."""
    topic = ""
    key, headers, timestamp = (name if name in names else None for name in ("key", "headers", "timestamp"))
    for batch in batches:
        if not batch.num_rows:
            continue
        for topic, partition, records in rows.parts(batch, names, options.topic):
            producer.send_arrow(
                topic, records, key=key, value="value", headers=headers, timestamp=timestamp, partition=partition
            )
    producer.flush()
    return topic


# -- what is kept in groups --------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def admin_of(servers: str, process_id: int) -> Admin:
    """The admin client of this process for some brokers."""
    del process_id  # A client belongs to the process that made it.
    return Admin(servers, client_id="anabranch-spark")


def decided_in(admin: Admin, options: SinkOptions, query: str) -> decision.Decision | None:
    """Read the newest decision of a query."""
    group = group_of(options, query)
    pieces: list[str] = []
    while True:
        found = admin.list_group_offsets(f"{group}.{len(pieces)}" if pieces else group)
        newest = max(found.values(), key=lambda at: at.offset, default=None)
        if newest is None:
            return None
        pieces.append(newest.metadata)
        if len(pieces) >= decision.piece_count(pieces[0]):
            return decision.from_metadata(pieces, group)


def decide(admin: Admin, options: SinkOptions, query: str, topic: str, made: decision.Decision) -> None:
    """Write a decision; when this returns, it holds."""
    group = group_of(options, query)
    pieces = decision.to_metadata(made, group)
    for number, piece in reversed(list(enumerate(pieces))):
        at = OffsetAndMetadata(made.batch_id + 1, metadata=piece)
        admin.alter_group_offsets(f"{group}.{number}" if number else group, {(topic, 0): at})


def ended(admin: Admin, prepared: PreparedTransaction, *, commit: bool) -> bool:
    """Commit or abort a prepared transaction; False if that was decided by others meanwhile."""
    try:
        admin.end_transaction(prepared, commit=commit)
    except ApiError as error:
        if error.code in FENCED:
            return False
        raise
    return True


def _mark(admin: Admin, group: str) -> int | None:
    found = admin.list_group_offsets(group)
    return max((at.offset for at in found.values()), default=None)


class SinkError(AnabranchError):
    """A micro-batch that was not written; the message says why, and what of it is visible."""
