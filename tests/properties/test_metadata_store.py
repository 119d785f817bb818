"""Two implementations of the metadata store do the same: any operations have the same results and leave the same tree.

Few names make few paths: versions are often stale, nodes are there already, have children, or are missing.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from anabranch.storage.interface import (
    ANY_VERSION,
    Change,
    Check,
    Create,
    Delete,
    MetadataError,
    MetadataStore,
    Operation,
    Set,
)
from anabranch.storage.metadata.embedded import EmbeddedMetadataStore
from tests.support.metadata import MemoryMetadataStore, MemoryTree

NAMES = ("a", "b", "a-b")
STEPS = 60


def a_path(chance: random.Random) -> str:
    return "".join(f"/{chance.choice(NAMES)}" for _ in range(chance.randint(1, 3)))


def an_operation(chance: random.Random) -> Operation:
    path = a_path(chance)
    version = chance.choice((ANY_VERSION, ANY_VERSION, 0, 1, 2))
    data = chance.randbytes(2)
    made: tuple[Operation, ...] = (
        Create(path, data),
        Create(path, data),
        Create(path, data, ephemeral=True),
        Set(path, data, version),
        Delete(path, version),
        Check(path, version),
    )
    return chance.choice(made)


def an_act(chance: random.Random) -> Callable[[MetadataStore], Awaitable[object]]:
    path, operations = a_path(chance), [an_operation(chance) for _ in range(chance.choice((1, 1, 2, 4)))]
    version, data = chance.choice((ANY_VERSION, 0, 1)), chance.randbytes(2)
    acts: tuple[Callable[[MetadataStore], Awaitable[object]], ...] = (
        lambda store: store.multi(operations),
        lambda store: store.multi(operations),
        lambda store: store.ensure(path),
        lambda store: store.set(path, data, version),
        lambda store: store.delete(path, version),
        lambda store: store.get(path),
        lambda store: store.children(path),
        lambda store: store.existing([path, "/a", "/"]),
    )
    return chance.choice(acts)


async def history(store: MetadataStore, seed: int) -> list[object]:
    """What a store answers, and tells, and holds in the end."""
    chance, told = random.Random(seed), list[object]()

    def watch(path: str, change: Change) -> None:
        told.append((path, change))

    for _ in range(STEPS):
        store.watch(a_path(chance), watch)
        try:
            told.append(await an_act(chance)(store))
        except MetadataError as error:
            told.append(type(error))
    tree = sorted(node for node in await store.subtree("/") if node.path != "/")  # Its version is the store's affair.
    owned = {node.path for node in tree if await store.owner(node.path) == store.session}
    return [*told, tree, owned]


@pytest.mark.parametrize("seed", range(20))
def test_any_operations_do_the_same_in_memory_and_in_the_file(seed: int, tmp_path: Path) -> None:
    async def story() -> None:
        embedded = await EmbeddedMetadataStore.open(tmp_path / "metadata.sqlite")
        expected = await history(embedded, seed)
        await embedded.close()
        assert await history(MemoryMetadataStore(MemoryTree()), seed) == expected
        assert sum(isinstance(step, type) for step in expected) not in (0, STEPS), "everything is refused, or nothing"

    asyncio.run(story())
