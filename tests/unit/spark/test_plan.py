from __future__ import annotations

import json
from dataclasses import replace

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.machines.keyspace import interval
from anabranch.machines.lineage import Lineage
from anabranch.spark.plan import (
    WHOLE,
    DataLossError,
    Extent,
    KeyRange,
    Loss,
    Read,
    Splitting,
    TopicOffsets,
    TopicSnapshot,
    begun_of,
    extent,
    is_folded_back,
    key_ranges,
    lost_between,
    offsets_from_json,
    offsets_to_json,
    plan_tasks,
    plan_to_json,
    query_positions,
    share,
    verify,
    with_begun,
)

GROWN = Lineage.of_ends(1, (1, 2, 4), ({0: 3}, {0: 3, 1: 0}))
"""The design's example: three records in 0, none in 1, and then some in 3."""


def grown(**changes: object) -> TopicSnapshot:
    values: dict[str, object] = {
        "topic": "t",
        "topic_id": "id",
        "lineage": GROWN,
        "starts": {0: 0, 1: 0, 2: 0, 3: 0},
        "ends": {0: 3, 1: 0, 2: 0, 3: 1},
    }
    return TopicSnapshot(**{**values, **changes})  # type: ignore[arg-type]


def flat(ends: dict[int, int], starts: dict[int, int] | None = None, topic: str = "t") -> TopicSnapshot:
    return TopicSnapshot(topic, "id", Lineage.flat(len(ends)), starts or dict.fromkeys(ends, 0), ends)


def offsets(of: dict[int, int], **more: object) -> dict[str, TopicOffsets]:
    return {"t": TopicOffsets(of, **{"topic_id": "id", "layouts": 1, **more})}  # type: ignore[arg-type]


def tp(partition: int) -> TopicPartition:
    return TopicPartition("t", partition)


def test_a_batch_stops_before_records_that_wait_on_others_and_the_next_one_takes_them() -> None:
    first = extent({"t": grown()}, {})
    assert first.end["t"].offsets == {0: 3, 1: 0, 2: 0, 3: 0}
    assert first.end["t"].seen == {3: 1}
    assert first.advances
    second = extent({"t": grown()}, first.end)
    assert second.end["t"].offsets == {0: 3, 1: 0, 2: 0, 3: 1}
    assert second.end["t"].seen == {}
    assert not extent({"t": grown()}, second.end).advances


WIDE = Lineage.of_cuts(2, (2, 4, 8), {0: [(0, 10), (1, 20)], 1: [(0, 10), (1, 20)], 2: [(1, 10)], 3: [(1, 10)]})
"""Ten records in each segment of 0 to 3, of layouts 0 to 2, and in 4 to 7."""


def wide(**ends: int) -> TopicSnapshot:
    given = {0: 30, 1: 30, 2: 20, 3: 20, 4: 10, 5: 10, 6: 10, 7: 10} | {int(p[1:]): end for p, end in ends.items()}
    return TopicSnapshot("t", "id", WIDE, dict.fromkeys(given, 0), given)


def read_in(snapshot: TopicSnapshot, limit: int | None = None) -> list[dict[int, int]]:
    """The positions at the ends of the micro-batches that read everything there is now."""
    found, reached = [], extent({"t": snapshot}, {}, limit)
    while reached.advances:
        found.append({p: offset for p, offset in reached.end["t"].offsets.items() if offset})
        reached = extent({"t": snapshot}, reached.end, limit)
    return found


def test_no_partition_is_read_beyond_the_layout_that_a_closed_gate_waits_for() -> None:
    assert read_in(wide()) == [{0: 10, 1: 10}, {0: 20, 1: 20, 2: 10, 3: 10}, dict(wide().ends)]
    for limit in (1, 3, 7):
        batches = read_in(wide(), limit)
        assert all(not reached.keys() - {0, 1} for reached in batches if min(reached.get(0, 0), reached.get(1, 0)) < 10)
        assert batches[-1] == wide().ends


def test_a_gate_without_records_behind_it_holds_nobody_back() -> None:
    assert read_in(wide(p2=0, p3=0, p4=0, p5=0, p6=0, p7=0)) == [{0: 30, 1: 30}]


