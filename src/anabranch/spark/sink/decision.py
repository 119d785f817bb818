"""What a replayed micro-batch finds, and what a task then does: pure.

A micro-batch is replayed when the driver died, or failed, before Spark had noted its end. Its tasks may have prepared
their transactions, and the driver may have committed some of them. Two things are durable, in consumer groups that
have no members, so that every broker can keep them:

    decision   committed metadata of the group PREFIX-QUERY: the number of the micro-batch, and all of its transactions.
               It is written before the first of them is committed.
    mark       committed offset of the group PREFIX-QUERY-TASK, written within the task's own transaction: the number of
               the micro-batch after the newest of which this task's rows are in the topic.

    no decision for the micro-batch  ->  nothing of it is visible; a new producer aborts what was prepared, and writes
    a decision, transaction open     ->  commit it: the rows are those of the first attempt, whatever they are now
    a decision without this task     ->  nothing to do: the first attempt was divided in another way
    a decision, committed            ->  nothing to do
    a decision, but it was aborted   ->  it had timed out before it could be committed: write the rows again

The mark tells the last two apart, and settles it where two drivers run at the same time: what the older one commits
after the newer one has begun is fenced, and what it has committed before is marked.
"""

from __future__ import annotations

import json
from base64 import b85decode, b85encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TypeGuard
from zlib import compress, decompress

from anabranch.base.ids import is_whole
from anabranch.client import PreparedTransaction

METADATA_MAX = 4_000
"""Characters of metadata that a committed offset can carry; brokers accept 4,096 (`offset.metadata.max.bytes`)."""
VERSION = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """A micro-batch that is to become visible, and the transactions of its tasks by number."""

    batch_id: int
    transactions: Mapping[int, PreparedTransaction]


class DecisionError(ValueError):
    """A decision that cannot be read."""


def to_metadata(decision: Decision, prefix: str) -> list[str]:
    """Write a decision as pieces of metadata, all of which are needed to read it; `prefix` is that of its ids."""
    entries = [[task, each.producer_id, each.producer_epoch] for task, each in sorted(decision.transactions.items())]
    for task, each in decision.transactions.items():
        assert each.transactional_id == f"{prefix}-{task}"
    text = b85encode(compress(json.dumps(entries, separators=(",", ":")).encode(), 9)).decode()
    size = METADATA_MAX - 64
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    return [f"{VERSION} {decision.batch_id} {number} {len(parts)} {part}" for number, part in enumerate(parts)]


def from_metadata(pieces: Iterable[str], prefix: str) -> Decision | None:
    """Read a decision; None if pieces of it are missing. Raises `DecisionError` for other text."""
    found: dict[int, tuple[int, int, str]] = {}
    try:
        for piece in pieces:
            version, batch, number, count, text = piece.split(" ", 4)
            if int(version) != VERSION:
                raise DecisionError(f"it is of version {version}, and this is version {VERSION}")
            found[int(number)] = int(batch), int(count), text
        if 0 not in found:
            return None
        batch_id, parts, _ = found[0]
        if any(found.get(number, (None,))[0] != batch_id for number in range(parts)):
            return None
        entries = json.loads(decompress(b85decode("".join(found[number][2] for number in range(parts)))))
        transactions = {task: PreparedTransaction(f"{prefix}-{task}", pid, epoch) for task, pid, epoch in entries}
    except DecisionError:
        raise
    except Exception as error:
        raise DecisionError(f"it cannot be read ({error})") from error
    return Decision(batch_id, transactions)


def is_decided(decision: Decision | None, batch_id: int) -> TypeGuard[Decision]:
    """Whether an earlier attempt of a micro-batch has decided: its tasks are the only ones that had rows."""
    return decision is not None and decision.batch_id == batch_id


def is_marked(mark: int | None, batch_id: int) -> bool:
    """Whether a task's rows of a micro-batch are in the topic."""
    return mark is not None and mark > batch_id


def next_decision(
    before: Decision | None, batch_id: int, prepared: Mapping[int, PreparedTransaction]
) -> tuple[Decision, tuple[PreparedTransaction, ...]]:
    """Return the decision to make, and of the one before those transactions of this micro-batch that nobody replaced.

    A replay may be divided in another way, so that nobody else finishes them.
    """
    known = before.transactions if is_decided(before, batch_id) else {}
    left = tuple(each for task, each in sorted(known.items()) if task not in prepared)
    return Decision(batch_id, {**known, **prepared}), left


def piece_count(head: str) -> int:
    """How many pieces a decision has, by the first of them; 1 for other text."""
    fields = head.split(" ", 4)
    return int(fields[3]) if len(fields) == 5 and is_whole(fields[3]) else 1
