"""The upkeep of compacted topics: what the shell around the cleaner does when partitions come, go, or fail."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.cleaning import Urgency
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.records.batch import CONTROL, TRANSACTIONAL, build, end_transaction_marker, headers, parse_header
from anabranch.records.compression import Compression
from anabranch.records.key_values import decode_pairs
from anabranch.records.varint import encode_varint
from anabranch.runtime.disk import Disk
from anabranch.server.partitions.compaction import _commit
from anabranch.server.partitions.folding import FoldBack
from anabranch.server.partitions.partition import Partition
from anabranch.storage.checkpoints import Checkpoints
from anabranch.storage.log.batch_files import records
from anabranch.storage.log.cleaner import Cleaned, Cleaning
from anabranch.storage.log.folding import Chunk, Folding
from anabranch.storage.log.recovery import remove_replaced
from tests.support.batches import make_batch, make_keyed_batch
from tests.support.replicas import NOW_MS, TOPIC, TOPIC_ID, LocalReplicas

OK = ErrorCode.NONE
ROLE = Role(0, 1, leader_epoch=2, layout=1, retiring=False, replicas=(1,), isr=(1,))
ORDER = SendLeaderAndIsr(1, 1, 1, TOPIC, TOPIC_ID, 1, 1, (ROLE,))
STOP = SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, ((0, 2),))


def compacted(path: Path) -> LocalReplicas:
    return LocalReplicas(path, cleanup_policy="compact", segment_bytes="150", min_cleanable_dirty_ratio="0")


def test_a_replica_that_is_stopped_while_it_is_compacted_leaves_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = compacted(tmp_path)
    assert local.runner.run(local.replicas.take_roles(ORDER)) == {0: OK}
    for _ in range(5):
        data = make_keyed_batch([(b"key", b"value")])
        local[0].append(data, parse_header(data), NOW_MS)
    local.sync(0)
    cleaned, go_on, run = threading.Event(), threading.Event(), Cleaning.run

    def run_and_wait(cleaning: Cleaning) -> list[Cleaned]:
        result = run(cleaning)
        cleaned.set()
        assert go_on.wait(10)
        return result

    monkeypatch.setattr(Cleaning, "run", run_and_wait)

    async def story() -> None:
        upkeep = asyncio.create_task(local.compaction.run())
        assert await asyncio.to_thread(cleaned.wait, 10)
        assert await local.replicas.stop(replace(STOP, topic_deleted=True)) == {0: OK}
        assert await local.replicas.take_roles(replace(ORDER, topic_id=UUID(int=2))) == {0: OK}
        go_on.set()
        await upkeep

    local.runner.run(story())
    assert local[0].log.end == 0
    assert Checkpoints(local.disk, tmp_path / "data").recovery_point(f"{TOPIC}-0") is None
    local.close()


def _poison(
    rows: bytes, *, base_timestamp: int = 0, count: int = 1, attributes: int = 0, producer: int = -1
) -> bytearray:
    """A batch as brokers took it before they looked at records."""
    return build(
        rows,
        record_count=count,
        last_offset_delta=max(count, 1) - 1,
        base_timestamp=base_timestamp,
        max_timestamp=NOW_MS,
        attributes=attributes,
        producer_id=producer,
        producer_epoch=0,
    )


POISONS = {
    "no record": _poison(b"no record"),
    "a length of -1, 2^31 - 1 times": _poison(b"\1", count=2**31 - 1),
    "a key of -100 bytes": _poison(bytes((14, 0, 0, 0, 199, 1, 2, 0))),
    "a timestamp beyond 64 bits": _poison(
        b"\x12\0\0\0\6key\0\0" + b"\x0e\0\2\2\2t\0\0", base_timestamp=2**63 - 1, count=2
    ),
    "a marker without a record": _poison(b"", count=0, attributes=CONTROL | TRANSACTIONAL, producer=5),
    "a codec's garbage": _poison(b"garbage", attributes=Compression.ZSTD),
}


@pytest.mark.parametrize("poison", POISONS)
def test_records_that_cannot_be_compacted_do_not_end_the_upkeep_of_other_partitions(
    tmp_path: Path, poison: str
) -> None:
    local = compacted(tmp_path)
    local.resize(2)
    for number, kept in enumerate((bytearray(POISONS[poison]), None)):
        for _ in range(5):
            data = make_keyed_batch([(b"key", b"value")])
            local[number].append(data, parse_header(data), NOW_MS)
            if kept is not None:
                header = parse_header(kept)._replace(producer_id=-1)
                local[number].append(kept, header, NOW_MS)
        local.sync(number)
    size, end = local[1].log.size, local[0].log.end
    for _ in range(2):
        local.runner.run(local.compaction.run())
    assert local[1].log.size < size
    assert local[0].log.end == end
    local.close()


def test_a_record_waits_no_longer_than_the_greatest_lag_however_little_is_dirty(tmp_path: Path) -> None:
    """In a segment that takes appends still, and behind clean segments that are a thousand times as large."""
    local = LocalReplicas(
        tmp_path, cleanup_policy="compact", segment_bytes="100000", max_compaction_lag_ms="60000", durability="fsync"
    )
    local.resize(1)

    def written(key: bytes, value: bytes) -> None:
        data = make_keyed_batch([(key, value)], timestamp=local.clock.ms)
        local[0].append(data, parse_header(data), local.clock.ms)
        local.sync(0)

    for number in range(12):
        written(b"large-%d" % number, bytes(30_000))
    local.runner.run(local.compaction.run())
    for number in range(5):
        written(b"k", b"%d" % number)
    size = local[0].log.size
    local.clock.ms += 60_000
    local.runner.run(local.compaction.run())
    assert local[0].log.size == size, "nothing has waited too long"
    local.clock.ms += 1
    local.runner.run(local.compaction.run())
    assert local[0].log.size < size - 4 * 60
    local.close()


def test_the_dirtiest_log_is_compacted_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = compacted(tmp_path)
    local.resize(3)
    for number, copies in enumerate((3, 30, 10)):  # The others of 30 batches have a key of their own.
        for place in range(30):
            data = make_keyed_batch([(b"key" if place < copies else b"%d" % place, b"value")])
            local[number].append(data, parse_header(data), NOW_MS)
        local.sync(number)
    local.runner.run(local.compaction.run())
    for number, fresh in enumerate((2, 9, 4)):
        for _ in range(fresh):
            data = make_keyed_batch([(b"key", b"new")])
            local[number].append(data, parse_header(data), NOW_MS)
        local.sync(number)
    order: list[int] = []
    run = Cleaning.run

    def noted(cleaning: Cleaning) -> list[Cleaned]:
        order.append(cleaning.subject.partition)
        return run(cleaning)

    monkeypatch.setattr(Cleaning, "run", noted)
    local.runner.run(local.compaction.run())
    assert order == [1, 2, 0]
    local.close()


def test_a_log_is_not_removed_while_its_segments_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a file of the old log could appear in a new one of its name."""
    local = compacted(tmp_path)
    assert local.runner.run(local.replicas.take_roles(ORDER)) == {0: OK}
    for _ in range(5):
        data = make_keyed_batch([(b"key", b"value")])
        local[0].append(data, parse_header(data), NOW_MS)
    local.sync(0)
    replacing, go_on = threading.Event(), threading.Event()
    remove = remove_replaced

    def remove_and_wait(disk: Disk, directory: Path, bases: list[int]) -> None:
        replacing.set()
        assert go_on.wait(10)
        remove(disk, directory, bases)

    monkeypatch.setattr("anabranch.storage.log.recovery.remove_replaced", remove_and_wait)
    found: list[bytes] = []

    async def story() -> None:
        upkeep = asyncio.create_task(local.compaction.run())
        assert await asyncio.to_thread(replacing.wait, 10)
        part = local[0].log.read(0, 10_000)
        assert part is not None and not isinstance(part, Awaitable)
        found.append(bytes(part.view()))
        stopping = asyncio.create_task(local.replicas.stop(replace(STOP, topic_deleted=True)))
        await asyncio.sleep(0.1)
        assert not stopping.done()
        go_on.set()
        assert await stopping == {0: OK}
        await upkeep

    local.runner.run(story())
    assert found[0], "the new segment is read before it has its name"
    assert not list(tmp_path.glob("data/*-0"))
    local.close()