def test_what_an_open_transaction_holds_back_does_not_hold_the_other_families_for_ever() -> None:
    """Readers of committed records see partition 0 end at offset 5; 2, 4 and 6 have its keys, the others have not."""
    assert read_in(wide(p0=5)) == [
        {0: 5, 1: 10},
        {0: 5, 1: 20, 3: 10},
        {0: 5, 1: 30, 3: 20, 5: 10, 7: 10},
    ]


def test_gates_do_not_wait_for_partitions_that_the_query_does_not_read() -> None:
    only = extent({"t": grown()}, {}, assigned={"t": frozenset({3})})
    assert only.end["t"].offsets == {3: 1}


def test_an_unordered_topic_is_read_to_the_ends_of_its_logs() -> None:
    assert extent({"t": grown(ordered=False)}, {}).end["t"].offsets == {0: 3, 1: 0, 2: 0, 3: 1}


def test_what_came_after_the_horizon_is_left_for_another_run() -> None:
    look = flat({0: 10, 1: 10, 2: 4})
    bounded = extent({"t": look}, {}, horizon={"t": {0: 7, 1: 10}})
    assert bounded.end["t"].offsets == {0: 7, 1: 10, 2: 0}
    assert not extent({"t": look}, bounded.end, horizon={"t": {0: 7, 1: 10}}).advances


def test_offsets_survive_the_checkpoint_and_equal_offsets_are_equal_text() -> None:
    one = {"b": TopicOffsets({10: 5, 2: 7}, "id", 3, {10: 9}, {12: 8, 11: 6}, partitions=11), "a": TopicOffsets({})}
    other = {"a": TopicOffsets({}), "b": replace(one["b"], offsets={2: 7, 10: 5}, removed={11: 6, 12: 8})}
    text = json.dumps(offsets_to_json(one))
    assert text == json.dumps(offsets_to_json(other))
    assert offsets_from_json(json.loads(text)) == one


@pytest.mark.parametrize(
    ("known", "looked", "loss"),
    [
        ({0: 3}, flat({0: 9}, {0: 5}), "t-0: wanted offset 3, available from offset 5: the log starts later"),
        ({0: 12}, flat({0: 9}), "t-0: wanted offset 12, available from offset 9: the log ends before"),
    ],
)
def test_an_offset_outside_the_log_is_a_loss_that_names_wanted_and_available(
    known: dict[int, int], looked: TopicSnapshot, loss: str
) -> None:
    found = extent({"t": looked}, offsets(known))
    assert [str(one)[: len(loss)] for one in found.losses] == [loss]
    assert loss in str(DataLossError(found.losses))
    assert "set the option failOnDataLoss to false" in str(DataLossError(found.losses))
    assert found.end["t"].offsets == {0: 9}


def test_a_partition_that_was_removed_is_no_loss_when_it_was_read_and_one_otherwise() -> None:
    look = flat({0: 9})
    assert query_positions(look, TopicOffsets({0: 9, 1: 40}, "id")).losses == ()
    (lost,) = query_positions(look, TopicOffsets({0: 9, 1: 40}, "id", 1, {1: 50})).losses
    assert lost == Loss("t", 1, 40, None, "the partition was removed before its records up to offset 50 were read")


SHRUNK = Lineage.of_cuts(1, (2, 1), {0: [(0, 500)]})


