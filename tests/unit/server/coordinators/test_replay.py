"""What a coordinator's log says, read record by record and in bulk: the same, whatever was written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from anabranch.base.errors import DecodeError
from anabranch.records.batch import end_transaction_marker
from anabranch.records.compression import Compression
from anabranch.records.key_values import Pair, encode_pairs
from anabranch.runtime.disk import Disk
from anabranch.server.coordinators import bulk_replay, replay
from anabranch.server.coordinators.bulk_replay import BulkReplay, UnsuitedError
from anabranch.server.coordinators.replay import Replay
from anabranch.storage.log.config import Durability, LogConfig
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_keyed_batch

CONFIG = LogConfig(durability=Durability.OS, segment_bytes=2_000)


@pytest.fixture(params=[200, 1 << 20])
def log(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalLog:
    for module in (replay, bulk_replay):
        monkeypatch.setattr(module, "WINDOW_SIZE", request.param)
    return LocalLog.open(tmp_path / "t-0", CONFIG, disk=Disk())


def write(log: LocalLog, pairs: list[Pair], producer_id: int = -1) -> None:
    epoch = 0 if producer_id >= 0 else -1
    log.append(encode_pairs(pairs, 1_000, producer_id=producer_id, producer_epoch=epoch), 0, 0)


def mark(log: LocalLog, producer_id: int, *, commit: bool) -> None:
    log.append(end_transaction_marker(producer_id, 0, commit=commit, coordinator_epoch=0, timestamp_ms=0), 0, 0)


def one_by_one(log: LocalLog) -> Replay:
    found = Replay()
    for _ in found.scan(log.slices()):
        pass
    return found


def in_bulk(log: LocalLog) -> BulkReplay:
    found = BulkReplay()
    for _ in found.scan(log.slices()):
        pass
    return found


def test_the_last_values_count_in_the_order_in_which_they_were_written(log: LocalLog) -> None:
    write(log, [(b"a", b"1"), (b"b", b"2"), (b"c", b"3"), (None, b"no key")])
    write(log, [(b"a", b"4"), (b"c", None)])
    for found in (one_by_one(log), in_bulk(log)):
        assert list(found.latest.items()) == [(b"b", b"2"), (b"a", b"4")]
        assert found.records == 6


def test_any_history_reads_the_same_both_ways(log: LocalLog) -> None:
    chance = random.Random(4)
    for _ in range(20):
        open_transactions: set[int] = set()
        for _ in range(60):
            pairs: list[Pair] = [
                (b"key %d" % chance.randrange(12), chance.choice((None, b"%d" % chance.randrange(1_000))))
                for _ in range(chance.randrange(1, 6))
            ]
            producer_id = chance.choice((-1, -1, 1, 2, 3))
            if producer_id >= 0 and chance.random() < 0.4:
                mark(log, producer_id, commit=chance.random() < 0.5)
                open_transactions.discard(producer_id)
            else:
                write(log, pairs, producer_id)
                open_transactions |= {producer_id} - {-1}
        slow, fast = one_by_one(log), in_bulk(log)
        assert sorted(slow.latest.items()) == sorted(fast.latest.items())
        assert slow.held() == fast.held()
        assert {held.producer_id for held in fast.held()} <= open_transactions


def test_an_empty_log_says_nothing(log: LocalLog) -> None:
    assert one_by_one(log).latest == in_bulk(log).latest == {}


def test_what_others_compressed_is_read_one_by_one(log: LocalLog) -> None:
    log.append(make_keyed_batch([(b"a", b"1")], compression=Compression.ZSTD), 0, 0)
    assert one_by_one(log).latest == {b"a": b"1"}
    with pytest.raises(UnsuitedError):
        in_bulk(log)


@pytest.mark.parametrize("at", [70, 8, 16])
def test_damage_is_found_both_ways(log: LocalLog, at: int) -> None:
    for number in range(20):
        write(log, [(b"a", b"%d" % number)])
    (path,) = log.directory.glob("*.log")
    data = bytearray(path.read_bytes())
    data[len(data) // 20 * 10 + at] ^= 0x40
    path.write_bytes(data)
    for read in (one_by_one, in_bulk):
        with pytest.raises(DecodeError):
            read(log)
