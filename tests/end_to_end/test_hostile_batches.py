"""Hostile record batches, sent and found on the disk: their senders are refused, and nobody else notices."""

from __future__ import annotations

import contextlib
import gzip
import random
import struct
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PRODUCERS_PER_PARTITION_MAX
from anabranch.machines.controller.nodes import PRODUCER_IDS
from anabranch.protocol.messages.metadata import MetadataRequest
from anabranch.protocol.messages.produce import PartitionProduceData
from anabranch.records.batch import build, stamp
from anabranch.records.compression import Compression, compress
from tests.support.broker import BrokerProcess, log_size, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch, varint
from tests.support.written_metadata import write_nodes

NOW_MS = 1_700_000_000_000
WAIT_MAX_S = 3.0
"""What an innocent client waits at most, on a machine that does many other things, too."""
EMPTY = b"\x0c\0\0\0\1\1\0"
"""A record with nothing in it; its offset delta is 0."""


def plain(count: int) -> bytes:
    """So many records of a few bytes."""
    rows = bytearray()
    for place in range(count):
        body = b"\0\0" + varint(place) + b"\1\1\0"
        rows += varint(len(body)) + body
    return bytes(rows)


def made(rows: bytes, count: int, codec: Compression = Compression.NONE, *, base_timestamp: int = NOW_MS) -> bytearray:
    """A batch of records, whatever they are."""
    return build(
        compress(codec, rows),
        record_count=count,
        base_timestamp=base_timestamp,
        max_timestamp=base_timestamp,
        attributes=codec,
    )


def framed(content: bytes, codec: Compression) -> bytearray:
    """A batch of one record, if that is what its compressed records hold."""
    return build(content, record_count=1, base_timestamp=NOW_MS, max_timestamp=NOW_MS, attributes=codec)


GZIP_OF_NOTHING = gzip.compress(b"")
XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
EMPTY_DEFLATE_BLOCKS = int("0000000010" * 4, 2).to_bytes(5, "little")
"""Four of ten bits: one that is not the last, of type 1, and its end."""


@contextlib.contextmanager
def innocent(broker: BrokerProcess) -> Iterator[None]:
    """A client that asks all the time, and must not wait."""
    waits: list[float] = []
    begun, over = threading.Event(), threading.Event()

    def ask() -> None:
        with WireClient(broker.port) as client:
            while not over.is_set():
                began = time.monotonic()
                client.call(MetadataRequest(topics=[]), 9)
                waits.append(time.monotonic() - began)
                begun.set()
                over.wait(0.005)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(20)
    try:
        yield
    finally:
        over.set()
        thread.join(30)
    assert max(waits) < WAIT_MAX_S, sorted(waits)[-5:]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with running(tmp_path_factory.mktemp("hostile")) as process:
        yield process


