"""The controller's orders at a broker: roles are taken or fenced, logs are made, deleted, and made again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.reaper import LogRange
from anabranch.records.batch import TRANSACTIONAL, parse_header
from anabranch.server.cluster.peers import retiring_ranges
from anabranch.server.partitions import replicas
from anabranch.server.partitions.partition import Partition
from tests.support.batches import make_batch
from tests.support.replicas import NOW_MS, TOPIC, TOPIC_ID, LocalReplicas

OK = ErrorCode.NONE
ROLE = Role(0, 1, leader_epoch=2, layout=1, retiring=False, replicas=(1,), isr=(1,))
ORDER = SendLeaderAndIsr(1, 1, 1, TOPIC, TOPIC_ID, 1, 1, (ROLE,))
STOP = SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, ((0, 2),))


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalReplicas]:
    made = LocalReplicas(tmp_path)
    yield made
    made.close()


def take(local: LocalReplicas, order: SendLeaderAndIsr = ORDER, *roles: Role) -> dict[int, ErrorCode]:
    return local.runner.run(local.replicas.take_roles(replace(order, roles=roles) if roles else order))


def stop(local: LocalReplicas, order: SendStopReplica = STOP) -> dict[int, ErrorCode]:
    return local.runner.run(local.replicas.stop(order))


def append(partition: Partition, sequence: int = 0, *, transactional: bool = False) -> None:
    attributes = TRANSACTIONAL if transactional else 0
    data = make_batch(producer_id=7, producer_epoch=0, base_sequence=sequence, attributes=attributes)
    partition.append(data, parse_header(data), NOW_MS)


def test_a_role_makes_its_log_where_the_controller_says(local: LocalReplicas) -> None:
    assert take(local, ORDER, replace(ROLE, start_offset=40)) == {0: OK}
    assert (local[0].log.log_start, local[0].log.end) == (40, 40)
    assert local[0].leader_epoch == local[0].log.epochs.latest == 2


def test_a_newer_role_ends_the_segment_durably_and_an_older_one_is_fenced(local: LocalReplicas) -> None:
    take(local)
    append(local[0])
    assert take(local, ORDER, replace(ROLE, leader_epoch=3, layout=2)) == {0: OK}
    assert local[0].log.end_offset_for_epoch(2) == (2, 1)
    assert local[0].log.flushed == 1, "a power loss must not move the end of a segment"
    assert take(local) == {0: ErrorCode.FENCED_LEADER_EPOCH}
    assert local[0].leader_epoch == 3


def test_a_log_is_synced_before_its_producers_are_refused(
    local: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    take(local)
    append(local[0])
    log = local[0].log
    begun = log.start_epoch
    unsynced: list[int] = []

    def start_epoch(epoch: int) -> None:
        unsynced.append(log.end - log.flushed)
        begun(epoch)

    monkeypatch.setattr(log, "start_epoch", start_epoch)
    assert take(local, ORDER, replace(ROLE, leader_epoch=3, layout=2)) == {0: OK}
    assert unsynced == [0]
    append(local[0], 1)
    assert take(local, ORDER, replace(ROLE, leader_epoch=3, layout=2)) == {0: OK}
    assert unsynced == [0], "the role is not new"


def test_another_topic_of_the_same_name_takes_no_role_of_this_one(local: LocalReplicas) -> None:
    take(local)
    assert take(local, replace(ORDER, topic_id=UUID(int=9))) == {0: ErrorCode.INCONSISTENT_TOPIC_ID}


def test_an_end_that_cannot_be_synced_is_no_end(local: LocalReplicas) -> None:
    take(local)
    append(local[0])
    local.disk.broken = True
    assert take(local, ORDER, replace(ROLE, leader_epoch=3, layout=2)) == {0: ErrorCode.KAFKA_STORAGE_ERROR}


def test_a_log_that_cannot_be_made_concerns_its_own_partition(local: LocalReplicas, tmp_path: Path) -> None:
    (tmp_path / "data" / f"{TOPIC}-1").write_text("in the way")
    assert take(local, ORDER, ROLE, replace(ROLE, partition=1)) == {0: OK, 1: ErrorCode.KAFKA_STORAGE_ERROR}
    assert local.replicas.get(TOPIC, 1) is None
    assert local.replicas.missing(TOPIC, 1) == ErrorCode.KAFKA_STORAGE_ERROR, "clients ask again"
    assert local.replicas.missing(TOPIC, 2) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    (tmp_path / "data" / f"{TOPIC}-1").unlink()
    assert take(local, ORDER, replace(ROLE, partition=1)) == {1: OK}
    assert stop(local, replace(STOP, partitions=((1, 2),))) == {1: OK}
    assert local.replicas.missing(TOPIC, 1) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_damaged_partition_is_offline_and_takes_no_role(local: LocalReplicas) -> None:
    take(local)
    local[0].take_offline("damaged")
    assert take(local, ORDER, replace(ROLE, leader_epoch=3)) == {0: ErrorCode.KAFKA_STORAGE_ERROR}


def test_a_batch_with_a_leader_epoch_above_the_metadata_takes_its_partition_offline_by_name(tmp_path: Path) -> None:
    """No checksum covers the leader epoch of a batch: a bit that flips there shows by the metadata alone."""
    local = LocalReplicas(tmp_path)
    take(local)
    append(local[0])
    local.close()
    path = tmp_path / "data" / f"{TOPIC}-0"
    (log,) = path.glob("*.log")
    data = bytearray(log.read_bytes())
    data[15] |= 16  # The leader epoch is in the bytes 12 to 15.
    log.write_bytes(data)
    (path / "leader-epoch-checkpoint").unlink()
    again = LocalReplicas(tmp_path)
    assert take(again) == {0: ErrorCode.KAFKA_STORAGE_ERROR}
    reason = again[0].offline_reason or ""
    assert reason.startswith(f"the log of {TOPIC}-0 has leader epoch 18, the metadata only 2: ")
    assert "the epoch of a batch, which no checksum covers" in reason
    again.close()


def test_a_stopped_replica_is_deleted_and_its_producers_are_remembered(local: LocalReplicas, tmp_path: Path) -> None:
    take(local)
    append(local[0])
    table = local[0].table
    assert stop(local) == {0: OK}
    assert local.replicas.get(TOPIC, 0) is None
    assert not (tmp_path / "data" / f"{TOPIC}-0").exists()
    assert local.replicas.removed.table(local.name(0), TOPIC_ID) is table
    assert stop(local) == {0: OK}, "what is deleted may be deleted again"


def test_a_partition_that_is_made_again_inherits_its_producers_durably(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path)
    take(local)
    append(local[0])
    table = local[0].table
    stop(local)
    take(local, ORDER, replace(ROLE, leader_epoch=4, start_offset=1))
    assert (local[0].table, local[0].log.end) == (table, 1)
    assert local.replicas.removed.table(local.name(0), TOPIC_ID) is None
    local.close()
    again = LocalReplicas(tmp_path)
    take(again, ORDER, replace(ROLE, leader_epoch=4))
    assert again[0].table.known(7) is not None
    again.close()


@pytest.mark.parametrize("which", range(14))
def test_too_few_descriptors_for_a_moment_take_no_partition_offline(tmp_path: Path, which: int) -> None:
    local = LocalReplicas(tmp_path)
    take(local)
    append(local[0])
    local.runner.run(local.replicas.maintain(1 << 40))
    local[0].snapshot()
    append(local[0], 1, transactional=True)
    local.close()
    again = LocalReplicas(tmp_path)
    again.disk.short = chain(repeat(False, which), repeat(True, 2))
    try:
        assert take(again, ORDER, replace(ROLE, leader_epoch=4)) == {0: OK}
        assert again[0].offline_reason is None
        assert (again[0].log.end, again[0].table.known(7) is not None) == (2, True)
    finally:
        again.close()


def test_a_later_leader_or_another_topics_replica_is_not_stopped(local: LocalReplicas) -> None:
    take(local)
    assert stop(local, replace(STOP, partitions=((0, 1),))) == {0: ErrorCode.FENCED_LEADER_EPOCH}
    assert stop(local, replace(STOP, topic_id=UUID(int=9))) == {0: OK}
    assert local[0].leader_epoch == 2


def test_with_its_topic_everything_of_a_partition_goes(local: LocalReplicas) -> None:
    take(local)
    append(local[0])
    assert stop(local, replace(STOP, topic_deleted=True)) == {0: OK}
    assert local.replicas.removed.table(local.name(0), TOPIC_ID) is None


def test_ancestors_are_the_partitions_here_that_had_the_keys(local: LocalReplicas) -> None:
    local.resize(7)
    ancestors = local.replicas.ancestors_of
    assert [each.name.partition for each in ancestors(TOPIC, 6, 1)] == [2, 0]
    assert [each.name.partition for each in ancestors(TOPIC, 13, 1)] == [5, 1, 0]
    assert ancestors(TOPIC, 0, 1) == []
    local.resize(2)
    local.remove(2)
    assert [each.name.partition for each in ancestors(TOPIC, 6, 1)] == [0]


def test_the_reaper_is_told_of_retiring_partitions_without_open_transactions(local: LocalReplicas) -> None:
    local.resize(4)
    append(local[2])
    append(local[3], transactional=True)
    local.resize(1)
    local[1].take_offline("damaged")
    assert retiring_ranges(local.replicas.of_topic(TOPIC)) == {2: LogRange(0, 1, 2)}


def test_changed_configs_reach_every_partition_and_its_readers(local: LocalReplicas) -> None:
    local.resize(2)
    changes: list[int] = []
    for number in (0, 1):
        local[number].watch(lambda number=number: changes.append(number))  # type: ignore[misc]
    local.configs["max.message.bytes"] = "123"
    local.apply_settings()
    assert [local[number].settings.message_size_max for number in (0, 1)] == [123, 123]
    assert changes == [0, 1]


def test_configs_reach_many_partitions_in_turns_and_the_last_ones_win(
    local: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "CONFIGURED_AT_A_TIME", 2)
    local.resize(6)

    async def story() -> None:
        local.configs["max.message.bytes"] = "123"
        applying = asyncio.create_task(local.replicas.apply_settings(TOPIC))
        await asyncio.sleep(0)
        sizes = [local[number].settings.message_size_max for number in range(6)]
        assert sizes[:2] == [123] * 2 and 123 not in sizes[2:], "other work has its turn after two of them"
        local.configs["max.message.bytes"] = "456"
        await local.replicas.apply_settings(TOPIC)
        await applying

    local.runner.run(story())
    assert [local[number].settings.message_size_max for number in range(6)] == [456] * 6


def test_configs_do_not_reach_partitions_that_are_removed_meanwhile(
    local: LocalReplicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "CONFIGURED_AT_A_TIME", 1)
    local.resize(2)

    async def story() -> None:
        local.configs["accept.range.fetch"] = "true"
        applying = asyncio.create_task(local.replicas.apply_settings(TOPIC))
        await asyncio.sleep(0)
        await local.replicas.stop(SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, ((1, -1),), topic_deleted=True))
        await applying

    local.runner.run(story())
    assert [*local.replicas.range_fetched] == [local.name(0)]


def test_configs_that_change_while_logs_are_opened_reach_the_new_partitions(local: LocalReplicas) -> None:
    async def story() -> None:
        taking = asyncio.create_task(local.replicas.take_roles(ORDER))
        await asyncio.sleep(0)
        assert local.replicas.get(TOPIC, 0) is None, "its log is being opened in a thread"
        local.configs.update({"max.message.bytes": "123", "retention.ms": "456"})
        await local.replicas.apply_settings(TOPIC)
        assert await taking == {0: OK}

    local.runner.run(story())
    assert local[0].settings.message_size_max == 123
    assert local[0].log.config.retention_ms == 456


def test_upkeep_deletes_what_is_past_its_retention_and_forgets_idle_producers(local: LocalReplicas) -> None:
    local.configs["retention.ms"] = "1000"
    local.resize(1)
    append(local[0])
    local.runner.run(local.replicas.maintain(5_000))
    assert local[0].table.known(7) is not None
    assert local[0].log.log_start == 1, "its timestamp is far in the past"
    local.clock.ms += 5_001
    local.runner.run(local.replicas.maintain(5_000))
    assert local[0].table.known(7) is None
