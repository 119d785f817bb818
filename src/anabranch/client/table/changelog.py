"""The changelog of a table: a compacted topic with one partition for each family of keys; how it is made and read.

A changelog that is made anew is empty. So it is made only for a group that has not committed anything: for any other
the state that went with its offsets would be gone without a word.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from typing import Any

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.admin.admin import Admin
from anabranch.client.consumer.consumer import Consumer
from anabranch.client.settings import ClientSettings, ConsumerSettings
from anabranch.machines.clients.fetching import LATEST
from anabranch.machines.keyspace import Interval

RANGE_FETCH = "accept.range.fetch"
CONFIGS = {"cleanup.policy": "compact", RANGE_FETCH: "true"}
AT_A_TIME = 500
"""Entries that are taken at a time: a step of the loop stays short."""
WAIT_S = 0.2
SLOW_S = 10.0

Entry = tuple[bytes, bytes | None]
_log = logging.getLogger("anabranch.client")


def connection_of(settings: ConsumerSettings) -> dict[str, Any]:
    """Return the settings of a consumer that other clients of the same application need."""
    return {item.name: getattr(settings, item.name) for item in fields(ClientSettings)}


class Changelog:
    """The changelog of one table."""

    def __init__(self, name: str, source: str, initial: int, settings: ConsumerSettings, group: str | None) -> None:
        self.name = name
        self.initial = initial
        self._source = source
        self._settings = settings
        self._group = group
        self._by_range = False
        self._lock = asyncio.Lock()
        self._checked = False

    async def check(self) -> None:
        """Check that the topic can be the changelog; make it if it does not exist. Raises `ApiError`."""
        async with self._lock:
            if self._checked:
                return
            async with Admin(**connection_of(self._settings)) as admin:
                if await self._is_missing(admin):
                    await self._refuse_if_lost(admin)
                    await self._make(admin)
                await self._check_count(admin)
                configs = await admin.describe_configs("topic", self.name)
            policy = configs["cleanup.policy"].value or ""
            if policy != "compact":
                text = f"topic {self.name} has cleanup.policy {policy}, and would lose entries that are not changed"
                raise ApiError(ErrorCode.INVALID_CONFIG, f"{text}: a changelog needs compact, and nothing else")
            self._by_range = RANGE_FETCH in configs and configs[RANGE_FETCH].value == "true"
            self._checked = True

    async def _is_missing(self, admin: Admin) -> bool:
        return self.name not in await admin.list_topics(internal=True)

    async def _make(self, admin: Admin) -> None:
        configs = CONFIGS
        while True:
            try:
                await admin.create_topics(self.name, partitions=self.initial, configs=configs)
            except ApiError as error:
                if error.code is ErrorCode.INVALID_CONFIG and RANGE_FETCH in configs:
                    configs = {"cleanup.policy": "compact"}  # A broker without fetches of key ranges.
                    continue
                if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                    raise
            return

    async def _refuse_if_lost(self, admin: Admin) -> None:
        if self._group is None:
            return
        committed = await admin.list_group_offsets(self._group)
        done = sorted(tp for tp, at in committed.items() if tp.topic == self._source and at.offset > 0)
        if done and await self._is_missing(admin):
            text = f"group '{self._group}' has processed records of {done[0]}, but its changelog {self.name} is missing"
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"{text}: its state is lost. Delete the group's offsets, so that it is built again from the records of "
                f"{self._source}, or create the topic, to go on without it",
            )

    async def _check_count(self, admin: Admin) -> None:
        lineage = await admin.lineage(self.name)
        if lineage.initial != self.initial or lineage.count != self.initial:
            text = f"changelog {self.name} was created with {lineage.initial} partitions and has {lineage.count}"
            raise ApiError(
                ErrorCode.INVALID_PARTITIONS,
                f"{text}; topic {self._source} was created with {self.initial}: a changelog has as many, for ever",
            )

    async def read(self, family: int, keys: Interval, wanted: Callable[[], bool]) -> AsyncIterator[list[Entry]]:
        """Yield the committed records of some keys, in order: all up to now, also of transactions that are open now."""
        tp = TopicPartition(self.name, family)
        settings = connection_of(self._settings)
        async with Consumer(
            **settings, isolation_level="read_committed", auto_offset_reset="earliest", fetch_max_wait_ms=100
        ) as reader:
            end = (await reader.driver.cluster.offsets({tp: LATEST}))[tp].offset
            if self._by_range:
                reader.assign({tp: [keys]})
            else:
                reader.assign([tp])
            began = warned = time.monotonic()
            while wanted() and await reader.position(*tp) < end:
                rows = await reader.poll_arrow(WAIT_S, columns=("key", "value"), key_range=keys)
                for first in range(0, rows.num_rows, AT_A_TIME):
                    some = rows.slice(first, AT_A_TIME)
                    found = some.column("key").to_pylist()
                    if None in found:
                        text = f"{tp} holds a record without a key, which is not a table's"
                        raise ApiError(ErrorCode.INVALID_RECORD, f"{text}: choose another topic")
                    yield list(zip(found, some.column("value").to_pylist(), strict=True))
                    await asyncio.sleep(0)
                if not rows.num_rows and time.monotonic() - warned > SLOW_S:
                    warned = time.monotonic()
                    _log.warning("%s: loading waits for open transactions since %d s", tp, warned - began)


def is_final(error: Exception) -> bool:
    """Whether trying again cannot help."""
    if isinstance(error, ApiError):
        return not error.retriable
    return isinstance(error, AnabranchError)
