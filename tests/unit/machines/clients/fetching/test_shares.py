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
