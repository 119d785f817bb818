"""The metadata store in a SQLite file: what the file, the disk and other processes may do to it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
import sqlite3
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from anabranch.storage.interface import (
    Change,
    Check,
    Create,
    DamagedMetadataError,
    Delete,
    MetadataError,
    Set,
    StoredNode,
)
from anabranch.storage.metadata import embedded
from anabranch.storage.metadata.embedded import EmbeddedMetadataStore, parent_of

EARLIER_TABLES = (
    """
CREATE TABLE node (
    path TEXT PRIMARY KEY, parent TEXT NOT NULL, data BLOB NOT NULL, version INTEGER NOT NULL,
    ephemeral INTEGER NOT NULL
) WITHOUT ROWID
""",
    """
CREATE TABLE IF NOT EXISTS node (
    path TEXT PRIMARY KEY NOT NULL,
    parent TEXT NOT NULL,
    data BLOB NOT NULL,
    version INTEGER NOT NULL,
    ephemeral INTEGER NOT NULL
)
""",
)
earlier = pytest.mark.parametrize("earlier", EARLIER_TABLES, ids=("within the index", "beside the index"))
EARLIER_NODES = {
    "/": (b"", 0, 0),
    "/topics": (b"", 0, 0),
    "/topics/a": (b"whole", 7, 0),
    "/topics/a/0": (b"\0", 1, 0),
    "/topics/b": (bytes(100_000), 2, 0),
    "/gone": (b"", 0, 1),
}
"""The bytes of each node, its version and its session."""


def test_ephemeral_nodes_of_a_session_that_died_go_when_the_next_one_opens(tmp_path: Path) -> None:
    async def story() -> None:
        first = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        await first.create("/lasting")
        await first.create("/alive", ephemeral=True)
        second = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        assert second.session > first.session
        assert await second.children("/") == ["lasting"]
        await second.close()
        await first.close()

    asyncio.run(story())


def test_a_store_that_is_locked_by_others_refuses_and_goes_on_when_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        store = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        other = sqlite3.connect(tmp_path / "metadata.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(OSError, match="refuses") as refused:
            await store.create("/a")
        assert refused.value.errno == errno.EBUSY
        other.execute("ROLLBACK")
        other.close()
        await store.create("/a")
        assert await store.exists("/a")
        await store.close()

    monkeypatch.setattr("anabranch.storage.metadata.embedded.BUSY_TIMEOUT_S", 0.05)
    asyncio.run(story())


def test_a_store_that_waits_for_others_does_not_block_the_loop(tmp_path: Path) -> None:
    async def story() -> None:
        store = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        other = sqlite3.connect(tmp_path / "metadata.sqlite", isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        change = asyncio.ensure_future(store.create("/a"))
        for _ in range(100):
            await asyncio.sleep(0)
        assert not change.done()
        other.execute("ROLLBACK")
        other.close()
        await change
        await store.close()

    asyncio.run(story())


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        store = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        await store.create("/a", b"old")
        await store._run(store._database._execute, "PRAGMA max_page_count = 8")
        with pytest.raises(OSError, match="full") as refused:
            await store.multi([Set("/a", b"new"), Create("/b", bytes(100_000))])
        assert refused.value.errno == errno.ENOSPC
        assert await store.get("/a") == (b"old", 0)
        await store.set("/a", b"new")
        await store.close()

    asyncio.run(story())


def test_a_damaged_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "metadata.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(MetadataError, match=r"damaged.*Restore"):
        asyncio.run(EmbeddedMetadataStore.open(path))


def change_on_the_disk(path: Path, sql: str, *values: object) -> None:
    """Change what is stored, as a disk may, without its checksum."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        changed = database.execute(sql, values)
        assert changed.rowcount == 1
        database.commit()
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")


async def check_a_flipped_bit_is_found(path: Path, node: str) -> None:
    """A store does not open a file in which a bit of a node has flipped."""
    change_on_the_disk(path, "UPDATE node SET data = x'01' || substr(data, 2) WHERE path = ?", node)
    with pytest.raises(DamagedMetadataError, match=f"the node {node} does not fit its checksum.*anabranch repair"):
        await EmbeddedMetadataStore.open(path)


