"""Our broker against Apache Kafka: same clients, same durability, the machine's cores shared with the client.

The clients are the Java one (ProducerPerformance, and a KafkaConsumer by assignment) and, as a second, librdkafka. What
a broker costs is the CPU time of its process tree while the client works. Our `durability=os` is what Apache Kafka does
by default.
"""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import pyarrow as pa

from benchmarks.harness import Bar, Result, Round, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.peers.artifacts import KAFKA_LOCK, fetch, java
from benchmarks.peers.java import JavaMachine
from benchmarks.peers.kafka import ApacheKafka
from benchmarks.peers.process import ServerProcess
from benchmarks.resizing import Load, grow_under_load

Pair = Mapping[str, ServerProcess]
RECORD_SIZE = 1024
WAIT_MAX_MS = 250.0
GB = 1e9
REPORT = re.compile(
    r"(?P<records>\d+) records sent, (?P<rate>[\d.]+) records/sec .*?"
    r"(?P<p50>\d+) ms 50th, (?P<p95>\d+) ms 95th, (?P<p99>\d+) ms 99th"
)


@contextmanager
def both(
    ours: Mapping[str, str], theirs: Mapping[str, str], scale: Scale, running: Pair | None = None
) -> Iterator[Mapping[str, ServerProcess]]:
    """Run the two brokers with these settings, or ours alone, or use a pair that runs already."""
    if running is not None:
        yield running
        return
    with ExitStack() as stack:
        servers: dict[str, ServerProcess] = {"anabranch": stack.enter_context(Anabranch(settings=ours))}
        if not scale.alone:
            servers["apache-kafka"] = stack.enter_context(ApacheKafka(settings=theirs))
        yield servers


def _topic(server: ServerProcess, partitions: int) -> str:
    from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

    name = f"bench-{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": server.address, "log_level": 0})
    (created,) = admin.create_topics([NewTopic(name, partitions, 1)]).values()
    created.result(30)
    return name


def _delete(server: ServerProcess, topic: str) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": server.address, "log_level": 0})
    (deleted,) = admin.delete_topics([topic]).values()
    deleted.result(30)


def _perform(server: ServerProcess, topic: str, records: int, rate: int, **settings: str) -> dict[str, float]:
    """Run ProducerPerformance; its report, and the broker's CPU seconds per GB of record data."""
    options = [f"{name.replace('_', '.')}={value}" for name, value in settings.items()]
    command = [java(), "-Xmx512M", "-cp", os.pathsep.join(map(str, fetch(KAFKA_LOCK)))]
    command += ["org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", str(records)]
    command += ["--record-size", str(RECORD_SIZE), "--throughput", str(rate), "--producer-props"]
    before = server.usage().cpu_s
    done = subprocess.run(
        [*command, f"bootstrap.servers={server.address}", *options], capture_output=True, text=True, check=False
    )
    found = [match for match in map(REPORT.search, done.stdout.splitlines()) if match]
    if done.returncode or not found:
        raise RuntimeError(f"ProducerPerformance failed:\n{done.stdout}{done.stderr}\n{server.log_tail()}")
    report = {name: float(value) for name, value in found[-1].groupdict().items()}
    assert report["records"] == records
    report["cpu_s_per_gb"] = (server.usage().cpu_s - before) / (records * RECORD_SIZE / GB)
    report["bytes_per_s"] = report["rate"] * RECORD_SIZE
    return report


def _produced(server: ServerProcess, partitions: int, records: int, rate: int, **settings: str) -> Round:
    def once() -> Mapping[str, float]:
        topic = _topic(server, partitions)
        try:
            return _perform(server, topic, records, rate, **settings)
        finally:
            _delete(server, topic)

    return once


BYTES_AND_CPU = (Bar("bytes_per_s", "B/s", "more", 1.0), Bar("cpu_s_per_gb", "s/GB", "less", 1.0))


def produce(scale: Scale, running: Pair | None = None) -> list[Result]:
    """Bytes in per second, and what a GB in costs the broker."""
    records = scale.choose(400_000, 5_000)
    with both({"durability": "os"}, {}, scale, running) as servers:
        return compare(
            "broker.produce",
            what=f"{records} records of 1 KiB into one partition by ProducerPerformance, acks=all, defaults otherwise",
            sides={name: _produced(server, 1, records, -1, acks="all") for name, server in servers.items()},
            bars=BYTES_AND_CPU,
            scale=scale,
        )


