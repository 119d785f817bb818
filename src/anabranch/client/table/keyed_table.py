"""The keyed table: one value for each key of a topic, at the member that reads the key's records.

Its values are kept in a changelog, a compacted topic. When keys come to a member, by a rebalance, a resize or a share,
their values are loaded before it is given the next records of these keys. Changes are committed together with the
offsets of the records that made them, in one transaction: after a crash, at any member, each record counts once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.client.consumer.consumer import Consumer
from anabranch.client.consumer.record import Record
from anabranch.client.table.keeper import Keeper
from anabranch.client.table.kept import Kept
from anabranch.client.table.owners import Owner, Owners
from anabranch.machines.clients.table import KeyNotOwnedError

if TYPE_CHECKING:
    from collections.abc import Iterable

UNFLUSHED_SIZE_MAX = 64 * 1024 * 1024
TRANSACTION_TIMEOUT_MS = 10_000
POLL_S = 0.02


class KeyedTable:
    """A value for each key whose records this consumer reads of topic `source`, kept in topic `changelog`.

    Made before the consumer's first poll. The changelog is made if it does not exist; with the topic's initial number
    of partitions, compacted. Several tables of one consumer are committed together.

    `transactional_id` and `progress`: for a consumer that is no member of a group, a name that is its own and stays the
    same when it is started again, and the group to whose offsets it commits what it has processed.
    `unflushed_size_max`: no more records are handed out beyond so many bytes of changes that are not committed.
    `transaction_timeout_ms`: how long the next owner waits for a member that died while it committed.
    """

    def __init__(
        self,
        consumer: Consumer,
        changelog: str,
        source: str,
        *,
        transactional_id: str | None = None,
        progress: str | None = None,
        unflushed_size_max: int = UNFLUSHED_SIZE_MAX,
        transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS,
    ) -> None:
        driver = consumer.driver
        if driver.started:
            raise ApiError(ErrorCode.INVALID_REQUEST, "this consumer has read already: make its tables before it polls")
        if consumer.settings.share == "any":
            text = "share 'any' gives records of a key to several members: a table by key needs a consumer without it"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        if (progress is None) == (consumer.settings.group_id is None):
            text = "offsets are committed to the consumer's group_id, or to the group that `progress` names: give one"
            raise ApiError(ErrorCode.INVALID_GROUP_ID, text)
        if progress is not None and transactional_id is None:
            text = "without a group, nothing but a transactional_id keeps an old owner from writing: give one"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)
        keeper = driver.state
        if keeper is None:
            keeper = driver.state = Keeper(consumer, transactional_id, transaction_timeout_ms, progress)
        assert isinstance(keeper, Keeper)
        if (keeper.transactional_id, keeper.progress) != (transactional_id, progress):
            raise ApiError(
                ErrorCode.INVALID_REQUEST, "tables of one consumer have the same transactional_id and progress"
            )
        self._consumer = consumer
        self._kept = Kept(
            driver, consumer.settings, keeper.group, changelog, source, unflushed_size_max=unflushed_size_max
        )
        self._owners = Owners(consumer, keeper.group, source)
        keeper.add(self._kept)

    @property
    def changelog(self) -> str:
        """The name of the changelog."""
        return self._kept.changelog

    # -- entries ------------------------------------------------------------------------------------------------------

    def get(self, key: bytes | str) -> bytes | None:
        """Return the value of a key, with all changes, None without one; callable from any thread.

        Raises `KeyNotOwnedError` for a key that this member does not own, `KeyLoadingError` while it is being loaded:
        never for the key of a record that was handed out and is not done.
        """
        return self._kept.get(_bytes(key, "key"))

    def put(self, key: bytes | str, value: bytes | str | None, record: Record | None = None) -> None:
        """Set the value of a key, None to delete it; callable from any thread. Seen by `get` at once.

        The change is committed with the offset of the record that is being processed, whose key it should be: the last
        one that was handed out of its partition, in `run` the handler's. With explicit acknowledgements `record` names
        it. Raises as `get`; `ApiError` for a record that does not count any more.
        """
        self._kept.put(_bytes(key, "key"), None if value is None else _bytes(value, "value"), record)

    def delete(self, key: bytes | str, record: Record | None = None) -> None:
        """Delete the value of a key; as `put`."""
        self.put(key, None, record)

    def items(self) -> list[tuple[bytes, bytes]]:
        """Return the keys and values that are in memory here, in no order; callable from any thread."""
        with self._kept.lock:
            return self._kept.machine.items()

    def owns(self, key: bytes | str) -> bool:
        """Whether the value of a key is in memory here."""
        try:
            self.get(key)
        except KeyNotOwnedError:
            return False
        return True

    # -- progress -----------------------------------------------------------------------------------------------------

    async def flush(self) -> None:
        """Commit what was processed, with all changes of it. Return once durable."""
        if self._consumer.settings.group_id is not None:
            await self._consumer.commit()
        elif self._consumer.driver.state is not None:
            await self._consumer.driver.state.flush()

    @property
    def ready(self) -> bool:
        """Whether the values of all keys of all assigned partitions are in memory."""
        return self._kept.is_ready

    async def wait_ready(self, key: bytes | str | None = None, timeout_s: float | None = None) -> None:
        """Wait until the value of a key is in memory here, or all of them, while another task polls.

        Raises `TimeoutError`.
        """
        async with asyncio.timeout(timeout_s):
            while not (self.ready if key is None else self.owns(key)):
                await asyncio.sleep(POLL_S)

    async def owner_of(self, key: bytes | str) -> Owner:
        """Return the member that is given the next records of a key."""
        return await self._owners.owner_of(_bytes(key, "key"))

    # -- what it takes ------------------------------------------------------------------------------------------------

    @property
    def entries(self) -> int:
        """The committed entries in memory."""
        return self._kept.machine.entries

    @property
    def size(self) -> int:
        """The bytes of their keys and values; Python objects take about 120 bytes more for each."""
        return self._kept.machine.size

    @property
    def unflushed_size(self) -> int:
        """The bytes of the keys and values of changes that are not committed."""
        return self._kept.machine.unflushed_size


def _bytes(given: Iterable[int] | bytes | str, what: str) -> bytes:
    if isinstance(given, str):
        return given.encode()
    if isinstance(given, bytes):
        return given
    raise TypeError(
        f"the {what} of an entry is {given!r}: it must be bytes or text; a record without a key has no entry"
    )
