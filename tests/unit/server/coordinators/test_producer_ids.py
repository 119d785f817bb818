"""Producer ids: never given twice, whatever fails and whoever asks at once."""

from __future__ import annotations

import asyncio
import errno

import pytest

from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.server.coordinators.producer_ids import BLOCK_SIZE, PATH, ProducerIds, ProducerIdsExhaustedError
from tests.support.metadata import MemoryMetadataStore, MemoryTree


async def take(ids: ProducerIds) -> int:
    await ids.reserve()
    given = ids.take()
    assert given is not None
    return given


def test_ids_are_given_in_order_through_the_ends_of_blocks() -> None:
    async def story() -> None:
        ids = ProducerIds(MemoryMetadataStore(MemoryTree()))
        assert [await take(ids) for _ in range(2 * BLOCK_SIZE + 1)] == list(range(2 * BLOCK_SIZE + 1))

    asyncio.run(story())


def test_no_id_is_given_twice_to_those_who_ask_at_once_nor_by_two_sessions_nor_after_a_restart() -> None:
    async def story() -> None:
        tree = MemoryTree()
        one, other = (ProducerIds(MemoryMetadataStore(tree)) for _ in range(2))
        given = await asyncio.gather(*(take(ids) for _ in range(2 * BLOCK_SIZE) for ids in (one, other)))
        given.append(await take(ProducerIds(MemoryMetadataStore(tree))))
        assert len(set(given)) == len(given) == 4 * BLOCK_SIZE + 1

    asyncio.run(story())


def test_without_a_reservation_no_id_is_given() -> None:
    async def story() -> None:
        assert ProducerIds(MemoryMetadataStore(MemoryTree())).take() is None

    asyncio.run(story())


def test_a_store_that_refuses_a_block_is_asked_again() -> None:
    async def story() -> None:
        refusing = True

        async def pause() -> None:
            if refusing:
                raise OSError(errno.ENOSPC, "no space")

        ids = ProducerIds(MemoryMetadataStore(MemoryTree(), pause))
        with pytest.raises(OSError, match="no space"):
            await ids.reserve()
        assert ids.take() is None
        refusing = False
        assert await take(ids) == 0

    asyncio.run(story())


def test_the_last_block_is_followed_by_an_error() -> None:
    async def story() -> None:
        tree = MemoryTree()
        store = MemoryMetadataStore(tree)
        await store.create(PATH, b"%d" % ((1 << PRODUCER_ID_BITS) - BLOCK_SIZE))
        ids = ProducerIds(store)
        assert [await take(ids) for _ in range(BLOCK_SIZE)][-1] == (1 << PRODUCER_ID_BITS) - 1
        with pytest.raises(ProducerIdsExhaustedError):
            await ids.reserve()

    asyncio.run(story())
