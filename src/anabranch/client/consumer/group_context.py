"""The state shared by the parts of a consumer's group: the member machine, the group's offsets, the running tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard
from uuid import UUID

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.client.cluster.coordinator import Coordinator
from anabranch.client.cluster.metadata import Cluster
from anabranch.client.consumer.offsets import MemberIdentity, Offsets
from anabranch.client.consumer.state import KeptState
from anabranch.client.settings import ConsumerSettings, taken
from anabranch.machines.clients.fetching import Fetcher
from anabranch.machines.clients.fetching.assigning import NO_RANGES
from anabranch.machines.clients.key_ranges import KeyRanges, Piece
from anabranch.machines.clients.membership.classic import ClassicMember
from anabranch.machines.clients.membership.consumer import ConsumerMember
from anabranch.machines.clients.membership.steps import Member, MemberSettings, Subscription
from anabranch.machines.clients.processing import Ranges
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.runtime.wakeup import Wakeup

EPOCH_STALE = frozenset({ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.ILLEGAL_GENERATION})
"""The group has a new epoch; a heartbeat may soon bring it to this member."""
OUT_OF_GROUP = frozenset({ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.FENCED_INSTANCE_ID})
TOPIC_GONE = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID})
"""The topic was deleted, or the coordinator has no metadata of the topic yet."""
AGAIN = TOPIC_GONE | {ErrorCode.REBALANCE_IN_PROGRESS}


class Host(Protocol):
    """The interface of a consumer to its group."""

    state: KeptState | None
    """State that is committed together with offsets."""

    def happened(self) -> None:
        """Carry out the fetcher's work after a change."""

    def dropped(self, partitions: Iterable[TopicPartition]) -> None:
        """Drop the decoded records of these partitions."""

    def narrowed(self, tp: TopicPartition, keys: KeyRanges) -> None:
        """Drop the records and the state of ranges that went to others, after `settle`; go on with the other keys."""

    def stands(self, tp: TopicPartition) -> None:
        """Go on at another position of a partition: ranges of keys were added."""

    def consumed(self) -> Mapping[TopicPartition, int]:
        """Return the offset before which all records are processed, for every partition with a position."""

    async def settle(
        self, partitions: Sequence[TopicPartition], shares: Mapping[TopicPartition, KeyRanges] = NO_RANGES
    ) -> None:
        """Have the running work on partitions, or on these ranges of their keys, finished before they are revoked."""

    @property
    def fresh(self) -> int:
        """The number of ranges above these offsets that were done since the last commit."""

    def take_fresh(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Ranges]:
        """Return these ranges, to be committed, or given back."""

    def give_back(self, ranges: Mapping[TopicPartition, Ranges]) -> None:
        """Take back ranges that could not be committed."""

    def skip(self, tp: TopicPartition, ranges: Ranges) -> None:
        """Hand out no records in these ranges of offsets: they are done."""

    def forget_skips(self, tp: TopicPartition, stable: int) -> None:
        """Forget the ranges below the group's stable offset."""


