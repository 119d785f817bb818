"""The decision about a produced batch: the one place with the order of checks of ordering.md, section 5.

    1. the partition has no role here                                        Refuse NOT_LEADER_OR_FOLLOWER
    2. the request has the id of another topic (KIP-516)                     Refuse UNKNOWN_TOPIC_ID
    3. its own log has the batch                                             Duplicate, with any partition count
    4. the request has a count that is not the topic's, or the partition     Refuse INVALID_PARTITION_METADATA
       is retiring or removed
    5. the request has no count, and an ancestor's log has the batch         Duplicate
    6. its sequence does not follow its producer's last batch                Refuse
    7. the partition is retiring or removed, and its survivor cannot serve   Refuse NOT_LEADER_OR_FOLLOWER
    8. its producer is new to the log, and its id was never handed out       Refuse UNKNOWN_PRODUCER_ID
       or neither the log nor the broker has room for one more               Refuse POLICY_VIOLATION
    9. no transaction of its producer holds the partition (KIP-890, part 1)  Refuse, or Verify to learn whether one does
   10. otherwise                                                             Append, or Redirect to the survivor

A partition count names a placement only together with the topic's id: a topic that was deleted and created again may
have the same count and place keys otherwise. So the id comes first; the sequences of the other topic mean nothing here.

A removed partition is a retiring one without a log: its role is `Leadership.of_removed`, its table the saved one.
The caller holds the lock that a resize takes, from looking up the role to appending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_PRODUCER_ID, NO_TOPIC_ID
from anabranch.base.limits import (
    ABORTED_TRANSACTIONS_MAX,
    PRODUCER_ID_BITS,
    PRODUCER_IDLE_MIN_MS,
    PRODUCERS_PER_PARTITION_MAX,
)
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition.producers import Batch, Producer, ProducerTable, Remembered, ahead, redirected


class Replica(Protocol):
    """A partition of this broker: its role, None before the first one, and its producers."""

    @property
    def leadership(self) -> Leadership | None: ...
    @property
    def table(self) -> ProducerTable: ...


AncestorT = TypeVar("AncestorT", bound=Replica)


@dataclass(frozen=True, slots=True)
class Append:
    """Append the batch to the partition that its producer addressed."""


class Redirect(NamedTuple, Generic[AncestorT]):
    """Append the batch to the survivor with the same keys, under a producer id of its own (docs/adr/0003)."""

    to: AncestorT
    producer_id: int
    """The id to write into the batch; NO_PRODUCER_ID where the batch has none."""


class Duplicate(NamedTuple, Generic[AncestorT]):
    """The batch was appended before: answer with its offsets, append nothing."""

    of: Remembered
    ancestor: AncestorT | None
    """The partition with the batch in its log; None for the partition that the producer addressed."""


class Refuse(NamedTuple):
    """Answer with this code, append nothing."""

    code: ErrorCode
    message: str | None = None
    remember: bool = False
    """Whether the partition's table must remember the refusal (`ProducerTable.refused`): the batch was in order, and
    the reason may pass (docs/adr/0012)."""
    records: tuple[tuple[int, str], ...] = ()
    """The records at fault, by their place in the batch, and why (KIP-467); empty where the whole batch is at fault."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Ask the coordinator whether the producer's transaction holds the partition, and decide again with the answer."""


class Newcomers(NamedTuple):
    """Which producers may be new to a log: otherwise invented ones would push those out that may repeat a batch."""

    ids_below: int = 1 << PRODUCER_ID_BITS
    """The producer ids that may have been handed out."""
    now_ms: int = 0
    has_room: Callable[[], bool] = lambda: True
    """Whether the broker has memory left for one more producer of a partition."""


ANYONE = Newcomers()
APPEND = Append()
VERIFY = Verify()
UNKNOWN_TOPIC = Refuse(ErrorCode.UNKNOWN_TOPIC_ID, "The topic with this id was deleted, or never existed.")
NOT_LEADER = Refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER)
SURVIVOR_NOT_READY = Refuse(ErrorCode.NOT_LEADER_OR_FOLLOWER, remember=True)
NOT_IN_TRANSACTION = "The partition is not part of a transaction that its producer has open."
NEVER_GIVEN = "This cluster has never given a producer this id: ask for one with InitProducerId."
NO_ROOM = (
    f"The partition remembers {PRODUCERS_PER_PARTITION_MAX} producers, all of them of the last "
    f"{PRODUCER_IDLE_MIN_MS // 60_000} minutes; a further one must wait until one of them has been idle for so long."
)
NO_MEMORY = (
    "The broker remembers as many producers as producer.state.max.bytes allows; a further one must wait until some "
    f"have been idle for {PRODUCER_IDLE_MIN_MS // 60_000} minutes."
)
OUT_OF_SEQUENCE = "The batch does not follow the last one of its producer."