@pytest.mark.parametrize(
    ("known", "removed", "lost"),
    [
        # The query had read all there was, and was down while 1,000 more came; whether it noted what is removed or not.
        (TopicOffsets({0: 100, 1: 100}, "id", 1, removed={}), {1: 1_100}, (100, 1_100)),
        (TopicOffsets({0: 100, 1: 100}, "id", 1), {1: 1_100}, (100, 1_100)),
        (TopicOffsets({0: 100, 1: 1_100}, "id", 1, removed={}), {1: 1_100}, None),
        # It appeared and went while the query was down.
        (TopicOffsets({0: 100}, "id", 1, removed={}), {1: 40}, (0, 40)),
        # It was removed before: by a query that notes it, and by one of an earlier version.
        (TopicOffsets({0: 100}, "id", 2, removed={1: 40}), {1: 40}, None),
        (TopicOffsets({0: 100}, "id", 2), {1: 40}, None),
        # It was created again and removed again.
        (TopicOffsets({0: 100}, "id", 2, removed={1: 40}), {1: 60}, (40, 60)),
        # An earlier version of brokers says nothing of it.
        (TopicOffsets({0: 100, 1: 40}, "id", 1, {1: 50}, removed={}), {}, (40, 50)),
    ],
)
def test_a_removed_partition_is_judged_by_where_it_ended(
    known: TopicOffsets, removed: dict[int, int], lost: tuple[int, int] | None
) -> None:
    look = TopicSnapshot("t", "id", SHRUNK, {0: 0}, {0: 600}, removed=removed)
    reached = extent({"t": look}, {"t": known})
    says = (
        [] if lost is None else [f"t-1: the partition was removed before its records up to offset {lost[1]} were read"]
    )
    assert [str(each) for each in reached.losses] == says
    assert [each.wanted for each in reached.losses] == ([] if lost is None else [lost[0]])
    assert extent({"t": look}, reached.end).losses == ()
    assert reached.end["t"].removed == removed


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        (TopicOffsets({0: 9}, "id", 1, removed={}), 0),
        (TopicOffsets({0: 9}, "id", 1, removed={1: 40}), 40),
        (TopicOffsets({0: 9}, "id", 1, removed={1: 50}), None),
        (TopicOffsets({0: 9}, "id", 1), None),
        (None, None),
    ],
)
def test_a_partition_that_appeared_and_was_trimmed_unread_is_a_loss(
    known: TopicOffsets | None, wanted: int | None
) -> None:
    found = query_positions(flat({0: 9, 1: 60}, {0: 0, 1: 50}), known)
    assert found.positions[1] == 50
    assert [each.wanted for each in found.losses if each.partition == 1] == ([] if wanted is None else [wanted])


@pytest.mark.parametrize(
    ("removed", "log_start", "wanted"),
    [
        # New to the query: removed or trimmed between the plan and its replay, or neither.
        ({}, None, 0),
        ({}, 50, 0),
        ({}, 0, None),
        # It had an earlier life, which ended where this micro-batch ends, or before.
        ({1: 60}, None, None),
        ({1: 60}, 60, None),
        ({1: 40}, None, 40),
        ({1: 40}, 50, 40),
        ({1: 50}, 50, None),
        # An earlier version did not note what is removed.
        (None, 50, None),
    ],
)
def test_a_replay_lost_what_its_plan_owed_of_a_partition_without_an_offset(
    removed: dict[int, int] | None, log_start: int | None, wanted: int | None
) -> None:
    there = flat({0: 9}) if log_start is None else flat({0: 9, 1: 60}, {0: 0, 1: log_start})
    losses = lost_between({"t": there}, offsets({0: 9}, removed=removed), offsets({0: 9, 1: 60}))
    assert [(each.partition, each.wanted) for each in losses] == ([] if wanted is None else [(1, wanted)])


@pytest.mark.parametrize(
    ("counts", "layouts", "elastic", "wanted"),
    [
        # The query read partition 0 alone, by `assign`: 2 was there, and begins at its log start.
        ((4,), 1, True, None),
        ((2, 4, 2, 4), 3, True, None),
        # The partition came with a layout that the query does not know; or nobody knows when it came.
        ((2, 4), 1, True, 0),
        ((4,), 1, False, 0),
        ((4,), 0, True, 0),
    ],
)
def test_a_partition_that_is_assigned_later_owes_nothing_of_before_unless_it_is_new_to_the_topic(
    counts: tuple[int, ...], layouts: int, elastic: bool, wanted: int | None
) -> None:
    lineage = Lineage.of_cuts(min(counts), counts, {})
    there = TopicSnapshot("t", "id", lineage, {0: 0, 2: 50}, {0: 9, 2: 60}, elastic=elastic)
    known = TopicOffsets({0: 9}, "id", layouts, removed={})
    found = query_positions(there, known, frozenset({0, 2}))
    expected = [] if wanted is None else [(2, wanted)]
    assert [(each.partition, each.wanted) for each in found.losses] == expected and found.positions == {0: 9, 2: 50}
    again = lost_between({"t": there}, {"t": known}, {"t": replace(known, offsets={0: 9, 2: 60})})
    assert [(each.partition, each.wanted) for each in again] == expected