def produce_librdkafka(scale: Scale, running: Pair | None = None) -> list[Result]:
    """The same by librdkafka."""
    from confluent_kafka import Producer

    records = scale.choose(400_000, 5_000)
    value = os.urandom(RECORD_SIZE)

    def produced(server: ServerProcess) -> Round:
        def once() -> Mapping[str, float]:
            topic = _topic(server, 1)
            errors: list[object] = []

            def delivered(error: object, _: object) -> None:
                if error is not None:
                    errors.append(error)

            producer = Producer(
                {
                    "bootstrap.servers": server.address,
                    "acks": "all",
                    "log_level": 0,
                    "queue.buffering.max.kbytes": 65_536,
                    "on_delivery": delivered,
                }
            )
            with _measured(server, records) as figures:
                for _ in range(records):
                    while True:
                        try:
                            producer.produce(topic, value)
                            break
                        except BufferError:
                            producer.poll(0.01)
                while producer.flush(60):
                    pass
            assert not errors, errors[0]
            _delete(server, topic)
            return figures

        return once

    with both({"durability": "os"}, {}, scale, running) as servers:
        return compare(
            "broker.produce_librdkafka",
            what=f"{records} records of 1 KiB into one partition by librdkafka (confluent-kafka), acks=all, "
            "64 MiB of queue, defaults otherwise",
            sides={name: produced(server) for name, server in servers.items()},
            bars=BYTES_AND_CPU,
            scale=scale,
        )


def consume(scale: Scale, running: Pair | None = None) -> list[Result]:
    """Bytes out per second, and what a GB out costs the broker."""
    records = scale.choose(400_000, 5_000)

    def consumed(machine: JavaMachine, server: ServerProcess, topic: str) -> Round:
        def once() -> Mapping[str, float]:
            consumer = machine.consumer(server.address, {"max.poll.records": "100000"})
            at = machine.list([machine.partition(topic, 0)])
            consumer.assign(at)
            consumer.seekToBeginning(at)
            wait, count = machine.jvm.java.time.Duration.ofSeconds(1), 0
            with _measured(server, records) as figures:
                while count < records:
                    count += consumer.poll(wait).count()
            consumer.close()
            return figures

        return once

    with both({"durability": "os"}, {}, scale, running) as servers, JavaMachine("-Xmx512M") as machine:
        return compare(
            "broker.consume",
            what=f"{records} records of 1 KiB from one partition by the Java client, by assignment, defaults otherwise",
            sides={name: consumed(machine, server, _filled(server, records)) for name, server in servers.items()},
            bars=BYTES_AND_CPU,
            scale=scale,
        )


def consume_librdkafka(scale: Scale, running: Pair | None = None) -> list[Result]:
    """The same by librdkafka."""
    from confluent_kafka import Consumer, TopicPartition

    records = scale.choose(400_000, 5_000)

    def consumed(server: ServerProcess, topic: str) -> Round:
        def once() -> Mapping[str, float]:
            settings = {"group.id": "unused", "enable.auto.commit": False, "auto.offset.reset": "earliest"}
            consumer = Consumer({"bootstrap.servers": server.address, "log_level": 0, **settings})
            consumer.assign([TopicPartition(topic, 0, 0)])
            count = 0
            with _measured(server, records) as figures:
                while count < records:
                    count += len(consumer.consume(10_000, 0.1))
            consumer.close()
            return figures

        return once

    with both({"durability": "os"}, {}, scale, running) as servers:
        return compare(
            "broker.consume_librdkafka",
            what=f"{records} records of 1 KiB from one partition by librdkafka (confluent-kafka), by assignment",
            sides={name: consumed(server, _filled(server, records)) for name, server in servers.items()},
            bars=BYTES_AND_CPU,
            scale=scale,
        )


def _filled(server: ServerProcess, records: int) -> str:
    topic = _topic(server, 1)
    _perform(server, topic, records, -1, acks="all")
    return topic


