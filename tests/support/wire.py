"""A small synchronous client that speaks the protocol through our codec, one request at a time or many."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterable
from typing import Any
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_TOPIC_ID
from anabranch.protocol.frames import decode_response, encode_request
from anabranch.protocol.messages.create_partitions import CreatePartitionsRequest, CreatePartitionsTopic
from anabranch.protocol.messages.create_topics import CreatableTopic, CreatableTopicConfig, CreateTopicsRequest
from anabranch.protocol.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest
from anabranch.protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.offset_for_leader_epoch import (
    OffsetForLeaderEpochRequest,
    OffsetForLeaderPartition,
    OffsetForLeaderTopic,
)
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from anabranch.protocol.registry import api_of
from anabranch.records.batch import build, headers


def varint(value: int) -> bytes:
    """Zigzag, variable length."""
    value = (value << 1) ^ (value >> 63)
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def field(value: bytes | None) -> bytes:
    """A key or a value of a record."""
    return varint(-1) if value is None else varint(len(value)) + value


def batch(
    values: Iterable[bytes | None],
    *,
    key: bytes | None = None,
    timestamp: int = 1_700_000_000_000,
    producer: tuple[int, int, int] = (-1, -1, -1),
    attributes: int = 0,
) -> bytearray:
    """A batch of these values; `producer` is id, epoch, base sequence."""
    records = bytearray()
    count = 0
    for count, value in enumerate(values, start=1):
        body = b"\0" + varint(0) + varint(count - 1) + field(key) + field(value) + varint(0)
        records += varint(len(body)) + body
    return build(
        records,
        record_count=count,
        base_timestamp=timestamp,
        max_timestamp=timestamp,
        attributes=attributes,
        producer_id=producer[0],
        producer_epoch=producer[1],
        base_sequence=producer[2],
    )


def values_of(records: bytes | memoryview | None) -> list[tuple[int, bytes]]:
    """Offset and value of each record of uncompressed batches."""
    found: list[tuple[int, bytes]] = []
    data = bytes(records or b"")
    for position, header in headers(data):
        at = position + 61
        for _ in range(header.record_count):
            length, at = _read_varint(data, at)
            end = at + length
            at += 1
            _, at = _read_varint(data, at)
            delta, at = _read_varint(data, at)
            size, at = _read_varint(data, at)
            at += max(size, 0)
            size, at = _read_varint(data, at)
            found.append((header.base_offset + delta, data[at : at + size]))
            at = end
    return found


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), at
        shift += 7


class WireClient:
    """One connection."""

    def __init__(self, port: int, timeout_s: float = 20.0) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port), timeout_s)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation = 0

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        self.sock.close()

    def send(self, message: Any, version: int | None = None, client_id: str = "wire") -> tuple[int, int]:
        """Send a request; return the arguments of `receive`."""
        api = api_of(type(message))
        chosen = api.served[-1] if version is None else version
        self._correlation += 1
        self.sock.sendall(b"".join(bytes(it) for it in encode_request(message, chosen, self._correlation, client_id)))
        return api.key, chosen

    def receive(self, sent: tuple[int, int]) -> Any:
        """Read the next answer."""
        correlation, message = decode_response(self.receive_frame(), *sent)
        assert correlation <= self._correlation
        return message

    def receive_frame(self) -> bytes:
        """Read the next frame, whatever it holds."""
        (size,) = struct.unpack(">i", self.read(4))
        return self.read(size)

    def read(self, size: int) -> bytes:
        """Read exactly `size` bytes; ConnectionError when the broker hangs up before."""
        got = bytearray()
        while len(got) < size:
            piece = self.sock.recv(size - len(got))
            if not piece:
                raise ConnectionError(f"closed after {len(got)} of {size} bytes")
            got += piece
        return bytes(got)

    def call(self, message: Any, version: int | None = None, client_id: str = "wire") -> Any:
        """Send a request and read its answer."""
        return self.receive(self.send(message, version, client_id))

    # -- requests that tests often make ------------------------------------------------------------------------------

    def create(self, topic: str, partitions: int = 1, **configs: str) -> UUID:
        """Create a topic; its id."""
        given = [CreatableTopicConfig(name=name.replace("_", "."), value=value) for name, value in configs.items()]
        asked = CreatableTopic(name=topic, num_partitions=partitions, replication_factor=1, configs=given)
        (result,) = self.call(CreateTopicsRequest(topics=[asked], timeout_ms=20_000)).topics
        assert result.error_code == ErrorCode.NONE, result
        return UUID(int=result.topic_id.int)

    def delete(self, topic: str) -> None:
        """Delete a topic."""
        (result,) = self.call(DeleteTopicsRequest(topics=[DeleteTopicState(name=topic)], timeout_ms=20_000)).responses
        assert result.error_code == ErrorCode.NONE, result

    def resize(self, topic: str, count: int, timeout_ms: int = 20_000) -> ErrorCode:
        """Change a topic's partition count."""
        asked = CreatePartitionsTopic(name=topic, count=count, assignments=None)
        (result,) = self.call(CreatePartitionsRequest(topics=[asked], timeout_ms=timeout_ms)).results
        return ErrorCode(result.error_code)

    def metadata(self, topic: str) -> Any:
        """Return the Metadata of a topic."""
        asked = MetadataRequest(
            topics=[MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False, include_lineage=True
        )
        return self.call(asked, 12).topics[0]

    def until_partitions(self, topic: str, count: int, timeout_s: float = 10.0) -> None:
        """Wait until a topic has so many partitions, those that retire among them."""
        deadline = time.monotonic() + timeout_s
        while len(self.metadata(topic).partitions) != count:
            assert time.monotonic() < deadline, f"{topic} should have {count} partitions"
            time.sleep(0.02)

    def delete_everything(self, topic: str, partition: int) -> int:
        """DeleteRecords up to the end of a partition; where it starts now."""
        asked = DeleteRecordsTopic(
            name=topic, partitions=[DeleteRecordsPartition(partition_index=partition, offset=-1)]
        )
        answer = self.call(DeleteRecordsRequest(topics=[asked], timeout_ms=1000)).topics[0].partitions[0]
        assert answer.error_code == ErrorCode.NONE, answer
        return int(answer.low_watermark)

    def producer_id(self) -> int:
        """A new producer id."""
        asked = InitProducerIdRequest(
            transactional_id=None, transaction_timeout_ms=0, producer_id=-1, producer_epoch=-1
        )
        return int(self.call(asked).producer_id)

    def produce_request(
        self,
        topic: str | UUID,
        partition: int,
        data: bytes | bytearray,
        *,
        acks: int = -1,
        count: int = COUNT_NOT_SAID,
    ) -> ProduceRequest:
        """A Produce request for one partition of a topic given by name (up to version 12) or by id."""
        return ProduceRequest(
            transactional_id=None,
            acks=acks,
            timeout_ms=10_000,
            topic_data=[
                TopicProduceData(
                    name=topic if isinstance(topic, str) else "",
                    topic_id=topic if isinstance(topic, UUID) else NO_TOPIC_ID,
                    partition_data=[PartitionProduceData(index=partition, records=bytes(data))],
                    undeleted_partition_count=count,
                )
            ],
        )

    def produce(
        self,
        topic: str | UUID,
        partition: int,
        data: bytes | bytearray,
        *,
        acks: int = -1,
        count: int = COUNT_NOT_SAID,
    ) -> Any:
        """Produce to one partition; its part of the answer."""
        asked = self.produce_request(topic, partition, data, acks=acks, count=count)
        version = 12 if isinstance(topic, str) else 13
        return self.call(asked, version).responses[0].partition_responses[0]

    def fetch_request(
        self,
        topic: str | UUID,
        offsets: dict[int, int],
        *,
        wait_ms: int = 0,
        min_bytes: int = 1,
        max_bytes: int = 50 << 20,
        partition_max_bytes: int = 10 << 20,
        session: tuple[int, int] = (0, -1),
        count: int = COUNT_NOT_SAID,
        leader_epoch: int = -1,
        isolation_level: int = 0,
    ) -> FetchRequest:
        """A Fetch request for partitions of one topic."""
        asked = [
            FetchPartition(
                partition=partition,
                fetch_offset=offset,
                partition_max_bytes=partition_max_bytes,
                current_leader_epoch=leader_epoch,
            )
            for partition, offset in offsets.items()
        ]
        named = topic if isinstance(topic, str) else ""
        by_id = topic if isinstance(topic, UUID) else NO_TOPIC_ID
        return FetchRequest(
            max_wait_ms=wait_ms,
            min_bytes=min_bytes,
            max_bytes=max_bytes,
            isolation_level=isolation_level,
            session_id=session[0],
            session_epoch=session[1],
            topics=[FetchTopic(topic=named, topic_id=by_id, partitions=asked, undeleted_partition_count=count)]
            if offsets
            else [],
        )

    def fetch(self, topic: str | UUID, partition: int = 0, offset: int = 0, **options: Any) -> Any:
        """Fetch one partition without a session; its part of the answer."""
        version = 12 if isinstance(topic, str) else 17
        answer = self.call(self.fetch_request(topic, {partition: offset}, **options), version)
        assert answer.error_code == ErrorCode.NONE, answer
        return answer.responses[0].partitions[0]

    def read_all(self, topic: str, partition: int = 0, start: int = 0) -> list[tuple[int, bytes]]:
        """Every record from `start` to the high watermark."""
        found: list[tuple[int, bytes]] = []
        offset = start
        while True:
            answer = self.fetch(topic, partition, offset)
            assert answer.error_code == ErrorCode.NONE, answer
            fresh = [it for it in values_of(answer.records) if it[0] >= offset]
            found += fresh
            if offset >= answer.high_watermark or not fresh:
                return found
            offset = fresh[-1][0] + 1

    def offset_at(
        self, topic: str, partition: int, timestamp: int, leader_epoch: int = -1, isolation_level: int = 0
    ) -> Any:
        """ListOffsets for one partition."""
        asked = ListOffsetsPartition(partition_index=partition, current_leader_epoch=leader_epoch, timestamp=timestamp)
        request = ListOffsetsRequest(
            replica_id=-1,
            isolation_level=isolation_level,
            topics=[ListOffsetsTopic(name=topic, partitions=[asked])],
        )
        return self.call(request, 8).topics[0].partitions[0]

    def end_of_epoch(self, topic: str, partition: int, leader_epoch: int) -> int:
        """OffsetForLeaderEpoch for one partition."""
        asked = OffsetForLeaderPartition(partition=partition, leader_epoch=leader_epoch)
        request = OffsetForLeaderEpochRequest(
            replica_id=-1, topics=[OffsetForLeaderTopic(topic=topic, partitions=[asked])]
        )
        return int(self.call(request).topics[0].partitions[0].end_offset)