@pytest.mark.parametrize(
    ("layouts", "partitions", "wanted"),
    [
        # An earlier version did not note which partitions there were, and the lineage has forgotten it.
        (2, None, None),
        (1, None, None),
        (3, None, None),
        # It was noted: partition 3 was there, or is new.
        (2, 4, None),
        (2, 3, 0),
    ],
)
def test_a_partition_that_may_have_been_there_before_the_layouts_that_are_left_owes_nothing(
    layouts: int, partitions: int | None, wanted: int | None
) -> None:
    there = TopicSnapshot("t", "id", Lineage(1, (5,), first=2), {0: 0, 3: 50}, {0: 9, 3: 60}, elastic=True)
    known = TopicOffsets({0: 9}, "id", layouts, removed={}, partitions=partitions)
    found = query_positions(there, known, frozenset({0, 3}))
    assert [(each.partition, each.wanted) for each in found.losses] == ([] if wanted is None else [(3, wanted)])
    assert found.positions == {0: 9, 3: 50}


def goes_on(known: TopicOffsets, there: TopicSnapshot, assigned: set[int] | None) -> Extent:
    """The next micro-batch, after a restart: what is known comes from the checkpoint."""
    start = offsets_from_json(json.loads(json.dumps(offsets_to_json({"t": known}))))
    return extent({"t": there}, start, assigned=None if assigned is None else {"t": frozenset(assigned)})


@pytest.mark.parametrize("again", [{0, 1}, None])
def test_a_partition_that_was_left_out_for_a_while_is_read_on_where_it_was_left(again: set[int] | None) -> None:
    """It was read again from its log start."""
    known = goes_on(TopicOffsets({}, "id"), flat({0: 9, 1: 20}), {0, 1}).end["t"]
    for end, lost in ((15, [(1, 20)]), (30, [])):
        found = goes_on(known, flat({0: end, 1: 40}), {0})
        assert [(each.partition, each.wanted) for each in found.losses] == lost
        known = found.end["t"]
        assert (known.offsets, known.left) == ({0: end}, {1: 20})
    found = goes_on(known, flat({0: 30, 1: 40}, {0: 0, 1: 5}), again)
    after = found.end["t"]
    assert (found.losses, after.offsets, after.left) == ((), {0: 30, 1: 40}, {})
    assert known.standing == {0: 30, 1: 20}, "the first offsets of the tasks"
    assert not lost_between({"t": flat({0: 30, 1: 40}, {0: 0, 1: 20})}, {"t": known}, {"t": after})
    (lost,) = goes_on(known, flat({0: 30, 1: 40}, {0: 0, 1: 25}), again).losses
    assert (lost.partition, lost.wanted, lost.available) == (1, 20, 25), "what was deleted while it was left out"


def test_a_partition_that_was_removed_while_it_was_left_out_is_a_loss_when_it_is_wanted_again() -> None:
    lineage = Lineage.of_cuts(1, (2, 1), {})
    there = TopicSnapshot("t", "id", lineage, {0: 0}, {0: 30}, removed={1: 40}, elastic=True)
    known = TopicOffsets({0: 9}, "id", 1, removed={}, partitions=2, left={1: 20})
    left_out = goes_on(known, there, {0})
    assert not left_out.losses and left_out.end["t"].left == {1: 20}
    (lost,) = goes_on(left_out.end["t"], there, None).losses
    assert (lost.partition, lost.wanted) == (1, 20)


def test_a_topic_that_the_options_leave_out_for_a_while_is_a_loss_once_and_is_read_on_where_it_was_left() -> None:
    known = {"t": TopicOffsets({0: 9, 1: 4}, "id", 1, {0: 12}), "u": TopicOffsets({0: 3}, "u")}
    other = replace(flat({0: 5}), topic="u", topic_id="u")
    found = extent({"u": other}, known, reads=lambda topic: topic == "u")
    assert [each.topic for each in found.losses] == ["t"]
    assert found.end["t"].left == {0: 9, 1: 4} and not found.end["t"].offsets
    assert not lost_between({"u": other}, known, found.end)
    after = extent({"u": other}, found.end, reads=lambda topic: topic == "u")
    assert not after.losses and after.end["t"] == found.end["t"]
    later = extent({"u": other, "t": flat({0: 12, 1: 4})}, found.end)
    assert (later.losses, later.end["t"].offsets, later.end["t"].left) == ((), {0: 12, 1: 4}, {})
    assert extent({"u": other}, known).end.keys() == {"u"}, "one that the options name is deleted"


