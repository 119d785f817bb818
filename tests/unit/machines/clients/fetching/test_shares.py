"""Fetches of shares: what is asked for, what is kept of the answers, and how far positions move without a record."""

from __future__ import annotations

from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings, FetchResult, RecordFilter, TopicView
from anabranch.machines.keyspace import SPACE, SPACE_END, Interval
from anabranch.machines.lineage import Lineage
from anabranch.machines.partition.sharing import Asked
from tests.properties import record_model as model

TP = TopicPartition("t", 0)
LOW, HIGH = Interval(0, 99), Interval(100, SPACE_END)


def batch(offset: int) -> memoryview:
    row = model.Row(offset, 1, b"k", b"v")
    return memoryview(model.encode(model.Batch(offset, (row,), leader_epoch=0)))


def fetcher(*share: Interval) -> Fetcher:
    """A fetcher of a share of the only partition of a topic, at its begin."""
    found = Fetcher(FetcherSettings(auto_offset_reset="earliest"))
    found.assign([TP], shares={TP: share})
    found.topic_known(TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, elastic=True), 0)
    found.seek(TP, 0)
    return found


def answer(found: Fetcher, *data: memoryview, filtered_to: int, error: ErrorCode = ErrorCode.NONE) -> None:
    """Answer the fetch that is sent now."""
    (fetch,) = found.drain(0).fetches
    result = FetchResult(error, memoryview(b"".join(data)), 100, 100, 0, filtered_to=filtered_to)
    found.answered(fetch.request_id, ErrorCode.NONE, 0, {TP: result}, 0)


def test_the_share_is_asked_for() -> None:
    (fetch,) = fetcher(LOW).drain(0).fetches
    assert fetch.partitions[TP].asked == Asked((LOW,))
    (fetch,) = fetcher().drain(0).fetches
    assert fetch.partitions[TP].asked is None


def test_positions_move_to_where_the_broker_has_looked() -> None:
    found = fetcher(LOW)
    answer(found, filtered_to=40)
    assert not found.deliverable()
    assert found.position(TP) == 40
    answer(found, batch(45), filtered_to=60)
    (part,) = found.deliverable()
    assert (part.start, part.end) == (40, 60)
    found.handed_out(part, part.end)
    (fetch,) = found.drain(0).fetches
    assert fetch.partitions[TP].offset == 60


@pytest.mark.parametrize(
    ("filtered_to", "error"), [(-1, ErrorCode.NONE), (-1, ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED)]
)
def test_a_broker_that_does_not_filter_ends_it_at_once(filtered_to: int, error: ErrorCode) -> None:
    found = fetcher(LOW)
    answer(found, batch(0), filtered_to=filtered_to, error=error)
    (told,) = found.errors()
    assert told.code is ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED
    assert not found.deliverable() and not found.drain(10_000).fetches
    found.assign([TP])
    assert found.drain(20_000).fetches, "all of it may be read"


def test_another_share_or_filter_drops_what_was_fetched_and_what_is_on_its_way() -> None:
    found = fetcher(LOW)
    answer(found, batch(5), filtered_to=10)
    (fetch,) = found.drain(0).fetches
    found.assign([TP], shares={TP: (HIGH,)})
    assert not found.deliverable()
    assert found.position(TP) == 0
    late = FetchResult(ErrorCode.NONE, batch(12), 100, 100, 0, filtered_to=20)
    found.answered(fetch.request_id, ErrorCode.NONE, 0, {TP: late}, 0)
    assert not found.deliverable()
    (fetch,) = found.drain(0).fetches
    assert (fetch.partitions[TP].offset, fetch.partitions[TP].asked) == (0, Asked((HIGH,)))
    found.filter(RecordFilter(keys=(b"k",)))
    found.answered(fetch.request_id, ErrorCode.NONE, 0, {TP: late}, 0)
    (fetch,) = found.drain(0).fetches
    assert fetch.partitions[TP].asked == Asked((HIGH,), (b"k",))