def test_a_defect_in_the_upkeep_of_one_partition_is_logged_and_counted_and_ends_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = compacted(tmp_path)
    local.resize(2)
    for number in range(2):
        for _ in range(5):
            data = make_keyed_batch([(b"key", b"value")])
            local[number].append(data, parse_header(data), NOW_MS)
        local.sync(number)
    size, run = local[1].log.size, Cleaning.run

    def fail_at_first(cleaning: Cleaning) -> list[Cleaned]:
        if cleaning.subject.directory.name.endswith("-0"):
            raise RuntimeError("a defect")
        return run(cleaning)

    monkeypatch.setattr(Cleaning, "run", fail_at_first)
    monkeypatch.setattr(type(local[0].table), "expire", lambda *_: 1 / 0)
    local.runner.run(local.compaction.run())
    local.runner.run(local.replicas.maintain(1))
    assert local[1].log.size < size
    assert local.metrics.counter("anabranch_compaction_failures_total", "").value == 1
    assert local.metrics.counter("anabranch_upkeep_failures_total", "").value == 2
    local.close()


def test_a_log_whose_cleaner_checkpoint_cannot_be_read_is_reported_until_it_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local = compacted(tmp_path)
    local.resize(2)
    for number in range(2):
        for _ in range(5):
            data = make_keyed_batch([(b"key", b"value")])
            local[number].append(data, parse_header(data), NOW_MS)
        local.sync(number)
    damaged = tmp_path / "data" / f"{TOPIC}-0" / "cleaner-checkpoint"
    damaged.write_text("0\n0\n")
    sizes = [local[number].log.size for number in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr(local.disk, "read", _unless(damaged, local.disk.read))
        for _ in range(2):
            local.runner.run(local.compaction.run())
    assert local[0].log.size == sizes[0] and local[1].log.size < sizes[1]
    assert local.metrics.counter("anabranch_compaction_failures_total", "").value == 2
    told = [record.__dict__["anabranch_fields"] for record in caplog.records if record.message == "not compacted"]
    assert [str(each["partition"]) for each in told] == [f"{TOPIC}-0"]
    assert str(damaged) in str(told[0]["reason"])
    local.runner.run(local.compaction.run())
    assert local[0].log.size < sizes[0]
    local.close()


def _unless(damaged: Path, work: Callable[..., Any]) -> Callable[..., Any]:
    """Do something with any file but a damaged one."""

    def refuse(path: Path, *rest: object) -> Any:
        if path == damaged:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return work(path, *rest)

    return refuse


def test_a_log_that_goes_on_failing_is_named_once_and_again_when_it_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    local = compacted(tmp_path)
    local.resize(1)
    for _ in range(5):
        data = make_keyed_batch([(b"key", b"value")])
        local[0].append(data, parse_header(data), NOW_MS)
    local.sync(0)
    caplog.set_level("INFO")

    def fail(_: Cleaning) -> list[Cleaned]:
        raise OSError(errno.EIO, "Input/output error")

    def said() -> list[tuple[str, str]]:
        return [(it.levelname, it.getMessage()) for it in caplog.records if "compacted" in it.getMessage()]

    with monkeypatch.context() as failing:
        failing.setattr(Cleaning, "run", fail)
        for _ in range(3):
            local.runner.run(local.compaction.run())
    assert said() == [("WARNING", "not compacted")]
    assert local.metrics.counter("anabranch_compaction_failures_total", "").value == 3
    for _ in range(2):
        local.runner.run(local.compaction.run())
    assert said()[1:] == [("INFO", "compacted"), ("INFO", "compacted again")]
    local.close()


# -- families ----------------------------------------------------------------------------------------------------------


class Topic:
    """A compacted topic with one partition at first, small segments, and tombstones that may go at once."""

    def __init__(self, path: Path, **configs: str) -> None:
        settings = {"delete_retention_ms": "0", "segment_bytes": "1", "min_cleanable_dirty_ratio": "0", **configs}
        self.local = LocalReplicas(path, durability="fsync", cleanup_policy="compact", **settings)
        self.local.resize(1)

    def put(self, number: int, key: bytes, value: bytes | None, *, transaction: int | None = None) -> int:
        sequence = {} if transaction is None else {"producer_id": transaction, "base_sequence": 0}
        data = make_keyed_batch(
            [(key, value)], timestamp=self.local.clock.ms, transactional=transaction is not None, **sequence
        )
        return self.local[number].append(data, parse_header(data), self.local.clock.ms).base_offset

    def end(self, number: int, transaction: int, *, commit: bool) -> None:
        now_ms = self.local.clock.ms
        marker = end_transaction_marker(transaction, 0, commit=commit, coordinator_epoch=0, timestamp_ms=now_ms)
        self.local[number].append(marker, parse_header(marker), now_ms)

    def compact(self, rounds: int = 1, after_ms: int = 1_000) -> None:
        for _ in range(rounds):
            self.local.clock.ms += after_ms
            for partition in self.local.replicas:
                partition.log.flush()
            self.local.runner.run(self.local.compaction.run())

    def found(self, number: int) -> list[tuple[bytes | None, bytes | None]]:
        """All records of a partition, those of transactions included."""
        rows: list[tuple[bytes | None, bytes | None]] = []
        for piece in self.local[number].log.slices():
            view = piece.view()
            for position, header in headers(view):
                if not header.is_control:
                    rows += decode_pairs(view[position : position + header.size], header)
        return rows

    def fill(self, number: int, count: int = 1) -> None:
        """Write so that the segments in front are finished."""
        for _ in range(count):
            self.put(number, b"filler-%d" % number, bytes(1))

    def count(self, name: str) -> float:
        return self.local.metrics.counter(f"anabranch_compaction_{name}_total", "").value


@pytest.fixture
def topic(tmp_path: Path) -> Iterator[Topic]:
    made = Topic(tmp_path)
    yield made
    made.local.close()


def test_a_record_goes_when_its_key_has_a_newer_one_in_a_partition_that_came_later(topic: Topic) -> None:
    topic.put(0, b"moved", b"old")
    topic.put(0, b"stayed", b"old")
    topic.local.resize(2)
    topic.put(1, b"moved", b"new")
    topic.fill(1)
    topic.compact()
    assert topic.found(0) == [(b"stayed", b"old")]
    assert topic.found(1)[0] == (b"moved", b"new")


def test_a_key_that_was_deleted_after_a_resize_does_not_come_back(topic: Topic) -> None:
    """An open transaction keeps the old value from being cleaned: its tombstone elsewhere must wait."""
    topic.put(0, b"first", b"", transaction=7)
    topic.put(0, b"gone", b"old")
    topic.local.resize(2)
    topic.put(1, b"gone", None)
    for _ in range(3):
        topic.fill(1)
        topic.compact()
    assert (b"gone", b"old") in topic.found(0)
    assert (b"gone", None) in topic.found(1), "the old value would come back"
    topic.end(0, 7, commit=True)
    topic.fill(0)
    topic.fill(1)
    topic.compact()
    assert (b"gone", b"old") not in topic.found(0)
    topic.fill(1)
    topic.compact()
    topic.fill(1)
    topic.compact()
    assert (b"gone", None) not in topic.found(1), "nothing older is left"


def test_a_tombstone_stays_for_its_retention_after_the_last_older_record_went(tmp_path: Path) -> None:
    topic = Topic(tmp_path, delete_retention_ms="10000")
    topic.put(0, b"first", b"", transaction=7)
    topic.put(0, b"gone", b"old")
    topic.local.resize(2)
    topic.put(1, b"gone", None)
    topic.fill(1)
    topic.compact()
    topic.compact(after_ms=20_000)
    topic.end(0, 7, commit=True)
    topic.fill(0)
    topic.compact()
    assert (b"gone", b"old") not in topic.found(0)
    for _ in range(4):
        topic.fill(1)
        topic.compact()
        assert (b"gone", None) in topic.found(1), "readers that were given the old value are still on their way"
    for _ in range(2):
        topic.fill(1)
        topic.compact(after_ms=10_000)
    assert (b"gone", None) not in topic.found(1)
    topic.local.close()


def test_records_that_producers_with_an_old_count_wrote_beside_newer_ones_stay(topic: Topic) -> None:
    topic.put(0, b"key", b"0")
    topic.local.resize(2)
    topic.put(0, b"key", b"late")
    topic.put(1, b"key", None)
    for _ in range(3):
        topic.fill(0)
        topic.fill(1)
        topic.compact()
    assert (b"key", b"late") in topic.found(0), "the two records of one layout have no order"
    assert (b"key", None) in topic.found(1)


def test_an_unreadable_log_holds_the_tombstones_of_its_family_and_nothing_else(topic: Topic) -> None:
    data = make_batch(payload=b"no record")
    topic.local[0].append(data, parse_header(data), NOW_MS)
    topic.local.resize(2)
    topic.put(1, b"gone", None)
    topic.put(1, b"kept", b"1")
    topic.put(1, b"kept", b"2")
    for _ in range(4):
        topic.fill(1)
        topic.compact()
    assert [row for row in topic.found(1) if row[0] != b"filler-1"] == [(b"gone", None), (b"kept", b"2")]
    assert topic.count("failures") > 0


# -- folding back ------------------------------------------------------------------------------------------------------


def test_a_retiring_partition_is_folded_back_and_empty(topic: Topic) -> None:
    topic.put(0, b"elsewhere", b"0")
    topic.local.resize(2)
    topic.put(1, b"twice", b"1")
    topic.put(1, b"twice", b"2")
    topic.put(1, b"deleted", None)
    topic.put(1, b"newer", b"3")
    topic.local.resize(1)
    topic.put(0, b"newer", b"4")
    topic.compact()
    assert topic.local[1].log.log_start == topic.local[1].log.end
    assert topic.found(0)[-2:] == [(b"twice", b"2"), (b"deleted", None)]
    assert (b"newer", b"3") not in topic.found(0)
    assert topic.local.emptied == [TOPIC]
    assert (topic.count("folded_records"), topic.count("emptied_partitions")) == (2, 1)
    topic.compact(2)
    assert topic.local.emptied == [TOPIC], "done once"


def test_a_folded_record_keeps_its_headers_and_its_time(topic: Topic) -> None:
    topic.local.resize(2)
    body = b"\x00" + encode_varint(70_000) + b"\x00" + b"\x02k" + b"\x02v" + b"\x02\x02h\x02x"
    record = encode_varint(len(body)) + body
    data = build(record, record_count=1, base_timestamp=5, max_timestamp=70_005)
    topic.put(1, b"first", b"1")
    topic.local[1].append(data, parse_header(data), NOW_MS)
    topic.local.resize(1)
    topic.compact()
    (piece,) = topic.local[0].log.slices()
    view = piece.view()
    ((position, header),) = headers(view)
    copies = list(records(header, view[position : position + header.size]))
    assert [(copy.key, copy.timestamp) for copy in copies] == [(b"first", NOW_MS), (b"k", 70_005)]
    assert bytes(copies[1].data).endswith(b"\x02k\x02v\x02\x02h\x02x")
    assert (header.producer_id, header.max_timestamp) == (-1, NOW_MS)


def test_a_key_in_an_open_transaction_of_the_survivor_waits_for_its_end(topic: Topic) -> None:
    topic.local.resize(2)
    topic.put(1, b"before", b"0")
    topic.put(1, b"aborted", b"1")
    topic.put(1, b"committed", b"2")
    topic.local.resize(1)
    topic.put(0, b"aborted", b"3", transaction=7)
    topic.put(0, b"committed", b"4", transaction=8)
    topic.compact(2)
    assert topic.found(1) == [(b"aborted", b"1"), (b"committed", b"2")]
    assert topic.found(0)[-1] == (b"before", b"0")
    topic.end(0, 7, commit=False)
    topic.end(0, 8, commit=True)
    topic.compact()
    assert topic.found(1) == []
    assert topic.found(0)[-1] == (b"aborted", b"1")
    assert (b"committed", b"2") not in topic.found(0)


def test_an_open_transaction_in_the_retiring_partition_is_waited_for_and_an_aborted_one_left_out(topic: Topic) -> None:
    topic.local.resize(2)
    topic.put(1, b"key", b"1")
    topic.put(1, b"key", b"2", transaction=7)
    topic.local.resize(1)
    topic.compact()
    assert len(topic.found(1)) == 2
    topic.end(1, 7, commit=False)
    topic.compact()
    assert topic.found(1) == []
    assert topic.found(0) == [(b"key", b"1")]


def test_what_is_written_while_files_are_read_comes_after_nothing_older(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic.local.resize(2)
    for number in range(3):
        topic.put(1, b"key-%d" % number, b"old")
    topic.local.resize(1)
    read = Folding.next_chunk

    def read_and_write(folding: Folding) -> Chunk | None:
        chunk = read(folding)
        if chunk is not None:
            topic.put(0, b"key-1", b"new")
            topic.put(0, b"key-2", None, transaction=7)
        return chunk

    monkeypatch.setattr(Folding, "next_chunk", read_and_write)
    topic.compact()
    assert topic.found(0) == [(b"key-1", b"new"), (b"key-2", None), (b"key-0", b"old")]
    assert topic.found(1) == [(b"key-2", b"old")], "its transaction is open"
    topic.end(0, 7, commit=False)
    monkeypatch.undo()
    topic.compact()
    assert topic.found(0)[-1] == (b"key-2", b"old")
    assert topic.found(1) == []


def test_a_tombstone_stays_for_its_retention_after_what_it_hides_was_deleted_from_a_retiring_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Topic(tmp_path, delete_retention_ms="10000")
    topic.local.resize(2)
    topic.put(1, b"first", b"", transaction=7)
    topic.put(1, b"gone", b"old")
    topic.local.resize(1)
    topic.put(0, b"gone", None)
    for _ in range(2):
        topic.fill(0)
        topic.compact(after_ms=20_000)
    assert (b"gone", b"old") in topic.found(1)
    topic.end(1, 7, commit=True)

    async def clean_nothing(*_: object) -> None:
        """Else the old value is cleaned before it can be folded back."""

    with monkeypatch.context() as patch:
        patch.setattr(topic.local.compaction, "_clean_all", clean_nothing)
        topic.compact()
    assert topic.found(1) == []
    for _ in range(4):
        topic.fill(0)
        topic.compact()
        assert (b"gone", None) in topic.found(0), "readers that were given the old value are still on their way"
    for _ in range(2):
        topic.fill(0)
        topic.compact(after_ms=10_000)
    assert (b"gone", None) not in topic.found(0)
    topic.local.close()


def test_nothing_is_folded_back_before_the_layout_is_published(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stock producer's records are redirected from the change of roles on: they are newer, and not known to be."""
    topic.local.resize(2)
    topic.put(1, b"key", b"old")
    shape = topic.local._shape_of(TOPIC)
    topic.local.resize(1)
    topic.put(0, b"key", b"new")
    monkeypatch.setattr(topic.local.compaction, "_shape_of", lambda name: shape)
    topic.compact()
    assert (topic.found(0), topic.found(1)) == ([(b"key", b"new")], [(b"key", b"old")])
    monkeypatch.undo()
    topic.compact()
    assert (topic.found(0), topic.found(1)) == ([(b"key", b"new")], [])


class _Beside:
    """Has the loop of a running story do something, from another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


def test_a_fold_ends_when_its_partition_took_keys_again_meanwhile(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the copy of the old value would come after the new one, which is in the retiring partition again."""
    local = topic.local
    local.resize(2)
    topic.put(1, b"key", b"old")
    local.resize(1)
    read, runner = Folding.next_chunk, local.runner

    def read_and_resize(folding: Folding) -> Chunk | None:
        chunk = read(folding)
        if local.layout == 2:
            monkeypatch.setattr(local, "runner", _Beside(runner.get_loop()))
            local.resize(2)
            topic.put(1, b"key", b"new")
            local.resize(1)
            monkeypatch.setattr(local, "runner", runner)
        return chunk

    monkeypatch.setattr(Folding, "next_chunk", read_and_resize)
    topic.compact()
    assert (topic.found(0), topic.found(1)) == ([], [(b"key", b"old"), (b"key", b"new")])
    topic.compact()
    assert (topic.found(0), topic.found(1)) == ([(b"key", b"new")], [])


def test_a_fold_does_not_begin_when_its_keys_were_elsewhere_since_their_family_was_found(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody looks into the partition that had them, and a copy of the old value would come after the new one."""
    local = topic.local
    local.resize(8)
    topic.put(7, b"key", b"old")
    local.resize(2)
    runner = local.runner

    def move_there_and_back() -> None:
        local.resize(4)
        topic.put(3, b"key", b"new")
        local.resize(2)

    async def commit(partitions: Iterable[Partition]) -> None:
        if local.layout == 2:
            monkeypatch.setattr(local, "runner", _Beside(runner.get_loop()))
            await asyncio.to_thread(move_there_and_back)
            monkeypatch.setattr(local, "runner", runner)
        await _commit(partitions)

    monkeypatch.setattr("anabranch.server.partitions.compaction._commit", commit)
    topic.compact(2)
    assert (topic.found(1), topic.found(3), topic.found(7)) == ([(b"key", b"new")], [], [])


def test_nothing_is_folded_back_while_a_relative_cannot_be_read(topic: Topic) -> None:
    """Its log may have a newer record, or an older one that a tombstone hides; other partitions have none."""
    topic.local.resize(4)
    topic.put(3, b"key", b"1")
    topic.put(2, b"other", b"1")
    topic.local.resize(1)
    topic.local[1].take_offline("a test")
    topic.compact()
    assert topic.found(3) == [(b"key", b"1")]
    assert (topic.found(2), topic.found(0)) == ([], [(b"other", b"1")])


def test_the_checkpoints_are_saved_once_for_all_logs_that_are_cleaned_and_once_for_those_folded_back(
    topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save writes the lines of all logs."""
    topic.local.resize(16)
    for number in range(16):
        for value in (b"1", b"2", b"3"):
            topic.put(number, b"key-%d" % number, value)
    saves: list[None] = []
    save = topic.local.checkpoints._replace
    monkeypatch.setattr(topic.local.checkpoints, "_replace", lambda *it: (saves.append(None), save(*it)))
    topic.compact()
    assert topic.count("runs") >= 15
    assert len(saves) <= 6, "two saves of three files"
    topic.local.resize(1)
    saves.clear()
    topic.compact()
    assert topic.count("emptied_partitions") == 15
    assert len(saves) <= 9
    assert {key for key, _ in topic.found(0)} == {b"key-%d" % number for number in range(16)}


def test_a_fold_that_died_is_repeated_without_a_second_copy(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    topic.local.resize(2)
    topic.put(1, b"key", b"1")
    topic.local.resize(1)

    async def die(fold: FoldBack) -> None:
        raise OSError("the disk refuses")

    monkeypatch.setattr(FoldBack, "delete", die)
    topic.compact()
    assert (topic.found(0), topic.found(1)) == ([(b"key", b"1")], [(b"key", b"1")])
    monkeypatch.undo()
    topic.compact()
    assert (topic.found(0), topic.found(1)) == ([(b"key", b"1")], [])


def test_nothing_is_deleted_when_the_copies_cannot_be_made_durable(topic: Topic) -> None:
    topic.local.resize(2)
    topic.put(1, b"key", b"1")
    topic.local.resize(1)
    for partition in topic.local.replicas:
        partition.log.flush()
    topic.local.disk.broken = True
    topic.local.clock.ms += 1_000
    topic.local.runner.run(topic.local.compaction.run())
    topic.local.disk.broken = False
    assert topic.found(1) == [(b"key", b"1")]
    topic.local[0].log.resume(topic.local.clock.ms)
    topic.compact()
    assert (topic.found(0), topic.found(1)) == ([(b"key", b"1")], [])


def test_a_log_whose_tombstones_cannot_be_kept_longer_holds_up_the_folding_that_needs_it_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = Topic(tmp_path, delete_retention_ms="10000")
    topic.local.resize(4)
    for number in (2, 3):
        topic.put(number, b"first", b"", transaction=number)
    topic.put(2, b"gone", b"old")
    topic.put(3, b"other", b"value")
    topic.local.resize(2)
    topic.put(0, b"gone", None)
    for _ in range(2):
        topic.fill(0)
        topic.compact(after_ms=20_000)
    for number in (2, 3):
        topic.end(number, number, commit=True)

    async def clean_nothing(*_: object) -> None:
        """Else the old value is cleaned before it can be folded back."""

    checkpoint = tmp_path / "data" / f"{TOPIC}-0" / "cleaner-checkpoint"
    failures = topic.count("failures")
    with monkeypatch.context() as patch:
        patch.setattr(topic.local.compaction, "_clean_all", clean_nothing)
        patch.setattr(topic.local.disk, "replace", _unless(checkpoint, topic.local.disk.replace))
        topic.compact()
        assert topic.found(3) == []
        assert (b"other", b"value") in topic.found(1)
        assert (b"gone", b"old") in topic.found(2), "its tombstone might go before readers have had it"
        assert topic.count("failures") == failures + 1
    with monkeypatch.context() as patch:
        patch.setattr(topic.local.compaction, "_clean_all", clean_nothing)
        topic.compact()
    assert topic.found(2) == []
    topic.local.close()


def test_records_younger_than_the_compaction_lag_are_not_folded(tmp_path: Path) -> None:
    topic = Topic(tmp_path, min_compaction_lag_ms="5000")
    topic.local.resize(2)
    topic.put(1, b"key", b"1")
    topic.local.resize(1)
    topic.compact()
    assert topic.found(1) == [(b"key", b"1")]
    topic.compact(after_ms=5_000)
    assert topic.found(1) == []
    topic.local.close()


def test_a_topic_that_is_not_compacted_keeps_its_retiring_partitions(topic: Topic) -> None:
    topic.local.resize(2)
    topic.put(1, b"key", b"1")
    topic.local.resize(1)
    topic.local.configs["cleanup.policy"] = "delete"
    topic.local.apply_settings()
    topic.compact()
    assert topic.found(1) == [(b"key", b"1")]


def test_the_topic_with_the_most_urgent_log_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = compacted(tmp_path)
    local.resize(4)
    urgency = {"a": Urgency(0, 0.9), "b": None, "c": Urgency(5, 0.1), "d": Urgency(0, 1.0)}
    for partition, topic in zip(local.replicas, urgency, strict=True):
        partition.name = partition.name._replace(topic=topic)
    order: list[str] = []

    async def noted(topic: str) -> None:
        order.append(topic)

    monkeypatch.setattr(local.compaction, "_urgency", lambda partition: urgency[partition.name.topic])
    monkeypatch.setattr(local.compaction, "run_topic", noted)
    local.runner.run(local.compaction.run())
    assert order == ["c", "d", "a", "b"]
    local.close()