def test_offsets_note_how_many_partitions_there_were_and_so_tell_new_ones_where_no_lineage_is_kept() -> None:
    alone = frozenset({0})
    noted = extent({"t": flat({0: 9, 1: 60}, {0: 0, 1: 50})}, {}, assigned={"t": alone}).end["t"]
    assert (noted.offsets, noted.partitions) == ({0: 9}, 2)
    later = flat({0: 9, 1: 60, 2: 60}, {0: 0, 1: 50, 2: 50})
    assert [(each.partition, each.wanted) for each in query_positions(later, noted).losses] == [(2, 0)]


@pytest.mark.parametrize(
    ("cuts", "layouts", "position", "log_start", "wanted"),
    [
        # Partition 1 retired in layout 1 with 210 offsets, was emptied, and takes records again.
        ([(0, 210)], 1, 52, 210, None),
        ([(0, 210)], 2, 52, 210, None),
        # It was removed and created again: the new log has no cut.
        ([], 1, 52, 210, None),
        # Retention deleted records of its new life; or all that went, after the offsets were noted in it.
        ([(0, 210)], 1, 52, 230, 210),
        ([(0, 210)], 3, 52, 210, 52),
        ([(0, 210)], 3, 215, 230, 215),
    ],
)
def test_what_was_folded_back_is_no_loss_either_when_the_topic_has_grown_again(
    cuts: list[tuple[int, int]], layouts: int, position: int, log_start: int, wanted: int | None
) -> None:
    lineage = Lineage.of_cuts(1, (2, 1, 2), {0: [(0, 100), (1, 160)], 1: cuts})
    both = frozenset({"compact", "delete"})
    there = TopicSnapshot("t", "id", lineage, {0: 0, 1: log_start}, {0: 160, 1: 240}, cleanup=both, elastic=True)
    known = TopicOffsets({0: 160, 1: position}, "id", layouts, removed={}, partitions=2)
    lost = [] if wanted is None else [(1, wanted, log_start)]
    found = query_positions(there, known)
    assert [(each.partition, each.wanted, each.available) for each in found.losses] == lost
    assert found.positions == {0: 160, 1: log_start}
    planned = {"t": replace(known, offsets={0: 160, 1: 240})}
    again = lost_between({"t": there}, {"t": known}, planned)
    assert [(each.partition, each.wanted, each.available) for each in again] == lost
    (read,) = plan_tasks({"t": there}, {"t": known.offsets}, {"t": {0: 160, 1: 240}}, Splitting())[0].reads
    assert not read.folds_back, "what retention deletes from now on is lost"
    assert query_positions(replace(there, cleanup=frozenset({"delete"})), known).losses
    compacts = replace(there, cleanup=frozenset({"compact"}))
    assert query_positions(compacts, known).losses == found.losses, "it may have deleted, too, until a moment ago"