@pytest.mark.parametrize(
    "change",
    [
        "data = replace(data, '604800000', '204800000')",
        "data = CAST(data AS TEXT)",
        "version = version + 1",
        "version = 'x'",
        "ephemeral = 1",
        "crc = crc + 1",
    ],
)
def test_a_node_that_has_changed_on_the_disk_is_found_when_a_store_is_opened(tmp_path: Path, change: str) -> None:
    path = tmp_path / "metadata.sqlite"

    async def story() -> None:
        store = await EmbeddedMetadataStore.open(path)
        await store.create("/config", b'{"retention.ms": "604800000"}')
        await store.set("/config", b'{"retention.ms": "604800000"}')
        await store.close()
        change_on_the_disk(path, f"UPDATE node SET {change} WHERE path = '/config'")
        before = path.read_bytes()
        with pytest.raises(DamagedMetadataError, match="the node /config does not fit its checksum"):
            await EmbeddedMetadataStore.open(path)
        assert path.read_bytes() == before

    asyncio.run(story())


def test_any_flipped_bit_of_a_file_is_found_or_changes_no_node(tmp_path: Path) -> None:
    path = tmp_path / "metadata.sqlite"
    chance = random.Random(7)

    async def nodes() -> Sequence[StoredNode]:
        store = await EmbeddedMetadataStore.open(path)
        try:
            return await store.subtree("/")
        finally:
            await store.close()

    async def made() -> None:
        store = await EmbeddedMetadataStore.open(path)
        await store.create("/topics", b"{}")
        for number in range(20):
            await store.create(f"/topics/{number}", b'{"retention.ms": "604800000"}')
        await store.close()

    asyncio.run(made())
    whole, expected, found = path.read_bytes(), asyncio.run(nodes()), 0
    written = [at for at, byte in enumerate(whole) if byte]
    for _ in range(400):
        at = chance.choice(written)
        data = bytearray(whole)
        data[at] ^= 1 << chance.randrange(8)
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        path.write_bytes(data)
        try:
            assert asyncio.run(nodes()) == expected, f"byte {at} changed to {data[at]}"
        except DamagedMetadataError:
            found += 1
    assert found > 300


def test_a_node_that_changes_on_the_disk_while_a_store_is_open_concerns_no_other(tmp_path: Path) -> None:
    path, copy = tmp_path / "metadata.sqlite", tmp_path / "copy.sqlite"

    async def story() -> None:
        store = await EmbeddedMetadataStore.open(path)
        await store.multi([Create("/a", b"1000"), Create("/a/b", b"2000"), Create("/c", b"3000")])
        await store.copy_to(copy)
        sound = copy.read_bytes()
        change_on_the_disk(path, "UPDATE node SET data = x'30' WHERE path = '/a/b'")
        attempts: list[Callable[[], object]] = [
            lambda: store.get("/a/b"),
            lambda: store.subtree("/a"),
            lambda: store.set("/a/b", b"0"),
            lambda: store.multi([Set("/c", b"0"), Check("/a/b", 0)]),
        ]
        for attempt in attempts:
            with pytest.raises(DamagedMetadataError, match="the node /a/b does not fit"):
                await attempt()  # type: ignore[misc]
        assert await store.get("/c") == (b"3000", 0)
        assert await store.set("/c", b"4000") == 1
        with pytest.raises(OSError, match="the node /a/b does not fit"):
            await store.copy_to(copy)
        assert copy.read_bytes() == sound, "a damaged node was copied"
        await store.close()

    asyncio.run(story())


def test_a_change_whose_caller_is_cancelled_is_made_whole_and_told_to_the_watches(tmp_path: Path) -> None:
    async def story() -> None:
        store = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        go_on, seen = threading.Event(), list[Change]()
        store.watch("/a", lambda path, change: seen.append(change))
        held = asyncio.ensure_future(store._run(go_on.wait))
        change = asyncio.ensure_future(store.multi([Create("/a"), Create("/a/b")]))
        await asyncio.sleep(0)
        change.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await held
        assert await store.children("/a") == ["b"]
        assert seen == [Change.CREATED]
        await store.close()

    asyncio.run(story())


def test_the_version_of_the_root_counts_all_changes_of_the_tree(tmp_path: Path) -> None:
    async def story() -> None:
        store = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        before = (await store.get("/"))[1]
        await store.create("/a")
        await store.set("/a", b"1")
        await store.multi([Delete("/a"), Create("/a")])
        await store.multi([Check("/a", 0)])
        assert (await store.get("/"))[1] == before + 3, "/a is at version 0 again; to check is no change"
        await store.close()

    asyncio.run(story())


def test_a_closed_store_refuses_and_may_be_closed_again(tmp_path: Path) -> None:
    async def story() -> None:
        store = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        await store.close()
        await store.close()
        attempts: list[Callable[[], object]] = [lambda: store.get("/"), lambda: store.create("/a")]
        for attempt in attempts:
            with pytest.raises(OSError, match="closed"):
                await attempt()  # type: ignore[misc]

    asyncio.run(story())


