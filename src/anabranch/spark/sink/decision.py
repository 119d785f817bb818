"""What an attempt of a micro-batch finds, and what its tasks then do: pure.

A micro-batch is replayed when the driver died, or failed, before Spark had noted its end. Its tasks may have prepared
their transactions, and the driver may have committed some of them. Two things are durable, in consumer groups that
have no members, so that every broker can keep them:

    decision   committed metadata of a group of the query: the number of the micro-batch, when it was planned, and of
               each task the digest of its rows and its transaction. It is written before the first is committed.
    mark       committed offset of a group of the task, written within the task's own transaction: the number of the
               micro-batch after the newest of which this task's rows are in the topic.

    no decision for the micro-batch  ->  nothing of it is visible; a new producer aborts what was prepared, and writes
    a decision, transaction open     ->  commit it: the rows are those of the first attempt, whatever they are now
    a decision without this task     ->  nothing to do: the first attempt was divided in another way
    a decision, committed            ->  nothing to do
    a decision, but it was aborted   ->  it had timed out before it could be committed: write the rows again
    a later decision, or mark        ->  refuse: so it has this one

"Nothing to do" is right for a micro-batch that has been planned once, and the rows of its first attempt stand. So the
driver, which sees all tasks, then refuses (`why_refused`)

    one that was planned at another time than the decided one: its number was planned anew, from an older checkpoint
    where a time is unknown, one with other rows: by their number and keys, since nothing else can tell
    one of which a transaction was aborted, if any task has other rows than before: then nobody knows which are missing

The mark tells "committed" and "aborted" apart, and settles it where two drivers run at the same time: what the older
one commits after the newer one has begun is fenced, and what it has committed before is marked.
"""

from __future__ import annotations

import json
from base64 import b85decode, b85encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TypeGuard
from zlib import compress, crc32, decompress

from anabranch.base.ids import TopicPartition
from anabranch.client import OffsetAndMetadata, PreparedTransaction, TransactionDescription

METADATA_MAX = 4_000
"""Characters of metadata that a committed offset can carry; brokers accept 4,096 (`offset.metadata.max.bytes`)."""
VERSION = 3
OF_ALL_ROWS = 2
"""The version of decisions with one digest, of all rows: nobody knows how they were divided."""
WITHOUT_DIGEST = 1
"""The version of decisions that hold transactions alone."""
OPEN = "Ongoing"
ROOM_MAX_MS = 10_000
"""How long before its timeout a transaction is no longer relied on: a decision and its commits take some time."""


@dataclass(frozen=True, slots=True)
class Names:
    """The groups and transactional ids of a query. Queries that write to different topics share none."""

    prefix: str
    query: str
    topic: str | None
    """The topic of all rows; None if a column names it."""

    def decision(self, piece: int = 0, write: int = 0) -> str:
        """Return the group that keeps a piece of the decision that was written as the `write`-th.

        The first piece is written last, over that of the decision before. The others have groups in turns, so that the
        decision before is whole until then.
        """
        return self._named(f".{piece}{'b' if write % 2 else ''}" if piece else "")

    def task(self, number: int) -> str:
        """Return the transactional id of a task, which is also the group that keeps its mark."""
        return self._named(f"-{number}")

    def _named(self, part: str) -> str:
        return f"{self.prefix}-{self.query}{part}{'' if self.topic is None else f':{self.topic}'}"


@dataclass(frozen=True, slots=True)
class Digest:
    """What two attempts of a micro-batch, or of a task of it, have in common, whatever the order of their rows."""

    rows: int = 0
    keys: int = 0
    """The sum of the keys' hashes."""

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.rows + other.rows, self.keys + other.keys)


NO_ROWS = Digest()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """An attempt of a micro-batch, when all its tasks have ended."""

    batch_id: int
    digests: Mapping[int, Digest]
    """The digest of each task that has rows, also of those that an earlier attempt has written."""
    planned_ms: int | None = None
    """When Spark planned it; None if that is unknown."""

    @property
    def digest(self) -> Digest:
        """That of all rows."""
        return sum(self.digests.values(), NO_ROWS)


