from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import (
    EARLIEST,
    LATEST,
    Fetch,
    Fetcher,
    FetcherSettings,
    FetchResult,
    TopicView,
)
from anabranch.machines.lineage import Lineage
from anabranch.records.batch import build

FLAT = TopicView("t", UUID(int=1), Lineage.flat(2), {0: 7, 1: 7}, {0: 4, 1: 4}, elastic=True)
P0, P1, P2 = (TopicPartition("t", number) for number in range(3))


def batch(offset: int, count: int = 1, *, epoch: int = 4) -> bytearray:
    return build(
        b"",
        record_count=0,
        last_offset_delta=count - 1,
        base_timestamp=0,
        max_timestamp=0,
        base_offset=offset,
        leader_epoch=epoch,
    )


class Reader:
    """A fetcher, fed by hand."""

    def __init__(self, *, view: TopicView = FLAT, reset: str = "earliest") -> None:
        self.now = 0
        self.fetcher = Fetcher(FetcherSettings(auto_offset_reset=reset))
        self.view = view

    def read_whole(self, **starts: int) -> None:
        self.fetcher.assign([], ["t"])
        self.start({P0: starts.get("p0", 0), P1: starts.get("p1", 0), P2: starts.get("p2", 0)})

    def start(self, starts: dict[TopicPartition, int]) -> None:
        assert self.fetcher.drain(self.now).refresh == ["t"]
        self.fetcher.topic_known(self.view, self.now)
        for lookup in self.fetcher.drain(self.now).lookups:
            found = {tp: (ErrorCode.NONE, starts[tp]) for tp in lookup.partitions}
            self.fetcher.found(lookup.request_id, found, self.now)

    def fetch(self) -> Fetch:
        (fetch,) = self.fetcher.drain(self.now).fetches
        return fetch

    def answer(self, fetch: Fetch, answers: dict[TopicPartition, FetchResult], session_id: int = 55) -> None:
        self.fetcher.answered(fetch.request_id, ErrorCode.NONE, session_id, answers, self.now)

    def data(self, fetch: Fetch, **batches: bytearray) -> None:
        answers = {
            TopicPartition("t", int(name[1:])): FetchResult(ErrorCode.NONE, memoryview(data), high_watermark=100)
            for name, data in batches.items()
        }
        self.answer(fetch, answers)

    def ready(self) -> list[tuple[int, int, int]]:
        return sorted((part.partition, part.start, part.end) for part in self.fetcher.deliverable())

    def hand_out(self) -> None:
        for part in self.fetcher.deliverable():
            self.fetcher.handed_out(part, part.end)


def test_a_fetch_says_offset_epoch_and_count() -> None:
    reader = Reader()
    reader.read_whole(p0=3)
    fetch = reader.fetch()
    assert (fetch.node, fetch.session_id, fetch.session_epoch) == (7, 0, 0)
    said = fetch.partitions[P0]
    assert (said.offset, said.leader_epoch, said.count) == (3, 4, 2)


def test_what_was_fetched_is_ready_and_then_handed_out_once() -> None:
    reader = Reader()
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0, 5) + batch(5, 2))
    assert reader.ready() == [(0, 0, 7)]
    reader.hand_out()
    assert reader.ready() == []
    assert reader.fetcher.position(P0) == 7


def test_a_piece_of_a_batch_at_the_end_is_left_for_the_next_fetch() -> None:
    reader = Reader()
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0, 5) + batch(5, 2)[:-1])
    assert reader.ready() == [(0, 0, 5)]
    assert reader.fetch().partitions[P0].offset == 5


def test_a_later_fetch_of_a_session_tells_only_what_changed() -> None:
    reader = Reader()
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0, 5))
    second = reader.fetch()
    assert (second.session_id, second.session_epoch) == (55, 1)
    assert list(second.partitions) == [P0]
    assert second.partitions[P0].offset == 5
    reader.fetcher.pause(P1)
    reader.answer(second, {})
    third = reader.fetch()
    assert (third.session_epoch, dict(third.partitions), [tp for tp, _ in third.forgotten]) == (2, {}, [P1])


@pytest.mark.parametrize("error", [ErrorCode.FETCH_SESSION_ID_NOT_FOUND, ErrorCode.INVALID_FETCH_SESSION_EPOCH])
def test_a_lost_session_is_begun_anew_with_everything(error: ErrorCode) -> None:
    reader = Reader()
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0))
    reader.fetcher.answered(reader.fetch().request_id, error, 0, {}, reader.now)
    fetch = reader.fetch()
    assert (fetch.session_id, fetch.session_epoch, set(fetch.partitions)) == (0, 0, {P0, P1})


