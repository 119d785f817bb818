"""The cleaner on a real broker with a compacted topic of thousands of partitions, resized both ways: in short steps.

What takes some microseconds for each partition of the topic, and is not divided, shows in the steps of the upkeep.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID
from anabranch.machines.placement import place
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from anabranch.records.batch import headers
from anabranch.records.hashing import placement_hash
from tests.support.broker import BrokerProcess, running
from tests.support.steps import TRIES, long_steps
from tests.support.thorough import thorough
from tests.support.wire import WireClient, batch, values_of

TOPIC, COUNT = "wide", thorough(4_000, 2_000)
KEYS = [b"key-%d" % number for number in range(thorough(120, 60))]
BACKOFF_MS = 300
TIMEOUT_MS, DEADLINE_S = 112_000, 120.0
CLEANER = "Broker._every"
"""The work of the steps of the upkeep."""
CONFIGS = {
    "cleanup_policy": "compact",
    "segment_bytes": "14",
    "min_cleanable_dirty_ratio": "0",
    "delete_retention_ms": "0",
}


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def counted(broker: BrokerProcess, what: str) -> float:
    return broker.metrics().get(f"anabranch_compaction_{what}_total", 0.0)


def long_cleaner_steps(broker: BrokerProcess) -> float:
    return sum(count for name, count in long_steps(broker).items() if CLEANER in name)


def put(client: WireClient, count: int, value: bytes | None) -> None:
    """Write all keys, where a topic of `count` partitions has them; a value says whose it is."""
    left = {number: list[bytes]() for number in range(count)}
    for key in KEYS:
        left[place(placement_hash(key), 1, count)].append(key)
    while some := {number: keys.pop() for number, keys in left.items() if keys}:
        data = [
            PartitionProduceData(index=number, records=bytes(batch([value and key + b"=" + value], key=key)))
            for number, key in some.items()
        ]
        topics = [TopicProduceData(name=TOPIC, partition_data=data, undeleted_partition_count=COUNT_NOT_SAID)]
        asked = ProduceRequest(transactional_id=None, acks=-1, timeout_ms=TIMEOUT_MS, topic_data=topics)
        answers = client.call(asked, 12).responses[0].partition_responses
        assert {answer.error_code for answer in answers} == {ErrorCode.NONE}


def found_in(client: WireClient, partition: int) -> dict[bytes, bytes]:
    """The last value of each key in a partition, tombstones left out."""
    found: dict[bytes, bytes] = {}
    offset = 0
    while (answer := client.fetch(TOPIC, partition, offset)).records:
        found |= dict(value.split(b"=") for _, value in values_of(answer.records) if value)
        offset = max(header.next_offset for _, header in headers(answer.records))
    return found


def test_a_wide_compacted_topic_is_cleaned_and_folded_back_in_short_steps(tmp_path: Path) -> None:
    found: list[float] = []
    with (
        running(tmp_path, log_cleaner_backoff_ms=BACKOFF_MS, reaper_interval_ms=100) as broker,
        WireClient(broker.port, DEADLINE_S) as client,
    ):

        def there_and_back(value: bytes) -> None:
            cleaned, emptied = counted(broker, "runs"), counted(broker, "emptied_partitions")
            assert client.resize(TOPIC, COUNT, TIMEOUT_MS) is ErrorCode.NONE
            for written in (b"grown", None, value):
                put(client, COUNT, written)
            until(lambda: counted(broker, "runs") >= cleaned + len(KEYS) / 2)
            assert client.resize(TOPIC, 1, TIMEOUT_MS) is ErrorCode.NONE
            until(lambda: broker.metrics()["kafka_server_replicamanager_partitioncount"] == 1)
            assert counted(broker, "emptied_partitions") >= emptied + len(KEYS) / 2
            assert found_in(client, 0) == dict.fromkeys(KEYS, value)

        client.create(TOPIC, 1, **CONFIGS)
        put(client, 1, b"first")
        for turn in range(TRIES):
            before = long_cleaner_steps(broker)
            there_and_back(b"%d" % turn)
            found.append(long_cleaner_steps(broker) - before)
            if not found[-1]:
                break
        assert counted(broker, "failures") == 0
    assert not found[-1], f"steps of more than 10 ms of processor time: {found}"
    assert not broker.said("error")
