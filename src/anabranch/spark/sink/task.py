"""One task: its rows, in one transaction, prepared for the driver to commit.

The producer of an earlier attempt is fenced when this one begins, and its transaction aborted, unless it was decided:
then it is committed, and the task has nothing to write (`decision`). It reads its rows all the same: their digest says
whether they may be those of the decision. A worker process keeps its connections to brokers from task to task.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from itertools import chain

import pyarrow as pa

from anabranch.base.errors import AnabranchError, ApiError
from anabranch.client import OffsetAndMetadata, PreparedTransaction
from anabranch.client.cluster.connection import ConnectError, DisconnectedError
from anabranch.client.producer.delivery import DeliveryError
from anabranch.client.producer.transactions import FENCED
from anabranch.client.sync import Admin, Producer
from anabranch.spark.options import SERVERS, unreachable
from anabranch.spark.sink import decision, rows
from anabranch.spark.sink.options import SinkOptions


class SinkError(AnabranchError):
    """A micro-batch that was not written; the message says why, and what of it is visible."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Whose rows these are."""

    query: str
    """The id of the query, or of this one write of a batch query."""
    batch_id: int
    task: int

    def names(self, options: SinkOptions) -> decision.Names:
        """The groups and transactional ids of the query."""
        return decision.Names(options.prefix, self.query, options.topic)


@dataclass(frozen=True, slots=True)
class Written:
    """What a task tells the driver."""

    attempt: Attempt
    topic: str = ""
    """One that was written to; empty without rows."""
    prepared: PreparedTransaction | None = None
    """None if there is nothing to commit: no rows, or they are committed."""
    digest: decision.Digest = decision.NO_ROWS
    """That of all rows of the task, also of those that an earlier attempt has written."""


@contextmanager
def naming(options: SinkOptions) -> Iterator[None]:
    """Let the errors of clients say which options of a write they are about."""
    try:
        yield
    except (ConnectError, DisconnectedError) as error:
        raise unreachable(options.servers, error) from error
    except DeliveryError as error:
        topic = "the column topic names the topics" if options.topic is None else f"topic is '{options.topic}'"
        raise SinkError(f"{SERVERS} is {options.servers}, {topic}: {error}") from error


def write(options: SinkOptions, names: tuple[str, ...], attempt: Attempt, batches: Iterable[pa.RecordBatch]) -> Written:
    """Write the rows of a task. After an exception nothing of them becomes visible."""
    with naming(options):
        return _write(options, names, attempt, batches)


def _write(
    options: SinkOptions, names: tuple[str, ...], attempt: Attempt, batches: Iterable[pa.RecordBatch]
) -> Written:
    if not options.exactly_once:
        with Producer(options.servers, **options.producer) as producer:
            _send(producer, options, names, batches)
        return Written(attempt)
    admin = admin_of(options.servers, options.producer.get("max_block_ms"), os.getpid())
    query = attempt.names(options)
    transactional_id = query.task(attempt.task)
    decided = decided_in(admin, query)
    refuse_older(query, attempt.batch_id, decided)
    if decision.is_decided(decided, attempt.batch_id):
        mine = decided.transactions.get(attempt.task)
        if mine is None or ended(admin, mine, commit=True):
            return Written(attempt, digest=_digest(names, batches))
    with Producer(options.servers, transactional_id=transactional_id, **options.producer) as producer:
        producer.init_transactions()
        mark = _mark(admin, query, transactional_id)
        refuse_older(query, attempt.batch_id, decided, mark)
        if decision.is_marked(mark, attempt.batch_id):
            return Written(attempt, digest=_digest(names, batches))
        producer.begin_transaction()
        topic, digest = _send(producer, options, names, batches)
        if not topic:
            producer.abort_transaction()
            return Written(attempt)
        producer.send_offsets_to_transaction({(topic, 0): attempt.batch_id + 1}, transactional_id)
        return Written(attempt, topic, producer.prepare_transaction(), digest)


