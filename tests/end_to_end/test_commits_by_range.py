"""Commits by ranges at a real broker: kills, a lost or damaged second log, stock clients, requests of 60,000 ranges."""

from __future__ import annotations

import shutil
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client import Gap
from anabranch.client.sync import Admin, Consumer, Producer
from anabranch.machines.keyspace import interval
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from tests.end_to_end.test_gates_by_time import name_at
from tests.support.broker import SLOW_STEP, BrokerProcess
from tests.support.commands import document
from tests.support.group_client import GroupClient
from tests.support.wire import batch

RANGES_TOPIC = "__individual_commit_offsets"
MIDDLE = 1 << 62
END = (1 << 63) - 1
BOUND_MS = 20
"""On a machine that runs other tests, too, a step takes up to twice as long as it does alone."""


class RangedClient(GroupClient):
    """A connection that commits by ranges."""

    def commit_ranges(
        self,
        *ranges: tuple[int, int],
        shares: Sequence[tuple[int, int, int]] = (),
        offset: int = -1,
        group: str = "g",
        topic: str = "t",
        member: str = "",
        epoch: int = -1,
        version: int = 9,
    ) -> Any:
        """OffsetCommit of partition 0; the answer to it."""
        part = OffsetCommitRequestPartition(
            partition_index=0,
            committed_offset=offset,
            committed_metadata="",
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
            key_range_offsets=[KeyRangeOffset(start=start, end=end, offset=at) for start, end, at in shares],
        )
        request = OffsetCommitRequest(
            wants_stable_offset=True,
            group_id=group,
            member_id=member,
            generation_id_or_member_epoch=epoch,
            topics=[OffsetCommitRequestTopic(name=topic, partitions=[part])],
        )
        return self.call(request, version).topics[0].partitions[0]

    def progress(self, group: str = "g") -> tuple[int, list[tuple[int, int]], list[tuple[int, int, int]]]:
        """The stable offset of partition 0, the ranges above it, and the offset of each range of keys."""
        (topic,) = self.fetched(group, {"t": [0]}).topics
        (part,) = topic.partitions
        ranges = [(it.start, it.end) for it in part.committed_range_offsets]
        return part.committed_offset, ranges, [(it.start, it.end, it.offset) for it in part.key_range_offsets]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def broker(path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(path, offsets_topic_num_partitions=3).start()
    yield process
    if process.alive:
        process.kill()


def connected(broker: BrokerProcess) -> RangedClient:
    client = RangedClient(broker.port)
    client.ready()
    return client


def example(broker: BrokerProcess, **configs: str) -> RangedClient:
    """Group `g` has processed 43, 45-47 and 50, and of the upper half of the keys everything below 100."""
    client = connected(broker)
    client.create("t", **configs)
    client.produce("t", 0, batch([b"%d" % number for number in range(200)]))
    assert client.commit("g", {("t", 0): 43}) == [ErrorCode.NONE]
    assert client.commit_ranges((45, 47), (50, 50)).last_stable_offset == 43
    answer = client.commit_ranges((60, 61), shares=[(MIDDLE, END, 100)])
    assert (answer.error_code, answer.last_stable_offset) == (ErrorCode.NONE, 43)
    return client


EXAMPLE = (43, [(45, 47), (50, 50), (60, 61)], [(0, MIDDLE - 1, 43), (MIDDLE, END, 100)])


def log_of(path: Path) -> Path:
    """The directory of the second log that has records."""
    (found,) = [it for it in path.glob(f"{RANGES_TOPIC}-*") if any(file.stat().st_size for file in it.glob("*.log"))]
    return found


def test_the_second_topic_is_made_with_the_first_ranges_and_is_the_brokers_own(broker: BrokerProcess) -> None:
    with connected(broker) as client:
        client.create("t")
        client.commit("g", {("t", 0): 5})
        assert client.metadata(RANGES_TOPIC).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert client.commit_ranges((7, 8)).error_code == ErrorCode.NONE
        made = client.metadata(RANGES_TOPIC)
        assert made.is_internal and len(made.partitions) == 3


def test_what_was_committed_is_there_after_a_kill(broker: BrokerProcess) -> None:
    with example(broker) as client:
        assert client.progress() == EXAMPLE
    for _ in range(2):
        broker.kill()
        broker.start()
        with connected(broker) as client:
            assert client.progress() == EXAMPLE
    with connected(broker) as client:
        assert client.commit_ranges((43, 44), (48, 49), (51, 51)).last_stable_offset == 52
        assert client.commit_ranges((20, 30)).error_code == ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD
        assert client.commit_ranges(shares=[(0, MIDDLE - 1, 60)]).last_stable_offset == 62
        assert client.progress() == (62, [], [(0, MIDDLE - 1, 62), (MIDDLE, END, 100)])
    broker.kill()
    broker.start()
    with connected(broker) as client:
        assert client.progress()[0] == 62


def assert_short(broker: BrokerProcess) -> None:
    """No step took long of the processor, but for the one that imports the coordinator."""
    steps = [it for it in broker.said("warning", SLOW_STEP) if not str(it["work"]).startswith("ShardSet.")]
    long = [f"{it['work']}: {it['processor_ms']} ms" for it in steps if it["processor_ms"] >= BOUND_MS]
    assert not long, ", ".join(long)


def lose(path: Path) -> None:
    shutil.rmtree(path)


def damage(path: Path) -> None:
    (segment,) = path.glob("*.log")
    data = bytearray(segment.read_bytes())
    data[70] ^= 1
    segment.write_bytes(data)


@pytest.mark.parametrize("harm", [lose, damage])
def test_without_the_second_log_the_group_goes_on_from_its_frontier_and_that_is_said(
    broker: BrokerProcess, path: Path, harm: Any
) -> None:
    with example(broker) as client:
        assert client.progress() == EXAMPLE
    broker.kill()
    harm(log_of(path))
    broker.start()
    with connected(broker) as client:
        stable, ranges, shares = client.progress()
        assert (stable, ranges, shares) == (43, [], EXAMPLE[2])
        deadline = time.monotonic() + 10
        while not any(RANGES_TOPIC in str(line) and "delivered again" in str(line) for line in broker.said("error")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert client.commit_ranges((43, 47)).last_stable_offset == 48
        if client.commit_ranges((60, 61)).error_code:
            # The log cannot be written either: the operator deletes the topic, and the group goes on with a new one.
            client.delete(RANGES_TOPIC)
        deadline = time.monotonic() + 10
        while (code := client.commit_ranges((60, 61)).error_code) != ErrorCode.NONE:
            assert code == ErrorCode.COORDINATOR_NOT_AVAILABLE and time.monotonic() < deadline
            time.sleep(0.05)
        assert client.progress()[1] == [(60, 61)]
    broker.kill()
    broker.start()
    with connected(broker) as client:
        assert client.progress() == (48, [(60, 61)], [(0, MIDDLE - 1, 48), (MIDDLE, END, 100)])


def test_the_topic_can_be_deleted_under_a_running_group(broker: BrokerProcess) -> None:
    with example(broker) as client:
        client.delete(RANGES_TOPIC)
        assert client.commit_ranges((43, 44)).last_stable_offset == 48
        assert client.commit_ranges((70, 71)).error_code == ErrorCode.NONE
        assert client.progress()[1] == [(50, 50), (60, 61), (70, 71)]
    broker.kill()
    broker.start()
    with connected(broker) as client:
        assert client.progress()[:2] == (48, [(70, 71)])


def test_stock_tools_and_consumers_see_the_stable_offset_and_take_over_there(broker: BrokerProcess) -> None:
    with example(broker) as client:
        admin = AdminClient({"bootstrap.servers": broker.address, "log_level": 0})
        asked = confluent_kafka.ConsumerGroupTopicPartitions("g")
        found = admin.list_consumer_group_offsets([asked])["g"].result(20)
        assert [(it.topic, it.partition, it.offset) for it in found.topic_partitions] == [("t", 0, 43)]
        consumer = confluent_kafka.Consumer(
            {
                "bootstrap.servers": broker.address,
                "group.id": "g",
                "group.protocol": "consumer",
                "auto.offset.reset": "error",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        consumer.subscribe(["t"])
        first = None
        deadline = time.monotonic() + 30
        while first is None:
            assert time.monotonic() < deadline
            first = consumer.poll(0.5)
        assert (first.error(), first.offset()) == (None, 43)
        # It reads on and commits: what others did above its offset is kept for whoever comes next.
        consumer.commit(offsets=[confluent_kafka.TopicPartition("t", 0, 46)], asynchronous=False)
        assert client.progress()[:2] == (48, [(50, 50), (60, 61)])
        consumer.close()
        # A tool sets the offset: everything from there is read again, by whomever.
        again = confluent_kafka.ConsumerGroupTopicPartitions("g", [confluent_kafka.TopicPartition("t", 0, 48)])
        admin.alter_consumer_group_offsets([again])["g"].result(20)
        assert client.progress() == (48, [], [])


def test_a_zombie_is_fenced(broker: BrokerProcess) -> None:
    with example(broker) as client:
        joined = client.beat("g", "member", 0, topics=["t"])
        assert joined.error_code == ErrorCode.NONE
        assert client.commit_ranges((80, 81)).error_code == ErrorCode.UNKNOWN_MEMBER_ID
        stale = client.commit_ranges((80, 81), member="member", epoch=joined.member_epoch - 1)
        assert stale.error_code == ErrorCode.STALE_MEMBER_EPOCH
        fine = client.commit_ranges((80, 81), member="member", epoch=joined.member_epoch)
        assert fine.error_code == ErrorCode.NONE
        assert client.progress()[1][-1] == (80, 81)


@pytest.mark.parametrize("is_read_before", [True, False])
def test_what_others_have_finished_at_a_gate_does_not_open_it_for_keys_that_wait_there(
    broker: BrokerProcess, is_read_before: bool
) -> None:
    """The group stood behind the gate then, as all before is done, and its next owner took the gate for passed.

    Or it said so itself, when it committed what it had read of other keys.
    """
    before = TopicPartition("t", 1)
    kept, moved = (name_at((2, part)) + "-0" for part in (0, 1))
    with Admin(broker.address) as admin, Producer(broker.address) as producer:

        def send(*keys: str) -> None:
            for key in keys:
                producer.send("t", key, key=key)
            producer.flush()

        admin.create_topics("t", partitions=1)
        send(kept, moved)
        admin.resize("t", 2)
        send(moved)
        admin.resize("t", 1)
        send(kept, moved)
    with connected(broker) as client:
        gate, (mine, others) = 2, (interval(part, 2, 1) for part in (0, 1))
        client.commit("g", {("t", 0): 0})
        client.commit_ranges((gate, gate), shares=[(mine.start, mine.end, 0)])
        client.commit_ranges(shares=[(others.start, others.end, gate)])
        if is_read_before:
            client.commit_ranges(shares=[(mine.start, mine.end, gate + 2)])
    said: dict[str, Any] = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 100}
    with Consumer(broker.address, group_id="g", **said) as consumer:

        def wait(partitions: Collection[TopicPartition]) -> None:
            if before in partitions:
                consumer.pause(before)

        consumer.subscribe("t", on_partitions_assigned=wait)
        deadline = time.monotonic() + 20
        read: list[tuple[int, int]] = []

        def poll() -> None:
            read.extend((record.partition, record.offset) for record in consumer.poll(0.1))

        while before not in consumer.assignment() and time.monotonic() < deadline:
            poll()
        for _ in range(10):
            poll()
        first = [] if is_read_before else [(0, 0)]
        assert read == first, "the record before it is in the partition that is paused"
        with connected(broker) as client:
            ((part,),) = (topic.partitions for topic in client.fetched("g", {"t": [0]}).topics)
            assert gate in [it.offset for it in part.passed_key_ranges if it.start <= others.start <= it.end]
        consumer.resume(before)
        while len(read) < len(first) + 2 and time.monotonic() < deadline:
            poll()
        assert read == [*first, (1, 0), (0, gate + 1)]


def half_passed(broker: BrokerProcess, client: RangedClient) -> str:
    """Have group `g` stand at 20, where owners of the upper half of the keys have come to 10 only; a key that moves."""
    moved = name_at((2, 1)) + "-0"
    client.create("t")
    with Producer(broker.address) as producer:
        for number in range(20):
            producer.send("t", str(number), key=moved)
    assert client.commit("g", {("t", 0): 10}) == [ErrorCode.NONE]
    client.commit_ranges((10, 19))
    assert client.commit_ranges(shares=[(0, MIDDLE - 1, 20)]).last_stable_offset == 20
    ((part,),) = (topic.partitions for topic in client.fetched("g", {"t": [0]}).topics)
    assert [(it.start, it.offset) for it in part.passed_key_ranges] == [(0, 20), (MIDDLE, 10)]
    return moved


def test_a_member_goes_on_at_once_where_owners_of_some_keys_have_not_come_to_the_groups_position(
    broker: BrokerProcess,
) -> None:
    """What it committed automatically, for those keys, was to it all that the group has: no gate behind opened."""
    with connected(broker) as client:
        moved = half_passed(broker, client)
    with Admin(broker.address) as admin:
        admin.resize("t", 2)
    said: dict[str, Any] = {"auto_offset_reset": "earliest", "auto_commit_interval_ms": 20}
    with Consumer(broker.address, group_id="g", **said) as consumer, Producer(broker.address) as producer:
        consumer.subscribe("t")
        deadline = time.monotonic() + 20
        while len(consumer.assignment()) < 2:
            assert not consumer.poll(0.1) and time.monotonic() < deadline
        assert not consumer.poll(0.5)
        producer.send("t", "new", key=moved)
        producer.flush()
        while not (read := consumer.poll(0.1)):
            assert time.monotonic() < deadline, "the gate before the record stays closed"
        assert [(record.partition, record.value) for record in read] == [(1, b"new")]


def test_a_member_can_rewind_where_owners_of_some_keys_have_not_come_to_the_groups_position(
    broker: BrokerProcess,
) -> None:
    """After a commit for those keys alone, it did not take a commit of all of them for one that goes back."""
    with connected(broker) as client:
        half_passed(broker, client)
        said: dict[str, Any] = {"auto_offset_reset": "earliest", "enable_auto_commit": False}
        with Consumer(broker.address, group_id="g", **said) as consumer:
            consumer.subscribe("t")
            deadline = time.monotonic() + 20
            while not consumer.assignment():
                assert not consumer.poll(0.1) and time.monotonic() < deadline
            assert consumer.position("t", 0) == 20
            consumer.commit()
            consumer.commit({("t", 0): 5})
            assert client.progress() == (5, [], [])


@pytest.mark.parametrize("tables", [False, True])
def test_keys_that_are_ahead_are_not_read_again_where_the_topic_may_not_be_read_by_key_any_more(
    broker: BrokerProcess, tables: bool
) -> None:
    """What of them was done above the first unfinished record was skipped all the same: keys ended with older ones."""
    kept, moved = (name_at((2, part)) + "-0" for part in (0, 1))
    with Admin(broker.address) as admin, Producer(broker.address) as producer:
        admin.create_topics("t", partitions=1, configs={"accept.range.fetch": "true"})
        for number in range(12):
            producer.send("t", str(number), key=moved if number % 3 else kept)
        producer.send("t", "without a key", partition=0)
        producer.flush()
        with connected(broker) as client:
            mine, others = (interval(part, 2, 1) for part in (0, 1))
            client.commit("g", {("t", 0): 0})
            client.commit_ranges(shares=[(others.start, others.end, 7)])
            assert client.progress()[2] == [(mine.start, mine.end, 0), (others.start, others.end, 7)]
        admin.alter_configs("topic", "t", {"accept.range.fetch": "false"})
    with Consumer(broker.address, group_id="g", auto_offset_reset="earliest") as consumer:
        consumer.subscribe("t")
        read: list[int] = []
        deadline = time.monotonic() + 20
        while 12 not in read and time.monotonic() < deadline:
            if tables:
                read += consumer.poll_arrow(0.2).column("offset").to_pylist()
            else:
                read += [record.offset for record in consumer.poll(0.2, max_records=2)]
        assert read == [0, 3, 6, *range(7, 13)]


def test_a_broker_can_refuse_individual_commits(tmp_path: Path) -> None:
    process = BrokerProcess(tmp_path / "data", accept_individual_commit="false").start()
    try:
        with connected(process) as client:
            client.create("t")
            answer = client.commit_ranges((1, 2))
            assert answer.error_code == ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED
            assert "accept.individual.commit is false" in answer.error_message
            assert client.metadata(RANGES_TOPIC).error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            assert client.commit("g", {("t", 0): 5}) == [ErrorCode.NONE]
    finally:
        process.kill()


def test_sixty_thousand_ranges_are_decided_in_short_steps_and_one_more_is_refused(broker: BrokerProcess) -> None:
    with connected(broker) as client:
        client.create("t")
        client.commit("g", {("t", 0): 0})
        many = [(2 * number, 2 * number) for number in range(1, 60_002)]
        refused = client.commit_ranges(*many)
        assert refused.error_code == ErrorCode.INVALID_REQUEST
        assert "60001 ranges are committed at once; 60000 can be" in refused.error_message
        overlapping = client.commit_ranges(*many[:59_999], (60_000, 60_001))
        assert overlapping.error_code == ErrorCode.INVALID_REQUEST and "overlaps" in overlapping.error_message
        assert client.progress() == (0, [], [])
        assert client.commit_ranges(*many[:60_000]).error_code == ErrorCode.NONE
        assert client.progress()[:2] == (0, many[:60_000])
        full = client.commit_ranges(*((it + 200_000, it + 200_000) for it, _ in many[:60_000]))
        assert full.error_code == ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED
        assert broker.until_said("warning", "too many individual commits: group is assigned anew")
        assert len(client.progress()[1]) <= 100_000
        assert_short(broker)
    broker.kill()
    broker.start()
    with connected(broker) as client:
        assert len(client.progress()[1]) > 60_000
        assert client.commit_ranges((0, 1), *((it + 1, it + 1) for it, _ in many[:59_000])).error_code == ErrorCode.NONE
        assert client.progress()[0] == 2 * 59_001 + 1
        assert_short(broker)


def test_an_administrator_sees_shares_ranges_and_gaps(broker: BrokerProcess) -> None:
    with example(broker):
        (described,) = document(broker.address, "group", "describe", "g")
        (row,) = described["offsets"]
        assert (row["committed"], row["ranges"], row["gaps"]) == (
            43,
            [[45, 47], [50, 50], [60, 61]],
            [[43, 44], [48, 49], [51, 59]],
        )
        assert row["shares"] == [
            {"start": 0, "end": MIDDLE - 1, "offset": 43, "owner": None, "owners": []},
            {"start": MIDDLE, "end": END, "offset": 100, "owner": None, "owners": []},
        ]
        assert row["gap_owners"] == [[], [], []]
        with Admin(broker.address) as admin:
            found = admin.list_group_offsets("g")[TopicPartition("t", 0)]
        assert (found.offset, found.ranges, found.shares) == EXAMPLE
        assert list(found.gaps) == [Gap(43, 44), Gap(48, 49), Gap(51, 59)]


def test_the_owners_of_gaps_are_the_members_that_have_not_done_them(broker: BrokerProcess) -> None:
    tp = TopicPartition("t", 0)
    with example(broker, accept_range_fetch="true") as client, ExitStack() as members:
        client.commit_ranges((120, 130), (160, 161), shares=[(0, MIDDLE - 1, 150)])
        assert client.progress() == (100, [(120, 130), (160, 161)], [(0, MIDDLE - 1, 150), (MIDDLE, END, 100)])
        consumers = [
            members.enter_context(
                Consumer(broker.address, group_id="g", client_id=name, allow_key_share=True, enable_auto_commit=False)
            )
            for name in ("one", "two")
        ]
        for consumer in consumers:
            consumer.subscribe("t")
        deadline = time.monotonic() + 20
        while not all(consumer.key_ranges().get(tp) for consumer in consumers):
            assert time.monotonic() < deadline, [consumer.key_ranges() for consumer in consumers]
            for consumer in consumers:
                consumer.poll(0.05)
        consumers.sort(key=lambda consumer: consumer.key_ranges()[tp])
        lower, upper = (consumer.group_metadata().member_id for consumer in consumers)
        with Admin(broker.address) as admin:
            found = admin.list_group_offsets("g")[tp]
        assert list(found.gaps) == [Gap(100, 119, (upper,)), Gap(131, 159, (lower, upper))]
        (described,) = document(broker.address, "group", "describe", "g")
        assert described["offsets"][0]["gap_owners"] == [[upper], [lower, upper]]
