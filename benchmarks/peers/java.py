"""A Java virtual machine with Kafka's Java client, driven from Python through Py4J; nothing is compiled.

    with JavaMachine() as java:
        producer = java.producer(bootstrap, {"acks": "all"})
        producer.send(java.record("topic", 0, None, b"key", b"value", []))

Calls cross a socket (about 100 microseconds each), so work that is measured is a few calls that do much.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from py4j.java_collections import ListConverter, MapConverter
from py4j.java_gateway import CallbackServerParameters, GatewayParameters, JavaGateway, launch_gateway

from benchmarks.peers.artifacts import KAFKA_LOCK, fetch, java, pyspark_jar

CLIENT_JARS = ("kafka-clients", "lz4-java", "snappy-java", "zstd-jni", "slf4j-api")
SERIALIZER = "org.apache.kafka.common.serialization.ByteArraySerializer"
DESERIALIZER = "org.apache.kafka.common.serialization.ByteArrayDeserializer"


class JavaMachine:
    """A JVM that has Kafka's client on its class path; with `callbacks`, it can call Python objects."""

    def __init__(self, *options: str, callbacks: bool = False) -> None:
        class_path = os.pathsep.join(map(str, fetch(KAFKA_LOCK, only=CLIENT_JARS)))
        port, self.process = launch_gateway(
            jarpath=str(pyspark_jar("py4j")),
            classpath=class_path,
            javaopts=list(options),
            die_on_exit=True,
            java_path=java(),
            redirect_stderr=subprocess.DEVNULL,
            return_proc=True,
        )
        self._gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
        self.jvm: Any = self._gateway.jvm
        if callbacks:
            self._take_callbacks()

    def _take_callbacks(self) -> None:
        """Let Java call the Python objects that it is given, on a port of its own."""
        self._gateway.start_callback_server(CallbackServerParameters(port=0, daemonize=True))
        callbacks, server = self._gateway.get_callback_server(), self._gateway.java_gateway_server
        assert callbacks is not None
        server.resetCallbackClient(server.getCallbackClient().getAddress(), callbacks.get_listening_port())

    def map(self, values: Mapping[str, Any]) -> Any:
        """Return a java.util.Map."""
        return MapConverter().convert(dict(values), self._gateway._gateway_client)

    def list(self, values: Iterable[Any]) -> Any:
        """Return a java.util.List."""
        return ListConverter().convert(list(values), self._gateway._gateway_client)

    def producer(self, bootstrap: str, settings: Mapping[str, str]) -> Any:
        """Return a KafkaProducer of byte arrays."""
        common = {"bootstrap.servers": bootstrap, "key.serializer": SERIALIZER, "value.serializer": SERIALIZER}
        return self.jvm.org.apache.kafka.clients.producer.KafkaProducer(self.map({**common, **settings}))

    def consumer(self, bootstrap: str, settings: Mapping[str, str]) -> Any:
        """Return a KafkaConsumer of byte arrays, without a group unless the settings name one."""
        common = {"bootstrap.servers": bootstrap, "key.deserializer": DESERIALIZER, "value.deserializer": DESERIALIZER}
        settings = {**common, "enable.auto.commit": "false", **settings}
        return self.jvm.org.apache.kafka.clients.consumer.KafkaConsumer(self.map(settings))

    def admin(self, bootstrap: str) -> Any:
        """Return an Admin."""
        return self.jvm.org.apache.kafka.clients.admin.Admin.create(self.map({"bootstrap.servers": bootstrap}))

    def record(
        self,
        topic: str,
        partition: int | None,
        timestamp: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]],
    ) -> Any:
        """Return a ProducerRecord."""
        header = self.jvm.org.apache.kafka.common.header.internals.RecordHeader
        java_headers = self.list(header(name, data) for name, data in headers)
        long_timestamp = None if timestamp is None else self.jvm.java.lang.Long.valueOf(str(timestamp))
        record = self.jvm.org.apache.kafka.clients.producer.ProducerRecord
        return record(topic, partition, long_timestamp, key, value, java_headers)

    def partition(self, topic: str, partition: int) -> Any:
        """Return a TopicPartition."""
        return self.jvm.org.apache.kafka.common.TopicPartition(topic, partition)

    def records_before(self, offset: int) -> Any:
        """Return a RecordsToDelete; by reflection, since its static method shares its name with one that is not."""
        lang = self.jvm.java.lang
        types = self._gateway.new_array(lang.Class, 1)
        types[0] = lang.Long.TYPE
        arguments = self._gateway.new_array(lang.Object, 1)
        arguments[0] = offset
        kind = lang.Class.forName("org.apache.kafka.clients.admin.RecordsToDelete")
        return kind.getMethod("beforeOffset", types).invoke(None, arguments)

    def close(self) -> None:
        """End the JVM."""
        self._gateway.shutdown()
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream:
                stream.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
