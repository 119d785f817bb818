"""What removed partitions knew of producers: held, kept through restarts, inherited, forgotten in time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import pytest

from anabranch.base.ids import TopicPartition
from anabranch.machines.partition.producers import ProducerTable
from anabranch.runtime.disk import Disk
from anabranch.server.partitions.removed import FORGOTTEN_AT_A_TIME, RemovedPartitions
from tests.support.replicas import TOPIC_ID

NAME, OTHER = TopicPartition("a-topic", 3), TopicPartition("another", 3)


class Batch(NamedTuple):
    producer_id: int
    base_offset: int = 0
    last_offset_delta: int = 0
    max_timestamp: int = 0
    producer_epoch: int = 0
    base_sequence: int = 0
    is_transactional: bool = False
    is_control: bool = False


def table(*seen_ms: int) -> ProducerTable:
    """Producers that were last heard of at these times."""
    made = ProducerTable()
    for producer_id, now_ms in enumerate(seen_ms):
        made.apply(Batch(producer_id), now_ms)
    return made


@pytest.fixture
def removed(tmp_path: Path) -> RemovedPartitions:
    return RemovedPartitions(tmp_path, Disk())


def again(path: Path) -> RemovedPartitions:
    """As the next start finds it."""
    return RemovedPartitions(path, Disk())


def test_what_is_held_is_known_at_once_and_what_is_kept_after_a_restart(
    removed: RemovedPartitions, tmp_path: Path
) -> None:
    removed.remember(NAME, TOPIC_ID, table(5))
    assert removed.table(NAME, TOPIC_ID) == table(5)
    assert len(again(tmp_path)) == 0
    removed.save(NAME)
    assert again(tmp_path).table(NAME, TOPIC_ID) == table(5)


def test_another_topic_of_the_same_name_inherits_nothing(removed: RemovedPartitions) -> None:
    removed.remember(NAME, TOPIC_ID, table(5))
    assert removed.table(NAME, UUID(int=9)) is None
    assert removed.table(OTHER, TOPIC_ID) is None


def test_a_partition_that_knew_no_producer_costs_no_file(removed: RemovedPartitions, tmp_path: Path) -> None:
    removed.remember(NAME, TOPIC_ID, table())
    removed.save(NAME)
    assert list(tmp_path.iterdir()) == []
    assert removed.table(NAME, TOPIC_ID) is not None


def test_made_again_it_is_forgotten_with_its_file(removed: RemovedPartitions, tmp_path: Path) -> None:
    for name in (NAME, OTHER):
        removed.remember(name, TOPIC_ID, table(5))
        removed.save(name)
    removed.forget(NAME)
    assert removed.table(NAME, TOPIC_ID) is None
    assert again(tmp_path).table(NAME, TOPIC_ID) is None
    assert again(tmp_path).table(OTHER, TOPIC_ID) is not None


def test_a_deleted_topic_is_forgotten_whole(removed: RemovedPartitions, tmp_path: Path) -> None:
    names = [NAME, NAME._replace(partition=4), OTHER]
    for name in names:
        removed.remember(name, TOPIC_ID, table(5))
        removed.save(name)
    asyncio.run(removed.forget_topic(NAME.topic))
    assert [again(tmp_path).table(name, TOPIC_ID) is None for name in names] == [True, True, False]


def test_idle_producers_go_and_with_the_last_one_the_partition(removed: RemovedPartitions, tmp_path: Path) -> None:
    removed.remember(NAME, TOPIC_ID, table(0, 50))
    removed.save(NAME)
    asyncio.run(removed.expire(101, 100))
    left = removed.table(NAME, TOPIC_ID)
    assert left is not None
    assert left.known(0) is None
    assert left.known(1) is not None
    asyncio.run(removed.expire(151, 100))
    assert removed.table(NAME, TOPIC_ID) is None
    assert len(again(tmp_path)) == 0


def test_a_damaged_file_and_files_of_others_are_passed_over(removed: RemovedPartitions, tmp_path: Path) -> None:
    removed.remember(NAME, TOPIC_ID, table(5))
    removed.save(NAME)
    (tmp_path / f"{OTHER}.producers").write_bytes(b"damaged")
    (tmp_path / "no-number.producers").write_bytes(b"")
    (tmp_path / "no-number-\u00b2.producers").write_bytes(b"")
    (tmp_path / "directory-1.producers").mkdir()
    (tmp_path / "another-7").mkdir()
    assert len(again(tmp_path)) == 1


def test_a_flipped_bit_anywhere_and_a_cut_are_told(
    removed: RemovedPartitions, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The id of the topic had no checksum: where it changed, the table was no one's, without a word."""
    removed.remember(NAME, TOPIC_ID, table(5))
    removed.save(NAME)
    file = tmp_path / f"{NAME}.producers"
    sound = file.read_bytes()
    cut = [sound[:size] for size in range(len(sound))]
    bits = range(8 * len(sound))
    flipped = [(int.from_bytes(sound) ^ 1 << bit).to_bytes(len(sound)) for bit in bits]
    for damaged in (*cut, *flipped):
        file.write_bytes(damaged)
        caplog.clear()
        assert again(tmp_path).table(NAME, TOPIC_ID) is None
        assert caplog.messages == ["producers of a removed partition skipped"]


