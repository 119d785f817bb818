"""The handout: positions follow what the application has been given, whatever it does in between."""

from __future__ import annotations

from uuid import UUID

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.handout import Handout
from anabranch.client.consumer.record import Record
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings, TopicView
from anabranch.machines.lineage import Lineage

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)


def reading() -> tuple[Fetcher, Handout]:
    fetcher = Fetcher(FetcherSettings())
    fetcher.assign([P0, P1])
    fetcher.topic_known(TopicView("t", UUID(int=1), Lineage.flat(2), {0: 1, 1: 1}, {0: 0, 1: 0}, True), 0)
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


def test_partitions_that_were_taken_back_are_not_gone_back_to() -> None:
    fetcher, handout = reading()
    next(handout.one_by_one(POLLED))
    handout.dropped([P0])
    fetcher.assign([P1])
    handout.go_back()
    assert fetcher.positions() == {P1: 20}