@contextmanager
def _measured(server: ServerProcess, records: int) -> Iterator[dict[str, float]]:
    """Fill in the bytes a second and the broker's CPU seconds a GB of what is done inside."""
    size = records * RECORD_SIZE
    figures: dict[str, float] = {}
    before, began = server.usage().cpu_s, time.perf_counter()
    yield figures
    figures["bytes_per_s"] = size / (time.perf_counter() - began)
    figures["cpu_s_per_gb"] = (server.usage().cpu_s - before) / (size / GB)


def latency(scale: Scale, running: Pair | None = None) -> list[Result]:
    """The 99th percentile of acks=all at 5,000 records a second."""
    rate = scale.choose(5_000, 500)
    records = rate * scale.choose(10, 1)
    with both({"durability": "os"}, {}, scale, running) as servers:
        return compare(
            "broker.latency",
            what=f"ProducerPerformance at {rate} records/s of 1 KiB, acks=all, {records} records; its 99th percentile",
            sides={name: _produced(server, 1, records, rate, acks="all") for name, server in servers.items()},
            bars=[Bar("p99", "ms", "less", 1.0), Bar("p50", "ms", "less")],
            scale=scale,
        )


def acks_one(scale: Scale) -> list[Result]:
    """What it costs that acks=1 is answered when its records are visible: the same where that is at once."""
    rate = scale.choose(1_000, 500)
    records = rate * scale.choose(15, 1)
    with ExitStack() as stack:
        sides = {
            side: stack.enter_context(Anabranch(settings={"durability": durability}))
            for side, durability in (("anabranch", "fsync"), ("durability=os", "os"))
        }
        return compare(
            "broker.acks_one",
            what=f"ProducerPerformance at {rate} records/s of 1 KiB, acks=1, {records} records; "
            "durability=fsync against os",
            sides={name: _produced(server, 1, records, rate, acks="1") for name, server in sides.items()},
            bars=[Bar("p50", "ms", "less"), Bar("p99", "ms", "less")],
            scale=scale,
        )


def durable(scale: Scale, running: Pair | None = None) -> list[Result]:
    """Records a second that are on the disk when they are acknowledged."""
    records = scale.choose(100_000, 500)  # the client's first seconds are those of a cold virtual machine
    settings = {"acks": "all", "batch_size": "4096", "linger_ms": "0"}
    with both({"durability": "fsync"}, {"log.flush.interval.messages": "1"}, scale, running) as servers:
        return compare(
            "broker.durable",
            what=f"{records} records of 1 KiB over 16 partitions by ProducerPerformance, acks=all, batch.size=4096, "
            "linger.ms=0; durability=fsync against log.flush.interval.messages=1",
            sides={name: _produced(server, 16, records, -1, **settings) for name, server in servers.items()},
            bars=[Bar("rate", "records/s", "more", 3.0)],
            scale=scale,
        )


def start(scale: Scale) -> list[Result]:
    """Seconds from the start of the process to an answer that names the broker, and idle memory."""

    def started(make: Callable[[], ServerProcess]) -> Round:
        def once() -> Mapping[str, float]:
            with make() as server:
                time.sleep(scale.choose(3.0, 0.2))
                return {"seconds": server.started_in_s, "resident": server.usage().resident_bytes}

        return once

    return compare(
        "broker.start",
        what="a new, empty broker until Metadata names it; its resident memory three seconds later",
        sides={"anabranch": started(Anabranch), "apache-kafka": started(ApacheKafka)},
        bars=[Bar("seconds", "s", "less", 0.3), Bar("resident", "B", "less", 0.4)],
        scale=scale,
    )


def resize(scale: Scale) -> list[Result]:
    """The longest wait of any producer while 64 partitions are resized under load; lost and doubled records."""
    producers, seconds = scale.choose((4, 12.0), (2, 2.0))

    def once() -> Mapping[str, float]:
        with Anabranch(settings={"durability": "os"}) as server:
            return _resize_under_load(server, producers, seconds)

    return compare(
        "broker.resize",
        what=f"{producers} synchronous producers of one record at a time each while a topic goes 64, 96, 64, 128 "
        "partitions and back; then every record is read and counted",
        sides={"anabranch": once},
        bars=[
            Bar("longest_wait_ms", "ms", "less"),
            Bar("longest_resize_ms", "ms", "less"),
            Bar("lost", "records", "less"),
            Bar("doubled", "records", "less"),
            Bar("out_of_order", "records", "less"),
        ],
        scale=scale,
    )


