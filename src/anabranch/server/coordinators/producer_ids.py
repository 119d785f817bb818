"""Producer ids: never given twice, taken from the metadata store in blocks, below 2**40 (see `machines.producers`)."""

from __future__ import annotations

from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.storage.metadata.store import MetadataStore

PATH = "/latest_producer_id_block"
BLOCK_SIZE = 1_000


class ProducerIdsExhaustedError(OSError):
    """All 2**40 producer ids have been given."""


class ProducerIds:
    """Gives producer ids. A block is durable before the first id of it is given; a restart skips what is left of it."""

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        self._next = 0
        self._end = 0

    def take(self) -> int:
        """Give the next id. OSError when the store refuses another block."""
        if self._next == self._end:
            self._take_block()
        given = self._next
        self._next += 1
        return given

    def _take_block(self) -> None:
        self._store.ensure(PATH)
        data, version = self._store.get(PATH)
        start = int(data or b"0")
        if start + BLOCK_SIZE > 1 << PRODUCER_ID_BITS:
            raise ProducerIdsExhaustedError(f"all {1 << PRODUCER_ID_BITS} producer ids have been given")
        self._store.set(PATH, str(start + BLOCK_SIZE).encode(), version)
        self._next, self._end = start, start + BLOCK_SIZE
