"""The fetcher of a member of a group: what it is granted, and gates that wait for other members."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import EARLIEST, LATEST, Fetcher, FetcherSettings, FetchResult, TopicView
from anabranch.machines.clients.fetching.assigning import appeared_later
from anabranch.machines.lineage import Lineage
from anabranch.records.batch import build

OLD, NEW = UUID(int=1), UUID(int=2)
FLAT = TopicView("t", OLD, Lineage.flat(2), {0: 7, 1: 7}, {0: 4, 1: 4}, elastic=True)
GROWN = TopicView("t", OLD, Lineage.of_ends(1, (1, 2), ({0: 10},)), {0: 7, 1: 7}, {0: 5, 1: 4}, elastic=True)
P0, P1, P2 = (TopicPartition("t", number) for number in range(3))


def member(view: TopicView, *granted: TopicPartition, reset: str = "earliest") -> Fetcher:
    fetcher = Fetcher(FetcherSettings(auto_offset_reset=reset))
    fetcher.grant((tp, OLD) for tp in granted)
    assert fetcher.drain(0).refresh == ["t"]
    fetcher.topic_known(view, 0)
    return fetcher


def batch(offset: int, count: int, epoch: int) -> memoryview:
    data = build(
        b"",
        record_count=0,
        last_offset_delta=count - 1,
        base_timestamp=0,
        max_timestamp=0,
        base_offset=offset,
        leader_epoch=epoch,
    )
    return memoryview(data)


def feed(fetcher: Fetcher, tp: TopicPartition, data: memoryview) -> None:
    (fetch,) = fetcher.drain(0).fetches
    fetcher.answered(fetch.request_id, ErrorCode.NONE, 0, {tp: FetchResult(ErrorCode.NONE, data)}, 0)


def test_nothing_is_looked_up_or_fetched_before_it_is_said_where_to_begin() -> None:
    fetcher = member(FLAT, P0, P1)
    work = fetcher.drain(0)
    assert not work.lookups and not work.fetches and fetcher.awaiting() == (P0, P1)
    fetcher.begin(P0, offset=5)
    fetcher.begin(P1, timestamp=EARLIEST)
    work = fetcher.drain(0)
    assert work.fetches[0].partitions[P0].offset == 5
    assert work.lookups[0].partitions == {P1: (EARLIEST, 4)}
    assert fetcher.awaiting() == ()


def test_a_seek_is_stronger_than_what_was_committed() -> None:
    fetcher = member(FLAT, P0)
    fetcher.seek(P0, 3)
    fetcher.begin(P0, offset=9)
    assert fetcher.position(P0) == 3
    fetcher.withdraw([P0])
    fetcher.begin(P0, offset=9)
    assert fetcher.assignment == () and fetcher.positions() == {}


def test_what_was_fetched_of_withdrawn_partitions_is_dropped_also_what_is_on_its_way() -> None:
    fetcher = member(FLAT, P0)
    fetcher.begin(P0, offset=0)
    feed(fetcher, P0, batch(0, 5, 4))
    assert len(fetcher.deliverable()) == 1
    (fetch,) = fetcher.drain(0).fetches
    fetcher.withdraw([P0])
    fetcher.answered(fetch.request_id, ErrorCode.NONE, 0, {P0: FetchResult(ErrorCode.NONE, batch(5, 5, 4))}, 0)
    assert fetcher.deliverable() == []
    fetcher.grant([(P0, OLD)])
    fetcher.topic_known(FLAT, 0)
    assert fetcher.deliverable() == [] and fetcher.awaiting() == (P0,)


def test_a_granted_partition_that_metadata_does_not_show_yet_is_waited_for() -> None:
    fetcher = member(FLAT, P2)
    assert fetcher.errors() == [] and fetcher.assignment == (P2,)
    fetcher.begin(P2, offset=0)
    assert fetcher.drain(200).refresh == ["t"]
    fetcher.topic_known(replace(FLAT, lineage=Lineage.flat(3), leaders={0: 7, 1: 7, 2: 7}), 200)
    assert P2 in fetcher.drain(200).fetches[0].partitions


def test_another_topic_of_the_same_name_is_not_read_for_the_one_that_was_granted() -> None:
    fetcher = member(replace(FLAT, topic_id=NEW), P0)
    fetcher.begin(P0, offset=0)
    work = fetcher.drain(0)
    assert not work.fetches
    assert fetcher.drain(work.wake_at_ms or 0).refresh == ["t"]


def test_a_topic_that_was_made_anew_is_read_from_its_beginning_where_ids_are_not_known() -> None:
    fetcher = Fetcher(FetcherSettings(auto_offset_reset="latest"))
    fetcher.grant([(P0, None)])
    fetcher.drain(0)
    fetcher.topic_known(FLAT, 0)
    fetcher.begin(P0, offset=500)
    fetcher.topic_known(replace(FLAT, topic_id=NEW), 0)
    assert fetcher.drain(0).lookups[0].partitions == {P0: (EARLIEST, 4)}


def test_a_gate_waits_for_the_progress_of_another_member() -> None:
    fetcher = member(GROWN, P1)
    fetcher.begin(P1, offset=0)
    feed(fetcher, P1, batch(0, 5, 4))
    assert fetcher.deliverable() == [] and fetcher.needs() == {P0: 10}
    fetcher.told(P0, 9)
    assert fetcher.deliverable() == [] and fetcher.needs() == {P0: 10}
    fetcher.told(P0, 10)
    assert len(fetcher.deliverable()) == 1 and fetcher.needs() == {}


def test_what_was_told_is_known_until_the_last_partition_of_the_topic_is_withdrawn() -> None:
    fetcher = member(GROWN, P1)
    fetcher.begin(P1, offset=0)
    assert (fetcher.known(P0), fetcher.known(P1)) == (None, None)
    fetcher.told(P0, 10)
    fetcher.told(P1, 3)
    assert (fetcher.known(P0), fetcher.known(P1)) == (10, 3)
    fetcher.withdraw([P1])
    assert (fetcher.known(P0), fetcher.known(P1)) == (None, None)
    fetcher.grant([(P1, None)])
    fetcher.topic_known(GROWN, 0)
    fetcher.begin(P1, offset=0)
    assert fetcher.needs() == {P0: 10} and fetcher.known(P0) is None


def test_a_milestone_is_passed_where_others_may_wait() -> None:
    fetcher = member(GROWN, P0)
    fetcher.begin(P0, offset=5)
    fetcher.milestone()
    feed(fetcher, P0, batch(5, 10, 5))
    (part,) = fetcher.deliverable()
    fetcher.handed_out(part, 9)
    assert not fetcher.milestone()
    (part,) = fetcher.deliverable()
    fetcher.handed_out(part, 10)
    assert fetcher.milestone() and not fetcher.milestone()


@pytest.mark.parametrize(
    ("partition", "view", "committed", "seen", "later"),
    [
        (1, FLAT, set(), {0, 1}, False),  # a new group: the reset decides
        (1, FLAT, set(), {0}, True),  # it appeared while this member was there
        (0, FLAT, set(), set(), True),  # the whole topic did
        (1, GROWN, {0}, None, True),  # the group was there before the resize
        (1, GROWN, set(), None, False),  # the group came after it
        (0, GROWN, {1}, None, False),  # a quiet partition of the first layout
        (1, replace(FLAT, elastic=False), {0}, None, True),
        (0, replace(FLAT, elastic=False), {1}, None, False),
    ],
)
def test_which_partitions_appeared_later(
    partition: int, view: TopicView, committed: set[int], seen: set[int] | None, later: bool
) -> None:
    assert appeared_later(partition, view, committed, seen) is later


def test_what_is_assigned_with_a_group_begins_where_it_is_said_also_partitions_to_come() -> None:
    fetcher = Fetcher(FetcherSettings(auto_offset_reset="latest"))
    fetcher.assign([], ["t"], awaiting=True)
    fetcher.drain(0)
    fetcher.topic_known(FLAT, 0)
    assert fetcher.awaiting() == (P0, P1)
    fetcher.begin(P0, timestamp=LATEST)
    assert fetcher.drain(0).lookups[0].partitions == {P0: (LATEST, 4)}
