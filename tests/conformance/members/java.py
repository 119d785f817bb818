"""Members that are the Java client's consumers, in one Java virtual machine that calls back into Python."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from py4j.protocol import Py4JJavaError

from benchmarks.peers.java import JavaMachine
from tests.conformance.members.worker import METADATA_MS, POLL_S, At, Got, Member

ASSIGNORS = {
    "range": "RangeAssignor",
    "roundrobin": "RoundRobinAssignor",
    "cooperative-sticky": "CooperativeStickyAssignor",
}


_one = threading.Lock()
_made: list[JavaMachine] = []


def machine() -> JavaMachine:
    """The virtual machine of this process."""
    with _one:
        if not _made:
            _made.append(JavaMachine("-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", callbacks=True))
        return _made[0]


class LibraryMember(Member):
    refusals = (Py4JJavaError,)

    def open(self) -> None:
        asked, java = self.asked, machine()
        settings = {
            "client.id": self._name,
            "group.id": asked.group,
            "group.protocol": asked.protocol,
            "auto.offset.reset": asked.reset,
            "fetch.max.wait.ms": "100",
            "metadata.max.age.ms": str(METADATA_MS),
            "retry.backoff.ms": "50",
        }
        if asked.protocol == "classic":
            assignor = ASSIGNORS[asked.assignor or "range"]
            settings["partition.assignment.strategy"] = f"org.apache.kafka.clients.consumer.{assignor}"
            settings["session.timeout.ms"] = str(asked.session_timeout_ms)
            settings["heartbeat.interval.ms"] = "100"
        elif asked.assignor:
            settings["group.remote.assignor"] = asked.assignor
        if asked.instance:
            settings["group.instance.id"] = asked.instance
        self._consumer = java.consumer(asked.address, settings)
        self._consumer.subscribe(self._subscription(java), _Listener(self))

    def _subscription(self, java: JavaMachine) -> Any:
        pattern = self.asked.pattern
        if not pattern:
            return java.list(self.asked.topics)
        if self.asked.protocol == "consumer":
            return java.jvm.org.apache.kafka.clients.consumer.SubscriptionPattern(pattern)
        return java.jvm.java.util.regex.Pattern.compile(pattern)

    def poll(self) -> Sequence[Got]:
        found = self._consumer.poll(machine().jvm.java.time.Duration.ofMillis(int(POLL_S * 1_000)))
        if found.isEmpty():
            return ()
        records = found.iterator()
        got = []
        while records.hasNext():
            each = records.next()
            got.append(Got(each.topic(), each.partition(), each.offset(), each.value()))
        return got

    def commit(self, offsets: dict[At, int]) -> Iterable[At]:
        java = machine()
        metadata = java.jvm.org.apache.kafka.clients.consumer.OffsetAndMetadata
        self._consumer.commitSync(java.map({java.partition(*at): metadata(offset) for at, offset in offsets.items()}))
        return offsets

    def close(self) -> None:
        self._consumer.close()


class _Listener:
    """A ConsumerRebalanceListener."""

    def __init__(self, member: Member) -> None:
        self._member = member

    def onPartitionsAssigned(self, partitions: Any) -> None:  # noqa: N802 - Java's name
        self._member.assigned(_at(partitions))

    def onPartitionsRevoked(self, partitions: Any) -> None:  # noqa: N802
        self._member.revoked(_at(partitions))

    def onPartitionsLost(self, partitions: Any) -> None:  # noqa: N802
        self._member.revoked(_at(partitions))

    class Java:
        implements = ("org.apache.kafka.clients.consumer.ConsumerRebalanceListener",)


def _at(partitions: Any) -> list[At]:
    return [(each.topic(), each.partition()) for each in partitions.toArray()]
