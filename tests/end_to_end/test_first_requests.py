"""The first request of each kind in a process is prepared for in a thread: nothing else is different about it."""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest

from anabranch.protocol.frames import encode_request
from anabranch.protocol.messages.api_versions import ApiVersionsRequest
from anabranch.protocol.messages.list_offsets import ListOffsetsPartition, ListOffsetsRequest, ListOffsetsTopic
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataRequestTopic
from anabranch.protocol.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.support.broker import running
from tests.support.wire import WireClient, batch

MANY, NAMES = 6, 1_500
"""Partitions of a produce whose files are not open, and names of a request: as many are looked at apart."""
PRODUCE_VERSION, METADATA_VERSION, LIST_OFFSETS_VERSION = 11, 9, 5
"""Versions that nothing else here uses."""


def framed(request: object, version: int, correlation_id: int) -> bytes:
    return b"".join(map(bytes, encode_request(request, version, correlation_id, "client")))


def answered(connection: socket.socket, count: int) -> list[int]:
    """The correlation ids of so many answers, or of those that come before the broker hangs up."""
    found: list[int] = []
    with connection.makefile("rb") as answers:
        while len(found) < count and (head := answers.read(4)):
            (size,) = struct.unpack(">i", head)
            found.append(struct.unpack_from(">i", answers.read(size))[0])
    return found


def produced(name: bytes, partitions: Sequence[int], producer: tuple[int, int, int], correlation_id: int) -> bytes:
    parts = [PartitionProduceData(index=number, records=batch([name], producer=producer)) for number in partitions]
    topics = [TopicProduceData(name="t", partition_data=parts)]
    request = ProduceRequest(transactional_id=None, acks=-1, timeout_ms=5_000, topic_data=topics)
    return framed(request, PRODUCE_VERSION, correlation_id)


@pytest.mark.parametrize("is_idempotent", [False, True])
def test_what_is_produced_behind_the_first_request_stays_behind_it(tmp_path: Path, is_idempotent: bool) -> None:
    """It names many partitions: it is appended in steps, and the next ones wait until it is."""
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.create("t", MANY)
        producer_id, epoch = (client.producer_id(), 0) if is_idempotent else (-1, -1)

        def at(sequence: int) -> tuple[int, int, int]:
            return producer_id, epoch, sequence if is_idempotent else -1

        requests = [produced(b"0", range(MANY), at(0), 0)]
        requests += [produced(b"%d" % number, [MANY - 1], at(number), number) for number in (1, 2, 3)]
        with socket.create_connection(("127.0.0.1", broker.port), 10) as connection:
            connection.sendall(b"".join(requests))
            assert answered(connection, 4) == [0, 1, 2, 3]
        assert [value for _, value in client.read_all("t", MANY - 1)] == [b"0", b"1", b"2", b"3"]


def test_the_first_request_is_answered_first_where_it_is_decoded_apart(tmp_path: Path) -> None:
    names = [MetadataRequestTopic(name=f"t{number}") for number in range(NAMES)]
    other = ApiVersionsRequest(client_software_name="a", client_software_version="1")
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.call(other, 3)
        requests = [framed(MetadataRequest(topics=names, allow_auto_topic_creation=False), METADATA_VERSION, 0)]
        requests += [framed(other, 3, number) for number in (1, 2, 3)]
        with socket.create_connection(("127.0.0.1", broker.port), 10) as connection:
            connection.sendall(b"".join(requests))
            assert answered(connection, 4) == [0, 1, 2, 3]


def test_a_client_that_sends_no_more_is_answered_its_first_request(tmp_path: Path) -> None:
    parts = [ListOffsetsPartition(partition_index=0, timestamp=-1)]
    request = ListOffsetsRequest(
        replica_id=-1, isolation_level=0, topics=[ListOffsetsTopic(name="t", partitions=parts)]
    )
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.create("t")
        with socket.create_connection(("127.0.0.1", broker.port), 10) as connection:
            connection.sendall(framed(request, LIST_OFFSETS_VERSION, 0) + framed(request, LIST_OFFSETS_VERSION, 1))
            connection.shutdown(socket.SHUT_WR)
            assert answered(connection, 3) == [0, 1]
