"""Requests to any broker over a plain socket, written and read with `kio`: an oracle that shares no code with ours."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from io import BytesIO
from typing import Any

from kio.schema.fetch.v4.request import FetchPartition, FetchRequest, FetchTopic
from kio.serial import entity_reader, entity_writer

BATCH_HEADER = struct.Struct(">qiiBIhiqqqhii")
TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """The header of a record batch as the broker keeps it."""

    base_offset: int
    size: int
    compression: int
    log_append_time: bool
    producer_id: int
    record_count: int


def ask(address: str, request: Any) -> Any:
    """Send one request on a connection of its own and return the response."""
    host, _, port = address.rpartition(":")
    kind = type(request)
    header = kind.__header_schema__(
        request_api_key=kind.__api_key__,
        request_api_version=kind.__version__,
        correlation_id=1,
        client_id="oracle",
    )
    payload = _written(header) + _written(request)
    with socket.create_connection((host, int(port)), TIMEOUT_S) as connection:
        connection.sendall(struct.pack(">i", len(payload)) + payload)
        with connection.makefile("rb") as stream:
            (size,) = struct.unpack(">i", stream.read(4))
            answer = stream.read(size)
    module = import_module(kind.__module__.replace(".request", ".response"))
    response_kind = getattr(module, kind.__name__.replace("Request", "Response"))
    _, position = entity_reader(response_kind.__header_schema__)(answer, 0)
    response, size_read = entity_reader(response_kind)(answer, position)
    assert position + size_read == len(answer), "the response is longer than its schema says"
    return response


def wait_until_served(address: str, topic: str, partitions: int) -> None:
    """Wait until a new topic's partitions can be fetched: some brokers answer for the topic before they lead it."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        at = tuple(FetchPartition(partition=p, fetch_offset=0, partition_max_bytes=1) for p in range(partitions))
        request = FetchRequest(max_wait=timedelta(0), min_bytes=0, topics=(FetchTopic(topic=topic, partitions=at),))
        errors = [each.error_code for each in ask(address, request).responses[0].partitions]
        if not any(errors):
            return
        assert time.monotonic() < deadline, f"{topic} is not served: {errors}"
        time.sleep(0.05)


def stored_batches(address: str, topic: str, partition: int) -> list[StoredBatch]:
    """Fetch a partition from its first offset, and on to its end, and return the headers of its batches."""
    found: list[StoredBatch] = []
    position = 0
    while True:
        at = FetchPartition(partition=partition, fetch_offset=position, partition_max_bytes=1 << 24)
        topics = (FetchTopic(topic=topic, partitions=(at,)),)
        answer = ask(address, FetchRequest(max_wait=timedelta(0), min_bytes=0, topics=topics))
        (result,) = answer.responses[0].partitions
        assert result.error_code == 0, f"fetch failed with {result.error_code}"
        batches = list(_batches(bytes(result.records or b"")))
        if not batches:
            return found
        found += batches
        position = batches[-1].base_offset + batches[-1].record_count


def _written(entity: Any) -> bytes:
    buffer = BytesIO()
    entity_writer(type(entity))(buffer, entity)
    return buffer.getvalue()


def _batches(records: bytes) -> Iterator[StoredBatch]:
    position = 0
    while position + BATCH_HEADER.size <= len(records):
        base_offset, length, _, _, _, attributes, _, _, _, producer_id, _, _, count = BATCH_HEADER.unpack_from(
            records, position
        )
        size = length + 12
        if position + size > len(records):
            return
        yield StoredBatch(base_offset, size, attributes & 7, bool(attributes & 8), producer_id, count)
        position += size
