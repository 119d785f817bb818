"""Frames of LZ4: what a broker takes, Java's client and librdkafka read; what they do not read is refused."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

import lz4.frame
import pytest

from anabranch.base.errors import ErrorCode
from anabranch.records.batch import build
from tests.conformance.clients import Client
from tests.conformance.clients.confluent import ConfluentKafka
from tests.conformance.clients.java import JavaClient
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, field, varint

VALUE = b"".join(struct.pack(">i", number % 977) for number in range(50_000))
"""More than one block."""
BODY = b"\0\0\0" + field(None) + field(VALUE) + b"\0"
ROWS = varint(len(BODY)) + BODY


def frame(**options: object) -> bytes:
    return bytes(lz4.frame.compress(ROWS, **{"block_linked": False, **options}))


def made(content: bytes) -> bytearray:
    return build(
        content, record_count=1, base_timestamp=1_700_000_000_000, max_timestamp=1_700_000_000_000, attributes=3
    )


TAKEN = {
    "plain": frame(store_size=False),
    "with its size": frame(),
    "with all checksums": frame(block_checksum=True, content_checksum=True),
    "large blocks": frame(block_size=lz4.frame.BLOCKSIZE_MAX1MB),
}
REFUSED = {
    "linked blocks": frame(block_linked=True),
    "two frames": bytes(lz4.frame.compress(ROWS[:90_000], block_linked=False))
    + bytes(lz4.frame.compress(ROWS[90_000:], block_linked=False)),
    "a frame that is left out in front": b"\x50\x2a\x4d\x18\4\0\0\0abcd" + frame(),
    "bytes behind": frame() + b"abc",
    "no end": frame(content_checksum=False)[:-4],
}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("data")) as process:
        with WireClient(process.port) as client:
            client.create("taken", retention_ms="-1")
            for content in TAKEN.values():
                assert client.produce("taken", 0, made(content)).error_code == ErrorCode.NONE
        yield process


@pytest.mark.parametrize("kind", [ConfluentKafka, JavaClient])
def test_what_is_taken_is_read(kind: Callable[[str], Client], broker: BrokerProcess) -> None:
    client = kind(broker.address)
    try:
        found = client.fetch("taken", {0: len(TAKEN)})
    finally:
        client.close()
    assert [each.record.value == VALUE for each in found[0]] == [True] * len(TAKEN)


@pytest.mark.parametrize("name", REFUSED)
def test_what_some_client_does_not_read_is_refused(name: str, broker: BrokerProcess) -> None:
    with WireClient(broker.port) as client:
        client.create(name.replace(" ", "-"))
        answer = client.produce(name.replace(" ", "-"), 0, made(REFUSED[name]))
        assert answer.error_code == ErrorCode.INVALID_RECORD
        assert "LZ4" in answer.error_message