def test_a_file_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.producers").write_bytes(TOPIC_ID.bytes + table(5).snapshot())
    assert again(tmp_path).table(NAME, TOPIC_ID) == table(5)


@pytest.mark.parametrize("length", [243, 244, 249])
def test_a_name_that_leaves_no_room_for_a_suffix_is_kept_too(
    removed: RemovedPartitions, tmp_path: Path, length: int
) -> None:
    names = [TopicPartition("n" * length, number) for number in (1, 99_999)]
    for name in names:
        removed.remember(name, TOPIC_ID, table(5))
        removed.save(name)
    assert [again(tmp_path).table(name, TOPIC_ID) for name in names] == [table(5)] * 2
    for name in names:
        removed.forget(name)
    assert len(again(tmp_path)) == 0


def turns_beside(work: Coroutine[object, object, None]) -> int:
    """Do work; how often another task of the loop had its turn meanwhile."""

    async def story() -> int:
        turns = 0

        async def beside() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(beside())
        await work
        task.cancel()
        return turns

    return asyncio.run(story())


@pytest.mark.parametrize("deleted", [False, True])
def test_many_partitions_are_forgotten_in_turns_without_a_look_at_the_disk(
    removed: RemovedPartitions, monkeypatch: pytest.MonkeyPatch, deleted: bool
) -> None:
    for number in range(2_000):
        removed.remember(NAME._replace(partition=number), TOPIC_ID, table())
    looked_at: list[Path] = []
    monkeypatch.setattr(Disk, "exists", lambda _, path: looked_at.append(path))
    turns = turns_beside(removed.forget_topic(NAME.topic) if deleted else removed.expire(101, 100))
    assert (len(removed), looked_at) == (0, [])
    assert turns >= 2_000 // FORGOTTEN_AT_A_TIME


def test_a_partition_that_is_removed_again_while_others_are_forgotten_is_kept(removed: RemovedPartitions) -> None:
    names = [NAME._replace(partition=number) for number in range(2 * FORGOTTEN_AT_A_TIME)]
    for name in names:
        removed.remember(name, TOPIC_ID, table())

    async def story() -> None:
        forgetting = asyncio.create_task(removed.expire(101, 100))
        await asyncio.sleep(0)
        assert len(removed) == FORGOTTEN_AT_A_TIME, "half of them are forgotten"
        for name in names:
            removed.remember(name, TOPIC_ID, table(200))
        await forgetting

    asyncio.run(story())
    assert [removed.table(name, TOPIC_ID) is None for name in names] == [False] * len(names)
