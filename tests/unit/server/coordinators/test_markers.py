"""Markers written into real logs: durable when they are answered, whatever the disk and earlier attempts did."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.partition.producers import PRODUCER_SIZE, redirected
from anabranch.protocol.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from anabranch.records.batch import parse_header
from anabranch.server.coordinators.markers import AT_A_TIME, Markers
from anabranch.server.coordinators.shard_set import ShardSet
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_batch
from tests.support.replicas import NOW_MS, TOPIC, LocalReplicas

PRODUCER, EPOCH = 7, 0
TRANSACTIONAL = 0x10


class Groups:
    """The group coordinators of `topic`, whose shards note what they are to end."""

    def __init__(self, topic: str = "__consumer_offsets", error: ErrorCode = ErrorCode.NONE) -> None:
        self.topic = topic
        self.ended: list[tuple[int, int, bool]] = []
        self._error = error

    def shard(self, number: int) -> Any:
        if self._error:
            raise ApiError(self._error, "no")

        async def end(producer_id: int, producer_epoch: int, *, committed: bool, coordinator_epoch: int) -> None:
            self.ended.append((number, producer_id, committed))

        return SimpleNamespace(end_transaction=end)


class Written(LocalReplicas):
    """Partitions that markers are written to."""

    def begin(self, number: int, producer_id: int = PRODUCER) -> None:
        """Open a transaction of a producer."""
        data = make_batch(
            timestamp=NOW_MS,
            attributes=TRANSACTIONAL,
            producer_id=producer_id,
            producer_epoch=EPOCH,
            base_sequence=0,
        )
        self[number].append(data, parse_header(data), NOW_MS)

    def opened(self, number: int, producer_id: int = PRODUCER) -> bool:
        return self[number].table.open_transaction(producer_id) is not None

    def write(self, *numbers: int, groups: Groups | None = None, epoch: int = EPOCH) -> dict[int, ErrorCode]:
        markers = Markers(self.replicas, self.clock, cast(ShardSet[Any, Any], groups or Groups()))
        topic = WritableTxnMarkerTopic(name=TOPIC, partition_indexes=list(numbers))
        marker = WritableTxnMarker(
            producer_id=PRODUCER, producer_epoch=epoch, transaction_result=True, topics=[topic], coordinator_epoch=0
        )
        response = self.runner.run(markers.write_markers(WriteTxnMarkersRequest(markers=[marker])))
        ((topic_result,),) = (it.topics for it in response.markers)
        return {it.partition_index: ErrorCode.of(it.error_code) for it in topic_result.partitions}


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Written]:
    made = Written(tmp_path, durability="fsync")
    made.resize(2)
    yield made
    made.close()


@pytest.fixture
def shrunk(tmp_path: Path) -> Iterator[Written]:
    """Partition 1 retires into partition 0."""
    made = Written(tmp_path, durability="fsync")
    made.resize(2)
    made.resize(1)
    yield made
    made.close()


def test_a_marker_ends_its_transaction_in_every_partition_and_is_written_once(local: Written) -> None:
    local.begin(0)
    local.begin(1)
    assert local.write(0, 1, 5) == {
        0: ErrorCode.NONE,
        1: ErrorCode.NONE,
        5: ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    }
    assert not local.opened(0)
    assert not local.opened(1)
    ends = [local[number].log.flushed for number in (0, 1)]
    assert ends == [2, 2]
    assert local.write(0, 1) == {0: ErrorCode.NONE, 1: ErrorCode.NONE}
    assert [local[number].log.end for number in (0, 1)] == ends


def test_a_marker_of_an_earlier_epoch_is_refused(local: Written) -> None:
    local.begin(0)
    assert local.write(0, epoch=EPOCH - 1) == {0: ErrorCode.INVALID_PRODUCER_EPOCH}
    assert local.opened(0)


def test_a_marker_whose_sync_failed_is_not_answered_and_written_again(local: Written) -> None:
    local.begin(0)
    local.sync(0)
    local.disk.broken = True
    assert local.write(0) == {0: ErrorCode.KAFKA_STORAGE_ERROR}
    local.disk.broken = False
    assert local.write(0) == {0: ErrorCode.NONE}
    assert not local.opened(0)
    assert local[0].log.flushed == local[0].log.end == 2


def test_a_redirected_batch_has_its_marker_durable_before_the_retiring_partition_answers(shrunk: Written) -> None:
    alias = redirected(PRODUCER, 1)
    shrunk.begin(0, alias)
    shrunk.sync(0)
    shrunk.disk.broken = True
    assert shrunk.write(1) == {1: ErrorCode.KAFKA_STORAGE_ERROR}
    shrunk.disk.broken = False
    assert shrunk.write(1) == {1: ErrorCode.NONE}
    shrunk[0].log.resume(NOW_MS)
    assert not shrunk.opened(0, alias), "the marker was lost, and its transaction is open for ever"
    assert shrunk[0].log.flushed == 2


def test_a_retiring_partition_takes_a_marker_only_for_what_is_open_in_it(tmp_path: Path) -> None:
    made = Written(tmp_path, durability="fsync")
    made.resize(2)
    made.begin(1)
    made.resize(1)
    assert made.write(1) == {1: ErrorCode.NONE}
    end = made[1].log.end
    assert made.write(1, epoch=EPOCH + 1) == {1: ErrorCode.NONE}
    assert made[1].log.end == end
    made.close()


def test_a_retiring_partition_that_held_nothing_but_a_transaction_is_empty_after_its_marker(tmp_path: Path) -> None:
    made = Written(tmp_path, durability="fsync")
    made.resize(2)
    made.begin(1)
    made.sync(1)
    made.resize(1)
    assert made[1].log.delete_before(1) is None
    assert made.write(1) == {1: ErrorCode.NONE}
    log = made[1].log
    assert (log.log_start, log.end) == (2, 2)
    assert isinstance(log, LocalLog)
    assert len(log.dropped) and not log.dropped.removing, "the marker's answer waits for no removal of files"
    made.close()


def test_the_coordinator_of_groups_writes_the_markers_of_its_partitions(local: Written) -> None:
    groups = Groups(TOPIC)
    assert local.write(0, 1, groups=groups) == {0: ErrorCode.NONE, 1: ErrorCode.NONE}
    assert groups.ended == [(0, PRODUCER, True), (1, PRODUCER, True)]
    assert local[0].log.end == 0
    loading = Groups(TOPIC, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
    assert local.write(0, groups=loading) == {0: ErrorCode.COORDINATOR_LOAD_IN_PROGRESS}


def marker_for(*numbers: int, topic: str = TOPIC) -> WritableTxnMarker:
    named = WritableTxnMarkerTopic(name=topic, partition_indexes=list(numbers))
    return WritableTxnMarker(
        producer_id=PRODUCER, producer_epoch=EPOCH, transaction_result=True, topics=[named], coordinator_epoch=0
    )


def test_a_partition_that_the_producer_wrote_nothing_into_gets_no_marker(local: Written) -> None:
    """A client names as many as it likes: none of them has files for that, nor remembers the producer."""
    local.begin(0)
    remembered = local.replicas.producers.size
    assert local.write(0, 1) == {0: ErrorCode.NONE, 1: ErrorCode.NONE}
    assert (local[0].log.end, local[1].log.end) == (2, 0)
    assert len(local[1].table) == 0
    assert local.replicas.producers.size == remembered


def test_a_marker_fences_the_earlier_epoch_where_its_producer_wrote_before(local: Written) -> None:
    local.begin(0)
    assert local.write(0) == {0: ErrorCode.NONE}
    assert local.write(0, epoch=EPOCH + 1) == {0: ErrorCode.NONE}
    known = local[0].table.known(PRODUCER)
    assert known is not None
    assert known.epoch == EPOCH + 1


def test_a_producer_counts_in_the_budget_whoever_appends_its_batch(local: Written) -> None:
    local.begin(0)
    assert local.replicas.producers.size == PRODUCER_SIZE
    local.begin(0)
    local.begin(1)
    assert local.replicas.producers.size == 2 * PRODUCER_SIZE


def test_a_marker_does_not_look_at_all_partitions_of_its_topic(local: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    def listed(topic: str) -> None:
        raise AssertionError("a topic has 100,000 of them")

    monkeypatch.setattr(local.replicas, "of_topic", listed)
    local.begin(0)
    assert local.write(0) == {0: ErrorCode.NONE}
    local[0].leadership = None
    assert local.replicas.role_in(TOPIC) == local[1].leadership
    assert local.replicas.role_in("another") is None


def test_markers_of_many_requests_share_the_turns_of_the_loop(local: Written) -> None:
    turn = 0
    begun: Counter[int] = Counter()

    class Watched(Markers):
        async def _end(self, *given: Any, **named: Any) -> ErrorCode:
            begun[turn] += 1
            return await super()._end(*given, **named)

    async def story() -> None:
        nonlocal turn
        markers = Watched(local.replicas, local.clock, cast(ShardSet[Any, Any], Groups()))
        asked = [WriteTxnMarkersRequest(markers=[marker_for(*range(10, 260))]) for _ in range(20)]
        writing = asyncio.gather(*map(markers.write_markers, asked))
        while not writing.done():
            turn += 1
            await asyncio.sleep(0)
        assert len(await writing) == 20

    local.runner.run(story())
    assert begun.total() == 20 * 250
    assert max(begun.values()) <= AT_A_TIME


def test_a_request_that_is_given_up_leaves_no_cycle(monkeypatch: pytest.MonkeyPatch, local: Written) -> None:
    """Its client may hang up while markers are being synced; a cycle would keep its connection, too."""

    async def never(*given: object, **named: object) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Markers, "_end", never)

    async def story() -> None:
        markers = Markers(local.replicas, local.clock, cast(ShardSet[Any, Any], Groups()))
        request = WriteTxnMarkersRequest(markers=[marker_for(0)])
        task = asyncio.create_task(markers.write_markers(request))
        await asyncio.sleep(0.01)
        gc.collect()
        gc.disable()
        try:
            task.cancel()
            await asyncio.wait([task])
            del task
            gone = weakref.ref(markers)
            del markers
            await asyncio.sleep(0.01)
            assert gone() is None
        finally:
            gc.enable()

    asyncio.run(story())
