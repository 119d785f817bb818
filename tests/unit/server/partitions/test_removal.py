"""Deleting logs: ended between two of them when the broker stops, taken up by the next one while it serves."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.records.batch import parse_header
from anabranch.runtime.disk import Disk
from anabranch.server.partitions.removal import LogRemoval
from anabranch.storage.directory import DataDirectory
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_batch
from tests.support.replicas import NOW_MS, TOPIC, TOPIC_ID, LocalReplicas

COUNT = 40
ROLES = tuple(Role(number, 1, 2, 1, False, (1,), (1,)) for number in range(COUNT))
ORDER = SendLeaderAndIsr(1, 1, 1, TOPIC, TOPIC_ID, 1, COUNT, ROLES)
STOP = SendStopReplica(1, 1, 1, TOPIC, TOPIC_ID, tuple((number, 2) for number in range(COUNT)), topic_deleted=True)


def write_all(local: LocalReplicas) -> None:
    local.runner.run(local.replicas.take_roles(ORDER))
    for number in range(COUNT):
        data = make_batch()
        local[number].append(data, parse_header(data), NOW_MS)


def logs(path: Path) -> set[str]:
    path = path / "data"
    return {it.name for it in path.iterdir() if it.is_dir() and it.name.startswith(f"{TOPIC}-")}


def left_over(path: Path) -> set[str]:
    parent = path / "data" / ".deleted"
    return {it.name for it in parent.iterdir()} if parent.exists() else set()


def stopped_after(monkeypatch: pytest.MonkeyPatch, name: str, count: int, stop: Callable[[], None]) -> None:
    """Call `stop` within the `count`th call of a method of the disk."""
    whole: Any = getattr(Disk, name)
    calls = 0

    def counted(self: Disk, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            stop()
        return whole(self, *arguments)

    monkeypatch.setattr(Disk, name, counted)


@pytest.mark.parametrize("during", ["rename", "remove_tree"])
def test_a_stop_ends_a_deletion_between_two_logs_and_the_next_process_finishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    local = LocalReplicas(tmp_path)
    write_all(local)
    with monkeypatch.context() as patched:
        stopped_after(patched, during, 5, local.replicas.removal.stop)
        done = local.runner.run(local.replicas.stop(STOP))
    taken = 5 if during == "rename" else COUNT
    assert set(done.values()) == {ErrorCode.NONE} and len(done) == taken
    assert len(logs(tmp_path)) == COUNT - taken
    assert len(left_over(tmp_path)) == (5 if during == "rename" else COUNT - 5)
    local.close()

    again = LocalReplicas(tmp_path)
    assert len(left_over(tmp_path)) > 0, "a start does not wait for them"
    assert again.runner.run(again.replicas.stop(STOP)) == dict.fromkeys(range(COUNT), ErrorCode.NONE)
    again.runner.run(again.replicas.removal.clear())
    assert (logs(tmp_path), left_over(tmp_path)) == (set(), set())
    again.close()


def test_what_is_left_over_goes_some_at_a_time_and_what_cannot_go_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(120):
        (tmp_path / "data" / ".deleted" / str(number)).mkdir(parents=True)
    (tmp_path / "data" / "old-0.deleted").mkdir()
    directory = DataDirectory(tmp_path / "data", Disk())
    threads: list[int] = []

    async def in_thread(work: Callable[[], Any]) -> Any:
        threads.append(threading.get_ident())
        return await asyncio.to_thread(work)

    whole = Disk.remove_tree

    def refuse_one(self: Disk, path: Path) -> None:
        if path.name == "70":
            raise OSError(5, "Input/output error", str(path))
        whole(self, path)

    monkeypatch.setattr(Disk, "remove_tree", refuse_one)
    removal = LogRemoval(directory, in_thread)
    (tmp_path / "data" / ".deleted" / "new").mkdir()
    asyncio.run(removal.clear())
    assert len(threads) == 3 and "deleted log not removed" in caplog.text
    assert not (tmp_path / "data" / "old-0.deleted").exists()
    assert left_over(tmp_path) == {"70", "new"}, "what this process deletes is its own"
    directory.release()


def test_a_sync_of_a_log_that_is_about_to_be_deleted_notes_nothing_of_it(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path)
    write_all(local)
    logs_here = [local[number].log for number in range(2)]
    assert all(isinstance(log, LocalLog) for log in logs_here)
    logs_here[0].abandon()  # type: ignore[attr-defined]

    async def sync() -> None:
        await asyncio.gather(*(log.commit() for log in logs_here))

    local.runner.run(sync())
    assert [log.flushed for log in logs_here] == [log.end for log in logs_here]
    assert local.replicas._checkpoints.names() == {f"{TOPIC}-1"}
    local.close()


def test_an_order_of_another_topic_deletes_nothing(tmp_path: Path) -> None:
    local = LocalReplicas(tmp_path)
    write_all(local)
    other = replace(STOP, topic="other")
    assert local.runner.run(local.replicas.stop(other)) == dict.fromkeys(range(COUNT), ErrorCode.NONE)
    assert logs(tmp_path) == {str(TopicPartition(TOPIC, number)) for number in range(COUNT)}
    local.close()


def test_files_that_cannot_be_removed_are_tried_again_with_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They took their space until the next start: their log had been renamed, so nothing was found to be deleted."""
    local = LocalReplicas(tmp_path)
    write_all(local)

    def fail() -> None:
        raise OSError(errno.EIO, "the disk does not answer")

    with monkeypatch.context() as patched:
        stopped_after(patched, "remove_tree", 7, fail)
        done = local.runner.run(local.replicas.stop(STOP))
    assert list(done.values()).count(ErrorCode.KAFKA_STORAGE_ERROR) == 1 and len(done) == COUNT
    assert not logs(tmp_path) and len(left_over(tmp_path)) == 1
    assert local.runner.run(local.replicas.stop(STOP)) == dict.fromkeys(range(COUNT), ErrorCode.NONE)
    assert not left_over(tmp_path)
    local.close()