def test_what_a_compacted_topic_folds_back_is_no_loss() -> None:
    compact = frozenset({"compact"})
    known = TopicOffsets({0: 100, 1: 52}, "id", 1, {1: 210}, removed={})
    emptied = TopicSnapshot("t", "id", SHRUNK, {0: 0, 1: 210}, {0: 160, 1: 210}, cleanup=compact)
    removed = TopicSnapshot("t", "id", SHRUNK, {0: 0}, {0: 160}, removed={1: 210}, cleanup=compact)
    opened = flat({0: 160, 1: 230}, {0: 0, 1: 210})
    for look, cleanup, lost in [
        (emptied, {"compact"}, False),
        (emptied, {"compact", "delete"}, False),
        (emptied, {"delete"}, True),
        (removed, {"compact"}, False),
        (removed, {"compact", "delete"}, False),
        (removed, {"delete"}, True),
        (opened, {"compact"}, True),
        (opened, {"compact", "delete"}, True),
        (opened, set(), True),
    ]:
        snapshot = replace(look, cleanup=frozenset(cleanup))
        begun, planned = {"t": known}, {"t": replace(known, offsets={0: 100, 1: 210})}
        assert bool(query_positions(snapshot, known).losses) is lost
        assert bool(lost_between({"t": snapshot}, begun, planned)) is lost
    ends = {"t": {0: 100, 1: 210}}
    (read,) = plan_tasks({"t": replace(emptied, starts={0: 0, 1: 0})}, {"t": {0: 100, 1: 52}}, ends, Splitting())[
        0
    ].reads
    assert (read.partition, read.folds_back) == (1, True)
    (task,) = plan_tasks({"t": replace(emptied, starts={0: 100, 1: 0})}, {}, ends, Splitting(), whole=True)
    assert [each.folds_back for each in task.reads] == [False], "a batch query does not read the copies"
    assert plan_tasks({"t": removed}, {"t": {0: 100, 1: 52}}, ends, Splitting()) == []


def test_a_new_partition_starts_at_its_log_start_without_loss() -> None:
    standing = query_positions(flat({0: 9, 1: 60}, {0: 0, 1: 50}), TopicOffsets({0: 9}, "id"))
    assert standing.positions == {0: 9, 1: 50}
    assert standing.losses == ()


def test_only_the_end_of_the_first_micro_batch_says_where_it_began() -> None:
    start = {"t": TopicOffsets({0: 3, 1: 2}, "id", 1)}
    end = {"t": TopicOffsets({0: 5, 1: 2}, "id", 1, {1: 9}), "u": TopicOffsets({0: 4}, "other", 1)}
    first = offsets_from_json(json.loads(json.dumps(offsets_to_json(with_begun(end, start)))))
    assert first == {"t": replace(end["t"], begun={0: 3, 1: 2}), "u": replace(end["u"], begun={})}
    elsewhere = {"t": TopicOffsets({0: 5, 1: 9}, "id", 1)}
    begun = begun_of(elsewhere, first)
    assert {topic: known.offsets for topic, known in begun.items()} == {"t": {0: 3, 1: 2}, "u": {}}
    assert begun_of(elsewhere, end) == elsewhere
    assert "begun" not in offsets_to_json(end)["t"]


def test_a_position_beyond_the_last_stable_offset_waits_there_and_beyond_the_log_it_is_a_loss() -> None:
    open_transaction = replace(flat({0: 5, 1: 5}), high_watermarks={0: 9, 1: 5})
    waiting = extent({"t": open_transaction}, offsets({0: 8, 1: 5}))
    assert not waiting.advances and waiting.losses == ()
    assert waiting.end["t"].offsets == {0: 8, 1: 5}
    assert extent({"t": flat({0: 12, 1: 5})}, waiting.end).end["t"].offsets == {0: 12, 1: 5}
    (lost,) = extent({"t": open_transaction}, offsets({0: 10, 1: 5})).losses
    assert lost == Loss("t", 0, 10, 9, "the log ends before, as after a crash of a broker that does not flush")


def test_what_waits_for_a_partition_waits_for_its_transaction_too() -> None:
    """Partition 0 ends at offset 2 of 3 for readers of committed records."""
    held = extent({"t": grown(ends={0: 2, 1: 0, 2: 0, 3: 1}, high_watermarks=None)}, {})
    assert held.end["t"].offsets == {0: 2, 1: 0, 2: 0, 3: 0}
    assert extent({"t": grown()}, held.end).end["t"].offsets == {0: 3, 1: 0, 2: 0, 3: 0}


def test_a_topic_that_was_made_anew_is_a_loss_and_read_from_its_start() -> None:
    found = extent({"t": flat({0: 4})}, offsets({0: 9}, topic_id="an older one"))
    assert ["deleted and created again" in str(loss) for loss in found.losses] == [True]
    assert found.end["t"].offsets == {0: 4}
    assert "deleted" in str(extent({}, offsets({0: 9})).losses[0])


def test_the_limit_is_shared_in_proportion_and_leaves_nobody_out() -> None:
    taken = share({tp(0): 1_000_000, tp(1): 100_000, tp(2): 1, tp(3): 0}, 1_100, turn=0)
    assert sum(taken.values()) == 1_100
    assert taken[tp(2)] == 1
    assert 995 <= taken[tp(0)] <= 1_000
    assert tp(3) not in taken