def test_a_lost_answer_costs_nothing_but_the_session() -> None:
    reader = Reader()
    reader.read_whole()
    reader.now += 1_000
    reader.fetcher.lost(reader.fetch().request_id, reader.now)
    assert reader.fetcher.drain(reader.now).refresh == ["t"]
    reader.fetcher.topic_known(FLAT, reader.now)
    reader.now = 10_000
    assert reader.fetch().partitions[P0].offset == 0


def test_an_answer_to_a_fetch_from_before_a_seek_is_dropped() -> None:
    reader = Reader()
    reader.read_whole()
    fetch = reader.fetch()
    reader.fetcher.seek(P0, 40)
    reader.data(fetch, p0=batch(0, 5))
    assert reader.ready() == []
    assert reader.fetch().partitions[P0].offset == 40


def test_a_paused_partition_keeps_its_position_and_what_it_holds() -> None:
    reader = Reader()
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0, 5))
    reader.fetcher.pause(P0)
    assert reader.ready() == []
    reader.fetcher.resume(P0)
    assert reader.ready() == [(0, 0, 5)]


EXPANDED = TopicView(
    "t", UUID(int=1), Lineage.of_ends(2, (2, 3), ({0: 5, 1: 9},)), {0: 7, 1: 7, 2: 7}, {0: 5, 1: 5, 2: 0}, elastic=True
)


def test_a_gate_holds_what_was_fetched_until_the_parent_is_read() -> None:
    reader = Reader(view=EXPANDED)
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0, 5), p2=batch(0, 3, epoch=0))
    assert reader.ready() == [(0, 0, 5)]
    reader.hand_out()
    assert reader.ready() == [(2, 0, 3)]


SHRUNK = TopicView(
    "t",
    UUID(int=1),
    Lineage.of_ends(2, (3, 2), ({0: 5, 1: 9, 2: 4},)),
    {0: 7, 1: 7, 2: 7},
    {0: 5, 1: 5, 2: 6},
    elastic=True,
)


def test_a_survivor_stops_at_exactly_the_first_record_that_must_wait() -> None:
    reader = Reader(view=SHRUNK)
    reader.read_whole()
    fetch = reader.fetch()
    reader.data(fetch, p0=batch(0, 3) + batch(3, 2) + batch(5, 2, epoch=5))
    assert reader.ready() == [(0, 0, 5)]
    reader.hand_out()
    assert reader.ready() == []
    reader.data(reader.fetch(), p2=batch(0, 4))
    assert reader.ready() == [(2, 0, 4)]
    reader.hand_out()
    assert reader.ready() == [(0, 5, 7)]


def test_partitions_that_are_not_read_are_waited_for_by_none() -> None:
    reader = Reader(view=EXPANDED)
    reader.fetcher.assign([P2])
    reader.start({P2: 0})
    reader.data(reader.fetch(), p2=batch(0, 3, epoch=0))
    assert reader.ready() == [(2, 0, 3)]


def test_gates_do_not_apply_where_order_does_not_matter() -> None:
    reader = Reader(view=replace(EXPANDED, ordered=False))
    reader.read_whole()
    reader.data(reader.fetch(), p2=batch(0, 3, epoch=0))
    assert reader.ready() == [(2, 0, 3)]


def test_a_batch_of_a_later_epoch_than_the_fetch_said_is_not_taken() -> None:
    reader = Reader()
    reader.read_whole()
    reader.now += 1_000
    reader.data(reader.fetch(), p0=batch(0, 5) + batch(5, 2, epoch=5), p1=batch(0))
    assert reader.ready() == [(0, 0, 5), (1, 0, 1)]
    work = reader.fetcher.drain(reader.now)
    assert work.refresh == ["t"]
    assert work.fetches[0].partitions[P0].offset == 5


@pytest.mark.parametrize("error", [ErrorCode.INVALID_PARTITION_METADATA, ErrorCode.FENCED_LEADER_EPOCH])
def test_a_refused_fetch_looks_at_the_topic_again_and_keeps_the_position(error: ErrorCode) -> None:
    reader = Reader()
    reader.read_whole(p0=3)
    reader.now += 1_000
    reader.answer(reader.fetch(), {P0: FetchResult(error)})
    work = reader.fetcher.drain(reader.now)
    assert work.refresh == ["t"]
    assert P0 not in work.fetches[0].partitions
    reader.answer(work.fetches[0], {})
    reader.fetcher.topic_known(EXPANDED, reader.now)
    said = reader.fetch().partitions[P0]
    assert (said.offset, said.leader_epoch, said.count) == (3, 5, 3)


