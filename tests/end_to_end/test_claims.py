"""Claims of slices on the wire, request by request: what repeats, old epochs, zombies, resets and other refusals do."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client import TopicPartition
from anabranch.client import sync as plain
from anabranch.protocol.messages.fetch import Claim, FetchPartition, FetchRequest, FetchTopic
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.support import commands
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.steps import in_short_steps
from tests.support.thorough import THOROUGH
from tests.support.transactions import TransactionalProducer
from tests.support.wire import WireClient, batch, values_of

QUICK = {
    "group.consumer.session.timeout.ms": 3_000,
    "group.consumer.min.session.timeout.ms": 500,
    "group.consumer.heartbeat.interval.ms": 100,
    "group.consumer.min.heartbeat.interval.ms": 100,
}
GROUP = "g"
LEFT = -1
FIRST_S = 0.002
"""For a request to be the first of two; making a topic takes longer."""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data"), **QUICK) as broker:
        yield broker


class Sharer(GroupClient):
    """A member that claims slices of partition 0 of its topic; the group has the topic's name."""

    def __init__(self, broker: BrokerProcess, topic: str, name: str, records: int = 0) -> None:
        super().__init__(broker.port)
        self.topic, self.name, self.epoch = topic, name, 0
        if records:
            self.create(topic, **{"accept.range.fetch": "true"})
            self.write(records)
            self.ready(topic)

    def write(self, records: int) -> None:
        for _ in range(records // 10):
            self.produce(self.topic, 0, batch([b"v"] * 10))

    def join(self) -> None:  # type: ignore[override]
        deadline = time.monotonic() + 10
        while (answer := self.beat(self.topic, self.name, 0, topics=[self.topic])).error_code:
            assert time.monotonic() < deadline, answer
        self.epoch = answer.member_epoch

    def stay(self) -> None:
        answer = self.beat(self.topic, self.name, self.epoch)
        assert not answer.error_code, answer
        self.epoch = answer.member_epoch

    def claim(self, sequence: int, *, session: int = 1, most: int = 10, begin: int = 0, wait_ms: int = 0) -> Any:
        part = FetchPartition(
            partition=0,
            fetch_offset=begin,
            partition_max_bytes=100_000,
            claim=Claim(session=session, sequence=sequence, records_max=most),
        )
        request = FetchRequest(
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=1 << 24,
            session_id=0,
            session_epoch=-1,
            topics=[FetchTopic(topic=self.topic, partitions=[part])],
            forgotten_topics_data=[],
            group_id=self.topic,
            member_id=self.name,
            generation_id_or_member_epoch=self.epoch,
        )
        return self.call(request, 12).responses[0].partitions[0]

    def slice(self, sequence: int, **options: Any) -> tuple[int, int] | None:
        answer = self.claim(sequence, **options)
        assert answer.error_code == ErrorCode.NONE, (ErrorCode(answer.error_code), answer.error_message)
        return None if answer.slice is None else (answer.slice.start, answer.slice.end)

    def commit_slice(self, *ranges: tuple[int, int], offset: int = -1) -> ErrorCode:
        part = OffsetCommitRequestPartition(
            partition_index=0,
            committed_offset=offset,
            committed_metadata="",
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
        )
        request = OffsetCommitRequest(
            group_id=self.topic,
            member_id=self.name,
            generation_id_or_member_epoch=self.epoch,
            wants_stable_offset=True,
            topics=[OffsetCommitRequestTopic(name=self.topic, partitions=[part])],
        )
        return ErrorCode(self.call(request, 9).topics[0].partitions[0].error_code)

    def progress(self) -> tuple[int, list[tuple[int, int]]]:
        part = self.fetched(self.topic, {self.topic: [0]}).topics[0].partitions[0]
        return part.committed_offset, [(it.start, it.end) for it in part.committed_range_offsets]


def two(broker: BrokerProcess, topic: str, records: int = 100) -> tuple[Sharer, Sharer]:
    first = Sharer(broker, topic, "first", records)
    second = Sharer(broker, topic, "second")
    first.join()
    second.join()
    first.stay()
    return first, second


def both(first: Sharer, second: Sharer) -> None:
    first.stay()
    second.stay()


def test_members_get_what_is_next_and_the_frontier_follows_their_commits(process: BrokerProcess) -> None:
    first, second = two(process, "next")
    with first, second:
        assert [first.slice(0), second.slice(0), first.slice(1, most=15)] == [(0, 9), (10, 19), (20, 34)]
        assert second.commit_slice((10, 19)) is ErrorCode.NONE
        assert first.progress() == (0, [(10, 19)])
        assert first.commit_slice((0, 9), (20, 30)) is ErrorCode.NONE
        assert first.progress() == (31, [])
        assert second.slice(1) == (35, 44), "what is held is not handed out, nor what is committed"


def test_a_repeated_claim_gets_the_same_slice_and_an_old_one_moves_nothing(process: BrokerProcess) -> None:
    first, second = two(process, "repeats")
    with first, second:
        assert first.slice(0) == first.slice(0) == first.slice(0, most=20) == (0, 9)
        assert first.slice(1) == (10, 19)
        assert first.claim(0).error_code == ErrorCode.INVALID_SHARE_SESSION_EPOCH
        assert first.claim(3).error_code == ErrorCode.INVALID_SHARE_SESSION_EPOCH
        first.epoch -= 1
        stale = first.claim(2)
        assert stale.error_code == ErrorCode.STALE_MEMBER_EPOCH and "send a heartbeat" in stale.error_message
        assert first.commit_slice((0, 9)) is ErrorCode.STALE_MEMBER_EPOCH
        first.epoch += 1
        stranger = Sharer(process, "repeats", "stranger")
        with stranger:
            unknown = stranger.claim(0)
            assert unknown.error_code == ErrorCode.UNKNOWN_MEMBER_ID and "no member" in unknown.error_message
        assert second.slice(0) == (20, 29), "none of them has moved anything"
        assert first.claim(1, session=7).error_code == ErrorCode.SHARE_SESSION_NOT_FOUND
        assert first.slice(0, session=8) == (0, 9), "another session begins with what the last one had"
        assert first.claim(2).error_code == ErrorCode.INVALID_SHARE_SESSION_EPOCH


def test_what_a_member_had_is_offered_again_when_it_is_gone_and_its_commit_counts_no_more(
    process: BrokerProcess,
) -> None:
    first, second = two(process, "zombies")
    with first, second:
        assert (first.slice(0), first.slice(1), second.slice(0)) == ((0, 9), (10, 19), (20, 29))
        assert first.commit_slice((0, 4)) is ErrorCode.NONE
        deadline = time.monotonic() + 10
        sequence, got = 1, []
        while len(got) < 2 and time.monotonic() < deadline:  # The session of the first one ends meanwhile.
            second.stay()
            if (found := second.slice(sequence, wait_ms=100)) is not None and found[0] < 20:
                got.append(found)
            sequence += found is not None
            time.sleep(0.05)
        assert got == [(5, 14), (15, 19)], "the oldest first, and nothing that was committed"
        assert first.commit_slice((5, 9)) is ErrorCode.UNKNOWN_MEMBER_ID
        first.join()
        both(first, second)
        assert first.commit_slice((5, 9)) is ErrorCode.INVALID_RECORD_STATE, "another member has them"
        assert first.commit_slice(offset=30) is ErrorCode.INVALID_RECORD_STATE, "nor by a plain commit"
        with WireClient(process.port) as client:
            transaction = TransactionalProducer(client).init()
            at: dict[str, Any] = {"group": "zombies", "topic": "zombies", "partition": 0}
            lost = transaction.commit_offset(**at, offset=-1, ranges=[(5, 9)], member=(first.name, first.epoch))
            assert lost is ErrorCode.INVALID_RECORD_STATE, "nor in a transaction"
            assert transaction.commit_offset(**at, offset=30) is ErrorCode.INVALID_RECORD_STATE, "nor by no member"
            both(first, second)
            mine = transaction.commit_offset(**at, offset=-1, ranges=[(5, 19)], member=(second.name, second.epoch))
            assert mine is ErrorCode.NONE
            transaction.commit()
        assert second.commit_slice((20, 29)) is ErrorCode.NONE
        assert second.progress() == (30, [])


def test_what_a_member_that_has_left_has_in_a_transaction_is_handed_out_when_that_is_aborted(
    process: BrokerProcess,
) -> None:
    first, second = two(process, "decides", 40)
    with first, second, WireClient(process.port) as client:
        assert [first.slice(0), first.slice(1)] == [(0, 9), (10, 19)]
        at: dict[str, Any] = {"group": "decides", "topic": "decides", "partition": 0, "offset": -1}
        counts, fails = (TransactionalProducer(client, name).init() for name in ("counts", "fails"))
        who = first.name, first.epoch
        assert counts.commit_offset(**at, ranges=[(0, 9)], member=who) is ErrorCode.NONE
        assert fails.commit_offset(**at, ranges=[(10, 19)], member=who) is ErrorCode.NONE
        first.beat("decides", "first", LEFT)
        second.stay()
        assert second.slice(0) == (20, 29), "nothing that may have been processed, and count"
        counts.commit()
        assert second.slice(1) == (30, 39)
        assert second.slice(2) is None
        fails.abort()
        second.stay()
        assert second.slice(2, wait_ms=5_000) == (10, 19), "what does not count"
        assert second.commit_slice((10, 39)) is ErrorCode.NONE
        assert second.progress() == (40, [])


def test_a_member_that_leaves_or_ends_its_session_gives_back_at_once(process: BrokerProcess) -> None:
    first, second = two(process, "gives")
    with first, second:
        assert (first.slice(0), second.slice(0)) == ((0, 9), (10, 19))
        assert first.claim(LEFT).error_code == ErrorCode.NONE
        assert second.slice(1) == (0, 9)
        assert first.slice(0, session=2) == (20, 29)
        asked = time.monotonic()
        first.beat("gives", "first", LEFT)
        second.stay()
        assert second.slice(2, wait_ms=5_000) == (20, 29)
        assert time.monotonic() - asked < 4, "without waiting for anything"


@pytest.mark.skipif(not THOROUGH, reason="a broker of its own; tests/properties/test_slices.py has the rule")
def test_a_slice_that_is_held_for_too_long_is_offered_again(tmp_path: Path) -> None:
    with running(tmp_path / "data", **{**QUICK, "cooperative.fetch.hold.ms": 2_000}) as broker:
        first, second = two(broker, "slow", 10)
        with first, second:
            assert first.slice(0) == (0, 9)
            deadline = time.monotonic() + 15
            while second.slice(0, wait_ms=100) != (0, 9):
                assert time.monotonic() < deadline
                both(first, second)
            assert first.commit_slice((0, 9)) is ErrorCode.INVALID_RECORD_STATE


def test_a_slice_ends_where_its_records_were_found(process: BrokerProcess) -> None:
    with Sharer(process, "large", "first", 10) as first:
        for _ in range(4):
            first.produce("large", 0, batch([b"v" * 60_000]))
        first.join()
        got: list[int] = []
        for sequence in range(10):
            answer = first.claim(sequence, most=100)
            if answer.slice is None:
                break
            read = [offset for offset, _ in values_of(answer.records)]
            assert read == list(range(answer.slice.start, answer.slice.end + 1)), "no record is claimed unseen"
            got += read
        assert got == list(range(14))


def test_a_claim_waits_for_records(process: BrokerProcess) -> None:
    first, second = two(process, "waits", 10)
    with first, second:
        assert first.slice(0) == (0, 9)
        assert second.slice(0, wait_ms=300) is None
        sent = second.send(_claim_of(second, 0), 12)
        time.sleep(0.2)
        first.write(10)
        answer = second.receive(sent).responses[0].partitions[0]
        assert (answer.slice.start, answer.slice.end) == (10, 19)


def _claim_of(member: Sharer, sequence: int, begin: int = 0) -> FetchRequest:
    part = FetchPartition(
        partition=0,
        fetch_offset=begin,
        partition_max_bytes=1 << 20,
        claim=Claim(session=1, sequence=sequence, records_max=10),
    )
    return FetchRequest(
        max_wait_ms=10_000,
        min_bytes=1,
        max_bytes=1 << 24,
        session_id=0,
        session_epoch=-1,
        topics=[FetchTopic(topic=member.topic, partitions=[part])],
        forgotten_topics_data=[],
        group_id=member.topic,
        member_id=member.name,
        generation_id_or_member_epoch=member.epoch,
    )


def test_where_a_group_begins_is_decided_once(process: BrokerProcess) -> None:
    """Of a new broker both are asked before there is a beginning: it makes the topic of individual commits first."""
    first, second = two(process, "at-once", 200)
    with first, second:
        sent = []
        for each, begin in ((first, 50), (second, 100)):
            sent.append(each.send(_claim_of(each, 0, begin), 12))
            time.sleep(FIRST_S)
        answers = [
            each.receive(one).responses[0].partitions[0] for each, one in zip((first, second), sent, strict=True)
        ]
        assert sorted(answer.slice.start for answer in answers) == [50, 60], "the first beginning counts, for both"


def test_a_group_that_has_begun_goes_on(process: BrokerProcess) -> None:
    first, second = two(process, "begins")
    with first, second:
        nowhere = first.claim(0, begin=-1)
        assert nowhere.error_code == ErrorCode.OFFSET_OUT_OF_RANGE and "committed nothing" in nowhere.error_message
        assert first.slice(0, begin=50) == (50, 59)
        assert second.slice(0, begin=100) == (60, 69), "another's beginning counts no more"
        assert first.progress() == (50, [])


def test_after_a_fail_over_an_old_claim_counts_until_others_have_the_records(process: BrokerProcess) -> None:
    first, second = two(process, "over")
    with first, second:
        assert (first.slice(0), first.slice(1), second.slice(0)) == ((0, 9), (10, 19), (20, 29))
        epochs = first.epoch, second.epoch
        process.kill()
        process.start()
    first, second = Sharer(process, "over", "first"), Sharer(process, "over", "second")
    with first, second:
        first.epoch, second.epoch = epochs
        first.ready("over")
        assert first.commit_slice((0, 9)) is ErrorCode.NONE, "nobody else has them"
        lost = second.claim(1)
        assert lost.error_code == ErrorCode.SHARE_SESSION_NOT_FOUND and "Begin another session" in lost.error_message
        assert second.slice(0, session=2) == (10, 19), "what was out is offered again"
        assert first.commit_slice((10, 19)) is ErrorCode.INVALID_RECORD_STATE
        assert second.commit_slice((10, 19)) is ErrorCode.NONE
        assert first.progress() == (20, [])


@pytest.mark.skipif(not THOROUGH, reason="a broker of its own; test_commits_by_range.py has such a refusal")
def test_a_broker_without_individual_commits_says_so(tmp_path: Path) -> None:
    with running(tmp_path / "data", accept_individual_commit="false") as broker, Sharer(broker, "no", "a", 10) as first:
        first.join()
        refused = first.claim(0)
        assert refused.error_code == ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED
        assert "accept.individual.commit is false" in refused.error_message


def test_a_group_that_shares_by_key_is_refused(process: BrokerProcess) -> None:
    first, second = two(process, "keys")
    with first, second:
        assert first.slice(0) == (0, 9)
        part = OffsetCommitRequestPartition(
            partition_index=0,
            committed_offset=-1,
            committed_metadata="",
            key_range_offsets=[KeyRangeOffset(start=0, end=1 << 61, offset=5)],
        )
        request = OffsetCommitRequest(
            group_id="keys", topics=[OffsetCommitRequestTopic(name="keys", partitions=[part])]
        )
        for member in (first, second):
            member.beat("keys", member.name, LEFT)
        assert first.call(request, 9).topics[0].partitions[0].error_code == ErrorCode.NONE
        first.join()
        refused = first.claim(0, session=2)
        assert refused.error_code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        assert "reset its offsets" in refused.error_message


def test_claims_of_a_thousand_partitions_take_short_steps(process: BrokerProcess) -> None:
    count = 1_000
    with Sharer(process, "wide", "first") as first:
        first.create("wide", count, **{"accept.range.fetch": "true"})
        first.ready("wide")
        first.join()
        sessions = iter(range(1, 100))

        def claimed() -> Any:
            first.stay()
            session = next(sessions)
            parts = [
                FetchPartition(
                    partition=number,
                    fetch_offset=0,
                    partition_max_bytes=1_000,
                    claim=Claim(session=session, sequence=0, records_max=10),
                )
                for number in range(count)
            ]
            request = FetchRequest(
                max_wait_ms=0,
                min_bytes=1,
                max_bytes=1 << 24,
                session_id=0,
                session_epoch=-1,
                topics=[FetchTopic(topic="wide", partitions=parts)],
                forgotten_topics_data=[],
                group_id="wide",
                member_id="first",
                generation_id_or_member_epoch=first.epoch,
            )
            return first.call(request, 12).responses[0].partitions

        answers = in_short_steps(process, claimed)
        assert not any(it.error_code or it.slice for it in answers), "where there are no records"
        records = bytes(batch([b"v"] * 10))
        data = [PartitionProduceData(index=number, records=records) for number in range(count)]
        first.call(
            ProduceRequest(acks=-1, timeout_ms=10_000, topic_data=[TopicProduceData(name="wide", partition_data=data)]),
            12,
        )
        first.join()  # Making a thousand logs may have taken longer than its session.
        answers = in_short_steps(process, claimed)
        assert all((it.slice.start, it.slice.end) == (0, 9) for it in answers)


def test_slices_of_a_topic_that_is_deleted_are_forgotten(tmp_path: Path) -> None:
    with running(tmp_path) as own:  # What members of other groups held is forgotten some at a time.

        def held() -> float:
            return own.metrics()["anabranch_slices_held"]

        first, second = two(own, "deleted")
        with first, second:
            assert [first.slice(0), second.slice(0)] == [(0, 9), (10, 19)]
            assert held() == 2
            first.delete("deleted")
            assert held() == 0


def test_the_description_of_a_group_shows_who_holds_slices(process: BrokerProcess) -> None:
    first, second = two(process, "described")
    with first, second:
        assert [first.slice(0), second.slice(0), first.slice(1, most=15)] == [(0, 9), (10, 19), (20, 34)]
        ((row,),) = [it["offsets"] for it in commands.document(process.address, "group", "describe", "described")]
        assert row["slices"] == [
            {"member_id": "first", "slices": 2, "records": 25, "first_offset": 0, "last_offset": 34},
            {"member_id": "second", "slices": 1, "records": 10, "first_offset": 10, "last_offset": 19},
        ]
        both(first, second)
        table, _ = commands.run(process.address, "group", "describe", "described")
        shown = [line.split() for line in table.splitlines()]
        assert ["described", "0", "first", "2", "25", "0-34"] in shown
        assert ["described", "0", "second", "1", "10", "10-19"] in shown
        both(first, second)
        assert second.commit_slice((10, 19)) is ErrorCode.NONE
        assert second.slice(1) == (35, 44)
        with plain.Admin(process.address) as admin:
            held = admin.describe_slices("described", [TopicPartition("described", 0), TopicPartition("none", 1)])
            nobody = admin.describe_slices("another", [TopicPartition("described", 0)])
        assert {it.member_id for it in held[TopicPartition("described", 0)]} == {"first", "second"}
        assert nobody == {}


def test_what_is_appended_wakes_as_many_waiting_claims_as_there_are_slices(process: BrokerProcess) -> None:
    first, second = two(process, "turns", 10)
    third = Sharer(process, "turns", "third")
    with first, second, third:
        third.join()
        both(first, second)
        assert first.slice(0) == (0, 9)
        waiting = [(member, member.send(_claim_of(member, 0), 12)) for member in (second, third)]
        time.sleep(0.1)
        first.produce("turns", 0, batch([b"v"] * 15))
        got = [member.receive(sent).responses[0].partitions[0].slice for member, sent in waiting]
        assert sorted((it.start, it.end) for it in got) == [(10, 19), (20, 24)]


def test_a_member_that_gives_its_slices_back_takes_none_with_a_claim_that_waits(process: BrokerProcess) -> None:
    first, second = two(process, "own", 10)
    with first, second:
        assert second.slice(0) == (0, 9)
        with GroupClient(process.port) as beside:  # Requests of one connection are answered in their order.
            waiting = beside.send(_claim_of(first, 0), 12)
            time.sleep(0.1)
            assert first.claim(LEFT).error_code == ErrorCode.NONE
            first.write(10)
            answer = beside.receive(waiting).responses[0].partitions[0]
        assert (answer.error_code, answer.slice) == (ErrorCode.NONE, None)
        assert second.slice(1) == (10, 19)