@dataclass(frozen=True, slots=True)
class Decision:
    """A micro-batch that is to become visible, and the transactions of its tasks by number."""

    batch_id: int
    transactions: Mapping[int, PreparedTransaction]
    digest: Digest | None = None
    """That of all its rows; None in a decision of version 1."""
    digests: Mapping[int, Digest] | None = None
    """Those of its tasks; None in a decision of an older version."""
    planned_ms: int | None = None
    """When Spark planned it; None if that is unknown."""
    write: int = 0
    """How many decisions of the query were written before this one."""


class DecisionError(ValueError):
    """A decision that cannot be read."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a decision."""

    version: int
    batch_id: int
    number: int
    count: int
    text: str
    write: int = 0
    check: str = ""
    """The checksum of the whole decision; empty in one of an older version."""

    def goes_with(self, head: Piece) -> bool:
        """Whether it is a piece of the same decision."""
        return (self.version, self.batch_id, self.write, self.check, self.count) == (
            head.version,
            head.batch_id,
            head.write,
            head.check,
            head.count,
        )


def to_metadata(decision: Decision, names: Names) -> list[str]:
    """Write a decision as pieces of metadata, all of which are needed to read it."""
    assert decision.digests is not None and decision.transactions.keys() == decision.digests.keys()
    entries = []
    for task, each in sorted(decision.transactions.items()):
        assert each.transactional_id == names.task(task)
        digest = decision.digests[task]
        entries.append([task, each.producer_id, each.producer_epoch, digest.rows, digest.keys])
    body = json.dumps([decision.planned_ms, entries], separators=(",", ":"))
    text = b85encode(compress(body.encode(), 9)).decode()
    size = METADATA_MAX - 64
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    head = f"{VERSION} {decision.batch_id} {decision.write} {_check(text)}"
    return [f"{head} {number} {len(parts)} {part}" for number, part in enumerate(parts)]


def piece_of(metadata: str) -> Piece:
    """Read a piece of a decision. Raises `DecisionError` for other text."""
    try:
        version = int(metadata.split(" ", 1)[0])
        if version in (OF_ALL_ROWS, WITHOUT_DIGEST):
            _, batch, number, count, text = metadata.split(" ", 4)
            return Piece(version, int(batch), int(number), int(count), text)
        if version != VERSION:
            raise DecisionError(f"it is of version {version}, and this is version {VERSION}")
        _, batch, write, check, number, count, text = metadata.split(" ", 6)
        return Piece(version, int(batch), int(number), int(count), text, int(write), check)
    except DecisionError:
        raise
    except ValueError as error:
        raise DecisionError(f"it cannot be read ({error})") from error


def newest(heads: Iterable[Piece]) -> Piece | None:
    """Return the first piece of the decision that was written last: each topic of a query may hold one."""
    return max(heads, key=lambda head: (head.batch_id, head.write), default=None)


def from_pieces(head: Piece, pieces: Iterable[Piece], names: Names) -> Decision:
    """Read a decision by its first piece and whatever others there are.

    Raises `DecisionError` if one is missing: what was decided then counts, and is unknown.
    """
    found = {piece.number: piece.text for piece in [*pieces, head] if piece.goes_with(head)}
    if found.keys() != set(range(head.count)):
        raise DecisionError(f"it has {head.count} pieces, and {len(found)} of them are there")
    text = "".join(found[number] for number in range(head.count))
    if head.version == VERSION and _check(text) != head.check:
        raise DecisionError("its checksum is wrong")
    try:
        body = json.loads(decompress(b85decode(text)))
        planned: int | None = None
        digests: dict[int, Digest] | None = None
        digest: Digest | None = None
        if head.version == VERSION:
            planned, rows = body
            entries = [each[:3] for each in rows]
            digests = {task: Digest(*each) for task, _, _, *each in rows}
            digest = sum(digests.values(), NO_ROWS)
        elif head.version == OF_ALL_ROWS:
            digest, entries = Digest(*body[:2]), body[2]
        else:
            entries = body
        transactions = {task: PreparedTransaction(names.task(task), pid, epoch) for task, pid, epoch in entries}
    except Exception as error:
        raise DecisionError(f"it cannot be read ({error})") from error
    return Decision(head.batch_id, transactions, digest, digests, planned, head.write)