def decide_append(
    role: Leadership | None,
    table: ProducerTable,
    ancestors: Sequence[AncestorT],
    header: Batch,
    count_said: int,
    held: ErrorCode | None = None,
    topic_id_said: UUID = NO_TOPIC_ID,
    newcomers: Newcomers = ANYONE,
) -> Append | Redirect[AncestorT] | Duplicate[AncestorT] | Refuse | Verify:
    """Decide about one produced batch that is sound (`checking`), in the order of ordering.md, section 5.

    `role`, `table`: of the partition that the producer addressed. `ancestors`: the partitions here to which its batches
    may have been redirected, nearest first; they are searched only for a batch without a partition count, and without
    them a retiring partition cannot redirect. `count_said`: COUNT_NOT_SAID for stock producers. `held`: the
    coordinator's answer to a `Verify`, NONE if the producer's transaction holds the partition; None before.
    `topic_id_said`: NO_TOPIC_ID where the request names the topic by its name. `newcomers`: which producers may be new
    to the log.
    """
    if role is None:
        return NOT_LEADER
    if topic_id_said is not NO_TOPIC_ID and topic_id_said not in (NO_TOPIC_ID, role.topic_id):
        return UNKNOWN_TOPIC
    producer_id = header.producer_id
    known = table.known(producer_id)
    repeated = None if known is None else known.repetition(header)
    if repeated is not None:
        return Duplicate(repeated, None)
    if count_said == COUNT_NOT_SAID and ancestors and producer_id != NO_PRODUCER_ID:
        judged = _judge_among(role.partition, table, known, ancestors, header)
        if isinstance(judged, Duplicate):
            return judged
    else:
        judged = table.follows(header, producer_id)
        if count_said != COUNT_NOT_SAID and (role.retiring or count_said != role.undeleted_partition_count):
            message = f"The topic has {role.undeleted_partition_count} partitions."
            return Refuse(ErrorCode.INVALID_PARTITION_METADATA, message, remember=judged is ErrorCode.NONE)
    if judged is not ErrorCode.NONE:
        return Refuse(judged, OUT_OF_SEQUENCE)
    if role.retiring:
        return _redirect(role, ancestors, header, held, newcomers)
    if producer_id == NO_PRODUCER_ID:
        return APPEND
    if known is None:
        refused: Refuse | Verify | None = refuse_newcomer(table, producer_id, newcomers)
        if refused is not None:
            return refused
    elif known.transaction_start is None and not header.is_transactional:
        return APPEND
    return _refuse_transaction(table, known, header, held) or APPEND


def refuse_newcomer(table: ProducerTable, producer_id: int, newcomers: Newcomers) -> Refuse | None:
    """Check that a producer that `table` does not know may be added to it; `producer_id` is the one it sent."""
    if producer_id >= newcomers.ids_below:
        return Refuse(ErrorCode.UNKNOWN_PRODUCER_ID, NEVER_GIVEN)
    if not newcomers.has_room():
        return Refuse(ErrorCode.POLICY_VIOLATION, NO_MEMORY)
    return None if table.has_room(newcomers.now_ms) else Refuse(ErrorCode.POLICY_VIOLATION, NO_ROOM)


def _judge_among(
    partition: int,
    table: ProducerTable,
    known: Producer | None,
    ancestors: Sequence[AncestorT],
    header: Batch,
) -> Duplicate[AncestorT] | ErrorCode:
    """Check the sequence of a batch of a producer that was, or may have been, redirected from `partition` to ancestors.

    The producer counts one sequence for all of them, so repetitions are searched in all tables, and the batch must
    follow the newest batch of all.
    """
    alias = redirected(header.producer_id, partition)
    newest, newest_table, newest_id = known, table, header.producer_id
    for ancestor in ancestors:
        found = ancestor.table.known(alias)
        if found is None:
            continue
        repeated = found.repetition(header)
        if repeated is not None:
            return Duplicate(repeated, ancestor)
        if newest is None or ahead(found, newest):
            newest, newest_table, newest_id = found, ancestor.table, alias
    return newest_table.follows(header, newest_id)


def _redirect(
    role: Leadership, ancestors: Sequence[AncestorT], header: Batch, held: ErrorCode | None, newcomers: Newcomers
) -> Redirect[AncestorT] | Refuse | Verify:
    """Redirect a batch for a closed partition to its survivor, once the survivor has taken its own role.

    Before that, the survivor may still append under the previous count, and order could be lost.
    """
    number = role.survivor
    for survivor in ancestors:
        taken = survivor.leadership
        if taken is None or taken.partition != number or taken.retiring or not _follows(taken, role):
            continue
        if header.producer_id == NO_PRODUCER_ID:
            return Redirect(survivor, NO_PRODUCER_ID)
        alias = redirected(header.producer_id, role.partition)
        table = survivor.table
        known = table.known(alias)
        refused = None if known is not None else refuse_newcomer(table, header.producer_id, newcomers)
        return refused or _refuse_transaction(table, known, header, held) or Redirect(survivor, alias)
    return SURVIVOR_NOT_READY


def _follows(taken: Leadership, role: Leadership) -> bool:
    """Whether a survivor has taken its role in the layout that closed the partition of `role`, or in a later one.

    The number of a layout alone does not tell: after a canceled resize the next one has the number again.
    """
    if taken.layout == role.layout:
        return taken.undeleted_partition_count == role.undeleted_partition_count
    return taken.layout > role.layout


def _refuse_transaction(
    table: ProducerTable, known: Producer | None, header: Batch, held: ErrorCode | None
) -> Refuse | Verify | None:
    """Check that a transactional batch belongs to a transaction of its producer, and that no other one cuts into one.

    `table` and `known` are of the partition and the producer id that the batch would be appended under. The
    coordinator is asked once per transaction and partition: from then on the transaction is open in the table.
    """
    opened = known is not None and known.transaction_start is not None
    if not header.is_transactional:
        return Refuse(ErrorCode.INVALID_TXN_STATE, NOT_IN_TRANSACTION) if opened else None
    if known is not None and opened and known.epoch == header.producer_epoch:
        return None
    if len(table.aborted) >= ABORTED_TRANSACTIONS_MAX:
        return Refuse(ErrorCode.POLICY_VIOLATION, NOT_IN_TRANSACTION)
    if held is None:
        return VERIFY
    return None if held is ErrorCode.NONE else Refuse(held, NOT_IN_TRANSACTION, remember=held.retriable)