def refuse_older(
    query: decision.Names, batch_id: int, decided: decision.Decision | None, mark: int | None = None
) -> None:
    """Raise `SinkError` for a micro-batch behind which the topic holds a later one."""
    later = decision.later_batch(decided, mark, batch_id)
    if later is not None:
        raise SinkError(
            f"{_held(query)} micro-batch {later} of this query already, and this is micro-batch {batch_id}: the "
            "checkpoint is older, as a backup or a second convert-checkpoint is, or another run of the query is ahead, "
            f"as on a copy of the checkpoint. Nothing was written. {_ways_on(batch_id, later)}"
        )


def refuse_other(
    query: decision.Names,
    decided: decision.Decision | None,
    batch: decision.MicroBatch,
    prepared: Mapping[int, PreparedTransaction],
    missing: int,
) -> None:
    """Raise `SinkError` for a micro-batch that what was decided does not finish; arguments as of `why_refused`."""
    why = decision.why_refused(decided, batch, prepared, missing)
    if why is None:
        return
    number, now = batch.batch_id, batch.digest.rows
    if why is decision.Refusal.NOT_DECIDED:
        raise SinkError(
            f"{_held(query)} rows of micro-batch {number} of this query already, and what was decided of it is gone, "
            "as when groups are deleted or expire: which rows these are is unknown. None of these rows was written. "
            f"{_ways_on(number, number)}"
        )
    assert decided is not None
    count, lost = len(decided.transactions), missing + len(decided.transactions.keys() & prepared)
    gone = f"{lost} of its {count} transactions were aborted before they could be committed, as by their timeout"
    if why is decision.Refusal.ROWS_MISSING:
        differ = ". Its rows now come in other tasks than then, or are others"
        divided = (
            "Start the query again with all that divides its rows into tasks as it was (minPartitions, "
            "maxRecordsPerPartition, coalesce): then what is missing is written. Or set"
        )
        if decided.digests is None:
            differ, divided = ", and the earlier version that decided it did not note which rows each held", "Set"
        raise SinkError(
            f"Micro-batch {number} of this query was decided, but {gone}{differ}. "
            f"{_held(query, 'lack')} some of them, and nobody knows which. None of these was written. "
            f"{divided} transactionalIdPrefix to a new name, to write on from here: then no row is missing, and rows "
            f"of micro-batch {number} come twice."
        )
    others = ", or the rows of the query depend on more than its sources"
    if why is decision.Refusal.PLANNED_ANEW:
        how, others = f"planned at {_time(decided.planned_ms)}, and this one is of {_time(batch.planned_ms)}", ""
    elif decided.digest is None:
        how = f"from an earlier version, which cannot be compared with these {now} rows"
    elif decided.digest.rows == now:
        how = f"with {now} rows of other keys"
    else:
        how = f"with {decided.digest.rows} rows, and now it has {now}"
        others += ", or these have lost rows, as compacted topics do" if now < decided.digest.rows else ""
    raise SinkError(
        f"{_held(query)} micro-batch {number} of this query already, {how}: Spark has planned it anew, as from a "
        f"backup of the checkpoint or one with its last files deleted{others}. None of these rows was written. "
        f"{f'Of what was decided, {gone}. ' if lost else ''}{_ways_on(number, number)}"
    )


def _held(query: decision.Names, verb: str = "hold") -> str:
    return f"The topics that are written {verb}" if query.topic is None else f"Topic {query.topic} {verb}s"


def _time(planned_ms: int | None) -> str:
    assert planned_ms is not None
    return f"{datetime.fromtimestamp(planned_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}.{planned_ms % 1000:03d} UTC"


def _ways_on(first: int, last: int) -> str:
    twice = f"micro-batch {first}" if first == last else f"micro-batches {first} to {last}"
    return (
        "Go on with the newest checkpoint; or set transactionalIdPrefix to a new name, to write on from here: then no "
        f"row is missing, and the rows of {twice} come twice."
    )


