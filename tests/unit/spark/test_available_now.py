"""Queries with `Trigger.AvailableNow`: how far they read, where a topic changes or is not known to all brokers yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.range_reader import OffsetsGoneError
from anabranch.machines.lineage import Lineage
from anabranch.spark.options import OptionError, for_stream, parse
from anabranch.spark.plan import Offsets, TopicSnapshot
from anabranch.spark.reader import loss_of
from anabranch.spark.source import StreamReader, full_schema

Snapshots = Mapping[str, TopicSnapshot]

GROWN = Lineage.of_ends(1, (1, 2), ({0: 50},))
SHRUNK = Lineage.of_ends(1, (1, 2, 1), ({0: 50}, {0: 60, 1: 100}))
LIVE = TopicSnapshot("t", "id", GROWN, {0: 50, 1: 0}, {0: 60, 1: 100}, elastic=True)
FOLDED = TopicSnapshot("t", "id", SHRUNK, {0: 50, 1: 100}, {0: 160, 1: 100}, elastic=True)
WITHOUT = Lineage.of_ends(1, (1, 2, 1), ({0: 50}, {0: 60}))
"""What is left of it when a partition is removed."""
REMOVED = replace(FOLDED, lineage=WITHOUT, starts={0: 50}, ends={0: 160}, removed={1: 100})


class Brokers:
    """What brokers say of the topics, one time after the other; the last answer again and again."""

    def __init__(self, answers: Sequence[Snapshots]) -> None:
        self.answers = list(answers)

    def read(self, known: Offsets, *, begins: bool | None = None) -> Snapshots:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    def with_high_watermarks(self, snapshots: Snapshots, positions: object) -> Snapshots:
        return snapshots

    def bound(self, snapshots: Snapshots, bound: object, name: str) -> dict[str, dict[int, int]]:
        return {topic: dict(each.starts) for topic, each in snapshots.items()}


def query(answers: Sequence[Snapshots], **options: str) -> tuple[StreamReader, Brokers]:
    given = {"bootstrap.servers": "localhost:1", "startingOffsets": "earliest", **options}
    if not {"assign", "subscribePattern"} & options.keys():
        given["subscribe"] = "t"
    reader = StreamReader(for_stream(parse(given)), full_schema(headers=False))
    brokers = Brokers(answers)
    reader._snapshot_reader = brokers  # type: ignore[assignment]
    return reader, brokers


def ends(offsets: Mapping[str, Any]) -> dict[int, int]:
    return {int(partition): end for partition, end in offsets["t"]["offsets"].items()}


@pytest.mark.parametrize("cleanup", [{"compact"}, {"compact", "delete"}])
@pytest.mark.parametrize(("after", "available"), [(FOLDED, 100), (REMOVED, None)])
def test_what_is_folded_back_while_the_last_micro_batch_is_read_is_read_before_the_query_ends(
    cleanup: set[str], after: TopicSnapshot, available: int | None
) -> None:
    live, folded = ({"t": replace(each, cleanup=frozenset(cleanup))} for each in (LIVE, after))
    reader, brokers = query([live])
    reader.prepareForTriggerAvailableNow()
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, ReadAllAvailable())
    assert ends(end) == {0: 60, 1: 100}
    (read,) = [read for task in reader.partitions(begin, end) for read in task.value.reads if read.partition == 1]
    brokers.answers = [folded]
    gone = OffsetsGoneError(TopicPartition("t", 1), 0, available, "deleted")
    gone.has_retired = True  # As brokers say by then.
    assert loss_of(read, gone) is None
    last = reader.latestOffset(end, ReadAllAvailable())
    assert ends(last)[0] == 160
    assert reader.latestOffset(last, ReadAllAvailable()) == last, "and then it ends"


@pytest.mark.parametrize(
    ("retired", "cleanup", "lost"), [(True, "compact", False), (False, "compact", True), (True, "delete", True)]
)
def test_what_is_gone_of_a_partition_that_was_live_when_it_was_planned_is_a_loss_unless_it_has_retired(
    retired: bool, cleanup: str, lost: bool
) -> None:
    reader, _ = query([{"t": replace(LIVE, cleanup=frozenset({cleanup}))}])
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, ReadAllAvailable())
    (read,) = [read for task in reader.partitions(begin, end) for read in task.value.reads if read.partition == 1]
    gone = OffsetsGoneError(TopicPartition("t", 1), 0, 100, "deleted")
    gone.has_retired = retired
    assert (loss_of(read, gone) is not None) is lost


def test_what_is_folded_back_while_a_micro_batch_is_run_again_is_read_before_the_query_ends() -> None:
    live, folded = ({"t": replace(each, cleanup=frozenset({"compact"}))} for each in (LIVE, FOLDED))
    planned, _ = query([live])
    begin = planned.initialOffset()
    end = planned.latestOffset(begin, ReadAllAvailable())
    reader, brokers = query([live])
    reader.prepareForTriggerAvailableNow()
    reader.initialOffset()
    reader.partitions(begin, end)
    brokers.answers = [folded]
    assert ends(reader.latestOffset(end, ReadAllAvailable()))[0] == 160


def test_a_topic_that_a_broker_does_not_know_of_when_the_query_begins_is_read_to_its_ends_of_then() -> None:
    reader, brokers = query([{}, {"t": LIVE}])
    reader.prepareForTriggerAvailableNow()
    end = reader.latestOffset(reader.initialOffset(), ReadAllAvailable())
    assert ends(end) == {0: 60, 1: 100}
    brokers.answers = [{"t": replace(LIVE, ends={0: 70, 1: 110})}]
    assert reader.latestOffset(end, ReadAllAvailable()) == end


@pytest.mark.parametrize(("assigned", "lost"), [("[0, 1]", False), ("[1]", True)])
def test_what_is_folded_back_to_a_partition_that_is_not_assigned_is_lost(assigned: str, lost: bool) -> None:
    """Where the query is, in a plan that is run again, and while it is read."""
    live, folded, removed = ({"t": replace(each, cleanup=frozenset({"compact"}))} for each in (LIVE, FOLDED, REMOVED))
    options = {"assign": f'{{"t": {assigned}}}', "failOnDataLoss": "false"}
    reader, brokers = query([live], **options)
    begin = reader.initialOffset()
    end = reader.latestOffset(begin, ReadAllAvailable())
    (read,) = [read for task in reader.partitions(begin, end) for read in task.value.reads if read.partition == 1]
    gone = OffsetsGoneError(TopicPartition("t", 1), 0, 100, "deleted")
    gone.has_retired = True
    assert (loss_of(read, gone) is not None) is lost
    for after in (folded, removed):
        losses: list[Any] = []
        brokers.answers = [after]
        reader._report = losses.extend  # type: ignore[method-assign]
        reader.latestOffset(begin, ReadAllAvailable())
        reader._snapshots = None
        reader.partitions(begin, end)
        assert bool(losses) is lost


def test_a_pattern_without_matches_has_begun_once_its_first_micro_batch_is_run_again() -> None:
    """What the options say of where to begin is refused for a new query only; this one owes new topics all records."""
    reader, _ = query([{}], subscribePattern="t.*")

    def refuse(*_: object) -> dict[str, dict[int, int]]:
        raise OptionError("startingTimestamp: no record is that late")

    reader._snapshot_reader.bound = refuse  # type: ignore[union-attr, method-assign]
    begin = reader.initialOffset()
    assert begin == {}
    with pytest.raises(OptionError):
        reader.latestOffset(begin, ReadAllAvailable())
    reader._snapshots = None
    assert reader.partitions(begin, {}) == []
    assert reader.latestOffset(begin, ReadAllAvailable()) == {}
