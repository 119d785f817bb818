"""Topics that are created, deleted and created again through kills.

An acknowledged creation exists, an acknowledged deletion is gone with its files, and a topic that is created again
shows no record of the one before. A request without a response is repeated: then either way it has its effect.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from tests.crash.work import Stopped, turns
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient, batch

NAMES = ("life-a", "life-b", "life-c")
PARTITIONS = 3


class _Topic:
    """One name, and the lives of its topics."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.life = 0
        self.wished: bool | None = False
        self.exists: bool | None = False
        """None while a request has no response."""
        self.records: dict[int, int] = {}
        """Acknowledged records of this life, by partition."""
        self.unacknowledged = 0


class Topics:
    """A few names."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(f"topics {seed}")
        self.topics = [_Topic(name) for name in NAMES]
        self.created = self.deleted = 0

    def prepare(self, client: WireClient) -> None:
        """Nothing is there yet."""

    def run(self, client: WireClient, stopped: Stopped) -> None:
        while not stopped():
            topic = self.chance.choice(self.topics)
            if topic.exists is None:
                self._finish(client, topic)
            elif topic.exists and self.chance.random() < 0.7:
                self._produce(client, topic)
            else:
                topic.wished, topic.exists = not topic.exists, None
                self._finish(client, topic)

    def settle(self, client: WireClient) -> None:
        for topic in self.topics:
            if topic.exists is None:
                self._finish(client, topic)

    def _finish(self, client: WireClient, topic: _Topic) -> None:
        """Ask for what is wished, (again) until it is answered."""
        for _ in turns(f"{topic.name} is neither created nor deleted"):
            error = ErrorCode.of(self._ask(client, topic).error_code)
            if not error.retriable or error is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                break
        if topic.wished:
            # A name that is still being deleted is taken; one of ours may have been created by the request before.
            assert error in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS), error
            topic.life += 1
            topic.records = dict.fromkeys(range(PARTITIONS), 0)
            self.created += 1
        else:
            assert error in (ErrorCode.NONE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), error
            self.deleted += 1
        topic.exists = topic.wished

    @staticmethod
    def _ask(client: WireClient, topic: _Topic) -> Any:
        if topic.wished:
            configs = [CreatableTopicConfig(name="retention.ms", value="-1")]
            asked = CreatableTopic(name=topic.name, num_partitions=PARTITIONS, replication_factor=1, configs=configs)
            return client.call(CreateTopicsRequest(topics=[asked], timeout_ms=20_000)).topics[0]
        deleted = [DeleteTopicState(name=topic.name)]
        return client.call(DeleteTopicsRequest(topics=deleted, timeout_ms=20_000)).responses[0]

    def _produce(self, client: WireClient, topic: _Topic) -> None:
        """Produce a record. Its topic exists, so that it is refused for nothing but a process that has just begun."""
        partition = self.chance.randrange(PARTITIONS)
        value = b"%s %d %d" % (topic.name.encode(), topic.life, partition)
        error = ErrorCode.of(client.produce(topic.name, partition, batch([value])).error_code)
        assert error is ErrorCode.NONE, f"{topic.name}, created and acknowledged: {error.name}"
        topic.records[partition] += 1

    async def verify(self, broker: BrokerProcess, client: WireClient) -> None:
        for topic in self.topics:
            shown = client.metadata(topic.name)
            if not topic.exists:
                assert shown.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"deleted and there: {shown}"
                continue
            assert shown.error_code == ErrorCode.NONE, f"created and not there: {shown}"
            assert len(shown.partitions) == PARTITIONS, shown
            for partition, acknowledged in topic.records.items():
                values = [value for _, value in client.read_all(topic.name, partition)]
                wanted = b"%s %d %d" % (topic.name.encode(), topic.life, partition)
                assert set(values) <= {wanted}, f"of an earlier life: {set(values) - {wanted}}, not {wanted!r}"
                assert len(values) >= acknowledged, f"{topic.name}-{partition}: {len(values)} of {acknowledged}"
        gone = [topic.name for topic in self.topics if not topic.exists]
        for _ in turns(f"files of deleted topics remain: {files_of(broker.data, gone)}"):
            if not files_of(broker.data, gone):
                return

    def summary(self) -> str:
        return f"{self.created} topics created, {self.deleted} deleted"


def files_of(data: Path, names: list[str]) -> list[Path]:
    """What a data directory has of topics, and of what was renamed to be deleted."""
    found = [path for name in names for path in data.glob(f"{name}-*")]
    return found + list(data.glob(".deleted/*"))