def test_a_filter_without_a_share_is_of_all_keys() -> None:
    found = fetcher()
    found.filter(RecordFilter(size_min=5))
    (fetch,) = found.drain(0).fetches
    assert fetch.partitions[TP].asked == Asked((SPACE,), size_min=5)


# -- records that are not there any more ------------------------------------------------------------------------------


def member(reset: str, *share: Interval, steps: tuple[tuple[int, int, int], ...]) -> Fetcher:
    """A member whose group is at `steps` in its share."""
    found = Fetcher(FetcherSettings(auto_offset_reset=reset))
    found.grant([(TP, UUID(int=1))], {TP: share} if share else {})
    found.topic_known(TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, elastic=True), 0)
    found.begin(TP, offset=min(at for _, _, at in steps), steps=steps)
    return found


def out_of_range(found: Fetcher, log_start: int) -> None:
    (fetch,) = found.drain(0).fetches
    result = FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, None, 100, 100, log_start)
    found.answered(fetch.request_id, ErrorCode.NONE, 0, {TP: result}, 0)


def look_up(found: Fetcher, offset: int) -> None:
    (lookup,) = found.drain(1_000).lookups
    found.found(lookup.request_id, {TP: (ErrorCode.NONE, offset)}, 1_000)


MID = Interval(100, 199)
STEPS = ((0, 99, 10), (100, 199, 30), (200, SPACE_END, 60))


@pytest.mark.parametrize("share", [(), (LOW, Interval(150, 250))])
def test_only_keys_whose_records_are_gone_begin_at_the_log_end(share: tuple[Interval, ...]) -> None:
    found = member("latest", *share, steps=STEPS)
    out_of_range(found, 40)
    assert found.position(TP) is None
    look_up(found, 90)
    assert found.position(TP) == 60
    (fetch,) = found.drain(1_000).fetches
    high = Interval(200, share[1].end if share else SPACE_END)
    assert fetch.partitions[TP].asked == Asked((high,))
    gone = [(0, 99, 90), (150, 199, 90)] if share else [(0, 199, 90)]
    assert found.to_commit(TP, 60) == [*gone, (high.start, high.end, 60)]


def test_keys_whose_records_are_gone_begin_at_the_log_start() -> None:
    found = member("earliest", steps=STEPS)
    out_of_range(found, 40)
    look_up(found, 40)
    assert found.position(TP) == 40
    (fetch,) = found.drain(1_000).fetches
    assert fetch.partitions[TP].asked == Asked((Interval(0, 199),))


def test_all_keys_begin_anew_where_the_log_ends_before_them() -> None:
    found = member("latest", steps=((0, 99, 50), (100, SPACE_END, 60)))
    out_of_range(found, 0)
    look_up(found, 40)
    assert found.position(TP) == 40 and not found.to_commit(TP, 40)


def test_ranges_that_come_during_the_lookup_begin_where_the_group_is_in_them() -> None:
    found = member("latest", LOW, steps=((0, 99, 10),))
    out_of_range(found, 40)
    found.grant([(TP, UUID(int=1))], {TP: (MID,)})
    found.arrive(TP, 50, (), 0)
    look_up(found, 90)
    assert found.position(TP) == 50
    (fetch,) = found.drain(1_000).fetches
    assert fetch.partitions[TP].asked == Asked((MID,))
    assert found.to_commit(TP, 50) == [(0, 99, 90), (100, 199, 50)]


