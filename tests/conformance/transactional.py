"""Other people's transactional producers, and their readers of committed records, behind one interface."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from aiokafka.errors import KafkaError as AioError
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PythonPartition
from kafka.errors import KafkaError as PythonError
from py4j.protocol import Py4JJavaError

from benchmarks.peers.java import JavaMachine

TIMEOUT_S = 30.0
TRANSACTION_TIMEOUT_MS = 30_000


class FencedError(Exception):
    """Another producer has the transactional id now."""


class Transactional(ABC):
    """A transactional producer; `send` waits until the broker has the record."""

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def send(self, topic: str, partition: int, value: bytes) -> None: ...

    @abstractmethod
    def commit(self) -> None:
        """FencedError when it was fenced."""

    @abstractmethod
    def abort(self) -> None: ...

    @abstractmethod
    def close(self) -> None: ...


class Kind(ABC):
    """One kind of client."""

    @abstractmethod
    def producer(self, bootstrap: str, name: str) -> Transactional:
        """A producer that is initialised."""

    @abstractmethod
    def read(self, bootstrap: str, topic: str, partition: int, last: bytes) -> list[bytes]:
        """The committed values of a partition, up to the `last` one."""

    @abstractmethod
    def close(self) -> None:
        """Close what is open."""


class Confluent(Kind):
    def producer(self, bootstrap: str, name: str) -> Transactional:
        return _ConfluentProducer(bootstrap, name)

    def read(self, bootstrap: str, topic: str, partition: int, last: bytes) -> list[bytes]:
        consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "unused",
                "enable.auto.commit": False,
                "auto.offset.reset": "error",
                "isolation.level": "read_committed",
                "log_level": 0,
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0)])

        def poll() -> list[bytes]:
            message = consumer.poll(0.2)
            if message is None:
                return []
            assert message.error() is None, message.error()
            return [message.value()]

        try:
            return _until(last, poll)
        finally:
            consumer.close()

    def close(self) -> None:
        pass


class _ConfluentProducer(Transactional):
    def __init__(self, bootstrap: str, name: str) -> None:
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": name,
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "log_level": 0,
                "linger.ms": 1,
            }
        )
        self._producer.init_transactions(TIMEOUT_S)

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self._producer.produce(topic, value, partition=partition)
        assert self._producer.flush(TIMEOUT_S) == 0

    def commit(self) -> None:
        try:
            self._producer.commit_transaction(TIMEOUT_S)
        except KafkaException as error:
            if not error.args[0].fatal():
                raise
            raise FencedError(str(error)) from error

    def abort(self) -> None:
        self._producer.abort_transaction(TIMEOUT_S)

    def close(self) -> None:
        with contextlib.suppress(KafkaException):  # which repeats that it was fenced
            self._producer.close(1.0)


class Aio(Kind):
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)

    def producer(self, bootstrap: str, name: str) -> Transactional:
        return _AioProducer(self, bootstrap, name)

    def read(self, bootstrap: str, topic: str, partition: int, last: bytes) -> list[bytes]:
        async def read() -> list[bytes]:
            async with AIOKafkaConsumer(
                bootstrap_servers=bootstrap, auto_offset_reset="none", isolation_level="read_committed"
            ) as consumer:
                consumer.assign([AioPartition(topic, partition)])
                consumer.seek(AioPartition(topic, partition), 0)
                found: list[bytes] = []
                while last not in found:
                    found.append((await asyncio.wait_for(consumer.getone(), TIMEOUT_S)).value)
                consumer.unsubscribe()
                return found

        return list(self.run(read()))

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _AioProducer(Transactional):
    def __init__(self, kind: Aio, bootstrap: str, name: str) -> None:
        self._kind = kind

        async def start() -> Any:
            producer = AIOKafkaProducer(
                bootstrap_servers=bootstrap,
                transactional_id=name,
                transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
                enable_idempotence=True,
            )
            await producer.start()
            return producer

        self._producer = kind.run(start())

    def begin(self) -> None:
        self._kind.run(self._producer.begin_transaction())

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self._kind.run(self._producer.send_and_wait(topic, value, partition=partition))

    def commit(self) -> None:
        try:
            self._kind.run(self._producer.commit_transaction())
        except AioError as error:
            raise FencedError(str(error)) from error

    def abort(self) -> None:
        self._kind.run(self._producer.abort_transaction())

    def close(self) -> None:
        self._kind.run(self._producer.stop())


class Python(Kind):
    def producer(self, bootstrap: str, name: str) -> Transactional:
        return _PythonProducer(bootstrap, name)

    def read(self, bootstrap: str, topic: str, partition: int, last: bytes) -> list[bytes]:
        consumer = KafkaConsumer(
            bootstrap_servers=bootstrap,
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
        )
        at = PythonPartition(topic, partition)
        consumer.assign([at])
        consumer.seek(at, 0)

        def poll() -> list[bytes]:
            return [message.value for message in consumer.poll(200).get(at, [])]

        try:
            return _until(last, poll)
        finally:
            consumer.close()

    def close(self) -> None:
        pass


class _PythonProducer(Transactional):
    def __init__(self, bootstrap: str, name: str) -> None:
        self._producer = KafkaProducer(
            bootstrap_servers=bootstrap, transactional_id=name, transaction_timeout_ms=TRANSACTION_TIMEOUT_MS
        )
        self._producer.init_transactions()

    def begin(self) -> None:
        self._producer.begin_transaction()

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self._producer.send(topic, value, partition=partition).get(TIMEOUT_S)

    def commit(self) -> None:
        try:
            self._producer.commit_transaction()
        except PythonError as error:
            raise FencedError(str(error)) from error

    def abort(self) -> None:
        self._producer.abort_transaction()

    def close(self) -> None:
        self._producer.close(1)


class Java(Kind):
    def __init__(self) -> None:
        self.java = JavaMachine("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")

    def producer(self, bootstrap: str, name: str) -> Transactional:
        return _JavaProducer(self.java, bootstrap, name)

    def read(self, bootstrap: str, topic: str, partition: int, last: bytes) -> list[bytes]:
        settings = {"auto.offset.reset": "none", "isolation.level": "read_committed"}
        consumer = self.java.consumer(bootstrap, settings)
        at = self.java.partition(topic, partition)
        consumer.assign(self.java.list([at]))
        consumer.seek(at, 0)

        def poll() -> list[bytes]:
            found = consumer.poll(self.java.jvm.java.time.Duration.ofMillis(200)).iterator()
            values: list[bytes] = []
            while found.hasNext():
                values.append(found.next().value())
            return values

        try:
            return _until(last, poll)
        finally:
            consumer.close()

    def close(self) -> None:
        self.java.close()


class _JavaProducer(Transactional):
    def __init__(self, java: JavaMachine, bootstrap: str, name: str) -> None:
        self._java = java
        settings = {"transactional.id": name, "transaction.timeout.ms": str(TRANSACTION_TIMEOUT_MS)}
        self._producer = java.producer(bootstrap, settings)
        self._producer.initTransactions()

    def begin(self) -> None:
        self._producer.beginTransaction()

    def send(self, topic: str, partition: int, value: bytes) -> None:
        self._producer.send(self._java.record(topic, partition, None, None, value, [])).get()

    def commit(self) -> None:
        try:
            self._producer.commitTransaction()
        except Py4JJavaError as error:
            raise FencedError(str(error.java_exception.toString())) from error

    def abort(self) -> None:
        self._producer.abortTransaction()

    def close(self) -> None:
        self._producer.close(self._java.jvm.java.time.Duration.ofSeconds(1))


KINDS: dict[str, type[Kind]] = {"confluent-kafka": Confluent, "aiokafka": Aio, "kafka-python": Python, "java": Java}


def _until(last: bytes, poll: Callable[[], Iterable[bytes]]) -> list[bytes]:
    found: list[bytes] = []
    deadline = time.monotonic() + TIMEOUT_S
    while last not in found:
        assert time.monotonic() < deadline, f"{last!r} was not read, only {_shown(found)}"
        found += poll()
    return found


def _shown(values: Sequence[bytes]) -> str:
    return ", ".join(value.decode() for value in values[-20:]) or "nothing"
