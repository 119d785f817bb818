"""Batches of 60 MB on a real broker: the loop writes none, nothing of them is lost, and kills leave no part of one."""

from __future__ import annotations

import random
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.protocol.frames import encode_request
from anabranch.records.batch import HEADER_SIZE, check, parse_header
from anabranch.records.compression import Compression
from anabranch.storage.log.segment import LOG_SUFFIX
from anabranch.storage.log.staging import STAGED_SUFFIX
from tests.support.batches import make_keyed_batch
from tests.support.broker import BrokerProcess, running
from tests.support.steps import in_short_steps
from tests.support.wire import WireClient, batch, values_of

SIZE = 60 << 20
BYTES_MAX = 80 << 20
TIMEOUT_S = 60.0
TOPIC = "large"
VALUE = random.Random(1).randbytes(SIZE)


def fetched(client: WireClient, offset: int) -> bytes:
    """The batch at an offset of the first partition; it is sound."""
    found: bytes = client.fetch(TOPIC, 0, offset, max_bytes=2 * SIZE, partition_max_bytes=1).records
    check(found, 0, parse_header(found))
    return found


def read(client: WireClient, offset: int) -> list[tuple[int, bytes]]:
    """Its records."""
    return values_of(fetched(client, offset))


def files(broker: BrokerProcess) -> list[str]:
    """The files of the first partition that hold records, or were to hold some."""
    names = (path.name for path in broker.data.glob(f"{TOPIC}-0/*"))
    return sorted(name for name in names if name.endswith((LOG_SUFFIX, STAGED_SUFFIX)))


@pytest.mark.parametrize("timestamps", ["CreateTime", "LogAppendTime"])
def test_a_large_batch_is_appended_and_read_in_short_steps(
    broker: BrokerProcess, client: WireClient, timestamps: str
) -> None:
    client.create(TOPIC, max_message_bytes=str(BYTES_MAX), message_timestamp_type=timestamps)
    ends: list[int] = []

    def append() -> None:
        assert client.produce(TOPIC, 0, batch([b"before"])).error_code == ErrorCode.NONE
        answer = client.produce(TOPIC, 0, batch([VALUE]))
        assert answer.error_code == ErrorCode.NONE, answer
        assert client.produce(TOPIC, 0, batch([b"behind"])).base_offset == answer.base_offset + 1
        ends.append(answer.base_offset)

    in_short_steps(broker, append)
    found = in_short_steps(broker, lambda: read(client, ends[-1]))
    assert found == [(ends[-1], VALUE)]
    assert read(client, ends[-1] + 1) == [(ends[-1] + 1, b"behind")]
    assert files(broker) == [f"{base:020d}.log" for base in (0, *ends)]


def test_a_large_batch_for_a_removed_partition_is_appended_in_short_steps_where_its_keys_are(
    broker: BrokerProcess, client: WireClient
) -> None:
    client.create(TOPIC, max_message_bytes=str(BYTES_MAX))
    assert client.resize(TOPIC, 2) == ErrorCode.NONE
    producer = client.producer_id()
    assert client.produce(TOPIC, 1, batch([b"one"], producer=(producer, 0, 0))).error_code == ErrorCode.NONE
    assert client.produce(TOPIC, 0, batch([b"two"], producer=(producer, 0, 0))).base_offset == 0
    assert client.resize(TOPIC, 1) == ErrorCode.NONE
    sequence = 1

    def append() -> None:
        nonlocal sequence
        sent = batch([VALUE], producer=(producer, 0, sequence))
        first, again = (client.produce(TOPIC, 1, sent) for _ in range(2))
        assert (first.error_code, again.error_code) == (ErrorCode.NONE, ErrorCode.NONE), first
        assert first.base_offset == again.base_offset
        sequence += 1

    in_short_steps(broker, append)
    for offset in range(1, sequence):
        stored = fetched(client, offset)
        named = parse_header(stored).producer_id
        assert named not in (producer, -1), "its sequences would be those of the sender's other partition"
        assert values_of(stored) == [(offset, VALUE)]
    assert not any(name.endswith(STAGED_SUFFIX) for name in files(broker))


