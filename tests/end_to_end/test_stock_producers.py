"""Stock producers whose topic loses partitions while records for them are on the way."""

from __future__ import annotations

from pathlib import Path

from confluent_kafka import Producer

from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient

TOPIC = "moors"


def removed_under(broker: BrokerProcess, producer: Producer) -> None:
    """Have a producer write to partitions that are emptied and removed afterwards."""
    with WireClient(broker.port) as wire:
        wire.create(TOPIC, 1)
        wire.resize(TOPIC, 3)
        for partition in range(3):
            producer.produce(TOPIC, f"before-{partition}", partition=partition)
        assert producer.flush(20) == 0
        wire.resize(TOPIC, 1)
        for partition in (2, 1):
            wire.delete_everything(TOPIC, partition)
        wire.until_partitions(TOPIC, 1)


def test_records_for_removed_partitions_arrive_after_the_broker_was_away(tmp_path: Path) -> None:
    """librdkafka takes no lower count; with its default recovery it would forget who leads the removed partitions."""
    with running(tmp_path) as broker:
        broker.settings["listeners"] = f"127.0.0.1:{broker.port}"
        failed: list[object] = []
        producer = Producer(
            {
                "bootstrap.servers": broker.settings["listeners"],
                "enable.idempotence": True,
                "metadata.recovery.strategy": "none",
                "topic.metadata.refresh.interval.ms": 200,
                "log_level": 0,
            }
        )
        removed_under(broker, producer)
        values = [f"after-{number}" for number in range(40)]
        for number, value in enumerate(values):
            if number == 20:
                broker.kill()
            producer.produce(
                TOPIC, value, partition=number % 3, on_delivery=lambda error, _: error and failed.append(error)
            )
        broker.start()
        assert producer.flush(30) == 0 and not failed
        with WireClient(broker.port) as wire:
            read = [value.decode() for _, value in wire.read_all(TOPIC)]
        assert sorted(value for value in read if value.startswith("after")) == sorted(values)
