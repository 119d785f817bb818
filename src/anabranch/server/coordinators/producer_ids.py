"""Producer ids: never given twice, taken from the metadata store in blocks, below 2**40 (see `machines.producers`).

A machine that decides cannot wait for the store: its shell awaits `reserve` first, and then takes without waiting.
"""

from __future__ import annotations

import asyncio

from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.machines.controller.nodes import PRODUCER_ID_BLOCK_SIZE, PRODUCER_IDS
from anabranch.storage.interface import BadVersionError, MetadataStore

PATH, BLOCK_SIZE = PRODUCER_IDS, PRODUCER_ID_BLOCK_SIZE


class ProducerIdsExhaustedError(OSError):
    """All 2**40 producer ids have been given."""


class ProducerIds:
    """Allocates producer ids. A block is durable before its first id is used; a restart skips the rest of the block."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._next = 0
        self._end = 0
        self.given_below = 0
        """Above every id that has been given; known from `load` on."""
        self._turn = asyncio.Lock()

    async def load(self) -> None:
        """Learn which ids may have been given before. OSError when the store refuses."""
        await self._store.ensure(PATH)
        data, _ = await self._store.get(PATH)
        self.given_below = int(data or b"0")

    async def reserve(self) -> None:
        """See to it that an id can be taken until the loop runs others. OSError when the store refuses a block."""
        while self._next == self._end:
            async with self._turn:
                if self._next == self._end:
                    await self._take_block()

    def take(self) -> int | None:
        """Give the next id; None where none is reserved."""
        if self._next == self._end:
            return None
        given = self._next
        self._next += 1
        return given

    async def _take_block(self) -> None:
        await self._store.ensure(PATH)
        data, version = await self._store.get(PATH)
        start = int(data or b"0")
        if start + BLOCK_SIZE > 1 << PRODUCER_ID_BITS:
            raise ProducerIdsExhaustedError(f"all {1 << PRODUCER_ID_BITS} producer ids have been given")
        try:
            await self._store.set(PATH, str(start + BLOCK_SIZE).encode(), version)
        except BadVersionError:
            return  # Another session took this block: the next one is asked for.
        self._next, self._end = start, start + BLOCK_SIZE
        self.given_below = self._end