def test_a_kill_leaves_all_of_a_large_batch_or_nothing(tmp_path: Path) -> None:
    acknowledged = 0
    for wait_s in (0.0, 0.02, 0.05, 0.1, 0.15):
        with running(tmp_path / "data") as broker, WireClient(broker.port, TIMEOUT_S) as client:
            if not client.metadata(TOPIC).partitions:
                client.create(TOPIC, max_message_bytes=str(BYTES_MAX))
            assert not any(name.endswith(STAGED_SUFFIX) for name in files(broker)), "left by a kill"
            end = client.offset_at(TOPIC, 0, -1).offset
            assert end >= acknowledged
            for offset in range(end):
                assert read(client, offset) in ([(offset, VALUE)], [(offset, b"small")])
            assert client.produce(TOPIC, 0, batch([b"small"])).error_code == ErrorCode.NONE
            client.send(client.produce_request(TOPIC, 0, batch([VALUE])), 12)
            time.sleep(wait_s)
            broker.kill()
            acknowledged = end + 1


@pytest.mark.parametrize("sizes", [(3 << 20, 3 << 20), (1, 3 << 20), (3 << 20, 1)])
def test_several_batches_that_are_large_once_recompressed_are_refused(
    broker: BrokerProcess, client: WireClient, sizes: tuple[int, int]
) -> None:
    client.create(TOPIC, compression_type="uncompressed", max_message_bytes=str(BYTES_MAX))
    several = [make_keyed_batch([(b"k", bytes(size))], compression=Compression.GZIP) for size in sizes]
    assert client.produce(TOPIC, 0, b"".join(several)).error_code == ErrorCode.INVALID_RECORD
    assert [client.produce(TOPIC, 0, one).base_offset for one in several] == [0, 1]
    assert [read(client, offset) for offset in (0, 1)] == [[(at, bytes(size))] for at, size in enumerate(sizes)]


def test_large_batches_that_wait_to_be_written_have_the_budget_of_requests(tmp_path: Path) -> None:
    budget, count = 100 << 20, 6
    with running(tmp_path / "data", queued_max_request_bytes=budget) as broker, WireClient(broker.port) as client:
        client.create(TOPIC, max_message_bytes=str(BYTES_MAX))
        assert client.produce(TOPIC, 0, batch([b"first"])).error_code == ErrorCode.NONE
        broker.forget_peak()
        before = broker.resident_bytes()
        frame = b"".join(map(bytes, encode_request(client.produce_request(TOPIC, 0, batch([VALUE])), 12, 0, "large")))

        def send(_: int) -> ErrorCode:
            with WireClient(broker.port, TIMEOUT_S) as sender:
                sender.sock.sendall(frame)
                (answer,) = sender.receive((0, 12)).responses[0].partition_responses
                return ErrorCode(answer.error_code)

        with ThreadPoolExecutor(count) as senders:
            assert [*senders.map(send, range(count))] == [ErrorCode.NONE] * count
        assert client.offset_at(TOPIC, 0, -1).offset == count + 1
        assert broker.peak_bytes() - before < budget + SIZE + (48 << 20)


def test_a_large_batch_needs_its_size_of_the_disk_once(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={3 * SIZE}", "none", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a file system")
    try:
        settings = {"log_dirs_free_bytes_min": 4 << 20}
        with running(disk / "data", **settings) as broker, WireClient(broker.port, TIMEOUT_S) as client:
            client.create(TOPIC, max_message_bytes=str(BYTES_MAX))
            codes = [ErrorCode(client.produce(TOPIC, 0, batch([VALUE])).error_code) for _ in range(3)]
            assert codes == [ErrorCode.NONE, ErrorCode.NONE, ErrorCode.KAFKA_STORAGE_ERROR]
            assert client.produce(TOPIC, 0, batch([b"small"])).base_offset == 2
            assert [name for name in files(broker) if name.endswith(STAGED_SUFFIX)] == []
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_large_batch_that_is_refused_leaves_nothing(broker: BrokerProcess, client: WireClient) -> None:
    client.create(TOPIC, max_message_bytes=str(BYTES_MAX))
    producer = client.producer_id()
    sent = batch([VALUE], producer=(producer, 0, 5))
    assert client.produce(TOPIC, 0, batch([b"x"], producer=(producer, 0, 0))).error_code == ErrorCode.NONE
    assert client.produce(TOPIC, 0, sent).error_code == ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert parse_header(sent).size > HEADER_SIZE + SIZE
    assert files(broker) == [f"{0:020d}.log"]
