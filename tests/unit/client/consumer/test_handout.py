"""The handout: positions follow what the application has been given, whatever it does in between."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import cast
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.consumer.handout import Handout
from anabranch.client.consumer.record import Record
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings, FetchResult, TopicView
from anabranch.machines.lineage import Lineage
from tests.support.wire import batch

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
VIEW = TopicView("t", UUID(int=1), Lineage.flat(2), {0: 1, 1: 1}, {0: 0, 1: 0}, True)


def reading() -> tuple[Fetcher, Handout]:
    fetcher = Fetcher(FetcherSettings())
    fetcher.assign([P0, P1])
    fetcher.topic_known(VIEW, 0)
    fetcher.seek(P0, 12)
    fetcher.seek(P1, 21)
    return fetcher, Handout(fetcher, check_crcs=True)


def record(partition: int, offset: int) -> Record:
    return Record("t", partition, offset, 0, 0, None, None)


POLLED = [record(0, 10), record(1, 20), record(0, 11)]


def test_in_a_loop_the_positions_are_those_of_the_first_records_not_come_to() -> None:
    _, handout = reading()
    loop = handout.one_by_one(POLLED)
    assert handout.consumed() == {P0: 12, P1: 21}
    next(loop)
    assert handout.consumed() == {P0: 11, P1: 20}
    next(loop)
    assert handout.consumed() == {P0: 11, P1: 21}
    next(loop)
    assert handout.consumed() == {P0: 12, P1: 21} and next(loop, None) is None


def test_a_loop_that_was_left_is_gone_back_to() -> None:
    fetcher, handout = reading()
    next(handout.one_by_one(POLLED))
    handout.go_back()
    assert fetcher.positions() == {P0: 11, P1: 20}
    fetcher.seek(P0, 99)
    handout.go_back()
    assert fetcher.positions()[P0] == 99, "only once"


def test_what_a_poll_has_yet_to_return_is_not_consumed_and_comes_again_where_it_never_does() -> None:
    fetcher, handout = reading()

    async def poll() -> list[int]:
        handout.go_back()
        fetch = fetcher.drain(0).fetches[0]
        answer = FetchResult(ErrorCode.NONE, batch([b"a", b"b", b"c"]), 3, 3, 0)
        fetcher.answered(fetch.request_id, ErrorCode.NONE, 0, {P0: answer}, 0)
        found: list[Record] = []
        for part in fetcher.deliverable():
            await handout.hand_out_some(part, 2, found)
        return [it.offset for it in found]

    fetcher.seek(P0, 0)
    for _ in range(2):
        assert asyncio.run(poll()) == [0, 1]
        assert fetcher.positions()[P0] == 2 and handout.consumed()[P0] == handout.consumed_of(P0) == 0
    handout.returned()
    assert handout.consumed()[P0] == 2


def test_where_a_loop_was_left_counts_no_more_after_a_seek() -> None:
    driver = FetchingDriver(ConsumerSettings(), cast(Cluster, None))
    driver.fetcher.assign([P0, P1])
    driver.fetcher.topic_known(VIEW, 0)
    next(driver.handout.one_by_one(POLLED))
    driver.moved_by_hand(P0)
    driver.fetcher.seek(P0, 99)
    driver.handout.go_back()
    assert driver.fetcher.positions() == {P0: 99, P1: 20}


def test_partitions_that_were_taken_back_are_not_gone_back_to() -> None:
    fetcher, handout = reading()
    next(handout.one_by_one(POLLED))
    handout.dropped([P0])
    fetcher.assign([P1])
    handout.go_back()
    assert fetcher.positions() == {P1: 20}


def skipped(handout: Handout, tp: TopicPartition) -> list[tuple[int, int]]:
    return list(handout._skipped(tp, 0, 1_000))


def test_ranges_below_the_stable_offset_are_left_out_until_all_before_them_is_handed_out() -> None:
    fetcher, handout = reading()
    handout.skip(P0, [(8, 9), (12, 14), (20, 20)])
    handout.forget_skips(P0, 21)
    assert skipped(handout, P0) == [(12, 14), (20, 20)], "the position is 12: a commit of 11-11 moves the stable offset"
    next(handout.one_by_one([record(0, 10), record(0, 11)]))
    fetcher.seek(P0, 30)
    handout.forget_skips(P0, 21)
    assert skipped(handout, P0) == [(12, 14), (20, 20)], "a loop that is left goes back to 11"
    list(handout.one_by_one([record(0, 29)]))
    handout.forget_skips(P0, 20)
    assert skipped(handout, P0) == [(20, 20)]
    handout.forget_skips(P0, 21)
    assert skipped(handout, P0) == []


def test_ranges_are_left_out_while_the_position_is_being_looked_up() -> None:
    fetcher = Fetcher(FetcherSettings())
    fetcher.assign([P0])
    handout = Handout(fetcher, check_crcs=True)
    handout.forget_skips(P1, 21)
    handout.skip(P0, [(12, 14)])
    handout.forget_skips(P0, 21)
    assert skipped(handout, P0) == [(12, 14)]


def test_ranges_are_left_out_while_a_record_before_them_is_not_done() -> None:
    settings = ConsumerSettings(acknowledgement_mode="explicit")
    driver = FetchingDriver(settings, SimpleNamespace())  # type: ignore[arg-type]
    driver.fetcher.assign([P0])
    tracker = driver.track().tracker
    driver.fetcher.seek(P0, 30)
    tracker.begin(P0, 11)
    tracker.take(P0, [record(0, 11)], 30, skipped=[(12, 14)])
    driver.skip(P0, [(12, 14)])
    driver.forget_skips(P1, 21)
    driver.forget_skips(P0, 21)
    assert skipped(driver.handout, P0) == [(12, 14)], "what is not done may be handed out again from 11 on"
    entry = tracker.next(0)
    assert entry is not None and tracker.done(entry.lease, 1)
    driver.forget_skips(P0, 21)
    assert skipped(driver.handout, P0) == []


def test_what_was_decoded_before_a_gate_closed_is_not_handed_out_behind_it() -> None:
    """The position was to move behind the part: a check failed in the application's poll."""

    async def scenario() -> None:
        fetcher = Fetcher(FetcherSettings())
        fetcher.assign([P0])
        fetcher.topic_known(TopicView("t", UUID(int=1), Lineage.flat(1), {0: 1}, {0: 0}, True), 0)
        fetcher.seek(P0, 0)
        handout = Handout(fetcher, check_crcs=True)
        data = memoryview(batch([b"%d" % number for number in range(6)]))
        (fetch,) = fetcher.drain(0).fetches
        fetcher.answered(fetch.request_id, ErrorCode.NONE, 7, {P0: FetchResult(ErrorCode.NONE, data, 6, 6, 0)}, 0)
        (part,) = fetcher.deliverable()
        found: list[Record] = []
        await handout.hand_out_some(part, 2, found)
        (rest,) = fetcher.deliverable()
        assert (rest.start, rest.end) == (2, 6)
        await handout.hand_out_some(replace(rest, end=4), 10, found)
        assert [record.value for record in found] == [b"0", b"1", b"2", b"3"]
        assert fetcher.positions() == {P0: 4}

    asyncio.run(scenario())
