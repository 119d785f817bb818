"""The contract of a metadata store, run against every implementation."""

from __future__ import annotations

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
