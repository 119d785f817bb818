"""What an attempt of a micro-batch finds, and what its tasks then do: pure.

A micro-batch is replayed when the driver died, or failed, before Spark had noted its end. Its tasks may have prepared
their transactions, and the driver may have committed some of them. Two things are durable, in consumer groups that
have no members, so that every broker can keep them:

    decision   committed metadata of a group of the query: the number of the micro-batch, the digest of its rows, and
               all of its transactions. It is written before the first of them is committed.
    mark       committed offset of a group of the task, written within the task's own transaction: the number of the
               micro-batch after the newest of which this task's rows are in the topic.

    no decision for the micro-batch  ->  nothing of it is visible; a new producer aborts what was prepared, and writes
    a decision, transaction open     ->  commit it: the rows are those of the first attempt, whatever they are now
    a decision without this task     ->  nothing to do: the first attempt was divided in another way
    a decision, committed            ->  nothing to do
    a decision, but it was aborted   ->  it had timed out before it could be committed: write the rows again
    a decision for more rows         ->  nothing to do: the source has lost some since, as a compacted topic does
    a decision for other rows        ->  refuse: Spark has planned the number anew, from an older checkpoint
    a later decision, or mark        ->  refuse: so it has this one

The mark tells "committed" and "aborted" apart, and settles it where two drivers run at the same time: what the older
one commits after the newer one has begun is fenced, and what it has committed before is marked.
"""

from __future__ import annotations

import json
from base64 import b85decode, b85encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard
from zlib import compress, decompress

from anabranch.base.ids import is_whole
from anabranch.client import PreparedTransaction, TransactionDescription

METADATA_MAX = 4_000
"""Characters of metadata that a committed offset can carry; brokers accept 4,096 (`offset.metadata.max.bytes`)."""
VERSION = 2
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

    def decision(self, piece: int = 0) -> str:
        """Return the group that keeps a piece of the decision."""
        return self._named(f".{piece}" if piece else "")

    def task(self, number: int) -> str:
        """Return the transactional id of a task, which is also the group that keeps its mark."""
        return self._named(f"-{number}")

    def _named(self, part: str) -> str:
        return f"{self.prefix}-{self.query}{part}{'' if self.topic is None else f':{self.topic}'}"


@dataclass(frozen=True, slots=True)
class Digest:
    """What two attempts of a micro-batch have in common, however their rows are divided among tasks."""

    rows: int = 0
    keys: int = 0
    """The sum of the keys' hashes."""

    def __add__(self, other: Digest) -> Digest:
        return Digest(self.rows + other.rows, self.keys + other.keys)


@dataclass(frozen=True, slots=True)
class Decision:
    """A micro-batch that is to become visible, and the transactions of its tasks by number."""

    batch_id: int
    transactions: Mapping[int, PreparedTransaction]
    digest: Digest | None = None
    """That of all its rows; None in a decision of an older version."""


class DecisionError(ValueError):
    """A decision that cannot be read."""


def to_metadata(decision: Decision, names: Names) -> list[str]:
    """Write a decision as pieces of metadata, all of which are needed to read it."""
    assert decision.digest is not None
    entries = [[task, each.producer_id, each.producer_epoch] for task, each in sorted(decision.transactions.items())]
    for task, each in decision.transactions.items():
        assert each.transactional_id == names.task(task)
    body = [decision.digest.rows, decision.digest.keys, entries]
    text = b85encode(compress(json.dumps(body, separators=(",", ":")).encode(), 9)).decode()
    size = METADATA_MAX - 64
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return [f"{VERSION} {decision.batch_id} {number} {len(parts)} {part}" for number, part in enumerate(parts)]


def from_metadata(pieces: Iterable[str], names: Names) -> Decision | None:
    """Read a decision; None if pieces of it are missing. Raises `DecisionError` for other text."""
    found: dict[int, tuple[int, int, int, str]] = {}
    try:
        for piece in pieces:
            version, batch, number, count, text = piece.split(" ", 4)
            if int(version) not in (VERSION, WITHOUT_DIGEST):
                raise DecisionError(f"it is of version {version}, and this is version {VERSION}")
            found[int(number)] = int(batch), int(version), int(count), text
        if 0 not in found:
            return None
        batch_id, version_, parts, _ = found[0]
        if any(found.get(number, (None,))[0] != batch_id for number in range(parts)):
            return None
        body = json.loads(decompress(b85decode("".join(found[number][3] for number in range(parts)))))
        digest, entries = (None, body) if version_ == WITHOUT_DIGEST else (Digest(*body[:2]), body[2])
        transactions = {task: PreparedTransaction(names.task(task), pid, epoch) for task, pid, epoch in entries}
    except DecisionError:
        raise
    except Exception as error:
        raise DecisionError(f"it cannot be read ({error})") from error
    return Decision(batch_id, transactions, digest)


def is_decided(decision: Decision | None, batch_id: int) -> TypeGuard[Decision]:
    """Whether an earlier attempt of a micro-batch has decided: its tasks are the only ones that had rows."""
    return decision is not None and decision.batch_id == batch_id


def is_marked(mark: int | None, batch_id: int) -> bool:
    """Whether a task's rows of a micro-batch are in the topic."""
    return mark == batch_id + 1


def later_batch(decision: Decision | None, mark: int | None, batch_id: int) -> int | None:
    """Return the micro-batch behind this one that the topic holds already; None if it holds none."""
    newest = max(-1 if decision is None else decision.batch_id, -1 if mark is None else mark - 1)
    return newest if newest > batch_id else None


def has_fewer_rows(decision: Decision | None, batch_id: int, digest: Digest) -> bool:
    """Whether a micro-batch was decided with more rows than it has now, as when compaction or retention took some."""
    return is_decided(decision, batch_id) and decision.digest is not None and digest.rows < decision.digest.rows


def has_other_rows(decision: Decision | None, batch_id: int, digest: Digest, *, is_written: bool = True) -> bool:
    """Whether a micro-batch was decided with other rows than it has now.

    Fewer rows are no others if the decided ones are written: each of the decision's transactions is committed, or was
    replaced by one that will be.
    """
    if not is_decided(decision, batch_id) or decision.digest in (None, digest):
        return False
    return not (is_written and has_fewer_rows(decision, batch_id, digest))


def next_decision(
    before: Decision | None, batch_id: int, prepared: Mapping[int, PreparedTransaction], digest: Digest
) -> tuple[Decision, tuple[PreparedTransaction, ...]]:
    """Return the decision to make, and of the one before those transactions of this micro-batch that nobody replaced.

    A replay may be divided in another way, so that nobody else finishes them. It may have fewer rows: the digest stays
    that of the first attempt.
    """
    if not is_decided(before, batch_id):
        return Decision(batch_id, prepared, digest), ()
    known = before.transactions
    left = tuple(each for task, each in sorted(known.items()) if task not in prepared)
    return Decision(batch_id, {**known, **prepared}, before.digest or digest), left


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


def piece_count(head: str) -> int:
    """How many pieces a decision has, by the first of them; 1 for other text."""
    fields = head.split(" ", 4)
    return int(fields[3]) if len(fields) == 5 and is_whole(fields[3]) else 1
