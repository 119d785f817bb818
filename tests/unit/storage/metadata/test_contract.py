"""The contract of a metadata store, run against every implementation."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from anabranch.storage.interface import (
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
    StoredNode,
)
from anabranch.storage.metadata.embedded import EmbeddedMetadataStore
from tests.support.metadata import MemoryMetadataStore, MemoryTree

Open = Callable[[], Awaitable[MetadataStore]]
Story = Callable[[MetadataStore], Awaitable[None]]
SessionsStory = Callable[[Open], Awaitable[None]]


def _embedded(path: Path) -> Open:
    return lambda: EmbeddedMetadataStore.open(path / "metadata.sqlite")


def _in_memory(path: Path) -> Open:
    tree = MemoryTree()

    async def open_session() -> MetadataStore:
        return MemoryMetadataStore(tree)

    return open_session


@pytest.fixture(params=[_embedded, _in_memory])
def play_sessions(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[SessionsStory], None]:
    """Run a story that opens sessions on one tree, and closes them."""

    async def run(story: SessionsStory) -> None:
        await story(request.param(tmp_path))

    return lambda story: asyncio.run(run(story))


@pytest.fixture
def play(play_sessions: Callable[[SessionsStory], None]) -> Callable[[Story], None]:
    """Run a story on a store that is open."""

    async def run(open_session: Open, story: Story) -> None:
        store = await open_session()
        try:
            await story(store)
        finally:
            await store.close()

    return lambda story: play_sessions(lambda open_session: run(open_session, story))


Play = Callable[[Story], None]
PlaySessions = Callable[[SessionsStory], None]


def test_a_node_has_bytes_and_a_version_that_grows(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.create("/a", b"one")
        assert await store.get("/a") == (b"one", 0)
        assert await store.set("/a", b"two") == 1
        assert await store.set("/a", b"three", expected_version=1) == 2
        assert await store.get("/a") == (b"three", 2)

    play(story)


def test_children_are_the_nodes_just_below_sorted(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.ensure("/topics/b/partitions/0")
        await store.ensure("/topics/a")
        await store.ensure("/topics/a")
        assert await store.children("/topics") == ["a", "b"]
        assert await store.children("/topics/b/partitions") == ["0"]
        assert await store.children("/") == ["topics"]

    play(story)


def test_a_subtree_is_read_at_once_parents_first(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        for path in ("/topics/b", "/topics/a/0", "/topics/a-b/1", "/topics0", "/topic"):
            await store.ensure(path)
        await store.set("/topics/a/0", b"zero")
        found = await store.subtree("/topics")
        assert sorted(found) == [
            StoredNode("/topics", b"", 0),
            StoredNode("/topics/a", b"", 0),
            StoredNode("/topics/a-b", b"", 0),
            StoredNode("/topics/a-b/1", b"", 0),
            StoredNode("/topics/a/0", b"zero", 1),
            StoredNode("/topics/b", b"", 0),
        ]
        places = {node.path: place for place, node in enumerate(found)}
        assert all(places[path.rpartition("/")[0]] < place for path, place in places.items() if path != "/topics")
        assert {node.path for node in await store.subtree("/")} >= {"/", "/topic", "/topics/a/0"}
        assert list(await store.subtree("/nothing")) == []

    play(story)


def test_which_of_many_paths_exist_is_one_question(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.ensure('/a/it\'s "b" €')
        assert await store.existing(["/a", "/a/c", '/a/it\'s "b" €', "/"]) == {"/a", '/a/it\'s "b" €', "/"}
        assert await store.existing([]) == frozenset()
        many = [f"/a/{number}" for number in range(5_000)]
        await store.multi([Create(path) for path in many[::2]])
        assert await store.existing(many) == {*many[::2]}
        assert (await store.exists("/a"), await store.exists("/b")) == (True, False)

    play(story)


def test_what_is_not_allowed_is_refused_and_changes_nothing(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.ensure("/a/b")
        refused: list[tuple[type[MetadataError], Callable[[], Awaitable[object]]]] = [
            (NoNodeError, lambda: store.get("/x")),
            (NoNodeError, lambda: store.create("/x/y")),
            (NoNodeError, lambda: store.children("/x")),
            (NoNodeError, lambda: store.set("/x", b"")),
            (NoNodeError, lambda: store.delete("/x")),
            (NoNodeError, lambda: store.owner("/x")),
            (NodeExistsError, lambda: store.create("/a")),
            (BadVersionError, lambda: store.set("/a", b"", expected_version=7)),
            (BadVersionError, lambda: store.delete("/a/b", expected_version=7)),
            (BadVersionError, lambda: store.multi([Check("/a/b", 7)])),
            (NotEmptyError, lambda: store.delete("/a")),
            *((MetadataError, lambda path=path: store.create(path)) for path in ("a", "/a/", "//a", "")),
        ]
        for error, attempt in refused:
            with pytest.raises(error):
                await attempt()
        assert await store.get("/a") == (b"", 0)

    play(story)


def test_several_changes_are_made_or_none(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.create("/a", b"old")
        await store.create("/gone")
        with pytest.raises(BadVersionError):
            await store.multi([Set("/a", b"new"), Create("/b"), Delete("/gone"), Check("/a", version=0)])
        assert await store.get("/a") == (b"old", 0)
        assert await store.children("/") == ["a", "gone"]
        await store.multi([Check("/a", version=0), Set("/a", b"new"), Create("/b"), Create("/b/c"), Delete("/b/c")])
        assert await store.get("/a") == (b"new", 1)
        assert await store.children("/b") == []
        await store.multi([])

    play(story)


def test_operations_take_effect_in_the_order_in_which_they_were_called(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.create("/a")
        results = await asyncio.gather(*(store.set("/a", b"%d" % number) for number in range(20)), store.get("/a"))
        assert results == [*range(1, 21), (b"19", 20)]

    play(story)


def test_of_two_changes_upon_one_version_one_is_made(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.create("/a")
        first, second = await asyncio.gather(
            store.set("/a", b"first", 0), store.set("/a", b"second", 0), return_exceptions=True
        )
        assert first == 1
        assert isinstance(second, BadVersionError)
        assert await store.get("/a") == (b"first", 1)

    play(story)


def test_a_watch_is_called_once_after_the_change(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        seen: list[tuple[str, Change]] = []

        def watch(path: str, change: Change) -> None:
            seen.append((path, change))

        await store.create("/a")
        store.watch("/a", watch)
        store.watch("/a/b", watch)
        await store.create("/a/b", b"")
        await store.set("/a/b", b"again")
        assert sorted(seen, key=str) == [("/a", Change.CHILDREN), ("/a/b", Change.CREATED)]
        store.watch("/a/b", watch)
        await store.set("/a/b", b"again")
        assert seen[-1] == ("/a/b", Change.CHANGED)
        store.watch("/a/b", watch)
        await store.delete("/a/b")
        assert seen[-1] == ("/a/b", Change.DELETED)

    play(story)


def test_whoever_is_told_of_a_change_reads_it(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        read: list[asyncio.Task[tuple[bytes, int]]] = []

        async def get() -> tuple[bytes, int]:
            return await store.get("/a")

        await store.create("/a", b"old")
        store.watch("/a", lambda path, change: read.append(asyncio.ensure_future(get())))
        await store.set("/a", b"new")
        assert [await task for task in read] == [(b"new", 1)]

    play(story)


def test_a_failed_change_wakes_no_watch(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        seen: list[str] = []
        await store.create("/a")
        store.watch("/a", lambda path, change: seen.append(path))
        with pytest.raises(NodeExistsError):
            await store.multi([Set("/a", b"x"), Create("/a")])
        assert seen == []

    play(story)


def test_nodes_outlive_the_session_and_ephemeral_ones_do_not(play_sessions: PlaySessions) -> None:
    async def story(open_session: Open) -> None:
        first = await open_session()
        await first.create("/durable", b"1")
        await first.create("/ephemeral", b"2", ephemeral=True)
        assert await first.exists("/ephemeral")
        await first.close()
        second = await open_session()
        assert second.session > first.session
        assert await second.get("/durable") == (b"1", 0)
        assert not await second.exists("/ephemeral")
        await second.close()

    play_sessions(story)


def test_an_ephemeral_node_belongs_to_its_session_and_has_no_children(play: Play) -> None:
    async def story(store: MetadataStore) -> None:
        await store.create("/lasting")
        await store.create("/alive", ephemeral=True)
        assert (await store.owner("/alive"), await store.owner("/lasting")) == (store.session, None)
        with pytest.raises(MetadataError, match="ephemeral"):
            await store.create("/alive/child")

    play(story)
