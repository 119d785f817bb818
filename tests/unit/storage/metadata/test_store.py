"""The contract of a metadata store, run against every implementation."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.storage.metadata.embedded import EmbeddedMetadataStore
from anabranch.storage.metadata.store import (
    BadVersionError,
    Change,
    Check,
    Create,
    Delete,
    MetadataError,
    MetadataStore,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    Set,
)

Open = Callable[[], MetadataStore]


@pytest.fixture(params=[EmbeddedMetadataStore])
def open_store(request: pytest.FixtureRequest, tmp_path: Path) -> Open:
    return lambda: request.param(tmp_path / "metadata.sqlite")


@pytest.fixture
def store(open_store: Open) -> Iterator[MetadataStore]:
    store = open_store()
    yield store
    store.close()


def test_a_node_has_bytes_and_a_version_that_grows(store: MetadataStore) -> None:
    store.create("/a", b"one")
    assert store.get("/a") == (b"one", 0)
    assert store.set("/a", b"two") == 1
    assert store.set("/a", b"three", expected_version=1) == 2
    assert store.get("/a") == (b"three", 2)


def test_children_are_the_nodes_just_below_sorted(store: MetadataStore) -> None:
    store.ensure("/topics/b/partitions/0")
    store.ensure("/topics/a")
    assert store.children("/topics") == ["a", "b"]
    assert store.children("/topics/b/partitions") == ["0"]
    assert store.children("/") == ["topics"]


def test_what_is_not_allowed_is_refused_and_changes_nothing(store: MetadataStore) -> None:
    store.ensure("/a/b")
    with pytest.raises(NoNodeError):
        store.get("/x")
    with pytest.raises(NoNodeError):
        store.create("/x/y")
    with pytest.raises(NoNodeError):
        store.children("/x")
    with pytest.raises(NodeExistsError):
        store.create("/a")
    with pytest.raises(BadVersionError):
        store.set("/a", b"", expected_version=7)
    with pytest.raises(BadVersionError):
        store.delete("/a/b", expected_version=7)
    with pytest.raises(NotEmptyError):
        store.delete("/a")
    for path in ("a", "/a/", "//a", ""):
        with pytest.raises(MetadataError):
            store.create(path)
    assert store.get("/a") == (b"", 0)


def test_several_changes_are_made_or_none(store: MetadataStore) -> None:
    store.create("/a", b"old")
    with pytest.raises(BadVersionError):
        store.multi([Set("/a", b"new"), Create("/b"), Check("/a", version=0)])
    assert store.get("/a") == (b"old", 0)
    assert not store.exists("/b")
    store.multi([Check("/a", version=0), Set("/a", b"new"), Create("/b"), Create("/b/c"), Delete("/b/c")])
    assert store.get("/a") == (b"new", 1)
    assert store.children("/b") == []


def test_a_watch_is_called_once_after_the_change(store: MetadataStore) -> None:
    seen: list[tuple[str, Change, bool]] = []

    def watch(path: str, change: Change) -> None:
        seen.append((path, change, store.exists("/a/b")))

    store.create("/a")
    store.watch("/a", watch)
    store.watch("/a/b", watch)
    store.create("/a/b", b"")
    store.set("/a/b", b"again")
    assert sorted(seen) == [("/a", Change.CHILDREN, True), ("/a/b", Change.CREATED, True)] or sorted(
        seen, key=lambda event: event[0]
    ) == [("/a", Change.CHILDREN, True), ("/a/b", Change.CREATED, True)]
    store.watch("/a/b", watch)
    store.delete("/a/b")
    assert seen[-1] == ("/a/b", Change.DELETED, False)


def test_a_failed_change_wakes_no_watch(store: MetadataStore) -> None:
    seen: list[str] = []
    store.create("/a")
    store.watch("/a", lambda path, change: seen.append(path))
    with pytest.raises(NodeExistsError):
        store.multi([Set("/a", b"x"), Create("/a")])
    assert seen == []


def test_nodes_outlive_the_session_and_ephemeral_ones_do_not(open_store: Open) -> None:
    first = open_store()
    first.create("/durable", b"1")
    first.create("/ephemeral", b"2", ephemeral=True)
    assert first.exists("/ephemeral")
    first.close()
    second = open_store()
    assert second.get("/durable") == (b"1", 0)
    assert not second.exists("/ephemeral")
    second.close()


def test_an_ephemeral_node_belongs_to_its_session_and_has_no_children(open_store: Open) -> None:
    first = open_store()
    first.create("/lasting")
    first.create("/alive", ephemeral=True)
    assert (first.owner("/alive"), first.owner("/lasting")) == (first.session, None)
    with pytest.raises(MetadataError, match="ephemeral"):
        first.create("/alive/child")
    with pytest.raises(NoNodeError):
        first.owner("/nowhere")
    second = open_store()
    assert second.session > first.session
    assert second.children("/") == ["lasting"]
    second.close()
    first.close()


def test_a_store_that_is_locked_by_others_refuses_and_goes_on_when_they_are_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.storage.metadata.embedded.BUSY_TIMEOUT_S", 0.05)
    store = EmbeddedMetadataStore(tmp_path / "metadata.sqlite")
    other = sqlite3.connect(tmp_path / "metadata.sqlite", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(OSError, match="refuses") as refused:
        store.create("/a")
    assert refused.value.errno == errno.EBUSY
    other.execute("ROLLBACK")
    other.close()
    store.create("/a")
    assert store.exists("/a")
    store.close()


def test_a_full_disk_changes_nothing(tmp_path: Path) -> None:
    store = EmbeddedMetadataStore(tmp_path / "metadata.sqlite")
    store.create("/a", b"old")
    store._execute("PRAGMA max_page_count = 8")
    with pytest.raises(OSError, match="full") as refused:
        store.multi([Set("/a", b"new"), Create("/b", bytes(100_000))])
    assert refused.value.errno == errno.ENOSPC
    assert store.get("/a") == (b"old", 0)
    store.set("/a", b"new")
    store.close()


def test_a_damaged_file_is_told_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "metadata.sqlite"
    path.write_bytes(b"this is no database" * 100)
    with pytest.raises(MetadataError, match=r"damaged.*Restore"):
        EmbeddedMetadataStore(path)
