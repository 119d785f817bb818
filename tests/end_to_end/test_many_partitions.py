"""Some thousand partitions: made, killed, found again, deleted, refused above the limit; idle ones are nearly free."""

from __future__ import annotations

import threading
import time
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
DOOMED = 600
"""Logs of a deletion that is cut short."""
REMOVED_IN_S = 0.015
STOP_S_MAX = 4.0
SLOW_DISK = f"""
import shutil, time
remove = shutil.rmtree
def slowly(*arguments, **options):
    time.sleep({REMOVED_IN_S})
    remove(*arguments, **options)
shutil.rmtree = slowly
"""
"""Has directories removed as slowly as a busy disk does, 600 of them in 9 s."""


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


def left_over(broker: BrokerProcess) -> list[Path]:
    """The logs whose files are still to be removed."""
    return list(broker.data.glob(".deleted/*"))


def test_a_stop_ends_a_long_deletion_and_the_next_start_finishes_it_while_it_serves(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    (slow := tmp_path / "slow").mkdir()
    (slow / "sitecustomize.py").write_text(SLOW_DISK)
    broker.stop()
    broker.import_paths.append(slow)
    broker.data = tmp_path / "data"
    broker.start()
    with WireClient(broker.port, TIMEOUT_S) as client:
        assert create(client, {"wide": DOOMED, "kept": 1}) == [(0, None), (0, None)]
        for number in range(DOOMED):
            assert client.produce("wide", number, batch([b"%d" % number])).error_code == ErrorCode.NONE
        assert client.produce("kept", 0, batch([b"kept"])).error_code == ErrorCode.NONE
        answers: list[set[int]] = []
        asking = threading.Thread(target=lambda: answers.append(delete(client, ["wide"])))
        asking.start()
        while not left_over(broker):
            time.sleep(0.01)
        began = time.monotonic()
        assert broker.stop() == 0
        assert time.monotonic() - began < STOP_S_MAX
        asking.join()
        assert answers == [{ErrorCode.REQUEST_TIMED_OUT}] and not broker.said("error")
    assert len(left_over(broker)) + len(logs(broker)) > DOOMED // 2
    broker.start()
    assert left_over(broker), "a start does not wait until they are removed"
    with WireClient(broker.port, TIMEOUT_S) as client:
        assert client.metadata("wide").error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert client.read_all("kept", 0) == [(0, b"kept")]
        deadline = time.monotonic() + TIMEOUT_S
        while left_over(broker) or logs(broker) != {"kept-0"}:
            assert time.monotonic() < deadline, (left_over(broker)[:3], len(logs(broker)))
            assert client.produce("kept", 0, batch([b"more"])).error_code == ErrorCode.NONE
            time.sleep(0.05)
        assert create(client, {"wide": 2}) == [(0, None)]
        assert client.read_all("wide", 0) == []