@pytest.mark.parametrize("filtered", [True, False])
def test_an_offset_that_an_application_says_is_of_what_it_was_handed_below_it_of_each_key(filtered: bool) -> None:
    low, high = Interval(0, 99), Interval(100, SPACE_END)
    found = member("earliest", low, steps=((0, 99, 10),))
    found.restart(TP, 40)
    found.grant([(TP, UUID(int=1))], {TP: (high,)})
    found.committed_by_key(TP, ((0, 99, 12), (100, SPACE_END, 20)), 12)
    found.arrive(TP, 12, ((0, 99, 12), (100, SPACE_END, 20)), 40)
    assert found.position(TP) == 20
    if not filtered:
        (fetch,) = found.drain(0).fetches
        refused = FetchResult(ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED, None, 100, 100, 0)
        found.answered(fetch.request_id, ErrorCode.NONE, 0, {TP: refused}, 0)
    assert found.to_commit_as_said(TP, 50) == [(0, 99, 40), (100, SPACE_END, 20)], "no more than was handed"
    assert found.to_commit_as_said(TP, 15) == [(0, 99, 15), (100, SPACE_END, 20)], "no more than was said"
    assert found.to_commit_as_said(TP, 5) == [(0, 99, 12), (100, SPACE_END, 20)], "no less than is committed"
    assert found.to_commit(TP, 20) == [(0, 99, 40), (100, SPACE_END, 20)], "by default all that was handed"
    found.restart(TP, 60)
    assert found.to_commit_as_said(TP, 60) == [] == found.to_commit(TP, 60)


def test_an_offset_behind_what_was_handed_out_is_that_offset_of_all_keys_long_after_some_arrived() -> None:
    low, high = Interval(0, 99), Interval(100, 199)
    found = member("earliest", low, steps=((0, 99, 10),))
    found.restart(TP, 40)
    found.grant([(TP, UUID(int=1))], {TP: (high,)})
    found.committed_by_key(TP, ((0, 99, 12),), 20)
    found.arrive(TP, 12, ((0, 99, 12), (100, 199, 20)), 40)
    found.restart(TP, 60)
    assert found.to_commit_as_said(TP, 30) == [(0, 199, 30)], "not 40 of the keys that it had"
    assert found.to_commit_as_said(TP, 15) == [(0, 99, 15), (100, 199, 20)]
    assert found.to_commit_as_said(TP, 70) == [(0, 199, 70)], "an application may pass over records"


def test_where_a_broker_gives_no_keys_all_is_asked_for_and_said_what_is_to_be_left_out() -> None:
    low, high = Interval(0, 99), Interval(100, SPACE_END)
    found = member("earliest", low, steps=((0, 99, 10),))
    found.restart(TP, 40)
    found.grant([(TP, UUID(int=1))], {TP: (high,)})
    found.arrive(TP, 12, ((0, 99, 12), (100, SPACE_END, 20)), 40)
    answer(found, filtered_to=-1, error=ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED)
    (fetch,) = found.drain(0).fetches
    assert (fetch.partitions[TP].offset, fetch.partitions[TP].asked) == (20, None)
    result = FetchResult(ErrorCode.NONE, memoryview(b"".join((batch(20), batch(30), batch(40)))), 100, 100, 0)
    found.answered(fetch.request_id, ErrorCode.NONE, 0, {TP: result}, 0)
    (part,) = found.deliverable()
    assert (part.start, part.end, list(part.floor)) == (20, 41, [(0, 99, 40), (100, SPACE_END, 20)])
    found.handed_out(part, 41)
    answer(found, batch(41), filtered_to=-1)
    (part,) = found.deliverable()
    assert (part.start, list(part.floor)) == (41, []), "all keys are read to there"


def test_a_member_says_nothing_of_keys_that_others_have_moved_on() -> None:
    """It would say that it has gone through the gate at which they wait."""
    low, high = (0, 99), (100, SPACE_END)
    found = Fetcher(FetcherSettings(auto_offset_reset="earliest"))
    found.grant([(TP, UUID(int=1))], {})
    found.topic_known(TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, elastic=True), 0)
    found.committed_by_key(TP, ((*low, 0), (*high, 3)), 0)
    found.passed(TP, ((*low, 0), (*high, 2)))
    found.begin(TP, offset=0, steps=((*low, 0), (*high, 3)))
    assert found.to_commit(TP, 0) == [(*low, 0)]
    answer(found, batch(0), filtered_to=1)
    (part,) = found.deliverable()
    found.handed_out(part, 1)
    assert found.to_commit(TP, 1) == [(*low, 1)] and found.has_gone(TP, 1)
    answer(found, batch(1), filtered_to=5)
    (part,) = found.deliverable()
    found.handed_out(part, 3)
    assert found.has_gone(TP, 3) and found.to_commit(TP, 3) == [], "one offset, as the gates of all are open to there"


