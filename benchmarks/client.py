"""The Arrow calls of our client against confluent-kafka's record calls: the same records, the same broker, records/s.

Records have 100 bytes, 8 of key and 92 of value, over 8 partitions; acks=all, idempotent, no compression. The broker is
ours with durability=os, so that the clients are what is measured. confluent-kafka is used the fast way that its API
has: `produce` without callbacks, `consume` of 10,000 messages at a time; neither side looks into the records it reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import cycle, islice
from time import perf_counter, process_time

import confluent_kafka
import pyarrow as pa

from anabranch.client.sync import Admin, Consumer, Producer
from benchmarks.harness import Bar, Result, Scale, compare
from benchmarks.peers.anabranch import Anabranch

TOPIC = "benchmark"
PARTITIONS = 8
KEYS = [b"key%05d" % number for number in range(100_000)]
VALUE = b"v" * 92
TIMEOUT_S = 60
PER_S = "records_per_second"
PER_CPU_S = "records_per_cpu_second"
_groups = itertools.count()


@contextmanager
def topic(address: str) -> Iterator[None]:
    """A topic for the time of a `with`."""
    with Admin(address) as admin:
        admin.create_topics(TOPIC, partitions=PARTITIONS)
        try:
            yield
        finally:
            admin.delete_topics(TOPIC)


def rate(count: int, began: float) -> Mapping[str, float]:
    return {PER_S: count / (perf_counter() - began)}


def tables(count: int) -> Iterator[pa.Table]:
    """So many records in tables of as many rows as there are keys."""
    whole = pa.table({"key": pa.array(KEYS, pa.binary()), "value": pa.array([VALUE] * len(KEYS), pa.binary())})
    for first in range(0, count, len(KEYS)):
        yield whole.slice(0, count - first)


def send_arrow(address: str, count: int) -> Mapping[str, float]:
    prepared = list(tables(count))
    with topic(address), Producer(address) as producer:
        producer.send_arrow(TOPIC, prepared[0].slice(0, PARTITIONS)).result(TIMEOUT_S)
        began = perf_counter()
        for table in prepared:
            producer.send_arrow(TOPIC, table)
        producer.flush()
        return rate(count, began)


def send(address: str, count: int) -> Mapping[str, float]:
    with topic(address), Producer(address) as producer:
        producer.send(TOPIC, VALUE).result(TIMEOUT_S)
        began = perf_counter()
        for key in islice(cycle(KEYS), count):
            producer.send(TOPIC, VALUE, key=key)
        producer.flush()
        return rate(count, began)


def confluent_produce(address: str, count: int) -> Mapping[str, float]:
    settings = {"bootstrap.servers": address, "enable.idempotence": True, "queue.buffering.max.messages": 1_000_000}
    with topic(address):
        producer = confluent_kafka.Producer(settings)
        producer.produce(TOPIC, VALUE)
        producer.flush(TIMEOUT_S)
        began = perf_counter()
        for key in islice(cycle(KEYS), count):
            while True:
                try:
                    producer.produce(TOPIC, VALUE, key)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.flush()
        return rate(count, began)


def fill(address: str, count: int) -> None:
    with Producer(address) as producer:
        for table in tables(count):
            producer.send_arrow(TOPIC, table)


def poll_arrow(address: str, count: int) -> Mapping[str, float]:
    with Consumer(address, auto_offset_reset="earliest") as consumer:
        consumer.assign(TOPIC)
        began = perf_counter()
        read = 0
        while read < count:
            read += consumer.poll_arrow(TIMEOUT_S).num_rows
        return rate(read, began)


def poll(address: str, count: int) -> Mapping[str, float]:
    with Consumer(address, auto_offset_reset="earliest", max_poll_records=10_000) as consumer:
        consumer.assign(TOPIC)
        began = perf_counter()
        read = 0
        while read < count:
            read += len(consumer.poll(TIMEOUT_S))
        return rate(read, began)


def poll_in_group(address: str, count: int, *, ordered: bool) -> Mapping[str, float]:
    """Read the topic with ordered delivery or without; it is one topic, so that both sides read the same files."""
    with Admin(address) as admin:
        admin.alter_configs("topic", TOPIC, {"enable.ordered.delivery": str(ordered).lower()})
    group = f"{TOPIC}-{next(_groups)}"
    with Consumer(address, group_id=group, auto_offset_reset="earliest") as consumer:
        consumer.subscribe(TOPIC)
        read = 0
        while not consumer.assignment():
            read += consumer.poll_arrow(0.01).num_rows
        began, worked = perf_counter(), process_time()
        while read < count:
            read += consumer.poll_arrow(TIMEOUT_S).num_rows
        return {**rate(read, began), PER_CPU_S: read / (process_time() - worked)}


def confluent_consume(address: str, count: int) -> Mapping[str, float]:
    settings = {"bootstrap.servers": address, "group.id": TOPIC, "enable.auto.commit": False}
    consumer = confluent_kafka.Consumer(settings)
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)])
    began = perf_counter()
    read = 0
    while read < count:
        read += len(consumer.consume(10_000, TIMEOUT_S))
    measured = rate(read, began)
    consumer.close()
    return measured


def produce(scale: Scale) -> Iterator[Result]:
    """`send_arrow`, and `send`, against confluent-kafka's `produce`."""
    many, few = scale.choose((4_000_000, 400_000), (20_000, 5_000))
    with Anabranch(settings={"durability": "os"}) as broker:
        address = broker.address
        yield from compare(
            "client.send_arrow",
            what=f"{many} records in tables of {len(KEYS)}; confluent-kafka produces {few}",
            sides={
                "anabranch": lambda: send_arrow(address, many),
                "confluent-kafka": lambda: confluent_produce(address, few),
            },
            bars=[Bar(PER_S, "records/s", "more", 10)],
            scale=scale,
        )
        yield from compare(
            "client.send",
            what=f"{few} records one by one",
            sides={
                "anabranch": lambda: send(address, few),
                "confluent-kafka": lambda: confluent_produce(address, few),
            },
            bars=[Bar(PER_S, "records/s", "more", 0.5)],
            scale=scale,
        )


