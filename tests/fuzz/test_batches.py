"""Hostile batches, some of them: `make fuzz` judges a million."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from confluent_kafka import Consumer, TopicPartition

from anabranch.base.errors import ErrorCode
from anabranch.machines.partition.appending import Refuse
from anabranch.machines.partition.checking import check_batches
from anabranch.records.batch import stamp_crc
from anabranch.records.examination import Accepted, Examine, Examined, Malformed, examine
from tests.fuzz.batches import NOW_MS, FoundError, Fuzz, Limits, expected, machine_code, make
from tests.fuzz.strict import ObjectionError
from tests.support.broker import running
from tests.support.wire import WireClient, batch

BATCHES = 2_000
SENT = 600


def test_what_is_accepted_is_exactly_what_is_sound_and_can_be_read() -> None:
    fuzz = Fuzz(seed=11, machine=machine_code().examine)
    fuzz.run(range(BATCHES))
    assert fuzz.counts.total() == BATCHES
    assert fuzz.counts["accepted"] > BATCHES / 5
    kinds = {"INVALID_RECORD", "INVALID_TIMESTAMP", "CORRUPT_MESSAGE", "UNSUPPORTED_COMPRESSION_TYPE"}
    assert kinds <= set(fuzz.counts)


def _forgets(rule: Malformed) -> Examine:
    """An examination without a rule."""

    def careless(
        records: bytes | bytearray | memoryview,
        count: int,
        base_timestamp: int,
        max_timestamp: int,
        accepted: Accepted,
    ) -> Examined | None:
        found = examine(records, count, base_timestamp, max_timestamp, accepted)
        return None if found is not None and found.malformed is rule else found

    return careless


@pytest.mark.parametrize("rule", [rule for rule in Malformed if rule])
def test_a_rule_that_is_forgotten_is_found_out(rule: Malformed) -> None:
    with pytest.raises(FoundError):
        Fuzz(seed=11, machine=_forgets(rule)).run(range(BATCHES))


def test_stock_readers_read_what_is_accepted_and_nothing_else(tmp_path: Path) -> None:
    values: list[list[bytes | None]] = [[], []]
    late = str(2**63 - 1)
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.create("t0", message_timestamp_after_max_ms=late, retention_ms="-1")
        client.create("t1", message_timestamp_after_max_ms=late, cleanup_policy="compact")
        for number in range(SENT):
            hostile = make(Random(f"5/{number}"))
            limits = Limits(keyed=bool(number % 2), timestamp_after_max_ms=2**63 - 1)
            records = expected(hostile._replace(limits=limits))
            if not hostile.comparable or (
                not isinstance(records, ObjectionError) and hostile.data[43:51] != b"\xff" * 8
            ):
                continue  # Sequences are not the matter here.
            answer = client.produce(f"t{number % 2}", 0, hostile.data)
            assert (answer.error_code == ErrorCode.NONE) is not isinstance(records, ObjectionError), (number, answer)
            assert answer.error_code == ErrorCode.NONE or answer.error_message
            if not isinstance(records, ObjectionError):
                values[number % 2] += [record.value for record in records]
        for number, wanted in enumerate(values):
            assert len(wanted) > 100
            assert _read(f"127.0.0.1:{broker.port}", f"t{number}", len(wanted)) == wanted
        assert not broker.said("error"), broker.said("error")


def _read(address: str, topic: str, count: int) -> list[bytes | None]:
    consumer = Consumer({"bootstrap.servers": address, "group.id": "readers", "enable.partition.eof": True})
    consumer.assign([TopicPartition(topic, 0, 0)])
    found: list[bytes | None] = []
    while True:
        message = consumer.poll(20)
        assert message is not None, f"{len(found)} of {count} records, then nothing"
        error = message.error()
        if error is not None:
            assert error.name() == "_PARTITION_EOF", error
            break
        found.append(message.value())
    consumer.close()
    return found


def test_the_batch_that_hung_a_broker_is_refused() -> None:
    """A count of 2^31 - 1, and a record of length -1."""
    hostile = batch([b""], timestamp=NOW_MS)
    del hostile[62:]
    hostile[61] = 1
    hostile[8:12] = (len(hostile) - 12).to_bytes(4, "big")
    hostile[23:27] = (2**31 - 2).to_bytes(4, "big")
    hostile[57:61] = (2**31 - 1).to_bytes(4, "big")
    stamp_crc(hostile)
    found = check_batches(memoryview(hostile), Limits(), NOW_MS, machine_code().examine)
    assert isinstance(found, Refuse)
    assert found.code is ErrorCode.INVALID_RECORD