def _check(text: str) -> str:
    return f"{crc32(text.encode()):08x}"


def is_decided(decision: Decision | None, batch_id: int) -> TypeGuard[Decision]:
    """Whether an earlier attempt of a micro-batch has decided: its tasks are the only ones that had rows."""
    return decision is not None and decision.batch_id == batch_id


def mark_of(offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int | None:
    """Return the mark among the committed offsets of a task's group; None if there is none.

    It lies in partition 0 of a topic that was written to: a resize gives a group offsets of other partitions.
    """
    return max((at.offset for tp, at in offsets.items() if tp.partition == 0), default=None)


def is_marked(mark: int | None, batch_id: int) -> bool:
    """Whether a task's rows of a micro-batch are in the topic."""
    return mark == batch_id + 1


def later_batch(decision: Decision | None, mark: int | None, batch_id: int) -> int | None:
    """Return the micro-batch behind this one that the topic holds already; None if it holds none."""
    newest = max(-1 if decision is None else decision.batch_id, -1 if mark is None else mark - 1)
    return newest if newest > batch_id else None


class Refusal(Enum):
    """Why an attempt of a micro-batch cannot end it."""

    NOT_DECIDED = auto()
    """Rows of it are in the topic, without a decision."""
    PLANNED_ANEW = auto()
    OTHER_ROWS = auto()
    ROWS_MISSING = auto()
    """Some of what was decided was aborted, and the rows are not divided among tasks as before."""


def why_refused(
    decision: Decision | None, batch: MicroBatch, prepared: Mapping[int, PreparedTransaction], missing: int
) -> Refusal | None:
    """Say why an attempt cannot end its micro-batch; None if it can.

    `prepared`: what it has written, of a decided micro-batch in place of what was aborted. `missing`: how many
    transactions of the decision were aborted without that.
    """
    if not is_decided(decision, batch.batch_id):
        return None if batch.digests.keys() == prepared.keys() else Refusal.NOT_DECIDED
    if decision.planned_ms is not None and batch.planned_ms is not None:
        if decision.planned_ms != batch.planned_ms:
            return Refusal.PLANNED_ANEW
    elif decision.digest != batch.digest:
        return Refusal.OTHER_ROWS
    is_whole = not prepared and not missing
    return None if is_whole or (not missing and decision.digests == batch.digests) else Refusal.ROWS_MISSING


def next_decision(
    before: Decision | None, batch: MicroBatch, prepared: Mapping[int, PreparedTransaction]
) -> tuple[Decision, tuple[PreparedTransaction, ...]]:
    """Return the decision to make, and of the one before those transactions of this micro-batch that nobody replaced.

    A replay may be divided in another way, so that nobody else finishes them.
    """
    write = 0 if before is None else before.write + 1
    if not is_decided(before, batch.batch_id):
        return Decision(batch.batch_id, prepared, batch.digest, batch.digests, batch.planned_ms, write), ()
    known = before.transactions
    left = tuple(each for task, each in sorted(known.items()) if task not in prepared)
    return replace(before, transactions={**known, **prepared}, write=write), left


def undecided(
    decision: Decision | None, batch_id: int, prepared: Mapping[int, PreparedTransaction]
) -> tuple[PreparedTransaction, ...]:
    """Return the transactions of an attempt, by task, that the decision for its micro-batch does not hold."""
    held = decision.transactions if is_decided(decision, batch_id) else {}
    return tuple(each for task, each in sorted(prepared.items()) if held.get(task) != each)


def is_open(prepared: PreparedTransaction, found: TransactionDescription | None, now_ms: int) -> bool:
    """Whether a transaction can still be committed, by what its coordinator says of its transactional id.

    A coordinator looks for timeouts now and then, so close to one its answer is not enough. Where `now_ms` is far from
    one, the answer counts: the clocks of this machine and of the coordinator may differ.
    """
    if found is None or found.state != OPEN:
        return False
    if (found.producer_id, found.producer_epoch) != (prepared.producer_id, prepared.producer_epoch):
        return False
    left_ms = found.started_ms + found.timeout_ms - now_ms
    return abs(left_ms) > min(ROOM_MAX_MS, found.timeout_ms // 10)