@contextmanager
def filled(records: int) -> Iterator[str]:
    """The address of a broker whose topic has so many records."""
    with Anabranch(settings={"durability": "os"}) as broker, topic(broker.address):
        fill(broker.address, records)
        yield broker.address


def consume(scale: Scale) -> Iterator[Result]:
    """`poll_arrow`, and `poll`, against confluent-kafka's `consume`."""
    many, few = scale.choose((4_000_000, 800_000), (20_000, 5_000))
    with filled(many) as address:
        yield from compare(
            "client.poll_arrow",
            what=f"{many} records as tables; confluent-kafka consumes {few}",
            sides={
                "anabranch": lambda: poll_arrow(address, many),
                "confluent-kafka": lambda: confluent_consume(address, few),
            },
            bars=[Bar(PER_S, "records/s", "more", 10)],
            scale=scale,
        )
        yield from compare(
            "client.poll",
            what=f"{few} records one by one, 10,000 at a time",
            sides={
                "anabranch": lambda: poll(address, few),
                "confluent-kafka": lambda: confluent_consume(address, few),
            },
            bars=[Bar(PER_S, "records/s", "more", 2.0)],
            scale=scale,
        )


def consume_ordered(scale: Scale) -> Iterator[Result]:
    """A member of a group, of a topic that is not resized: with ordered delivery, and with it switched off."""
    records = scale.choose(40_000_000, 20_000)
    with filled(records) as address:
        yield from compare(
            "client.consume_ordered",
            what=f"{records} records as tables, in a group; the other side has enable.ordered.delivery=false",
            sides={
                "ordered": lambda: poll_in_group(address, records, ordered=True),
                "unordered": lambda: poll_in_group(address, records, ordered=False),
            },
            bars=[Bar(PER_S, "records/s", "more", 0.97), Bar(PER_CPU_S, "records/CPU s", "more", 0.97)],
            scale=scale,
        )


BENCHMARKS = {"produce": produce, "consume": consume, "consume_ordered": consume_ordered}