def _resize_under_load(server: ServerProcess, producers: int, seconds: float) -> dict[str, float]:
    from anabranch.client.sync import Admin, Consumer, Producer

    stop = threading.Event()
    sent: list[int] = [0] * producers
    longest: list[float] = [0.0] * producers

    def work(number: int) -> None:
        with Producer(bootstrap_servers=server.address, linger_ms=0) as producer:
            while not stop.is_set():
                key = f"{number}-{sent[number] % 97}"
                began = time.perf_counter()
                producer.send("resized", str(sent[number]), key=key).result(60)
                longest[number] = max(longest[number], time.perf_counter() - began)
                sent[number] += 1

    with Admin(bootstrap_servers=server.address) as admin:
        admin.create_topics("resized", partitions=64)
        threads = [threading.Thread(target=work, args=(number,)) for number in range(producers)]
        for thread in threads:
            thread.start()
        slowest = 0.0
        for count in (96, 64, 128, 64):
            time.sleep(seconds / 5)
            began = time.perf_counter()
            admin.resize("resized", count)
            slowest = max(slowest, time.perf_counter() - began)
        time.sleep(seconds / 5)
        stop.set()
        for thread in threads:
            thread.join()
    seen: dict[str, list[int]] = {}
    with Consumer(bootstrap_servers=server.address, auto_offset_reset="earliest") as consumer:
        consumer.assign("resized")
        deadline = time.monotonic() + 60
        while sum(map(len, seen.values())) < sum(sent) and time.monotonic() < deadline:
            table: pa.Table = consumer.poll_arrow(timeout_s=1.0, columns=("key", "value"))
            for key, value in zip(table.column("key").to_pylist(), table.column("value").to_pylist(), strict=True):
                seen.setdefault(key.decode(), []).append(int(value))
    expected = {f"{n}-{k}": list(range(k, sent[n], 97)) for n in range(producers) for k in range(min(97, sent[n]))}
    lost = sum(len(set(numbers) - set(seen.get(key, []))) for key, numbers in expected.items())
    doubled = sum(len(numbers) - len(set(numbers)) for numbers in seen.values())
    disorder = sum(a > b for numbers in seen.values() for a, b in itertools.pairwise(numbers))
    return {
        "longest_wait_ms": max(longest) * 1000,
        "longest_resize_ms": slowest * 1000,
        "lost": lost,
        "doubled": doubled,
        "out_of_order": disorder,
        "sent": sum(sent),
    }


def resize_under_load(scale: Scale) -> list[Result]:
    """The longest wait of any producer while a topic grows from 8 to 64 partitions under 50 MB/s."""
    producers, rate, seconds = scale.choose((4, 50e6, 10.0), (2, 2e6, 2.0))
    figures = ("longest_wait_ms", "longest_calm_wait_ms", "resize_ms", "bytes_per_s", "lost")

    def once() -> Mapping[str, float]:
        with Anabranch(settings={"durability": "os"}) as server:
            return grow_under_load(server, Load(producers, rate, interval_s=0.1), 8, 64, seconds)

    return compare(
        "broker.resize_under_load",
        what=f"{producers} async producers, {rate / 1e6:g} MB/s in all, a table every 100 ms each, while a topic "
        "grows from 8 to 64 partitions; from the time a table is due to its acknowledgment",
        sides={"anabranch": once, "limit": lambda: dict.fromkeys(figures, 0.0) | {"longest_wait_ms": WAIT_MAX_MS}},
        bars=[
            Bar("longest_wait_ms", "ms", "less", 1.0),
            Bar("longest_calm_wait_ms", "ms", "less"),
            Bar("resize_ms", "ms", "less"),
            Bar("bytes_per_s", "B/s", "more"),
            Bar("lost", "records", "less"),
        ],
        scale=scale,
    )


BENCHMARKS = {
    "produce": produce,
    "produce_librdkafka": produce_librdkafka,
    "consume": consume,
    "consume_librdkafka": consume_librdkafka,
    "latency": latency,
    "acks_one": acks_one,
    "durable": durable,
    "start": start,
    "resize": resize,
    "resize_under_load": resize_under_load,
}
