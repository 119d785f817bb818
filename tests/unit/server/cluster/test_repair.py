"""Repairs that are interrupted at any point: the next one has the same end, and a start is refused until then."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest

from anabranch.machines.controller import nodes
from anabranch.machines.controller.nodes import PartitionNode
from anabranch.runtime.disk import Disk
from anabranch.server.cluster.repair import MetadataLostError, check_metadata, check_metadata_file, plan_repair
from anabranch.storage.directory import METADATA_COPY_FILE, METADATA_FILE, UNKNOWN_DIRECTORY, DataDirectory
from anabranch.storage.interface import Delete
from anabranch.storage.metadata.embedded import EmbeddedMetadataStore
from anabranch.storage.metadata.table import ROOT, read_tree, write_tree

FRAME_SIZE = 24 + 4096


class DiedError(BaseException):
    """The process is killed."""


class DyingDisk(Disk):
    """Fails for good at a change of names, before it or behind it."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.left = calls

    def _step(self, call: Callable[..., Any], *args: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise DiedError
        done = call(*args)
        self.left -= 1
        if self.left == 0:
            raise DiedError
        return done

    def rename(self, old: Path, new: Path) -> None:
        self._step(super().rename, old, new)

    def sync_directory(self, path: Path) -> None:
        self._step(super().sync_directory, path)

    def replace(self, path: Path, data: bytes) -> None:
        self._step(super().replace, path, data)


async def make_topic(store: EmbeddedMetadataStore, name: str) -> None:
    node = nodes.put_partition(name, 0, PartitionNode(0, 0, (0,), 1))
    path = nodes.partition_path(name, 0)
    await store.ensure(path.rpartition("/")[0])
    await store.create(path, node.data)


@asynccontextmanager
async def living(path: Path) -> AsyncIterator[EmbeddedMetadataStore]:
    """Metadata with a topic, of which there is a copy; a kill leaves what is there at the end of the block."""
    live = path / "live"
    live.mkdir()
    store = await EmbeddedMetadataStore.open(live / METADATA_FILE)
    await store.create(nodes.CONTROLLER_EPOCH, b"3")
    await store.create(nodes.PRODUCER_IDS, b"1000")
    await make_topic(store, "a")
    await store.copy_to(live / METADATA_COPY_FILE)
    yield store
    killed = path / "data"
    killed.mkdir()
    for file in live.iterdir():
        shutil.copy(file, killed)
    for log in ("a-0", "b-0"):
        (killed / log).mkdir()
    (killed / "controller-epoch").write_text("4\n")
    await store.close()


def damage(data: Path, frame: int) -> None:
    """Flip a bit in the write-ahead log, in the frame with this number."""
    log = data / f"{METADATA_FILE}-wal"
    found = bytearray(log.read_bytes())
    found[32 + frame * FRAME_SIZE + 100] ^= 1
    log.write_bytes(found)


def frames(path: Path) -> int:
    return (len((path / "live" / f"{METADATA_FILE}-wal").read_bytes()) - 32) // FRAME_SIZE


async def cut(path: Path) -> None:
    """The last changes are damaged: a block of producer ids was handed out, and a controller elected."""
    async with living(path) as store:
        await make_topic(store, "b")
        before = frames(path)
        await store.set(nodes.PRODUCER_IDS, b"2000")
        await store.set(nodes.CONTROLLER_EPOCH, b"4")
    damage(path / "data", before)


async def gone(path: Path) -> None:
    """The metadata is not there at all, and the copy lacks the last changes."""
    async with living(path) as store:
        await make_topic(store, "b")
        await store.copy_to(path / "live" / METADATA_COPY_FILE)
        await store.set(nodes.PRODUCER_IDS, b"2000")
        await store.set(nodes.CONTROLLER_EPOCH, b"4")
    for suffix in ("", "-wal", "-shm"):
        (path / "data" / f"{METADATA_FILE}{suffix}").unlink(missing_ok=True)


def repair(data: Path, disk: Disk) -> list[str]:
    directory, steps = plan_repair(data, disk)
    try:
        for step in steps:
            step.do()
    finally:
        directory.release()
    return [step.text for step in steps]


@pytest.mark.parametrize("damaged", [cut, gone])
def test_a_repair_that_was_interrupted_is_finished_by_the_next_one(
    tmp_path: Path, damaged: Callable[[Path], Coroutine[Any, Any, None]]
) -> None:
    asyncio.run(damaged(tmp_path))
    calls = 0
    while True:
        calls += 1
        data = tmp_path / f"{calls}"
        shutil.copytree(tmp_path / "data", data)
        try:
            repair(data, DyingDisk(calls))
        except DiedError:
            if any(data.glob(f"{METADATA_FILE}.repaired")):
                directory = DataDirectory(data, Disk())
                with pytest.raises(MetadataLostError, match="interrupted"):
                    check_metadata_file(directory)
                directory.release()
            repair(data, Disk())
        else:
            break
        finally:
            found = read_tree(data / METADATA_FILE)
            assert found is not None and not found.damaged and not found.is_cut, calls
            assert int(found.sound[nodes.PRODUCER_IDS].data) >= 2000, f"{calls}: ids would be handed out twice"
            assert int(found.sound[nodes.CONTROLLER_EPOCH].data) == 4, calls
            assert nodes.partition_path("b", 0) in found.sound, calls
            assert not (data / UNKNOWN_DIRECTORY).exists(), calls
            assert repair(data, Disk()) == [], calls
    assert calls > 10


LEFT = f"{METADATA_FILE}.repaired"


def leave_earlier(data: Path) -> None:
    """What a repair had made before the metadata changed."""
    found = read_tree(data / METADATA_COPY_FILE)
    assert found is not None
    write_tree(data / LEFT, found.sound.values())


def leave_empty(data: Path) -> None:
    (data / LEFT).touch()


def leave_damaged(data: Path) -> None:
    (data / LEFT).write_bytes((data / METADATA_COPY_FILE).read_bytes()[:4096] + b"1" * 4096)


async def gone_on(path: Path) -> None:
    """A topic more than the copy has."""
    async with living(path) as store:
        await make_topic(store, "b")
        await store.set(nodes.CONTROLLER_EPOCH, b"4")


@pytest.mark.parametrize("leave", [leave_earlier, leave_empty, leave_damaged])
def test_repaired_metadata_that_is_not_the_latest_is_put_away(tmp_path: Path, leave: Callable[[Path], None]) -> None:
    asyncio.run(gone_on(tmp_path))
    data = tmp_path / "data"
    leave(data)
    before = {".lock", *(file.name for file in data.iterdir())}
    (text,) = repair(data, Disk())
    assert text.startswith("rename") and LEFT in text
    assert {file.name for file in data.iterdir()} ^ before == {LEFT, f"{LEFT}.damaged"}, "and nothing else is made"
    found = read_tree(data / METADATA_FILE)
    assert found is not None and nodes.partition_path("b", 0) in found.sound
    assert repair(data, Disk()) == []


async def without_root(path: Path) -> None:
    """The first transactions are damaged: there is a table, and not even the root in it."""
    async with living(path) as store:
        await make_topic(store, "b")
        await store.copy_to(path / "live" / METADATA_COPY_FILE)
        await store.set(nodes.CONTROLLER_EPOCH, b"4")


def test_a_tree_without_its_root_is_behind_every_copy(tmp_path: Path) -> None:
    asyncio.run(without_root(tmp_path))
    found = 0
    size = (tmp_path / "data" / f"{METADATA_FILE}-wal").stat().st_size
    for frame in range((size - 32) // FRAME_SIZE):
        data = tmp_path / f"{frame}"
        shutil.copytree(tmp_path / "data", data)
        damage(data, frame)
        tree = read_tree(data / METADATA_FILE)
        found += tree is not None and "/" not in tree.sound
        repair(data, Disk())
        tree = read_tree(data / METADATA_FILE)
        assert tree is not None and nodes.partition_path("b", 0) in tree.sound, frame
    assert found


def test_a_repair_is_finished_where_only_an_older_copy_is_beside_it(tmp_path: Path) -> None:
    """The copy has a topic that was deleted since, of which there is a log."""
    asyncio.run(gone_on(tmp_path))
    data = tmp_path / "data"
    found = read_tree(data / METADATA_FILE)
    assert found is not None
    tree = {path: row for path, row in found.sound.items() if not path.startswith(nodes.topic_path("a"))}
    write_tree(data / LEFT, [tree[path] for path in sorted(tree)])
    for suffix in ("", "-wal", "-shm"):
        (data / f"{METADATA_FILE}{suffix}").unlink(missing_ok=True)
    assert "finish the repair that was interrupted" in repair(data, Disk())[0]
    found = read_tree(data / METADATA_FILE)
    assert found is not None and nodes.partition_path("b", 0) in found.sound
    assert not (data / UNKNOWN_DIRECTORY / "b-0").exists()


async def made_again(path: Path) -> None:
    """The changes are damaged in which a topic was deleted and created again, of which the copy knows."""
    async with living(path) as store:
        name = nodes.partition_path("a", 0)
        await store.set(name, b"changed")
        await make_topic(store, "b")
        before = frames(path)
        await store.multi([Delete(name)])
        await store.create(name, nodes.put_partition("a", 0, PartitionNode(7, 0, (0,), 1)).data)
        await store.copy_to(path / "live" / METADATA_COPY_FILE)
    damage(path / "data", before)


def test_a_topic_that_was_created_again_is_taken_from_the_copy_though_its_versions_began_anew(tmp_path: Path) -> None:
    asyncio.run(made_again(tmp_path))
    data = tmp_path / "data"
    repair(data, Disk())
    found = read_tree(data / METADATA_FILE)
    name = nodes.partition_path("a", 0)
    assert found is not None and nodes.read_partition(name, found.sound[name].data).leader == 7
    copied = read_tree(data / METADATA_COPY_FILE)
    assert copied is not None and found.sound["/"].version > copied.sound["/"].version, "it is the later one now"
    assert repair(data, Disk()) == []


async def changed_config(path: Path) -> None:
    async with living(path) as store:
        await store.ensure(nodes.CONFIGS)
        await store.create(nodes.config_path("a"), b'{"retention.ms":"1000"}')
        await store.copy_to(path / "live" / METADATA_COPY_FILE)
        await make_topic(store, "b")
        await store.set(nodes.config_path("a"), b'{"retention.ms":"5000"}')
        await store.set(nodes.CONTROLLER_EPOCH, b"4")
        await store.close()


def test_a_damaged_config_of_which_the_copy_has_an_earlier_form_hides_no_later_topic(tmp_path: Path) -> None:
    asyncio.run(changed_config(tmp_path))
    data = tmp_path / "data"
    file = data / METADATA_FILE
    file.write_bytes(file.read_bytes().replace(b'"5000"', b'"5001"'))
    (text,) = repair(data, Disk())
    assert "/config/topics/a" in text and "an earlier form" in text
    found = read_tree(file)
    assert found is not None and found.sound[nodes.config_path("a")].data == b'{"retention.ms":"1000"}'
    assert nodes.partition_path("b", 0) in found.sound and not (data / UNKNOWN_DIRECTORY).exists()
    assert repair(data, Disk()) == []


async def whole(path: Path) -> None:
    async with living(path) as store:
        await make_topic(store, "b")
        await store.set(nodes.CONTROLLER_EPOCH, b"4")
        await store.copy_to(path / "live" / METADATA_COPY_FILE)


def test_a_file_that_is_named_like_a_log_is_moved_away(tmp_path: Path) -> None:
    asyncio.run(whole(tmp_path))
    (tmp_path / "data" / "notes-7").write_text("of mine")
    repair(tmp_path / "data", Disk())
    assert (tmp_path / "data" / UNKNOWN_DIRECTORY / "notes-7").read_text() == "of mine"


def change_root(file: Path) -> None:
    with closing(sqlite3.connect(file)) as database:
        database.execute("UPDATE node SET crc = crc + 1 WHERE path = '/'")
        database.commit()


async def whole_alone(path: Path) -> None:
    await whole(path)
    (path / "data" / METADATA_COPY_FILE).unlink()


@pytest.mark.parametrize("made", [whole, whole_alone])
def test_a_damaged_root_is_written_anew_with_a_copy_or_without(
    tmp_path: Path, made: Callable[[Path], Coroutine[Any, Any, None]]
) -> None:
    asyncio.run(made(tmp_path))
    data = tmp_path / "data"
    before = read_tree(data / METADATA_FILE)
    assert before is not None
    change_root(data / METADATA_FILE)
    (text, *_) = repair(data, Disk())
    assert text.startswith("write the root of metadata.sqlite anew")
    after = read_tree(data / METADATA_FILE)
    assert after is not None
    assert not after.damaged
    assert {name: row.data for name, row in after.sound.items()} == {n: row.data for n, row in before.sound.items()}


def test_one_odd_file_in_a_log_keeps_no_metadata_from_being_repaired(tmp_path: Path) -> None:
    asyncio.run(gone(tmp_path))
    (tmp_path / "data" / "a-0" / f"{0:020d}.log").mkdir()
    repair(tmp_path / "data", Disk())
    found = read_tree(tmp_path / "data" / METADATA_FILE)
    assert found is not None
    assert nodes.partition_path("a", 0) in found.sound


def copied_to(data: Path, *, backfilled: int, attempted: int) -> None:
    """Have the index of the write-ahead log say how far SQLite has copied it, or has begun to."""
    index = data / f"{METADATA_FILE}-shm"
    found = bytearray(index.read_bytes())
    struct.pack_into("=I", found, 96, backfilled)
    struct.pack_into("=I", found, 128, attempted)
    index.write_bytes(found)


def test_metadata_that_may_mix_two_points_in_time_is_not_preferred_to_a_copy(tmp_path: Path) -> None:
    """SQLite was killed while it copied the log, which is damaged now: some changes are in the file, others are not."""
    asyncio.run(cut(tmp_path))
    data = tmp_path / "data"
    copied_to(data, backfilled=0, attempted=((data / f"{METADATA_FILE}-wal").stat().st_size - 32) // FRAME_SIZE)
    (text, *_) = repair(data, Disk())
    assert text.startswith("restore metadata.sqlite from metadata-copy.sqlite")


def test_metadata_that_has_all_changes_itself_is_repaired_without_loss(tmp_path: Path) -> None:
    async def story() -> None:
        async with living(tmp_path) as store:
            await make_topic(store, "b")
            await store.set(nodes.CONTROLLER_EPOCH, b"4")
            with closing(sqlite3.connect(tmp_path / "live" / METADATA_FILE)) as other:
                other.execute("PRAGMA wal_checkpoint(PASSIVE)")

    asyncio.run(story())
    data = tmp_path / "data"
    damage(data, 1)
    (text, *_) = repair(data, Disk())
    assert text.startswith("restore metadata.sqlite without metadata.sqlite-wal, which is damaged: it has all changes")
    found = read_tree(data / METADATA_FILE)
    assert found is not None
    assert found.sound[nodes.CONTROLLER_EPOCH].data == b"4"
    assert nodes.partition_path("b", 0) in found.sound


def test_a_repair_says_what_it_takes_from_the_copy_where_the_rest_is_whole(tmp_path: Path) -> None:
    config = f"{nodes.CONFIGS}/topic"

    async def story() -> None:
        async with living(tmp_path) as store:
            await make_topic(store, "b")
            await store.ensure(nodes.CONFIGS)
            await store.create(config, b"old")
            await store.copy_to(tmp_path / "live" / METADATA_COPY_FILE)
            await store.set(config, b"new settings")
            await store.set(nodes.CONTROLLER_EPOCH, b"4")
            with closing(sqlite3.connect(tmp_path / "live" / METADATA_FILE)) as other:
                other.execute("PRAGMA wal_checkpoint(PASSIVE)")

    asyncio.run(story())
    file = tmp_path / "data" / METADATA_FILE
    data = file.read_bytes()
    at = data.rindex(b"new settings")
    file.write_bytes(data[:at] + b"N" + data[at + 1 :])
    damage(tmp_path / "data", 1)
    (text, *_) = repair(tmp_path / "data", Disk())
    assert "it has all changes itself; restore /config" in text
    assert f"Of {config} the copy has an earlier form" in text


async def older(path: Path) -> None:
    """The metadata is an earlier state of the same controller, put in its place after a clean stop."""
    async with living(path) as store:
        await store.set(nodes.CONTROLLER_EPOCH, b"4")
        await make_topic(store, "b")
        await store.copy_to(path / "older")
        await store.set(nodes.PRODUCER_IDS, b"2000")
        await store.copy_to(path / "live" / METADATA_COPY_FILE)
    for suffix in ("-wal", "-shm"):
        (path / "data" / f"{METADATA_FILE}{suffix}").unlink()
    shutil.copy(path / "older", path / "data" / METADATA_FILE)


def test_metadata_that_is_older_than_its_copy_is_refused_as_it_is_and_restored(tmp_path: Path) -> None:
    asyncio.run(older(tmp_path))
    data = tmp_path / "data"
    before = (data / METADATA_FILE).read_bytes()
    directory = DataDirectory(data, Disk())
    with pytest.raises(MetadataLostError, match=r"has seen \d+ changes, .*: it is an older copy\..*repair"):
        check_metadata_file(directory)
    directory.release()
    assert (data / METADATA_FILE).read_bytes() == before
    (text,) = repair(data, Disk())
    assert "from metadata-copy.sqlite: 2 of 2 logs" in text
    found = read_tree(data / METADATA_FILE)
    assert found is not None
    assert int(found.sound[nodes.PRODUCER_IDS].data) >= 2000
    directory = DataDirectory(data, Disk())
    check_metadata_file(directory)
    directory.release()
    assert repair(data, Disk()) == []


def test_an_older_one_is_not_refused_for_a_damaged_copy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A repair would not restore it from that, nor anything else: no start was possible."""
    asyncio.run(older(tmp_path))
    copy = tmp_path / "data" / METADATA_COPY_FILE
    with closing(sqlite3.connect(copy)) as database:
        database.execute("UPDATE node SET data = 'x' WHERE path = ?", (nodes.CONTROLLER_EPOCH,))
        database.commit()
    directory = DataDirectory(tmp_path / "data", Disk())
    check_metadata_file(directory)
    directory.release()
    assert "the copy of the metadata is damaged, and made anew" in caplog.text


def test_an_older_one_with_a_write_ahead_log_is_refused_too(tmp_path: Path) -> None:
    """As in a directory that was copied while its broker ran; once the log was checkpointed, it was refused anyway."""

    async def story() -> None:
        async with living(tmp_path) as store:
            await make_topic(store, "b")
            await store.set(nodes.CONTROLLER_EPOCH, b"4")
            older = [
                (name, (tmp_path / "live" / name).read_bytes()) for name in (METADATA_FILE, f"{METADATA_FILE}-wal")
            ]
            await store.set(nodes.PRODUCER_IDS, b"2000")
            await store.copy_to(tmp_path / "live" / METADATA_COPY_FILE)
        for name, data in older:
            (tmp_path / "data" / name).write_bytes(data)
        (tmp_path / "data" / f"{METADATA_FILE}-shm").unlink()
        directory = DataDirectory(tmp_path / "data", Disk())
        check_metadata_file(directory)
        store = await EmbeddedMetadataStore.open(tmp_path / "data" / METADATA_FILE)
        with pytest.raises(MetadataLostError, match=r"has seen \d+ changes, .*: it is an older copy"):
            await check_metadata(directory, store)
        await store.close()
        directory.release()

    asyncio.run(story())


@pytest.mark.parametrize("copied", [True, False])
def test_metadata_that_is_older_than_the_logs_and_later_than_its_copy_stays(tmp_path: Path, copied: bool) -> None:
    """As where both were restored from a backup: the copy of that moment was older still."""

    async def story() -> None:
        async with living(tmp_path) as store:
            await make_topic(store, "b")

    asyncio.run(story())
    data = tmp_path / "data"
    if not copied:
        (data / METADATA_COPY_FILE).unlink()
    (text,) = repair(data, Disk())
    assert text.startswith("keep metadata.sqlite, which is of an earlier controller than the logs")
    assert f"bring 2 nodes up to the logs: {nodes.CONTROLLER_EPOCH}, {nodes.PRODUCER_IDS}" in text
    found = read_tree(data / METADATA_FILE)
    assert found is not None
    assert nodes.partition_path("b", 0) in found.sound and found.sound[nodes.CONTROLLER_EPOCH].data == b"4"
    assert repair(data, Disk()) == []


def test_metadata_that_counts_no_changes_is_not_behind_a_copy_with_a_topic_that_was_deleted(tmp_path: Path) -> None:
    """Of a version before the counts: a repair put the copy in its place, and moved the log of a new topic away."""

    async def story() -> None:
        async with living(tmp_path) as store:
            await store.set(nodes.CONTROLLER_EPOCH, b"4")
            await store.delete(nodes.partition_path("a", 0))
            await make_topic(store, "b")

    asyncio.run(story())
    data = tmp_path / "data"
    (data / "a-0").rmdir()
    for name in (METADATA_FILE, METADATA_COPY_FILE):
        found = read_tree(data / name)
        assert found is not None
        for suffix in ("-wal", "-shm"):
            (data / f"{name}{suffix}").unlink(missing_ok=True)
        write_tree(data / name, [row._replace(version=0) if row.path == ROOT else row for row in found.sound.values()])
    assert repair(data, Disk()) == []
