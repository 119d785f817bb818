"""Records that are deleted on request, through kills: they stay deleted, and those behind them stay there."""

from __future__ import annotations

import random

from anabranch.base.errors import ErrorCode
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from tests.crash.work import IdempotentProducer, Stopped
from tests.support.broker import BrokerProcess
from tests.support.wire import WireClient

SIZE, LARGE = 100, 3 << 20
"""Bytes of a record: large ones are written beside the log before they are appended."""


class Deleted:
    """One producer to one partition, in which offsets are the numbers of the records."""

    def __init__(self, seed: int, topic: str = "deleted") -> None:
        self.topic = topic
        self.chance = random.Random(f"deleted {seed}")
        self.producer = IdempotentProducer(topic, 1)
        self.sent = self.end = self.large = 0
        self.start = self.asked = 0
        """What DeleteRecords was answered with, and what it was asked for."""

    def prepare(self, client: WireClient) -> None:
        configs = {"retention_ms": "-1", "segment_bytes": "2000", "max_message_bytes": str(2 * LARGE)}
        client.create(self.topic, 1, **configs)

    def run(self, client: WireClient, stopped: Stopped) -> None:
        while not stopped():
            if self.chance.random() < 0.2:
                self._delete(client)
            else:
                self._step(client)

    def settle(self, client: WireClient) -> None:
        while self.producer.pending is not None:
            self._step(client)

    def _step(self, client: WireClient) -> None:
        self.producer.begin(client)
        if self.producer.pending is None:
            is_large = self.chance.random() < 0.04
            first, self.sent = self.sent, self.sent + (1 if is_large else self.chance.randint(1, 5))
            size = LARGE if is_large else SIZE
            self.producer.aim(tuple(b"%0*d" % (size, number) for number in range(first, self.sent)), None, 0)
        sent = self.producer.send(client)
        if sent is not None:
            self.end = self.sent
            self.large += sum(len(value or b"") > SIZE for value in sent.values)

    def _delete(self, client: WireClient) -> None:
        self.asked = max(self.asked, self.chance.randint(self.start, self.end))
        partition = DeleteRecordsPartition(partition_index=0, offset=self.asked)
        topics = [DeleteRecordsTopic(name=self.topic, partitions=[partition])]
        answer = client.call(DeleteRecordsRequest(topics=topics, timeout_ms=20_000)).topics[0].partitions[0]
        assert answer.error_code == ErrorCode.NONE, answer
        assert answer.low_watermark == self.asked, answer
        self.start = self.asked

    async def verify(self, broker: BrokerProcess, client: WireClient) -> None:
        start = client.fetch(self.topic, 0, self.end).log_start_offset
        assert self.start <= start <= self.asked, f"the log starts at {start}: {self.start} to {self.asked} was asked"
        found = client.read_all(self.topic, 0, start)
        numbers = [int(value[-SIZE:]) for _, value in found]
        assert numbers == [offset for offset, _ in found], "a record has another place"
        assert [offset for offset, _ in found] == [*range(start, self.end)]

    def summary(self) -> str:
        return f"{self.start} records deleted of {self.end}, {self.large} of which were large"
