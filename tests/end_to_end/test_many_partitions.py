"""Some thousand partitions: made, killed, found again, deleted, refused above the limit; idle ones are nearly free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.create_topics import CreatableTopic, CreateTopicsRequest
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

COUNT = 4_000
TOPICS = 300
WRITTEN = range(0, COUNT, 97)
TIMEOUT_MS, TIMEOUT_S = 120_000, 120.0


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that may hold so many partitions."""
    made = BrokerProcess(tmp_path, max_partitions_per_broker=COUNT + TOPICS)
    try:
        yield made.start()
        if made.alive:
            assert made.stop() == 0 and not made.said("error")
    finally:
        if made.alive:
            made.kill()


def create(client: WireClient, counts: dict[str, int]) -> list[tuple[int, str | None]]:
    """Create topics with one request; the error and its message of each."""
    asked = [CreatableTopic(name=name, num_partitions=count, replication_factor=1) for name, count in counts.items()]
    answer = client.call(CreateTopicsRequest(topics=asked, timeout_ms=TIMEOUT_MS))
    return [(it.error_code, it.error_message or None) for it in answer.topics]


def delete(client: WireClient, names: list[str]) -> set[int]:
    """Delete topics with one request; the errors."""
    asked = [DeleteTopicState(name=name) for name in names]
    answer = client.call(DeleteTopicsRequest(topics=asked, timeout_ms=TIMEOUT_MS))
    return {it.error_code for it in answer.responses}


def logs(broker: BrokerProcess) -> set[str]:
    """The directories of logs."""
    return {path.name for path in broker.data.iterdir() if path.is_dir() and not path.name.startswith(".")}


def test_partitions_without_records_leave_nothing_on_the_disk_and_are_there_after_a_kill(broker: BrokerProcess) -> None:
    with WireClient(broker.port, TIMEOUT_S) as client:
        assert create(client, {"wide": COUNT}) == [(0, None)]
        assert create(client, {f"narrow-{number}": 1 for number in range(TOPICS)}) == [(0, None)] * TOPICS
        assert logs(broker) == set()
        for number in WRITTEN:
            assert client.produce("wide", number, batch([b"%d" % number])).error_code == ErrorCode.NONE
        assert logs(broker) == {f"wide-{number}" for number in WRITTEN}
    broker.kill()
    broker.start()
    with WireClient(broker.port, TIMEOUT_S) as client:
        found = client.metadata("wide").partitions
        assert [it.partition_index for it in found] == [*range(COUNT)] and {it.error_code for it in found} == {0}
        for number in WRITTEN:
            assert client.read_all("wide", number) == [(0, b"%d" % number)]
        assert client.read_all("wide", 1) == []
        assert client.produce("wide", 1, batch([b"late"])).base_offset == 0
        assert logs(broker) == {f"wide-{number}" for number in (1, *WRITTEN)}
        assert delete(client, ["wide", *(f"narrow-{number}" for number in range(TOPICS))]) == {0}
        assert logs(broker) == set()
        assert create(client, {"wide": 2}) == [(0, None)]
        assert client.read_all("wide", 0) == []


def test_partitions_above_the_limit_are_refused_with_a_sentence(broker: BrokerProcess) -> None:
    with WireClient(broker.port, TIMEOUT_S) as client:
        assert create(client, {"wide": COUNT, "last": TOPICS}) == [(0, None), (0, None)]
        ((error, message),) = create(client, {"more": 1})
        assert error == ErrorCode.POLICY_VIOLATION
        assert message is not None and f"max.partitions.per.broker is {COUNT + TOPICS}" in message
        grown = [CreatePartitionsTopic(name="last", count=TOPICS + 1)]
        (resized,) = client.call(CreatePartitionsRequest(topics=grown, timeout_ms=TIMEOUT_MS)).results
        assert resized.error_code == ErrorCode.POLICY_VIOLATION and "max.partitions" in resized.error_message
        asked = MetadataRequest(topics=[MetadataRequestTopic(name="auto")], allow_auto_topic_creation=True)
        assert client.call(asked).topics[0].error_code == ErrorCode.POLICY_VIOLATION
        assert client.produce("wide", 0, batch([b"on"])).error_code == ErrorCode.NONE
        assert delete(client, ["last"]) == {0}
        assert create(client, {"more": 1}) == [(0, None)]