def make_earlier_file(path: Path, earlier: str) -> None:
    """A file as earlier versions wrote it."""
    database = sqlite3.connect(path)
    database.execute("PRAGMA journal_mode = WAL")
    database.execute(earlier)
    database.execute("CREATE INDEX node_parent ON node (parent)")
    for node, (data, version, session) in EARLIER_NODES.items():
        database.execute("INSERT INTO node VALUES (?, ?, ?, ?, ?)", (node, parent_of(node), data, version, session))
    database.execute("PRAGMA user_version = 1")
    database.commit()
    database.close()


def form_of(path: Path) -> str:
    """How the table of a file was declared."""
    database = sqlite3.connect(path)
    declared = str(database.execute("SELECT sql FROM sqlite_master WHERE name = 'node'").fetchone()[0])
    database.close()
    return declared


async def check_earlier_nodes(path: Path) -> None:
    """Everything lasting that was in the file is there, and can be changed."""
    store = await EmbeddedMetadataStore.open(path)
    lasting = {node: it for node, it in EARLIER_NODES.items() if not it[2]}
    found = [node for node in await store.subtree("/") if node.path != "/"]  # Whose version counts changes from now on.
    assert found == [StoredNode(node, it[0], it[1]) for node, it in sorted(lasting.items()) if node != "/"]
    assert (await store.children("/topics"), store.session) == (["a", "b"], 2)
    await store.multi([Set("/topics/a", b"again", 7), Delete("/topics/a/0", 1), Delete("/topics/a", 8)])
    assert await store.children("/topics") == ["b"]
    await store.close()


@earlier
def test_a_file_of_an_earlier_version_is_rewritten_with_all_that_is_in_it(tmp_path: Path, earlier: str) -> None:
    path = tmp_path / "metadata.sqlite"
    make_earlier_file(path, earlier)
    asyncio.run(check_earlier_nodes(path))
    assert "WITHOUT ROWID" not in form_of(path)
    assert "crc INTEGER NOT NULL" in form_of(path)
    asyncio.run(check_a_flipped_bit_is_found(path, "/topics/b"))


@earlier
def test_a_file_of_an_earlier_version_on_a_full_disk_is_used_as_it_is(
    tmp_path: Path, earlier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metadata.sqlite"
    make_earlier_file(path, earlier)
    pages = path.stat().st_size // 4096
    connect = sqlite3.connect

    def connect_full(*arguments: object, **options: object) -> sqlite3.Connection:
        made = connect(*arguments, **options)  # type: ignore[call-overload]
        made.execute(f"PRAGMA max_page_count = {pages + 4}")
        assert isinstance(made, sqlite3.Connection)
        return made

    with monkeypatch.context() as patched:
        patched.setattr(embedded.sqlite3, "connect", connect_full)
        asyncio.run(check_earlier_nodes(path))
    assert "crc" not in form_of(path)


def bytes_read() -> int:
    """What this process has read of files."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


def test_changes_of_nodes_do_not_read_a_large_node_beside_them(tmp_path: Path) -> None:
    large, count = 8 << 20, 400
    children = [f"/topics/wide/{number}" for number in range(count)]

    async def story() -> int:
        store = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        await store.multi([Create("/topics"), Create("/topics/wide", bytes(large)), *map(Create, children)])
        before = bytes_read()
        await store.multi([*map(Delete, children), *map(Create, children), *(Set(path, b"new") for path in children)])
        assert len(await store.existing(children)) == count
        await store.close()
        return bytes_read() - before

    # In an index of whole nodes each of these changes read some megabytes, gigabytes in all.
    assert asyncio.run(story()) < 4 * large


def test_a_root_that_changes_on_the_disk_holds_up_no_change(tmp_path: Path) -> None:
    path = tmp_path / "metadata.sqlite"

    async def story() -> None:
        store = await EmbeddedMetadataStore.open(path)
        await store.create("/a", b"1")
        change_on_the_disk(path, "UPDATE node SET crc = crc + 1 WHERE path = '/'")
        assert await store.set("/a", b"2") == 1
        await store.create("/b", b"")
        assert (await store.get("/"))[1] == 3, "it is written anew"
        await store.close()
        store = await EmbeddedMetadataStore.open(path)
        assert await store.get("/a") == (b"2", 1)
        await store.close()

    asyncio.run(story())