def _digest(names: tuple[str, ...], batches: Iterable[pa.RecordBatch]) -> decision.Digest:
    return sum((rows.digest_of(batch, names) for batch in batches), decision.NO_ROWS)


def _send(
    producer: Producer, options: SinkOptions, names: tuple[str, ...], batches: Iterable[pa.RecordBatch]
) -> tuple[str, decision.Digest]:
    """Hand over all rows; return a topic of them, empty without any, and their digest."""
    topic, digest = "", decision.NO_ROWS
    key, headers, timestamp = (name if name in names else None for name in ("key", "headers", "timestamp"))
    for batch in batches:
        if not batch.num_rows:
            continue
        digest += rows.digest_of(batch, names)
        for topic, partition, records in rows.parts(batch, names, options.topic):
            producer.send_arrow(
                topic, records, key=key, value="value", headers=headers, timestamp=timestamp, partition=partition
            )
    producer.flush()
    return topic, digest


# -- what is kept in groups --------------------------------------------------------------------------------------------


@lru_cache(maxsize=4)
def admin_of(servers: str, max_block_ms: int | None, process_id: int) -> Admin:
    """The admin client of this process for some brokers, which is as patient as the producers of its tasks."""
    del process_id  # A client belongs to the process that made it.
    patience = {} if max_block_ms is None else {"default_api_timeout_ms": max_block_ms}
    return Admin(servers, client_id="anabranch-spark", **patience)


def decided_in(admin: Admin, query: decision.Names) -> decision.Decision | None:
    """Read the newest decision of a query. Raises `SinkError` for one that cannot be read."""
    try:
        head = decision.newest(_pieces(admin, query.decision()))
        if head is None:
            return None
        others = [_pieces(admin, query.decision(number, head.write)) for number in range(1, head.count)]
        return decision.from_pieces(head, chain.from_iterable(others), query)
    except decision.DecisionError as error:
        raise SinkError(
            f"What was decided of the newest micro-batch of this query, in the groups {query.decision()} and those "
            f"after it, is unknown: {error}. Nothing was written. Set "
            "transactionalIdPrefix to a new name, to write on from here: then no row is missing, and rows of this "
            "micro-batch may come twice."
        ) from error


def _pieces(admin: Admin, group: str) -> list[decision.Piece]:
    """Read what a group holds; a resize of the topic gives a group offsets of more partitions, without metadata."""
    return [decision.piece_of(at.metadata) for at in admin.list_group_offsets(group).values() if at.metadata]


def decide(admin: Admin, query: decision.Names, topic: str, made: decision.Decision) -> None:
    """Write a decision; when this returns, it holds. Until its first piece is written, the one before holds."""
    for number, piece in reversed(list(enumerate(decision.to_metadata(made, query)))):
        at = OffsetAndMetadata(made.batch_id + 1, metadata=piece)
        admin.alter_group_offsets(query.decision(number, made.write), {(topic, 0): at})


def ended(admin: Admin, prepared: PreparedTransaction, *, commit: bool) -> bool:
    """Commit or abort a prepared transaction; False if that was decided by others meanwhile."""
    try:
        admin.end_transaction(prepared, commit=commit)
    except ApiError as error:
        if error.code in FENCED:
            return False
        raise
    return True


def is_written(admin: Admin, query: decision.Names, prepared: PreparedTransaction, batch_id: int) -> bool:
    """Whether the rows of a task are in the topic, by whichever transaction of its id."""
    return decision.is_marked(_mark(admin, query, prepared.transactional_id), batch_id)


def _mark(admin: Admin, query: decision.Names, group: str) -> int | None:
    """Read the mark of a task: the last one, also if its transaction is only just being committed."""
    places = None if query.topic is None else [(query.topic, 0)]
    found = admin.list_group_offsets(group, places, require_stable=True)
    return decision.mark_of(found)