def test_the_broker_forgets_a_refused_partition_while_it_is_not_fetched_and_would_end_every_wait() -> None:
    reader = Reader()
    reader.read_whole()
    reader.answer(reader.fetch(), {P0: FetchResult(ErrorCode.UNKNOWN_TOPIC_ID)})
    second = reader.fetch()
    assert (list(second.partitions), [tp for tp, _ in second.forgotten]) == ([], [P0])
    reader.answer(second, {})
    reader.fetcher.topic_known(FLAT, reader.now)
    assert list(reader.fetch().partitions) == [P0]


def test_the_broker_forgets_partitions_of_a_topic_that_was_created_again_under_the_id_that_it_knows() -> None:
    """Under the new id it has none: the errors of those that it kept ended every wait."""
    reader = Reader()
    reader.fetcher.assign([], ["t", "u"])
    other = replace(FLAT, name="u", topic_id=UUID(int=2))
    for view in (FLAT, other):
        reader.fetcher.topic_known(view, 0)
    for lookup in reader.fetcher.drain(0).lookups:
        reader.fetcher.found(lookup.request_id, dict.fromkeys(lookup.partitions, (ErrorCode.NONE, 0)), 0)
    reader.answer(reader.fetch(), {})
    reader.answer(reader.fetch(), {})
    reader.fetcher.topic_known(replace(FLAT, topic_id=UUID(int=3)), 0)
    assert [*reader.fetch().forgotten] == [(P0, FLAT.topic_id), (P1, FLAT.topic_id)]


def test_a_partition_without_a_whole_batch_at_its_position_is_fetched_again_after_a_while() -> None:
    """It was fetched again at once, for ever, and each time another error was kept."""
    reader = Reader()
    reader.read_whole()
    damaged = FetchResult(ErrorCode.NONE, memoryview(bytes(100)), high_watermark=9)
    reader.answer(reader.fetch(), {P0: damaged, P1: damaged})
    work = reader.fetcher.drain(reader.now)
    assert not work.fetches and work.wake_at_ms is not None
    assert [error.code for error in reader.fetcher.errors()] == [ErrorCode.CORRUPT_MESSAGE] * 2
    reader.now = work.wake_at_ms
    assert reader.fetcher.drain(reader.now).fetches


def test_a_partition_that_appears_starts_at_its_log_start_and_one_that_is_removed_leaves() -> None:
    reader = Reader(reset="latest")
    reader.fetcher.assign([], ["t"])
    reader.fetcher.drain(reader.now)
    reader.fetcher.topic_known(FLAT, reader.now)
    (first,) = reader.fetcher.drain(reader.now).lookups
    assert {timestamp for timestamp, _ in first.partitions.values()} == {LATEST}
    reader.fetcher.topic_known(EXPANDED, reader.now)
    (second,) = reader.fetcher.drain(reader.now).lookups
    assert second.partitions == {P2: (EARLIEST, 0)}
    reader.fetcher.topic_known(FLAT, reader.now)
    assert reader.fetcher.assignment == (P0, P1)


def test_a_position_below_the_log_start_is_reset_as_the_settings_say() -> None:
    reader = Reader(reset="earliest")
    reader.read_whole()
    reader.answer(reader.fetch(), {P0: FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE)})
    (lookup,) = reader.fetcher.drain(reader.now).lookups
    assert lookup.partitions == {P0: (EARLIEST, 4)}


def test_a_position_below_the_log_start_is_an_error_when_nothing_may_be_lost() -> None:
    reader = Reader(reset="none")
    reader.read_whole()
    reader.answer(reader.fetch(), {P0: FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE)})
    (error,) = reader.fetcher.errors()
    assert error.code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert "offset 0 of t-0 is not in its log" in str(error)


def test_what_is_held_is_read_before_a_position_is_reset() -> None:
    reader = Reader(reset="earliest")
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0, 5))
    reader.answer(reader.fetch(), {P0: FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE)})
    assert reader.ready() == [(0, 0, 5)]
    reader.hand_out()
    reader.now += 1_000
    reader.answer(reader.fetch(), {P0: FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE)})
    (lookup,) = reader.fetcher.drain(reader.now).lookups
    assert lookup.partitions == {P0: (EARLIEST, 4)}


def test_parts_that_do_not_follow_the_position_are_not_handed_out() -> None:
    reader = Reader()
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0, 5))
    reader.data(reader.fetch(), p0=batch(5, 5))
    first, second = reader.fetcher.deliverable()
    assert not reader.fetcher.all_handed_out([second])
    assert not reader.fetcher.all_handed_out([second, first])
    reader.fetcher.handed_out(first, 3)
    assert not reader.fetcher.all_handed_out([first, second])
    assert reader.fetcher.position(P0) == 3
    assert not reader.fetcher.is_next(second)
    assert reader.fetcher.all_handed_out(reader.fetcher.deliverable())
    assert reader.fetcher.position(P0) == 10


