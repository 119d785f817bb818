"""The partitions of a broker: what must hold from one life of the broker to the next."""

from __future__ import annotations

import asyncio
from pathlib import Path
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.records.batch import parse_header
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import Disk
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.directory import DataDirectory
from tests.support.batches import make_batch

TOPIC_ID = UUID(int=7)


class Life:
    """One life of a broker on a data directory, which leads the partitions t-0 and t-1; it is never stopped cleanly."""

    def __init__(self, path: Path) -> None:
        disk = Disk()
        self.directory = DataDirectory(path, disk)
        self.replicas = Replicas(
            self.directory,
            disk=disk,
            clock=Clock(),
            metrics=Metrics(),
            settings_of=lambda topic: topic_settings({}, NOT_SET, "fsync"),
        )

    async def begin(self, start_offset: int = 0) -> None:
        roles = tuple(Role(number, 1, 0, 0, False, (1,), (1,), start_offset * number) for number in range(2))
        order = SendLeaderAndIsr(1, 1, 1, "t", TOPIC_ID, 1, 2, roles)
        assert await self.replicas.take_roles(order) == {0: ErrorCode.NONE, 1: ErrorCode.NONE}

    async def remove(self, number: int) -> None:
        order = SendStopReplica(1, 1, 1, "t", TOPIC_ID, ((number, 0),))
        assert await self.replicas.stop(order) == {number: ErrorCode.NONE}

    def partition(self, number: int) -> Partition:
        found = self.replicas.get("t", number)
        assert found is not None
        return found

    def end(self) -> None:
        """As a kill of its process would."""
        self.replicas.commits.close()
        self.directory.release()


def test_a_removal_that_is_cut_short_does_not_bring_back_where_other_logs_started_before(tmp_path: Path) -> None:
    asyncio.run(_remove_one_of_two(tmp_path))


async def _remove_one_of_two(tmp_path: Path) -> None:
    first = Life(tmp_path)
    await first.begin()
    data = make_batch(3)
    first.partition(0).append(data, parse_header(data), 0)
    await first.replicas.commit(first.partition(0))
    first.partition(0).log.checkpoint()
    first.partition(1).log.checkpoint()
    first.end()

    second = Life(tmp_path)
    await second.begin()
    second.partition(0).log.delete_before(3)
    second.directory.remove_log(TopicPartition("t", 1))  # The broker is killed in the middle of a StopReplica.
    second.end()

    third = Life(tmp_path)
    await third.begin()
    assert (third.partition(0).log.log_start, third.partition(0).log.end) == (3, 3)
    third.end()


def test_a_partition_made_again_and_removed_again_before_anything_is_appended_remembers_its_producers(
    tmp_path: Path,
) -> None:
    asyncio.run(_remove_twice(tmp_path))


async def _remove_twice(tmp_path: Path) -> None:
    name = TopicPartition("t", 1)
    first = Life(tmp_path)
    await first.begin()
    data = make_batch(3, producer_id=7, producer_epoch=0, base_sequence=0)
    first.partition(1).append(data, parse_header(data), 0)
    await first.remove(1)
    await first.begin(start_offset=3)
    assert first.partition(1).table.known(7) is not None
    first.end()

    second = Life(tmp_path)
    await second.remove(1)
    table = second.replicas.removed.table(name, TOPIC_ID)
    assert table is not None
    assert table.known(7) is not None
    second.end()


def test_a_log_ahead_of_the_metadata_is_offline_with_a_sentence_and_not_without_a_leader_for_ever(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        first = Life(tmp_path)
        await first.begin()
        data = make_batch(3)
        first.partition(1).append(data, parse_header(data), 0)
        first.partition(1).log.start_epoch(1_000)
        first.end()
        second = Life(tmp_path)
        roles = tuple(Role(number, 1, 0, 0, False, (1,), (1,), 0) for number in range(2))
        errors = await second.replicas.take_roles(SendLeaderAndIsr(1, 1, 1, "t", TOPIC_ID, 1, 2, roles))
        assert errors == {0: ErrorCode.NONE, 1: ErrorCode.KAFKA_STORAGE_ERROR}
        assert second.partition(1).unavailable() is ErrorCode.KAFKA_STORAGE_ERROR
        assert "leader epoch 1000" in str(second.partition(1).offline_reason)
        second.end()

    asyncio.run(scenario())
    assert "partition offline" in caplog.text


def test_a_kill_soon_after_a_sync_leaves_the_proof_of_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        first = Life(tmp_path)
        await first.begin()
        data = make_batch(3)
        first.partition(0).append(data, parse_header(data), 0)
        await first.replicas.commit(first.partition(0))
        await first.replicas.save_checkpoints()
        first.end()
        [path] = (tmp_path / "t-0").glob("*.log")
        path.write_bytes(b"")
        second = Life(tmp_path)
        roles = tuple(Role(number, 1, 0, 0, False, (1,), (1,), 0) for number in range(2))
        errors = await second.replicas.take_roles(SendLeaderAndIsr(1, 1, 1, "t", TOPIC_ID, 1, 2, roles))
        assert errors == {0: ErrorCode.KAFKA_STORAGE_ERROR, 1: ErrorCode.NONE}
        assert "synced up to 3" in str(second.partition(0).offline_reason)
        second.end()

    asyncio.run(scenario())
