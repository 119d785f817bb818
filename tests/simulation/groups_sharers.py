"""Consumers of a group whose members share partitions: the handout that ships, with records in order, or one by one.

The host of the group driver is the driver that ships (`FetchingDriver`), without its connections: its fetches go over
the world's logs. Some applications finish each record by itself, in any order and after any time, or have it again
later. Members that take no parts are in such groups, too; some of those know committed offsets only, and neither ranges
nor keys, as stock clients do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from anabranch.base.errors import AnabranchError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.driver import FetchingDriver
from anabranch.client.consumer.group import Group
from anabranch.client.consumer.group_context import Host
from anabranch.client.consumer.offsets import OffsetAndMetadata
from anabranch.client.consumer.record import Record
from anabranch.client.settings import ConsumerSettings
from anabranch.machines.clients.fetching import FetchFrom, FetchResult, TopicView
from tests.simulation.groups_client import Client
from tests.simulation.groups_clock import WorldClock
from tests.simulation.groups_reader import FETCH_RECORDS_MAX, Reader
from tests.simulation.groups_records import Topic
from tests.simulation.groups_shared_topics import SharedLog, SharedTopic

if TYPE_CHECKING:
    from tests.simulation.groups_world import World


class SharingHost(FetchingDriver):
    """The driver that ships, in a world without sockets."""

    def __init__(self, client: SharingClient, settings: ConsumerSettings) -> None:
        """The group is made by the client."""
        alone = replace(settings, group_id=None, group_protocol="consumer", group_instance_id=None)
        super().__init__(alone, SimpleNamespace(), WorldClock(client.world))  # type: ignore[arg-type]
        self.handout._kernels_loaded = True  # Otherwise the first table is decoded in a thread.
        self._client = client

    def happened(self) -> None:
        self._client.happened()

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        super().dropped(partitions)
        self._client.dropped(partitions)

    def skip(self, tp: TopicPartition, ranges: Any) -> None:
        if not self._client.knows_stable_only:
            super().skip(tp, ranges)


class SharingReader(Reader):
    """What a consumer reads, of all keys or of some."""

    def __init__(self, client: SharingClient, settings: ConsumerSettings) -> None:
        super().__init__(client, settings)
        self.host = SharingHost(client, settings)
        self.fetcher = self.host.fetcher

    def _known(self, view: TopicView) -> None:
        self.host.handout.lineages[view.name] = view.lineage
        super()._known(view)

    def _has_news(self, tp: TopicPartition, wanted: FetchFrom) -> bool:
        topic, _ = self._log_of(tp)
        if wanted.asked is not None and topic is not None and not topic.accepts_ranges:
            return True
        return super()._has_news(tp, wanted)

    def _fetched_of(self, tp: TopicPartition, wanted: FetchFrom) -> FetchResult:
        found = super()._fetched_of(tp, wanted)
        if wanted.asked is None or found.error is not ErrorCode.NONE:
            return found
        topic, log = self._log_of(tp)
        assert isinstance(topic, SharedTopic) and isinstance(log, SharedLog)
        if not topic.accepts_ranges:
            return FetchResult(ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED)

        data, looked = log.fetch_some(
            wanted.offset, FETCH_RECORDS_MAX, wanted.asked, lambda epoch: topic.spread_in(tp.partition, epoch)
        )
        return found._replace(data=data, filtered_to=looked)


class SharingClient(Client):
    """One process with one consumer in a group that shares partitions."""

    def __init__(self, world: World, name: str, group: str, *, shares: bool, classic: bool, **given: Any) -> None:
        """`shares`: whether it takes parts of partitions."""
        chance = world.chance
        self.shares = shares
        self.knows_stable_only = not shares and chance.random() < world.theme.stock
        self.is_explicit = not self.knows_stable_only and chance.random() < world.theme.explicit
        more: dict[str, Any] = {"allow_key_share": shares}
        if self.is_explicit:
            more["acknowledgement_mode"] = "explicit"
            more["max_unfinished_records"] = chance.choice((10, 10_000))
            more["max_num_ranges_to_commit"] = chance.choice((1, 3, 10_000))
        if self.knows_stable_only:
            more["allow_individual_commit"] = False
        super().__init__(world, name, group, classic=classic, **given, **more)

    def _made_reader(self) -> Reader:
        reader = SharingReader(self, self._settings)
        self.host = reader.host
        return reader

    @property
    def _host(self) -> Host:
        return self.host

    def _made(self) -> Group:
        group = super()._made()
        self.host.group = group
        if self.knows_stable_only:
            offsets = group._context.offsets
            fetch = offsets.fetch

            async def stable_only(*given: Any, **more: Any) -> Any:
                found = await fetch(*given, **more)
                return {
                    tp: at._replace(ranges=(), shares=()) if isinstance(at, OffsetAndMetadata) else at
                    for tp, at in found.items()
                }

            offsets.fetch = stable_only  # type: ignore[method-assign]
        return group

    # -- the application -----------------------------------------------------------------------------------------------

    async def _take(self) -> bool:
        room = self.world.chance.choice((1, 5, 500))
        self._say_errors()
        if self.is_explicit:
            return await self._take_explicitly(room)
        parts = self.host.deliverable()
        found: list[Record] = []
        for part in parts:
            if len(found) >= room:
                break
            if self.host.fetcher.is_next(part):
                await self.host.handout.hand_out_some(part, room - len(found), found)
                tp = TopicPartition(part.topic, part.partition)
                self._handed[tp] = self.host.fetcher.position(tp) or 0
                self._handed_count += 1
        self.host.handout.returned()
        for record in found:
            self._finished(record, self._handed_one(record))
        return bool(parts)

    async def _take_explicitly(self, room: int) -> bool:
        unfinished = self.host.track()
        unfinished.note_progress()
        await unfinished.fill(max(0, room - unfinished.tracker.ready))
        found = unfinished.hand_out(room)
        for record in found:
            self._work_on(record, self._handed_one(record))
        wake_ms = unfinished.tracker.wake_ms
        if wake_ms is not None:
            self.world.at(max(wake_ms, self.world.now_ms + 1), self._perform_later, self.happened)
        return bool(found)

    def _work_on(self, record: Record, topic: Topic | None) -> None:
        chance = self.world.chance
        ms = chance.choice((1, 50, 300, 3_000 if self.is_slow else 500))
        self.world.after(ms, self._perform_later, self._end_work, record, topic)

    def _perform_later(self, work: Any, *given: Any) -> None:
        if not self.is_alive:
            return
        if self.is_standing_still:
            self.world.after(100, self._perform_later, work, *given)
        else:
            self.perform(work, *given)

    def _end_work(self, record: Record, topic: Topic | None) -> None:
        """Finish a record, or have it again a little later."""
        chance, tracker = self.world.chance, self.host.track().tracker
        if self.world.is_disturbed and chance.random() < 0.15:
            tracker.reject(record.lease, record.delivery_count, self.world.now_ms + chance.randint(0, 1_000))
        elif tracker.done(record.lease, record.delivery_count):
            self._finished(record, topic)
        self.happened()

    def _handed_one(self, record: Record) -> Topic | None:
        """Show the edge a record; return its topic, which may be made again before the work on it ends."""
        self.world.say("  %s #%s", record.key, record.value)
        tp = TopicPartition(record.topic, record.partition)
        self.handed(tp, record.offset, record.offset + 1)
        return self._topic_read(tp)

    def _topic_read(self, tp: TopicPartition) -> Topic | None:
        part = self.host.fetcher._state.find(tp)
        return super()._topic_read(tp) if part is None or part.topic_id is None else self.world.topic_of(part.topic_id)

    def _finished(self, record: Record, topic: Topic | None) -> None:
        if topic is not None:
            self.world.edges[self.group].done_by(topic, record.partition, [record.offset])

    async def commit_handed(self, partitions: Collection[TopicPartition]) -> None:
        if not self.is_explicit:
            await super().commit_handed(partitions)
            return
        with suppress(AnabranchError, OSError):
            await self._driver.commit(None)

    def consumed(self) -> Mapping[TopicPartition, int]:
        return self.host.consumed()