def test_a_reader_holds_at_most_two_fetches_of_a_partition() -> None:
    fetcher = Fetcher(FetcherSettings(auto_offset_reset="earliest", max_partition_fetch_bytes=100))
    reader = Reader()
    reader.fetcher = fetcher
    reader.read_whole()
    reader.data(reader.fetch(), p0=batch(0) + batch(1))
    second = reader.fetch()
    assert P0 in [tp for tp, _ in second.forgotten]
    reader.data(second)
    reader.hand_out()
    assert P0 in reader.fetch().partitions


def test_aborted_transactions_are_passed_on_with_their_records() -> None:
    reader = Reader()
    reader.read_whole()
    answer = FetchResult(ErrorCode.NONE, memoryview(batch(0, 2)), aborted=[(9, 0)])
    reader.answer(reader.fetch(), {P0: answer})
    (part,) = reader.fetcher.deliverable()
    assert part.fetched.aborted == ((9, 0),)


def test_an_assigned_partition_that_is_not_there_is_an_error_that_names_it() -> None:
    reader = Reader()
    reader.fetcher.assign([TopicPartition("t", 5)])
    reader.fetcher.topic_known(FLAT, 0)
    (error,) = reader.fetcher.errors()
    assert "topic t has no partition 5" in str(error)


def test_seeking_where_nothing_is_assigned_is_refused() -> None:
    with pytest.raises(ApiError, match="t-0 is not assigned"):
        Reader().fetcher.seek(P0, 1)


def test_a_topic_that_stays_missing_is_told_of() -> None:
    reader = Reader()
    reader.fetcher.assign([], ["t"])
    missing = ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no topic 't'")
    looks = 0
    while not (errors := reader.fetcher.errors()):
        looks += len(reader.fetcher.drain(reader.now).refresh)
        reader.fetcher.topic_unknown("t", missing, reader.now)
        reader.now += 1_000
    assert errors == [missing] and looks == 4


def test_while_an_end_is_unknown_its_lineage_is_asked_for_again_and_again() -> None:
    reader = Reader(view=replace(FLAT, lineage=Lineage.of_cuts(1, (1, 2), {}, unknown={0: 0})))
    reader.read_whole()
    looks = 0
    for _ in range(20):
        reader.now += 1_000
        if reader.fetcher.drain(reader.now).refresh:
            looks += 1
            reader.fetcher.topic_known(reader.view, reader.now)
    assert looks >= 10
    reader.view = replace(FLAT, lineage=Lineage.of_cuts(1, (1, 2), {0: [(0, 5)]}))
    reader.now += 1_000
    assert reader.fetcher.drain(reader.now).refresh == ["t"]
    reader.fetcher.topic_known(reader.view, reader.now)
    reader.now += 5_000
    assert reader.fetcher.drain(reader.now).refresh == []


@pytest.mark.parametrize("call", ["seek", "seek to time", "assign anew", "resume"])
def test_a_partition_whose_position_is_not_in_its_log_is_read_again_once_it_has_another_one(call: str) -> None:
    reader = Reader(reset="none")
    reader.fetcher.assign([P0], [])
    reader.start({P0: 3})
    reader.answer(reader.fetch(), {P0: FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=50)})
    (error,) = reader.fetcher.errors()
    assert "Seek to an offset that is there" in str(error)
    assert reader.fetcher.drain(reader.now).fetches == [] and reader.fetcher.paused == ()
    expected = 50
    if call == "seek":
        reader.fetcher.seek(P0, 50)
    elif call == "resume":
        reader.fetcher.resume(P0)
        expected = 3
    else:
        if call == "assign anew":
            reader.fetcher.assign([], [])
            reader.fetcher.assign([P0], [])
            assert reader.fetcher.drain(reader.now).refresh == ["t"]
            reader.fetcher.topic_known(reader.view, reader.now)
        else:
            reader.fetcher.seek_to_timestamp(P0, 1_000)
        (lookup,) = reader.fetcher.drain(reader.now).lookups
        reader.fetcher.found(lookup.request_id, {P0: (ErrorCode.NONE, 50)}, reader.now)
    assert reader.fetch().partitions[P0].offset == expected


def test_a_partition_that_is_paused_stays_so_over_an_error_and_a_seek() -> None:
    reader = Reader(reset="none")
    reader.fetcher.assign([P0], [])
    reader.start({P0: 3})
    fetch = reader.fetch()
    reader.fetcher.pause(P0)
    reader.answer(fetch, {P0: FetchResult(ErrorCode.OFFSET_OUT_OF_RANGE, log_start_offset=50)})
    reader.fetcher.seek(P0, 50)
    assert reader.fetcher.drain(reader.now).fetches == [] and reader.fetcher.paused == (P0,)