HOSTILE = {
    "a record of length -1, 2^31 - 1 times": (made(b"\1", 2**31 - 1), ErrorCode.INVALID_RECORD),
    "18 million records": (made(EMPTY * 18_000_000, 18_000_000, Compression.ZSTD), ErrorCode.INVALID_RECORD),
    "a bomb of a gigabyte": (made(bytes(1 << 30), 1, Compression.ZSTD), ErrorCode.MESSAGE_TOO_LARGE),
    "a million records out of order": (made(EMPTY * 1_000_000, 1_000_000, Compression.ZSTD), ErrorCode.INVALID_RECORD),
    "a time beyond 64 bits": (
        made(b"\x0c\0\2\0\1\1\0", 1, base_timestamp=2**63 - 1),
        ErrorCode.INVALID_RECORD,
    ),
    "a time in the year 5138": (made(plain(1), 1, base_timestamp=10**14), ErrorCode.INVALID_TIMESTAMP),
    "no content of gzip": (
        build(b"?", record_count=1, base_timestamp=0, max_timestamp=0, attributes=Compression.GZIP),
        ErrorCode.INVALID_RECORD,
    ),
    "45,000 members of gzip": (
        framed(GZIP_OF_NOTHING * 45_000 + gzip.compress(plain(1)), Compression.GZIP),
        ErrorCode.INVALID_RECORD,
    ),
    "two members of gzip": (
        framed(gzip.compress(plain(1)[:3]) + gzip.compress(plain(1)[3:]), Compression.GZIP),
        ErrorCode.INVALID_RECORD,
    ),
    "gzip with a name of 900,000 letters": (
        framed(
            b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * 900_000 + b"\0" + gzip.compress(plain(1))[10:], Compression.GZIP
        ),
        ErrorCode.INVALID_RECORD,
    ),
    "bytes behind a member of gzip": (
        framed(gzip.compress(plain(1)) + bytes(8), Compression.GZIP),
        ErrorCode.INVALID_RECORD,
    ),
    "a block of snappy without content": (
        framed(XERIAL + b"\0\0\0\1\0" + compress(Compression.SNAPPY, plain(1))[16:], Compression.SNAPPY),
        ErrorCode.INVALID_RECORD,
    ),
    "200,000 blocks of snappy without content": (
        framed(XERIAL + b"\0\0\0\1\0" * 200_000, Compression.SNAPPY),
        ErrorCode.INVALID_RECORD,
    ),
    "140,000 blocks of snappy with a byte of no record": (
        framed(XERIAL + b"\0\0\0\3\1\0a" * 140_000, Compression.SNAPPY),
        ErrorCode.INVALID_RECORD,
    ),
    "760,000 blocks of gzip without content": (
        framed(gzip.compress(b"")[:10] + EMPTY_DEFLATE_BLOCKS * 190_000, Compression.GZIP),
        ErrorCode.INVALID_RECORD,
    ),
    "messages of format 1": (
        bytearray(struct.pack(">qiIbbqii", 0, 22, 0, 1, 0, 0, -1, -1)),
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    ),
    "messages of format 0": (
        bytearray(struct.pack(">qiIbbii", 0, 14, 0, 0, 0, -1, -1)),
        ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_batch_is_refused_with_a_sentence_and_nobody_waits(broker: BrokerProcess, name: str) -> None:
    data, code = HOSTILE[name]
    with WireClient(broker.port) as client:
        topic = f"hostile-{time.monotonic_ns()}"
        client.create(topic)
        before = broker.resident_bytes()
        broker.forget_peak()
        with innocent(broker):
            for _ in range(3):
                answer = client.produce(topic, 0, data)
                assert answer.error_code == code, answer
                assert len(answer.error_message) > 20
        assert broker.peak_bytes() - before < 160 << 20
        assert client.produce(topic, 0, batch([b"sound"])).error_code == ErrorCode.NONE
        assert client.offset_at(topic, 0, 0).offset == 0
    assert not broker.said("error"), broker.said("error")


@pytest.mark.parametrize("codec", list(Compression))
def test_a_large_sound_batch_is_taken_and_nobody_waits(broker: BrokerProcess, codec: Compression) -> None:
    count = 140_000
    data = made(plain(count), count, codec)
    with WireClient(broker.port) as client:
        for target in ("producer", "gzip", "uncompressed"):
            topic = f"large-{codec.name}-{target}"
            client.create(topic, compression_type=target, max_message_bytes="2000000")
            with innocent(broker):
                answer = in_short_steps(broker, partial(client.produce, topic, 0, data))
            assert answer.error_code == ErrorCode.NONE
            assert client.offset_at(topic, 0, -1).offset == answer.base_offset + count


def test_a_large_batch_is_compressed_anew_beside_the_loop(broker: BrokerProcess) -> None:
    """Bytes that cannot be compressed take gzip 20 ms a megabyte."""
    values = [random.Random(number).randbytes(1_000) for number in range(1_500)]
    with WireClient(broker.port) as client:
        client.create("anew", compression_type="gzip", max_message_bytes="4000000")
        with innocent(broker):
            answer = in_short_steps(broker, partial(client.produce, "anew", 0, batch(values)))
        assert answer.error_code == ErrorCode.NONE
        assert client.offset_at("anew", 0, -1).offset == answer.base_offset + 1_500


@pytest.mark.parametrize("in_one", [False, True])
def test_records_that_are_headers_alone_hold_nobody_up(broker: BrokerProcess, in_one: bool) -> None:
    """A million headers take 3 ms, 60 times as long as other records of as many bytes."""
    count = 70_000 if in_one else 490_000
    body = b"\0\0\0\1\1" + varint(count) + bytes(2 * count)
    data = bytes(made(varint(len(body)) + body, 1))
    with WireClient(broker.port) as client:
        topic = f"headers-{in_one}"
        client.create(topic, 7)
        asked = client.produce_request(topic, 0, data * 7)
        if not in_one:
            parts = [PartitionProduceData(index=number, records=data) for number in range(7)]
            asked.topic_data[0].partition_data = parts
        answer = in_short_steps(broker, lambda: client.call(asked, 12))
        assert {part.error_code for part in answer.responses[0].partition_responses} == {ErrorCode.NONE}


def test_configs_that_no_request_could_use_are_refused(broker: BrokerProcess) -> None:
    with WireClient(broker.port) as client, pytest.raises(AssertionError, match="no request could bring"):
        client.create("boundless", max_message_bytes=str(2**31 - 1))


OLD = {
    "a record of length -1, 2^31 - 1 times": made(b"\1", 2**31 - 1),
    "18 million records": made(EMPTY * 18_000_000, 18_000_000, Compression.ZSTD),
    "a time beyond 64 bits": made(b"\x0c\0\2\0\1\1\0", 1, base_timestamp=2**63 - 1),
    "no record": made(b"no record", 1),
}


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path, durability="os", log_cleaner_backoff_ms=200)
    yield process
    if process.alive:
        process.kill()


@pytest.mark.parametrize("name", OLD)
def test_what_an_earlier_version_took_stops_no_reader_of_other_records(
    restarted: BrokerProcess, tmp_path: Path, name: str
) -> None:
    """The batch lies in a log, as a broker without checks took it."""
    broker = restarted.start()
    with WireClient(broker.port) as client:
        client.create("old", cleanup_policy="compact", segment_bytes="1000", min_cleanable_dirty_ratio="0")
        client.create("other", cleanup_policy="compact", segment_bytes="100", min_cleanable_dirty_ratio="0")
        client.produce("old", 0, batch([b"sound"], key=b"k", timestamp=NOW_MS))
    broker.kill()
    (path,) = tmp_path.glob("**/old-0/*.log")
    poison = bytearray(OLD[name])
    stamp(poison, 0, 1, 0)
    path.write_bytes(path.read_bytes() + poison)
    broker.start()
    with WireClient(broker.port) as reader, WireClient(broker.port) as client:
        with innocent(broker):
            assert reader.offset_at("old", 0, 0).offset == 0
            for timestamp in (NOW_MS + 1, -3, 2**63 - 1):
                reader.offset_at("old", 0, timestamp)
        for _ in range(20):
            for topic in ("old", "other"):  # Their segments are finished: the cleaner comes to them.
                assert client.produce(topic, 0, batch([bytes(200)], key=b"k")).error_code == ErrorCode.NONE
        deadline = time.monotonic() + 20
        while log_size(tmp_path / "other-0") > 20 * 200 / 2:
            assert time.monotonic() < deadline, "other topics are not compacted any more"
            threading.Event().wait(0.05)
    began = time.monotonic()
    assert broker.stop() == 0
    assert time.monotonic() - began < 5


def test_a_hundred_thousand_producers_push_no_other_out(tmp_path: Path) -> None:
    """An honest producer's batch is known again when its response was lost, whatever others have sent meanwhile."""
    with running(tmp_path) as broker, WireClient(broker.port) as client:
        client.producer_id()
    write_nodes(tmp_path / "metadata.sqlite", {PRODUCER_IDS: b"200000"})  # As after many years.
    with running(tmp_path) as broker, WireClient(broker.port, 60) as client:
        client.create("t", retention_ms="-1")
        honest = client.producer_id()
        assert honest == 200_000
        said = batch([b"once"], producer=(honest, 0, 0))
        assert client.produce("t", 0, said).base_offset == 0
        refused = 0
        for first in range(0, PRODUCERS_PER_PARTITION_MAX, 100):
            invented = b"".join(batch([b"x"], producer=(number, 0, 0)) for number in range(first, first + 100))
            refused += client.produce("t", 0, invented).error_code == ErrorCode.POLICY_VIOLATION
        assert refused == 1, "as many as fit are taken, and no further one"
        again = client.produce("t", 0, said)
        assert (again.error_code, again.base_offset) == (ErrorCode.NONE, 0)
        end = client.offset_at("t", 0, -1).offset
        newest = client.fetch("t", 0, end - 1)
        assert b"once" not in bytes(newest.records)
        assert client.produce("t", 0, batch([b"next"], producer=(honest, 0, 1))).error_code == ErrorCode.NONE
        assert client.produce("t", 0, batch([b"plain"])).error_code == ErrorCode.NONE