class GroupContext:
    """Shared by a group's parts; belongs to one event loop."""

    def __init__(
        self,
        settings: ConsumerSettings,
        cluster: Cluster,
        fetcher: Fetcher,
        host: Host,
        clock: Clock,
        chance: Chance,
    ) -> None:
        assert settings.group_id is not None
        self.settings = settings
        self.group_id = settings.group_id
        self.cluster = cluster
        self.fetcher = fetcher
        self.host = host
        self.coordinator = Coordinator(cluster, self.group_id)
        self.offsets = Offsets(self.coordinator, self.group_id, settings.request_timeout_ms)
        self.now_ms = clock.monotonic_ms
        """The clock of the member machine, in ms."""
        self.member = _member(self.group_id, settings, chance)
        self.subscription: Subscription | None = None
        self.changed = Wakeup()
        """Set whenever the member machine may have a step or an event."""
        self.committed: dict[TopicPartition, int] = {}
        """The offsets this member last read or wrote; equal offsets are not committed again."""
        self.committed_shares: dict[TopicPartition, Sequence[Piece]] = {}
        """The same of the ranges of shared partitions."""
        self.ranged: set[TopicPartition] = set()
        """The partitions in which the group has committed ranges above that offset."""
        self.drops = 0
        """How often partitions, or ranges of them, were dropped: revoked or lost."""
        self._dropped: dict[TopicPartition, int] = {}
        """The number of each partition's last drop."""
        self._dropped_whole: dict[TopicPartition, int] = {}
        """The same of drops of whole partitions."""
        self.jobs: dict[str, asyncio.Task[None]] = {}
        """Jobs by name; at most one of each name runs at a time."""
        self.error: AnabranchError | None = None
        """The error to raise in the next poll, or while a position is waited for."""
        self.closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    def note_committed(self, tp: TopicPartition, offset: int, *, by_owner: bool = True) -> None:
        """Note a committed offset, read or written: gates of this member may depend on it.

        `by_owner`: the owner of all keys is there; otherwise ranges of offsets have moved it.
        """
        self.committed[tp] = offset
        self.fetcher.committed(tp, offset, by_owner=by_owner)
        self.host.forget_skips(tp, offset)

    def note_committed_by_key(
        self,
        tp: TopicPartition,
        stable: int,
        steps: Sequence[Piece],
        *,
        everything: bool = False,
        by_owner: bool = True,
    ) -> None:
        """Note the committed offsets of a shared partition: of some ranges of keys, or of all keys."""
        self.committed[tp] = stable
        self.fetcher.committed_by_key(tp, steps, stable if everything else None, by_owner=by_owner)
        self.host.forget_skips(tp, stable)

    def note_drop(self, partitions: Iterable[TopicPartition], whole: Iterable[TopicPartition]) -> None:
        """Note that partitions, or ranges of them, are no longer this member's: others may go on with them."""
        self.drops += 1
        self._dropped.update(dict.fromkeys(partitions, self.drops))
        self._dropped_whole.update(dict.fromkeys(whole, self.drops))

    def dropped_since(self, tp: TopicPartition, drops: int) -> bool:
        """Whether a partition was dropped after so many drops, even if this member holds it again."""
        return self._dropped.get(tp, 0) > drops

    def dropped_whole_since(self, tp: TopicPartition, drops: int) -> bool:
        """Whether all of it was dropped: then its name may be that of another topic's partition."""
        return self._dropped_whole.get(tp, 0) > drops

    @property
    def reads_stable(self) -> bool:
        """Whether offsets of open transactions are waited for: another owner may have flushed state with them."""
        return self.settings.read_committed or self.host.state is not None

    def identity(self) -> MemberIdentity:
        """Return the identity for commits: the member with its epoch."""
        if self.subscription is None:
            return MemberIdentity()
        return MemberIdentity(self.member.member_id, self.member.epoch, self.settings.group_instance_id)

    def topic_ids(self, partitions: Iterable[TopicPartition]) -> dict[str, UUID]:
        """Return the known ids of the partitions' topics."""
        owned = {one.topic: one.topic_id for one in self.member.owned if one.topic_id != NO_TOPIC_ID}
        found: dict[str, UUID] = {}
        for topic in {tp.topic for tp in partitions}:
            view = self.fetcher.view(topic)
            found[topic] = owned.get(topic) or (NO_TOPIC_ID if view is None else view.topic_id)
        return found

    async def epoch_or_pause(self, asked_as: MemberIdentity) -> None:
        """Wait a moment; stop early if a heartbeat changes the member's epoch."""
        until = self.now_ms() + self.settings.retry_backoff_ms
        while self.now_ms() < until and self.identity() == asked_as:
            await asyncio.sleep(min(0.02, self.settings.retry_backoff_ms / 1000))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a task until the group is closed."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def job(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `work` unless a job of that name is running; its error is raised by the next poll."""
        running = self.jobs.get(name)
        if (running is not None and not running.done()) or self.closed:
            return
        task = self.jobs[name] = asyncio.get_running_loop().create_task(work())

        def ended(task: asyncio.Task[None]) -> None:
            if self.jobs.get(name) is task:
                del self.jobs[name]
            if not task.cancelled() and (error := task.exception()) is not None:
                self.error = error if isinstance(error, AnabranchError) else AnabranchError(repr(error))
                self.error.__cause__ = error
            if not self.closed and not task.cancelled():
                self.host.happened()

        task.add_done_callback(ended)

    async def close(self) -> None:
        """Cancel all tasks."""
        self.closed = True
        tasks = [*self._tasks, *self.jobs.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _member(group_id: str, settings: ConsumerSettings, chance: Chance) -> Member:
    common = taken(MemberSettings, settings, group_id=group_id)
    if settings.group_protocol == "classic":
        return ClassicMember(
            common,
            strategies=settings.strategies,
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            metadata_max_age_ms=settings.metadata_max_age_ms,
        )
    return ConsumerMember(
        common,
        str(chance.uuid()),
        server_assignor=settings.group_remote_assignor,
        local_assignors=settings.local_assignors,
    )


def is_final(error: Exception) -> TypeGuard[ApiError]:
    """Whether retrying cannot help."""
    if not isinstance(error, ApiError):
        return False
    return not (error.retriable or error.code in EPOCH_STALE or error.code in OUT_OF_GROUP or error.code in AGAIN)
