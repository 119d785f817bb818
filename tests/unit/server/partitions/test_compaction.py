"""The upkeep of compacted topics: what the shell around the cleaner does when partitions come, go, or fail."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.records.batch import parse_header
from anabranch.storage.checkpoints import Checkpoints
from anabranch.storage.log.cleaner import Cleaned, Cleaning
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


def test_records_that_cannot_be_compacted_do_not_end_the_upkeep_of_other_partitions(tmp_path: Path) -> None:
    local = compacted(tmp_path)
    local.resize(2)
    for number, payload in enumerate((b"no record", b"")):
        for _ in range(5):
            data = make_batch(payload=payload) if payload else make_keyed_batch([(b"key", b"value")])
            local[number].append(data, parse_header(data), NOW_MS)
        local.sync(number)
    size = local[1].log.size
    local.runner.run(local.compaction.run())
    assert local[1].log.size < size
    local.close()
