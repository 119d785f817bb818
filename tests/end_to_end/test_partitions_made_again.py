"""Groups that begin at the end of a topic, and partitions that are removed or emptied and come back later.

A partition that is made again has the number of the removed one, and its offsets continue those of the removed one.
Neither an offset that a group committed in the removed partition nor the group's beginning there applies to the new
one. The new partition appeared after the group began, so that the group reads all of it, whatever `auto.offset.reset`
says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.support.applications import QUICK
from tests.support.broker import BrokerProcess, running
from tests.support.group_client import GroupClient
from tests.support.wire import batch

TOPIC = "t"
GROUP = "z"
"""A coordinator settles it after `OTHERS`."""
SOON_S = 20.0
OTHERS = [f"g{number:03}" for number in range(500)]
"""More groups than a coordinator settles in one decision."""
ONE_COORDINATOR = {**QUICK, "offsets.topic.num.partitions": 1}
OLD = [b"old %d" % number for number in range(10)]
NEW = [b"new %d" % number for number in range(6)]

both_protocols = pytest.mark.parametrize("protocol", ["classic", "consumer"])


class Member:
    """A stock consumer that begins at the end of a partition without a committed offset, and commits nothing."""

    def __init__(self, address: str, protocol: str) -> None:
        self.values: list[bytes] = []
        settings = {"bootstrap.servers": address, "group.id": GROUP, "group.protocol": protocol, "log_level": 0}
        reading = {"auto.offset.reset": "latest", "enable.auto.commit": False, "fetch.wait.max.ms": 100}
        self.consumer = Consumer({**settings, **reading, "topic.metadata.refresh.interval.ms": 200})
        self.consumer.subscribe([TOPIC])

    def poll_until(self, true: Callable[[], bool]) -> bool:
        """Poll until a condition is true; return whether it became true soon."""
        deadline = time.monotonic() + SOON_S
        while not true() and time.monotonic() < deadline:
            record = self.consumer.poll(0.05)
            if record is not None and record.error() is None:
                self.values.append(record.value() or b"")
        return true()

    def holds(self, *partitions: int) -> bool:
        """Poll until exactly these partitions are assigned; return whether they are."""
        return self.poll_until(lambda: {it.partition for it in self.consumer.assignment()} == set(partitions))

    def read(self, count: int) -> list[bytes]:
        """Poll until `count` records have been read; return what has been read, which may be less."""
        self.poll_until(lambda: len(self.values) >= count)
        return self.values


@contextmanager
def member(address: str, protocol: str) -> Iterator[Member]:
    made = Member(address, protocol)
    try:
        yield made
    finally:
        made.consumer.close()


@contextmanager
def grown_topic(broker: BrokerProcess, partitions: int, **configs: str) -> Iterator[GroupClient]:
    """Create the topic with one partition, resize it, and write `OLD` to partition 1; a client."""
    with GroupClient(broker.port) as client:
        client.create(TOPIC, 1, **configs)
        client.ready(GROUP)
        assert client.resize(TOPIC, partitions) is ErrorCode.NONE
        write(client, 1, OLD)
        yield client


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with running(tmp_path, **ONE_COORDINATOR) as process:
        process.settings["listeners"] = process.address  # A restart keeps the port.
        yield process


def write(client: GroupClient, partition: int, values: list[bytes]) -> None:
    assert client.produce(TOPIC, partition, batch(values)).error_code == ErrorCode.NONE


def commit(client: GroupClient, offsets: dict[int, int]) -> None:
    found = {(TOPIC, partition): offset for partition, offset in offsets.items()}
    assert set(client.commit(GROUP, found)) == {ErrorCode.NONE}


def commit_for_many(client: GroupClient, groups: list[str]) -> None:
    """Commit offset 0 of partition 0 for each group."""
    parts = [OffsetCommitRequestPartition(partition_index=0, committed_offset=0)]
    topics = [OffsetCommitRequestTopic(name=TOPIC, partitions=parts)]
    sent = [client.send(OffsetCommitRequest(group_id=group, topics=topics), 9) for group in groups]
    for each in sent:
        assert client.receive(each).topics[0].partitions[0].error_code == ErrorCode.NONE


def offsets_in(client: GroupClient, groups: list[str], partition: int) -> set[tuple[int, ErrorCode]]:
    """Fetch the committed offset of a partition for each group; return the different answers."""
    answers = [client.fetched(group, {TOPIC: [partition]}).topics[0].partitions[0] for group in groups]
    return {(answer.committed_offset, ErrorCode(answer.error_code)) for answer in answers}


def remove_partition_1(client: GroupClient) -> None:
    """Shrink the topic to one partition, delete the records of partition 1, and wait until the partition is removed."""
    assert client.resize(TOPIC, 1) is ErrorCode.NONE
    assert client.delete_everything(TOPIC, 1) == len(OLD)
    client.until_partitions(TOPIC, 1)


@pytest.mark.parametrize("ordered", ["true", "false"])
@both_protocols
def test_a_group_that_was_away_reads_all_of_a_partition_that_was_made_again(
    broker: BrokerProcess, protocol: str, ordered: str
) -> None:
    """The offset committed in the removed partition is out of range in the new one: the reset skipped all of that."""
    with grown_topic(broker, 2, enable_ordered_delivery=ordered) as client:
        commit(client, {0: 0, 1: 5})
        with member(broker.address, protocol) as before:
            assert before.read(5) == OLD[5:]
        remove_partition_1(client)
        assert client.resize(TOPIC, 2) is ErrorCode.NONE
        write(client, 1, NEW)
        with member(broker.address, protocol) as after:
            assert after.read(len(NEW)) == NEW


@both_protocols
def test_a_member_reads_all_of_a_partition_that_is_taken_from_it_and_made_again(
    broker: BrokerProcess, protocol: str
) -> None:
    with grown_topic(broker, 2) as client:
        commit(client, {0: 0, 1: 5})
        with member(broker.address, protocol) as reader:
            assert reader.read(5) == OLD[5:]
            remove_partition_1(client)
            assert reader.holds(0)
            assert client.resize(TOPIC, 2) is ErrorCode.NONE
            write(client, 1, NEW)
            assert reader.holds(0, 1)
            assert reader.read(5 + len(NEW)) == OLD[5:] + NEW


@both_protocols
def test_a_group_that_was_away_reads_all_of_a_partition_that_was_emptied_before_it_came_back(
    broker: BrokerProcess, protocol: str
) -> None:
    """Partition 2 has a record, so that neither partition 2 nor partition 1 is removed."""
    with grown_topic(broker, 3) as client:
        write(client, 2, [b"read"])
        commit(client, {0: 0, 1: 5, 2: 1})
        with member(broker.address, protocol) as before:
            assert before.read(5) == OLD[5:]
        assert client.resize(TOPIC, 1) is ErrorCode.NONE
        assert client.delete_everything(TOPIC, 1) == len(OLD)
        assert client.resize(TOPIC, 3) is ErrorCode.NONE
        write(client, 1, NEW)
        with member(broker.address, protocol) as after:
            assert after.read(len(NEW)) == NEW


@both_protocols
def test_a_group_that_was_away_reads_all_of_a_partition_that_was_made_again_before_its_turn_to_be_settled(
    broker: BrokerProcess, protocol: str
) -> None:
    """The partition existed when the group began, and existed again when the coordinator settled the group."""
    with GroupClient(broker.port) as client:
        client.create(TOPIC, 1)
        client.ready(GROUP)
        assert client.resize(TOPIC, 2) is ErrorCode.NONE
        with member(broker.address, protocol) as before:
            assert before.holds(0, 1)
        commit(client, {0: 0})
        commit_for_many(client, OTHERS)
        assert client.resize(TOPIC, 1) is ErrorCode.NONE
        client.until_partitions(TOPIC, 1)
        assert client.resize(TOPIC, 2) is ErrorCode.NONE
        write(client, 1, NEW)
        with member(broker.address, protocol) as after:
            assert after.read(len(NEW)) == NEW


def test_groups_that_only_have_offsets_begin_at_the_start_of_a_partition_added_before_the_broker_was_killed(
    broker: BrokerProcess,
) -> None:
    """After a restart the coordinator settled only groups with members."""
    with GroupClient(broker.port) as client:
        client.create(TOPIC, 1)
        client.ready(GROUP)
        commit_for_many(client, OTHERS)
        assert client.resize(TOPIC, 2) is ErrorCode.NONE
        broker.kill()
    broker.start()
    with GroupClient(broker.port) as client:
        client.ready(GROUP)
        deadline = time.monotonic() + SOON_S
        while (found := offsets_in(client, OTHERS, 1)) != {(0, ErrorCode.NONE)}:
            assert time.monotonic() < deadline, found
            time.sleep(0.05)


def test_a_late_commit_of_a_removed_partition_leaves_the_position_in_the_one_that_was_made_again(
    broker: BrokerProcess,
) -> None:
    """It took the place of that: clients that read from the end skipped what was written since."""
    with grown_topic(broker, 2) as client:
        commit(client, {0: 0, 1: 5})
        remove_partition_1(client)
        assert client.resize(TOPIC, 2) is ErrorCode.NONE
        write(client, 1, NEW)
        for late in (None, 7):
            if late is not None:
                commit(client, {1: late})
            assert offsets_in(client, [GROUP], 1) == {(len(OLD), ErrorCode.NONE)}
