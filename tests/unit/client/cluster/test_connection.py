from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest

from anabranch.base.errors import ApiError, DecodeError
from anabranch.client.cluster.connection import ConnectError, Connection, ConnectionSettings, DisconnectedError, Lane
from anabranch.client.cluster.metadata import parse_servers
from anabranch.codec.primitives import EncodeError
from anabranch.protocol.frames import encode_response
from anabranch.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from anabranch.protocol.messages.fetch import FetchableTopicResponse, FetchRequest, FetchResponse, PartitionData
from anabranch.protocol.messages.metadata import MetadataRequest, MetadataResponse
from anabranch.protocol.registry import api_of

TIMEOUT_MS = 60_000
LARGE = 700_000


class Socket:
    """What is written, and whether it was closed."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closed = False

    def writelines(self, parts: list[Any]) -> None:
        for part in parts:
            self.written += part

    def abort(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int) -> None:
        """Nothing is ever full here."""


def connected() -> tuple[Connection, Socket]:
    connection, socket = Connection("broker:9092", "test"), Socket()
    connection.connection_made(cast(asyncio.Transport, socket))
    connection.versions = {1: (4, 17), 3: (0, 13), 0: (14, 15)}
    return connection, socket


def feed(connection: Connection, data: bytes, step: int) -> None:
    while data:
        room = connection.get_buffer(-1)
        size = min(len(room), step, len(data))
        room[:size] = data[:size]
        connection.buffer_updated(size)
        data = data[size:]


def answer(message: object, api_key: int, version: int, correlation_id: int) -> bytes:
    return b"".join(bytes(cast(Any, part)) for part in encode_response(message, api_key, version, correlation_id))


def fetched(size: int) -> FetchResponse:
    partition = PartitionData(partition_index=0, records=bytes(range(256)) * (size // 256))
    return FetchResponse(responses=[FetchableTopicResponse(topic="t", partitions=[partition])])


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


@pytest.mark.parametrize("step", [1, 3, 4_096, 1 << 20])
def test_answers_are_told_apart_however_their_bytes_come(step: int) -> None:
    async def scenario() -> None:
        connection, _ = connected()
        sizes = [0, 256, LARGE, 512] if step > 3 else [0, 256, 512]
        futures = [connection.send(FetchRequest(), timeout_ms=TIMEOUT_MS, version=12) for _ in sizes]
        feed(connection, b"".join(answer(fetched(size), 1, 12, n) for n, size in enumerate(sizes, 1)), step)
        for size, future in zip(sizes, futures, strict=True):
            records = (await future).responses[0].partitions[0].records
            assert bytes(records) == bytes(range(256)) * (size // 256)

    run(scenario)


def test_a_large_answer_is_a_view_of_the_bytes_that_came_and_outlives_the_next() -> None:
    async def scenario() -> None:
        connection, _ = connected()
        first = connection.send(FetchRequest(), timeout_ms=TIMEOUT_MS, version=12)
        data = answer(fetched(LARGE), 1, 12, 1)
        feed(connection, data, 1 << 20)
        records = (await first).responses[0].partitions[0].records
        assert isinstance(records, memoryview) and len(records.obj) == len(data) - 4
        second = connection.send(FetchRequest(), timeout_ms=TIMEOUT_MS, version=12)
        feed(connection, answer(fetched(256), 1, 12, 2), 1 << 20)
        await second
        assert bytes(records) == bytes(range(256)) * (LARGE // 256)

    run(scenario)


def test_answers_come_to_those_who_asked() -> None:
    async def scenario() -> None:
        connection, socket = connected()
        fetch = connection.send(FetchRequest(), timeout_ms=TIMEOUT_MS)
        metadata = connection.send(MetadataRequest(), timeout_ms=TIMEOUT_MS)
        assert socket.written.count(b"test") == 2
        feed(connection, answer(MetadataResponse(cluster_id="c"), 3, 13, 2), 100)
        assert (await metadata).cluster_id == "c" and not fetch.done()
        feed(connection, answer(FetchResponse(session_id=5), 1, 17, 1), 100)
        assert (await fetch).session_id == 5

    run(scenario)


@pytest.mark.parametrize(
    "data",
    [
        b"\x7f\xff\xff\xff0000",
        b"\xff\xff\xff\xff0000",
        b"\0\0\0\0",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"\0\0\0\x08\0\0\0\x630000",
        b"\0\0\0\x05\0\0\0\x01\xff",
    ],
    ids=["oversize", "negative", "too short", "http", "nobody asked", "malformed"],
)
def test_bytes_that_are_no_answer_end_the_connection(data: bytes) -> None:
    async def scenario() -> None:
        connection, socket = connected()
        future = connection.send(MetadataRequest(), timeout_ms=TIMEOUT_MS)
        feed(connection, data, 1_000)
        with pytest.raises((DisconnectedError, DecodeError)):
            await future
        assert socket.closed and not connection.is_open
        with pytest.raises(DisconnectedError, match="the connection to broker:9092 has ended"):
            connection.send(MetadataRequest(), timeout_ms=TIMEOUT_MS)

    run(scenario)


def test_who_waits_when_the_connection_ends_is_told() -> None:
    async def scenario() -> None:
        connection, _ = connected()
        futures = [connection.send(MetadataRequest(), timeout_ms=TIMEOUT_MS) for _ in range(3)]
        connection.connection_lost(ConnectionResetError("reset"))
        for future in futures:
            with pytest.raises(DisconnectedError, match="broker:9092 closed the connection: reset"):
                await future

    run(scenario)


def test_a_request_that_is_not_answered_in_time_ends_the_connection() -> None:
    async def scenario() -> None:
        connection, socket = connected()
        future = connection.send(MetadataRequest(), timeout_ms=1)
        with pytest.raises(DisconnectedError, match="broker:9092 did not answer Metadata within 1 ms"):
            await future
        assert socket.closed

    run(scenario)


def test_a_request_that_cannot_be_written_leaves_nothing_to_wait_for() -> None:
    """It raises at once, and does not end the connection for the others when its time would be over."""

    async def scenario() -> None:
        connection, socket = connected()
        with pytest.raises(EncodeError, match="cannot carry"):
            connection.send(FetchRequest(max_wait_ms=1 << 31), timeout_ms=1)
        other = connection.send(MetadataRequest(), timeout_ms=TIMEOUT_MS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(other), 0.05)
        assert not socket.closed
        connection.close()
        assert isinstance(other.exception(), DisconnectedError)

    run(scenario)


def test_the_highest_version_that_both_know_is_used_and_none_is_an_error() -> None:
    async def scenario() -> None:
        from anabranch.protocol.messages.list_offsets import ListOffsetsRequest
        from anabranch.protocol.messages.produce import ProduceRequest

        connection, _ = connected()
        assert connection.version_of(FetchRequest) == 17
        assert not connection.serves(ListOffsetsRequest)
        with pytest.raises(ApiError, match="serves versions 14 to 15 of Produce, and this client 3 to 13"):
            connection.version_of(ProduceRequest)
        with pytest.raises(ApiError, match="serves none of ListOffsets"):
            connection.version_of(ListOffsetsRequest)

    run(scenario)


def test_bootstrap_servers_are_read_as_kafka_reads_them() -> None:
    assert parse_servers("a:1, b:2,") == [("a", 1), ("b", 2)]
    assert parse_servers(["host", "[::1]:9"]) == [("host", 9092), ("::1", 9)]
    for wrong in ("", ":1", "a:b", "a:99999"):
        with pytest.raises(ValueError, match=r"bootstrap\.servers"):
            parse_servers(wrong)


def test_a_connection_is_made_over_the_transport_that_it_is_given() -> None:
    """The seam for TLS and for simulated networks: nothing else opens a stream."""
    asked: list[tuple[str, int]] = []

    async def connect(make_protocol: Callable[[], Connection], host: str, port: int, /) -> Connection:
        asked.append((host, port))
        connection = make_protocol()
        connection.connection_made(cast(asyncio.Transport, Socket()))
        keys = [ApiVersion(api_key=1, min_version=4, max_version=12)]
        data = answer(ApiVersionsResponse(api_keys=keys), 18, api_of(ApiVersionsRequest).versions[-1], 1)
        asyncio.get_running_loop().call_soon(feed, connection, data, 4_096)
        return connection

    async def refuse(make_protocol: Callable[[], Connection], host: str, port: int, /) -> Connection:
        raise ConnectionRefusedError(111, "refused")

    async def scenario() -> None:
        lane = Lane("broker", 9092, ConnectionSettings(connect=connect))
        connection = await lane.connection()
        assert connection.is_open and connection.versions == {1: (4, 12)}
        assert asked == [("broker", 9092)]
        with pytest.raises(ConnectError, match="no connection to broker:9092: refused"):
            await Lane("broker", 9092, ConnectionSettings(connect=refuse)).connection()

    run(scenario)