def test_a_limit_below_the_number_of_partitions_goes_round() -> None:
    open_ = {tp(p): 100 for p in range(5)}
    turns = [share(open_, 2, turn=turn) for turn in (0, 2, 4)]
    assert [sorted(p.partition for p in turn) for turn in turns] == [[0, 1], [2, 3], [0, 4]]


def test_a_micro_batch_is_one_task_per_partition_unless_more_are_asked_for() -> None:
    looks = {"t": flat({0: 10, 1: 0, 2: 30})}
    tasks = plan_tasks(looks, {}, {"t": {0: 10, 1: 0, 2: 30}}, Splitting())
    assert [task.reads for task in tasks] == [
        (Read("t", 0, 0, 10, initial=3, topic_id="id"),),
        (Read("t", 2, 0, 30, initial=3, topic_id="id"),),
    ]
    by_key = plan_tasks(looks, {}, {"t": {0: 10, 1: 0, 2: 30}}, Splitting(min_partitions=4))
    assert [(task.reads[0].partition, task.key_range) for task in by_key] == [
        (0, WHOLE),
        *((2, keys) for keys in key_ranges(tasks[1].reads, 3)),
    ]


def test_key_ranges_are_cut_where_the_keys_of_a_partition_are() -> None:
    """Partition 3 of 1 → 2 → 4 holds the last quarter of the keys, and held nothing before."""
    look = TopicSnapshot("t", "id", GROWN, dict.fromkeys(range(4), 0), {0: 0, 1: 0, 2: 0, 3: 40})
    quarter = (WHOLE.end + 1) // 4
    tasks = plan_tasks({"t": look}, {}, {"t": {3: 40}}, Splitting(min_partitions=2))
    assert [task.key_range for task in tasks] == [
        KeyRange(0, 3 * quarter + quarter // 2 - 1),
        KeyRange(3 * quarter + quarter // 2, WHOLE.end),
    ]


def test_key_ranges_over_two_layouts_weigh_the_records_of_each() -> None:
    """Partition 0 held all keys for 30 records, then the lower half for 10: three quarters of 40 lie below the half."""
    lineage = Lineage.of_ends(1, (1, 2), ({0: 30},))
    look = TopicSnapshot("t", "id", lineage, {0: 0, 1: 0}, {0: 40, 1: 0})
    (low, high) = (task.key_range for task in plan_tasks({"t": look}, {}, {"t": {0: 40}}, Splitting(min_partitions=2)))
    whole = WHOLE.end + 1
    below = 30 * high.start / whole + 10 * high.start / (whole // 2)
    assert abs(below - 20) < 1e-6
    assert (low.start, high.end) == (0, WHOLE.end)


def test_splits_by_offset_cover_the_partition_and_keep_their_layouts() -> None:
    lineage = Lineage.of_ends(1, (1, 2, 1), ({0: 4}, {0: 6, 1: 0}))
    look = TopicSnapshot("t", "id", lineage, {0: 0, 1: 0}, {0: 9, 1: 0})
    splitting = Splitting(max_records_per_partition=3, by_key=False)
    reads = [task.reads[0] for task in plan_tasks({"t": look}, {}, {"t": {0: 9}}, splitting)]
    assert reads == [
        Read("t", 0, 0, 3, (), (0,), (WHOLE,), topic_id="id"),
        Read("t", 0, 3, 6, (4,), (0, 1), (WHOLE, interval(0, 2, 1)), topic_id="id"),
        Read("t", 0, 6, 9, (), (2,), (WHOLE,), topic_id="id"),
    ]


def test_a_batch_query_reads_a_family_in_layout_order() -> None:
    lineage = Lineage.of_ends(1, (1, 2, 1), ({0: 4}, {0: 6, 1: 5}))
    look = TopicSnapshot("t", "id", lineage, {0: 0, 1: 0}, {0: 9, 1: 5})
    (task,) = plan_tasks({"t": look}, {}, {"t": look.ends}, Splitting(), whole=True)
    assert task.reads == (
        Read("t", 0, 0, 6, (4,), (0, 1), (WHOLE, interval(0, 2, 1)), topic_id="id"),
        Read("t", 1, 0, 5, (), (1,), (interval(1, 2, 1),), topic_id="id"),
        Read("t", 0, 6, 9, (), (2,), (WHOLE,), topic_id="id"),
    )
    line = plan_to_json({"t": look}, {}, {"t": look.ends}, [task], by_key=True, whole=True)
    assert verify(line) == []
    assert verify(line.replace('[["t",0,0,6],["t",1,0,5],', '[["t",1,0,5],["t",0,0,6],'))


def test_the_checker_finds_what_is_wrong_with_a_plan() -> None:
    look = grown()
    start, end = {"t": {0: 0, 1: 0, 2: 0, 3: 0}}, {"t": {0: 3, 1: 0, 2: 0, 3: 1}}
    tasks = plan_tasks({"t": look}, start, end, Splitting())
    early = verify(plan_to_json({"t": look}, start, end, tasks, by_key=True))
    assert "t-3: offset 0, of layout 2, is read before t-0 was read up to offset 3, the end of layout 0" in early
    good_end = {"t": {0: 3, 1: 0, 2: 0, 3: 0}}
    good = plan_tasks({"t": look}, start, good_end, Splitting())
    line = plan_to_json({"t": look}, start, good_end, good, by_key=True)
    assert verify(line) == []
    assert json.loads(line)["topics"]["t"]["closed"]["3"] == {"at": 0, "waits": [[0, 3]]}
    assert verify(plan_to_json({"t": look}, start, good_end, [*good, *good], by_key=True))
    assert verify(plan_to_json({"t": look}, start, good_end, [], by_key=True))
    assert verify(line.replace('["t",0,0,3]', '["t",0,0,2]'))
    assert verify(line.replace('"log_end":{"0":3', '"log_end":{"0":2'))
    assert verify('{"version":99}') == ["this is not a plan of version 3"]


@pytest.mark.parametrize(
    ("known", "assigned", "expected"),
    [
        (TopicOffsets({0: 50, 1: 40}, "id", 2, partitions=2), None, True),
        (TopicOffsets({0: 50, 1: 100}, "id", 2, partitions=2), None, False),
        # It was added while the query was down, so nothing of it was read.
        (TopicOffsets({0: 50}, "id", 1, removed={}, partitions=1), None, True),
        # The query has read it, and does not any more: its position never moves.
        (TopicOffsets({0: 50}, "id", 2, partitions=2, left={1: 40}), frozenset({0}), False),
        (TopicOffsets({0: 50, 1: 40}, "another", 2, partitions=2), None, False),
        (None, None, False),
    ],
)
def test_whether_records_are_folded_back_that_a_query_has_yet_to_read(
    known: TopicOffsets | None, assigned: frozenset[int] | None, expected: bool
) -> None:
    lineage = Lineage.of_ends(1, (1, 2, 1), ({0: 50}, {0: 60, 1: 100}))
    compacted = frozenset({"compact"})
    now = TopicSnapshot("t", "id", lineage, {0: 0, 1: 100}, {0: 160, 1: 100}, True, cleanup=compacted, elastic=True)
    assert is_folded_back(now, known, {0: 60, 1: 100}, assigned) is expected
    removed = replace(now, starts={0: 0}, ends={0: 160}, removed={1: 100})
    assert is_folded_back(removed, known, {0: 60, 1: 100}, assigned) is expected


def test_leaving_a_removed_partition_out_of_assign_is_no_loss_where_it_was_read_to_its_end() -> None:
    known = TopicOffsets({0: 160, 1: 210}, "id", 1, removed={})
    there = TopicSnapshot("t", "id", SHRUNK, {0: 0}, {0: 160}, removed={1: 210}, elastic=True)
    assert query_positions(there, known, frozenset({0})).losses == ()
    (loss,) = query_positions(there, replace(known, offsets={0: 160, 1: 209}), frozenset({0})).losses
    assert (loss.partition, loss.wanted) == (1, 209)
    (loss,) = query_positions(replace(there, starts={0: 0, 1: 0}, removed={}), known, frozenset({0})).losses
    assert loss.partition == 1
