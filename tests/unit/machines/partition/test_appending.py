"""What becomes of a produced batch: every combination has one outcome, and the checks come in their order.

The topic began with 2 partitions. Partition 4 is addressed; its keys were in 0 before, which is its only ancestor.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import NamedTuple
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID
from anabranch.base.limits import ABORTED_TRANSACTIONS_MAX, PRODUCER_IDLE_MIN_MS
from anabranch.machines.controller.leadership import Leadership
from anabranch.machines.partition.aborted import AbortedTransactions
from anabranch.machines.partition.appending import (
    APPEND,
    NEVER_GIVEN,
    NO_ROOM,
    NOT_LEADER,
    SURVIVOR_NOT_READY,
    UNKNOWN_TOPIC,
    VERIFY,
    Append,
    Duplicate,
    Newcomers,
    Redirect,
    Refuse,
    Verify,
    decide_append,
)
from anabranch.machines.partition.producers import Marker, ProducerTable, redirected

NUMBER, COUNT = 4, 6
NONE, STALE, GAP, FENCED = (
    ErrorCode.NONE,
    ErrorCode.INVALID_PARTITION_METADATA,
    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
    ErrorCode.INVALID_PRODUCER_EPOCH,
)


class Batch(NamedTuple):
    """What is read of a header."""

    base_sequence: int = 10
    producer_epoch: int = 5
    producer_id: int = 7
    is_transactional: bool = False
    base_offset: int = -1
    last_offset_delta: int = 0
    max_timestamp: int = 99
    is_control: bool = False


PLAIN = Batch(-1, -1, -1)


@dataclass
class Replica:
    """A partition that lives here."""

    leadership: Leadership | None
    table: ProducerTable = field(default_factory=ProducerTable)


Decision = Append | Redirect[Replica] | Duplicate[Replica] | Refuse | Verify

LEADER = Leadership(NO_TOPIC_ID, NUMBER, 3, 9, 2, COUNT, retiring=False)
RETIRING = replace(LEADER, undeleted_partition_count=3, retiring=True)
SURVIVOR = replace(RETIRING, partition=0, retiring=False)
REMOVED = SURVIVOR.of_removed(NUMBER)
ROLES: dict[str, Leadership | None] = {"none": None, "leader": LEADER, "retiring": RETIRING, "removed": REMOVED}


def test_another_topics_id_is_refused_before_anything_else_is_looked_at() -> None:
    role = replace(LEADER, topic_id=UUID(int=1))
    known = ProducerTable()
    known.apply(Batch(base_offset=3), 0)
    for count in (COUNT_NOT_SAID, COUNT, COUNT - 1):
        for batch in (PLAIN, Batch()):
            assert decide_append(role, known, (), batch, count, topic_id_said=UUID(int=2)) == UNKNOWN_TOPIC
    assert not UNKNOWN_TOPIC.remember, "the table is another topic's"
    for right in (NO_TOPIC_ID, UUID(int=1)):
        assert isinstance(decide_append(role, known, (), Batch(), COUNT, topic_id_said=right), Duplicate)
        assert decide_append(role, known, (), PLAIN, COUNT, topic_id_said=right) == APPEND
        stale = decide_append(role, known, (), PLAIN, COUNT - 1, topic_id_said=right)
        assert isinstance(stale, Refuse) and stale.code is STALE
    assert decide_append(None, known, (), PLAIN, COUNT, topic_id_said=UUID(int=2)) == NOT_LEADER


def test_a_producer_that_is_new_to_the_log_has_an_id_that_was_handed_out() -> None:
    known = table(Batch(8), Batch(9))
    for role, own in ((LEADER, table()), (RETIRING, table())):
        for ids_below, invented in ((7, True), (8, False)):
            survivor = Replica(SURVIVOR)
            decision = decide_append(
                role, own, [survivor], Batch(), COUNT_NOT_SAID, newcomers=Newcomers(ids_below=ids_below)
            )
            assert isinstance(decision, Refuse) is invented
            assert not invented or decision == Refuse(ErrorCode.UNKNOWN_PRODUCER_ID, NEVER_GIVEN)
    nobody = Newcomers(ids_below=0)
    assert decide_append(LEADER, known, (), Batch(), COUNT, newcomers=nobody) == APPEND, "its log says otherwise"
    assert isinstance(decide_append(LEADER, known, (), Batch(9), COUNT, newcomers=nobody), Duplicate)
    assert decide_append(LEADER, table(), (), PLAIN, COUNT, newcomers=nobody) == APPEND


def test_a_full_log_takes_a_new_producer_in_the_place_of_one_that_has_long_been_idle() -> None:
    """A producer repeats a batch for some minutes; whoever pushes it out of the table has its record stored twice."""
    full = ProducerTable(producers_max=2)
    full.apply(Batch(0, producer_id=1, is_transactional=True, base_offset=0), now_ms=0)
    full.apply(Batch(0, producer_id=2, base_offset=1), now_ms=1_000)
    late = 1_000 + PRODUCER_IDLE_MIN_MS
    for now_ms, expected in ((late - 1, Refuse(ErrorCode.POLICY_VIOLATION, NO_ROOM)), (late, APPEND)):
        assert decide_append(LEADER, full, (), Batch(0), COUNT, newcomers=Newcomers(now_ms=now_ms)) == expected
        known = Batch(1, producer_id=2)
        assert decide_append(LEADER, full, (), known, COUNT, newcomers=Newcomers(now_ms=now_ms)) == APPEND
    full.apply(Batch(0, base_offset=2), late)
    assert full.known(1) is not None, "its transaction is open"
    assert full.known(2) is None
    survivor = Replica(SURVIVOR, full)
    decision = decide_append(RETIRING, table(), [survivor], Batch(0), COUNT_NOT_SAID, newcomers=Newcomers(now_ms=late))
    assert decision == Refuse(ErrorCode.POLICY_VIOLATION, NO_ROOM), "the survivor's table counts"


def said(role: Leadership | None, count: str) -> int:
    """The partition count that the sender says."""
    right = COUNT if role is None else role.undeleted_partition_count
    return {"none": COUNT_NOT_SAID, "right": right, "stale": right - 1, "future": right + 1}[count]


def table(*batches: Batch, marker: Marker | None = None) -> ProducerTable:
    """The producers of a log that holds these batches, from offset 100 on, and perhaps a marker at their end."""
    made = ProducerTable()
    for offset, batch in enumerate(batches, 100):
        made.apply(batch._replace(base_offset=offset), 0)
    if marker is not None:
        made.apply(batches[-1]._replace(base_offset=100 + len(batches), base_sequence=-1, is_control=True), 0, marker)
    return made


TABLES = {
    "unknown": table(),
    "awaited": table(),
    "duplicate": table(Batch(9), Batch(10)),
    "next": table(Batch(8), Batch(9)),
    "gap": table(Batch(7), Batch(8)),
    "newer epoch": table(Batch(9, 6)),
    "older epoch": table(Batch(9, 4)),
}
TABLES["awaited"].refused(Batch(9))
"""Another batch was refused, and must come first."""


def decide(
    role: Leadership | None,
    own: ProducerTable,
    batch: Batch = Batch(),
    count: int = COUNT_NOT_SAID,
    *,
    ancestor: Replica | None = None,
    held: ErrorCode | None = None,
) -> Decision:
    ancestors = [Replica(SURVIVOR)] if ancestor is None else [ancestor]
    return decide_append(role, own, ancestors, batch, count, held)


def named(decision: Decision) -> str:
    """The outcome, in a word."""
    match decision:
        case Append():
            return "append"
        case Redirect():
            return "redirect"
        case Duplicate():
            return "duplicate"
        case Verify():
            return "verify"
        case Refuse(code, _, remember):
            return f"{code.name}, remembered" if remember else code.name


# One row for each role and count, one column for each state of the table in the order of TABLES, then without an id.
CODES = {
    "A": "append",
    "R": "redirect",
    "D": "duplicate",
    "L": "NOT_LEADER_OR_FOLLOWER",
    "c": "INVALID_PARTITION_METADATA",
    "C": "INVALID_PARTITION_METADATA, remembered",
    "G": "OUT_OF_ORDER_SEQUENCE_NUMBER",
    "F": "INVALID_PRODUCER_EPOCH",
}
GRID = {
    ("none", "none"): "LLLLLLL L",
    ("none", "right"): "LLLLLLL L",
    ("none", "stale"): "LLLLLLL L",
    ("none", "future"): "LLLLLLL L",
    ("leader", "none"): "AGDAGFG A",
    ("leader", "right"): "AGDAGFG A",
    ("leader", "stale"): "CcDCccc C",
    ("leader", "future"): "CcDCccc C",
    ("retiring", "none"): "RGDRGFG R",
    ("retiring", "right"): "CcDCccc C",
    ("retiring", "stale"): "CcDCccc C",
    ("retiring", "future"): "CcDCccc C",
    ("removed", "none"): "RGDRGFG R",
    ("removed", "right"): "CcDCccc C",
    ("removed", "stale"): "CcDCccc C",
    ("removed", "future"): "CcDCccc C",
}


@pytest.mark.parametrize(("role", "count"), GRID)
def test_every_role_count_and_table_has_one_outcome(role: str, count: str) -> None:
    expected = [CODES[code] for code in GRID[role, count].replace(" ", "")]
    found = [named(decide(ROLES[role], own, Batch(), said(ROLES[role], count))) for own in TABLES.values()]
    found.append(named(decide(ROLES[role], TABLES["next"], PLAIN, said(ROLES[role], count))))
    assert dict(zip([*TABLES, "no producer id"], found, strict=True)) == dict(
        zip([*TABLES, "no producer id"], expected, strict=True)
    )


def test_the_grid_has_every_role_and_count() -> None:
    assert set(GRID) == set(product(ROLES, ("none", "right", "stale", "future")))


HELD = (None, NONE, ErrorCode.INVALID_TXN_STATE, ErrorCode.NOT_ENOUGH_REPLICAS)


def test_every_combination_whatever_gives_one_outcome_and_changes_nothing() -> None:
    """Total and pure: over roles, counts, tables, transactions, ancestors and what the coordinator says."""
    outcomes: dict[str, int] = {}
    opened = {f"open, {name}": own for name, own in OPENED.items()}
    alias = redirected(7, NUMBER)
    ancestors = [
        [],
        [Replica(None)],
        [Replica(replace(SURVIVOR, layout=0))],
        [Replica(SURVIVOR)],
        [Replica(SURVIVOR, table(Batch(producer_id=alias)))],
        [Replica(SURVIVOR, table(Batch(9, producer_id=alias, is_transactional=True)))],
    ]
    batches = [PLAIN, Batch(), Batch(is_transactional=True), Batch(0, 6), Batch(0, 6, is_transactional=True)]
    for role, count, own, batch, others, held in product(
        ROLES.values(),
        ("none", "right", "stale", "future"),
        [*TABLES.values(), *opened.values()],
        batches,
        ancestors,
        HELD,
    ):
        before = [each.snapshot() for each in (own, *(other.table for other in others))]
        decision = decide_append(role, own, others, batch, said(role, count), held)
        assert decide_append(role, own, others, batch, said(role, count), held) == decision
        assert [each.snapshot() for each in (own, *(other.table for other in others))] == before
        assert held is None or decision is not VERIFY, "asked once"
        assert not (isinstance(decision, Append) and role is not None and role.retiring)
        assert not (isinstance(decision, Redirect) and not (role is not None and role.retiring))
        outcomes[named(decision)] = outcomes.get(named(decision), 0) + 1
    assert set(outcomes) == {
        *CODES.values(),
        "verify",
        "INVALID_TXN_STATE",
        "NOT_ENOUGH_REPLICAS, remembered",
        "NOT_LEADER_OR_FOLLOWER, remembered",
    }


# The order: a batch that two checks have something to say about is answered by the first.


def test_without_a_role_a_repetition_is_not_answered() -> None:
    """Step 1 before 2: another may lead the partition and have it otherwise."""
    assert decide(None, TABLES["duplicate"]) == NOT_LEADER


@pytest.mark.parametrize("role", ["leader", "retiring", "removed"])
@pytest.mark.parametrize("count", ["stale", "future"])
def test_a_repetition_is_answered_whatever_count_its_sender_says(role: str, count: str) -> None:
    """Step 2 before 3: otherwise a lost answer and a resize make a duplicate."""
    decision = decide(ROLES[role], TABLES["duplicate"], Batch(), said(ROLES[role], count))
    assert isinstance(decision, Duplicate)
    assert decision.ancestor is None
    assert (decision.of.base_offset, decision.of.last_offset, decision.of.timestamp) == (101, 101, 99)


def test_a_repetition_is_answered_whatever_has_become_of_its_transaction() -> None:
    """Step 2 before 7: the transaction may have ended since, and the answer have been lost."""
    repeated = Batch(is_transactional=True)
    ended = table(repeated, marker=Marker(commit=True, coordinator_epoch=0))
    assert isinstance(decide(LEADER, ended, repeated, COUNT, held=ErrorCode.INVALID_TXN_STATE), Duplicate)


def test_a_repetition_is_answered_where_the_survivor_does_not_serve_yet() -> None:
    """Step 2 before 6."""
    assert isinstance(decide(RETIRING, TABLES["duplicate"], ancestor=Replica(None)), Duplicate)


def test_a_sender_of_another_count_is_not_answered_from_an_ancestor() -> None:
    """Step 3 before 4: only stock producers are redirected."""
    ancestor = Replica(SURVIVOR, table(Batch(producer_id=redirected(7, NUMBER))))
    assert named(decide(LEADER, TABLES["next"], Batch(), 3, ancestor=ancestor)) == CODES["C"]
    assert isinstance(decide(LEADER, TABLES["next"], Batch(), ancestor=ancestor), Duplicate)


def test_a_sender_of_another_count_hears_of_the_count_and_not_of_its_sequence() -> None:
    """Step 3 before 5: INVALID_PARTITION_METADATA is a definite rejection, after which the records are placed anew."""
    assert decide(LEADER, TABLES["gap"], Batch(), 3) == Refuse(STALE, "The topic has 6 partitions.")
    assert decide(LEADER, TABLES["newer epoch"], Batch(), 3) == Refuse(STALE, "The topic has 6 partitions.")


def test_a_sender_of_another_count_hears_of_the_count_and_not_of_its_transaction() -> None:
    """Step 3 before 7."""
    for held in HELD:
        decision = decide(LEADER, TABLES["next"], Batch(is_transactional=True), 3, held=held)
        assert named(decision) == CODES["C"]


def test_a_repetition_of_what_was_redirected_is_answered_though_it_does_not_follow_here() -> None:
    """Step 4 before 5."""
    ancestor = Replica(SURVIVOR, table(Batch(producer_id=redirected(7, NUMBER))))
    for own in (TABLES["gap"], TABLES["awaited"], TABLES["unknown"]):
        decision = decide(RETIRING, own, ancestor=ancestor)
        assert isinstance(decision, Duplicate)
        assert decision.ancestor is ancestor
        assert decision.of.base_offset == 100


def test_a_batch_that_does_not_follow_is_refused_also_where_the_survivor_does_not_serve_yet() -> None:
    """Step 5 before 6."""
    assert named(decide(RETIRING, TABLES["gap"], ancestor=Replica(None))) == CODES["G"]
    assert decide(RETIRING, TABLES["next"], ancestor=Replica(None)) == SURVIVOR_NOT_READY


def test_the_coordinator_is_not_asked_of_a_batch_that_does_not_follow() -> None:
    """Step 5 before 7."""
    for held in HELD:
        assert named(decide(LEADER, TABLES["gap"], Batch(is_transactional=True), held=held)) == CODES["G"]


def test_the_coordinator_is_not_asked_where_the_survivor_does_not_serve_yet() -> None:
    """Step 6 before 7."""
    for held in HELD:
        batch = Batch(is_transactional=True)
        assert decide(RETIRING, TABLES["next"], batch, ancestor=Replica(None), held=held) == SURVIVOR_NOT_READY


def test_nothing_is_appended_that_no_transaction_holds() -> None:
    """Step 7 before 8."""
    batch = Batch(is_transactional=True)
    assert decide(LEADER, TABLES["next"], batch) is VERIFY
    assert decide(RETIRING, TABLES["next"], batch) is VERIFY
    assert decide(LEADER, TABLES["next"], batch, held=NONE) is APPEND
    assert isinstance(decide(RETIRING, TABLES["next"], batch, held=NONE), Redirect)


# Redirecting.


def test_a_batch_is_redirected_under_an_id_that_keeps_its_sequence_apart() -> None:
    survivor = Replica(SURVIVOR)
    assert decide(RETIRING, TABLES["next"], ancestor=survivor) == Redirect(survivor, redirected(7, NUMBER))
    assert decide(RETIRING, TABLES["next"], PLAIN, ancestor=survivor) == Redirect(survivor, -1)


@pytest.mark.parametrize(
    "taken",
    [None, replace(SURVIVOR, layout=2), replace(SURVIVOR, retiring=True), replace(SURVIVOR, partition=1)],
    ids=["no role", "the role of before", "retiring too", "another partition"],
)
def test_only_a_survivor_that_has_taken_its_role_is_redirected_to(taken: Leadership | None) -> None:
    assert decide(RETIRING, TABLES["next"], ancestor=Replica(taken)) == SURVIVOR_NOT_READY
    assert decide_append(RETIRING, TABLES["next"], (), Batch(), COUNT_NOT_SAID) == SURVIVOR_NOT_READY
    assert SURVIVOR_NOT_READY.remember, "the reason will pass"


def test_the_survivor_is_the_ancestor_that_has_the_keys_now() -> None:
    """Of partition 12, whose keys were in 4 and in 0: with 5 partitions they are in 4, with 3 in 0."""
    role = replace(RETIRING, partition=12)
    for count in (5, 3):
        near = Replica(replace(SURVIVOR, partition=4, undeleted_partition_count=count))
        far = Replica(replace(SURVIVOR, undeleted_partition_count=count))
        expected = near if count == 5 else far
        decision = decide_append(
            replace(role, undeleted_partition_count=count), table(), [near, far], Batch(), COUNT_NOT_SAID
        )
        assert decision == Redirect(expected, redirected(7, 12))
        assert isinstance(decision, Redirect)
        assert decision.to is expected


def test_a_survivor_in_a_layout_of_the_same_number_from_a_canceled_resize_is_not_ready() -> None:
    """Partition 0 missed the cancel of a growth to 7, and the shrink that has the number of its layout again."""
    for layout, count, ready in ((3, 7, False), (3, 3, True), (4, 7, True), (2, 3, False)):
        survivor = Replica(replace(SURVIVOR, layout=layout, undeleted_partition_count=count))
        decision = decide_append(RETIRING, table(), [survivor], PLAIN, COUNT_NOT_SAID)
        assert isinstance(decision, Redirect) is ready
        assert ready or decision == SURVIVOR_NOT_READY


def test_a_stock_producer_counts_on_where_it_was_redirected_and_where_its_partition_opens_again() -> None:
    alias = redirected(7, NUMBER)
    ancestor = Replica(SURVIVOR, table(Batch(9, producer_id=alias)))
    assert decide(LEADER, TABLES["gap"], ancestor=ancestor) is APPEND, "the newest batch is the redirected one"
    assert named(decide(LEADER, TABLES["gap"], Batch(9), ancestor=ancestor)) == "duplicate"
    assert named(decide(LEADER, TABLES["duplicate"], Batch(11), ancestor=ancestor)) == "append", "the newest is its own"
    assert named(decide(LEADER, TABLES["unknown"], Batch(11), ancestor=ancestor)) == CODES["G"]
    assert named(decide(LEADER, TABLES["next"], PLAIN, ancestor=ancestor)) == "append"


# Transactions.

OPENED = {
    "the same": table(Batch(9, is_transactional=True)),
    "of an older epoch": table(Batch(9, 4, is_transactional=True)),
    "ended": table(Batch(9, is_transactional=True), marker=Marker(commit=True, coordinator_epoch=0)),
}


def test_within_its_transaction_a_batch_is_appended_and_nobody_is_asked() -> None:
    for held in HELD:
        assert decide(LEADER, OPENED["the same"], Batch(is_transactional=True), COUNT, held=held) is APPEND


def test_the_first_batch_of_a_transaction_waits_for_the_coordinators_word() -> None:
    batch = Batch(is_transactional=True)
    for own in (OPENED["ended"], TABLES["next"], TABLES["unknown"]):
        assert decide(LEADER, own, batch, COUNT) is VERIFY
        assert decide(LEADER, own, batch, COUNT, held=NONE) is APPEND
        refusal = decide(LEADER, own, batch, COUNT, held=ErrorCode.INVALID_TXN_STATE)
        assert named(refusal) == "INVALID_TXN_STATE"
        refusal = decide(LEADER, own, batch, COUNT, held=ErrorCode.NOT_ENOUGH_REPLICAS)
        assert named(refusal) == "NOT_ENOUGH_REPLICAS, remembered", "the reason may pass"


def test_a_newer_epoch_begins_a_transaction_of_its_own() -> None:
    batch = Batch(0, 6, is_transactional=True)
    assert decide(LEADER, OPENED["of an older epoch"], batch, COUNT) is VERIFY


def test_a_batch_without_a_transaction_does_not_cut_into_one() -> None:
    assert named(decide(LEADER, OPENED["the same"], Batch(), COUNT)) == "INVALID_TXN_STATE"
    assert decide(LEADER, OPENED["ended"], Batch(), COUNT) is APPEND


def test_a_redirected_transaction_is_the_survivors() -> None:
    batch, alias = Batch(is_transactional=True), redirected(7, NUMBER)
    survivor = Replica(SURVIVOR, table(Batch(9, producer_id=alias, is_transactional=True)))
    assert decide(RETIRING, TABLES["gap"], batch, ancestor=survivor) == Redirect(survivor, alias)
    assert named(decide(RETIRING, TABLES["gap"], Batch(), ancestor=survivor)) == "INVALID_TXN_STATE"
    assert decide(RETIRING, OPENED["the same"], batch) is VERIFY, "it is not open where the batch would go"


class Full(AbortedTransactions):
    """An index that holds as many lines as it may."""

    def __len__(self) -> int:
        return ABORTED_TRANSACTIONS_MAX


def test_a_partition_with_too_many_aborted_transactions_takes_no_new_one() -> None:
    batch = Batch(is_transactional=True)
    full, going_on = table(Batch(9)), table(Batch(9, is_transactional=True))
    full.aborted = going_on.aborted = Full()
    for held in HELD:
        assert named(decide(LEADER, full, batch, COUNT, held=held)) == "POLICY_VIOLATION"
    assert decide(LEADER, going_on, batch, COUNT) is APPEND
    assert decide(LEADER, full, Batch(), COUNT) is APPEND
