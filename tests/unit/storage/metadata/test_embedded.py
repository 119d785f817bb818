"""The metadata store in a SQLite file: what the file, the disk and other processes may do to it."""

from __future__ import annotations

import asyncio
import errno
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from anabranch.storage.interface import Change, Create, MetadataError, Set
from anabranch.storage.metadata.embedded import EmbeddedMetadataStore


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