def where_others_have_finished() -> Fetcher:
    """A member that begins at 3, to where others have finished, and no owner has come beyond 2."""
    found = Fetcher(FetcherSettings(auto_offset_reset="earliest"))
    found.grant([(TP, UUID(int=1))], {})
    found.topic_known(TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, elastic=True), 0)
    found.committed(TP, 3)
    found.passed(TP, ((0, SPACE_END, 2),))
    found.begin(TP, offset=3)
    return found


def test_a_member_that_begins_where_others_have_finished_says_nothing() -> None:
    found = where_others_have_finished()
    assert not found.has_gone(TP, 3)
    (fetch,) = found.drain(0).fetches
    result = FetchResult(ErrorCode.NONE, batch(3), 100, 100, 0)
    found.answered(fetch.request_id, ErrorCode.NONE, 0, {TP: result}, 0)
    (part,) = found.deliverable()
    found.handed_out(part, 4)
    assert found.has_gone(TP, 4) and found.to_commit(TP, 4) == []
    assert found.to_commit_as_said(TP, 1) == [], "a rewind is one of all keys"


@pytest.mark.parametrize("how", ["sought", "looked up", "out of range", "rewound"])
def test_a_member_that_begins_elsewhere_says_where(how: str) -> None:
    found = where_others_have_finished()
    if how == "sought":
        found.seek(TP, 6)
    elif how == "rewound":
        assert found.to_commit_as_said(TP, 1) == []
        found.committed(TP, 1)
    else:
        if how == "looked up":
            found.seek_to_timestamp(TP, 0)
        else:
            out_of_range(found, 6)
        look_up(found, 6)
    offset = found.position(TP)
    assert offset == (3 if how == "rewound" else 6)
    assert found.has_gone(TP, offset) and found.to_commit(TP, offset) == []


def test_a_member_has_begun_where_it_has_when_keys_that_it_read_nothing_of_are_taken_away_again() -> None:
    """A group that has committed nothing begins there: also with those keys, at whoever is given them."""
    found = Fetcher(FetcherSettings(auto_offset_reset="earliest"))
    found.grant([(TP, UUID(int=1))], {TP: (LOW,)})
    found.topic_known(TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, elastic=True), 0)
    found.begin(TP, offset=0)
    answer(found, filtered_to=40)
    assert not found.deliverable() and found.position(TP) == 40
    found.grant([(TP, UUID(int=1))], {TP: (HIGH,)})
    found.arrive(TP, None, (), 40)
    assert found.position(TP) == 0
    found.withdraw([TP], {TP: (HIGH,)})
    assert found.position(TP) == 40 and found.first_position(TP) == 0
    found.grant([(TP, UUID(int=1))], {TP: (HIGH,)})
    found.arrive(TP, None, (), 40)
    assert found.position(TP) == 0


def test_keys_that_a_member_does_not_have_stand_where_the_group_does() -> None:
    found = Fetcher(FetcherSettings(auto_offset_reset="earliest"))
    found.grant([(TP, UUID(int=1))], {})
    found.topic_known(TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, elastic=True), 0)
    found.committed(TP, 20)
    found.passed(TP, ((0, 99, 20), (100, SPACE_END, 10)))
    found.begin(TP, offset=20)
    assert found.to_commit(TP, 20) == [(0, 99, 20)]
    found.committed_by_key(TP, [(0, 99, 20)])
    assert found.to_commit_as_said(TP, 5) == [], "a rewind is one of all keys"
    found.committed(TP, 5)
    assert found.to_commit(TP, 20) == [], "one offset: all keys are the member's again"
