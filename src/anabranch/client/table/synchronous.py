"""The keyed table of a synchronous consumer (`client.sync`)."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from anabranch.client.consumer.consumer import Consumer
from anabranch.client.table.keyed_table import KeyedTable as AsyncTable
from anabranch.client.table.owners import Owner

R = TypeVar("R")


class Beside(Protocol):
    """What a table needs of a synchronous consumer."""

    @property
    def inner(self) -> Consumer:
        """The asyncio consumer."""

    def wait_for(self, work: Coroutine[Any, Any, R]) -> R:
        """Run work on its loop, and wait for it."""


class KeyedTable:
    """A value for each key whose records this consumer reads; see `anabranch.client.KeyedTable`.

    Entries are read and changed in the caller's thread.
    """

    def __init__(self, consumer: Beside, changelog: str, source: str, **settings: Any) -> None:
        self._inner = AsyncTable(consumer.inner, changelog, source, **settings)
        self._consumer = consumer
        self.get = self._inner.get
        self.put = self._inner.put
        self.delete = self._inner.delete
        self.items = self._inner.items
        self.owns = self._inner.owns

    @property
    def inner(self) -> AsyncTable:
        """The asyncio table, for what it takes (`entries`, `size`, `unflushed_size`, `ready`)."""
        return self._inner

    def flush(self) -> None:
        """Commit what was processed, with all changes of it. Return once durable."""
        self._consumer.wait_for(self._inner.flush())

    def wait_ready(self, key: bytes | str | None = None, timeout_s: float | None = None) -> None:
        """Wait until the value of a key is in memory here, or all of them, while another thread polls."""
        self._consumer.wait_for(self._inner.wait_ready(key, timeout_s))

    def owner_of(self, key: bytes | str) -> Owner:
        """Return the member that is given the next records of a key."""
        return self._consumer.wait_for(self._inner.owner_of(key))
