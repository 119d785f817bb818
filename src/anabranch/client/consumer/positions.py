"""The starting positions of a member's partitions.

Positions come from committed offsets. A failed read is retried, and never taken for a missing offset. A read is dropped
if the member's epoch has changed meanwhile: a partition may have been lost, read by others, and assigned again.

Ranges of keys that are added to a partition which is read already begin inside `poll`, when no record is on its way.

Of a consumer with kept state that assigns by hand, a position is read after the commits that run: state that one of
them commits later would have counted records that are then read again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import BEGUN_HERE, TopicPartition
from anabranch.client.consumer.group_context import GroupContext, is_final
from anabranch.client.consumer.member_driver import MemberDriver
from anabranch.client.consumer.offsets import MemberIdentity, OffsetAndMetadata
from anabranch.machines.clients.fetching import EARLIEST, LATEST
from anabranch.machines.clients.fetching.assigning import appeared_later


class Positions:
    """Reads committed offsets for the fetcher."""

    def __init__(
        self, context: GroupContext, driver: MemberDriver, commits_ended: Callable[[], Awaitable[None]]
    ) -> None:
        """`commits_ended` waits for the commits that run."""
        self._context = context
        self._commits_ended = commits_ended
        self._settings = context.settings
        self._driver = driver
        self._arrived: dict[TopicPartition, tuple[int, OffsetAndMetadata | None]] = {}
        """Where the group is in ranges of partitions that are read already, and the grant that it was asked for."""

    def wanted(self) -> tuple[TopicPartition, ...]:
        """Return the partitions of which committed offsets are to be read."""
        fetcher, arrived = self._context.fetcher, self._arrived
        awaiting = fetcher.awaiting()
        if not arrived:
            return awaiting
        return tuple(tp for tp in awaiting if tp not in arrived or arrived[tp][0] != fetcher.arrivals(tp))

    def forget(self, tp: TopicPartition) -> None:
        """Forget what was read of ranges that are to be added: some were taken away."""
        self._arrived.pop(tp, None)

    def apply(self) -> None:
        """Begin to read ranges that were added to partitions. Not while the application is given records."""
        if not self._arrived:
            return
        context = self._context
        arrived, self._arrived = self._arrived, {}
        for tp, (grant, at) in arrived.items():
            if context.fetcher.arrivals(tp) != grant or not context.fetcher.arriving(tp):
                continue
            processed = context.host.consumed().get(tp, 0)
            if at is None:
                context.fetcher.arrive(tp, None, (), processed)
            else:
                self._note(tp, at)
                context.fetcher.arrive(tp, at.offset, at.shares, processed)
                self._skip(tp, at)
            context.host.stands(tp)

    def _note(self, tp: TopicPartition, at: OffsetAndMetadata) -> None:
        """Note committed offsets that were read."""
        if at.shares or self._context.fetcher.share(tp):
            self._context.note_committed_by_key(tp, at.offset, at.shares, everything=True)
        else:
            self._context.note_committed(tp, at.offset)
            if at.metadata == BEGUN_HERE:
                self._context.fetcher.begun(tp, at.offset)
        self._context.fetcher.passed(tp, at.passed)

    def _skip(self, tp: TopicPartition, at: OffsetAndMetadata) -> None:
        if at.ranges:
            self._context.ranged.add(tp)
            self._context.host.skip(tp, at.ranges)

    async def _committed(
        self, partitions: Sequence[TopicPartition], identity: MemberIdentity
    ) -> Mapping[TopicPartition, OffsetAndMetadata | ErrorCode]:
        context = self._context
        stable = context.reads_stable
        return await context.offsets.fetch(partitions, context.topic_ids(partitions), identity, stable=stable)

    async def find(self) -> None:
        """Set the starting position of every partition that waits for one."""
        fetcher = self._context.fetcher
        while awaiting := self.wanted():
            if self._context.host.state is not None and self._context.subscription is None:
                await self._commits_ended()
                awaiting = self.wanted()
            identity = self._context.identity()
            grants = {tp: fetcher.arrivals(tp) for tp in awaiting}
            again = False
            try:
                found = await self._committed(awaiting, identity)
                if self._context.identity() != identity:
                    continue
                without: list[TopicPartition] = []
                awaited = set(fetcher.awaiting())
                for tp, result in found.items():
                    if isinstance(result, ErrorCode):
                        if not result.retriable:
                            raise ApiError(result, f"the committed offset of {tp} cannot be read")
                        again = True
                    elif fetcher.arrivals(tp) != grants.get(tp, -1):
                        continue  # More was granted, or all was taken away: this may be older.
                    elif fetcher.arriving(tp):
                        self._arrived[tp] = grants[tp], result if result.offset >= 0 else None
                    elif result.offset >= 0:
                        self._note(tp, result)
                        fetcher.begin(tp, offset=result.offset, steps=result.shares)
                        if tp in awaited:
                            self._skip(tp, result)
                    elif (first := fetcher.anew_from(tp)) is not None:
                        fetcher.begin(tp, offset=first)
                    else:
                        without.append(tp)
                if without:
                    await self._begin_without(without, identity, grants)
            except (AnabranchError, OSError) as error:
                if is_final(error):
                    self._context.error = error
                    self._context.host.happened()
                    return
                again = True
            self._context.host.happened()
            if again or self.wanted() == awaiting:
                await self._context.epoch_or_pause(identity)

    async def _begin_without(
        self, partitions: list[TopicPartition], identity: MemberIdentity, grants: Mapping[TopicPartition, int]
    ) -> None:
        """Set the starting positions of partitions without a committed offset, as long as these grants are current."""
        reset = self._settings.auto_offset_reset
        if reset == "none":
            names = ", ".join(map(str, partitions))
            text = (
                f"group '{self._context.group_id}' has committed no offset of {names}, and auto.offset.reset is 'none'"
            )
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, f"{text}. Seek, or set it to earliest or latest.")
        if reset == "earliest":
            for tp in partitions:
                self._context.fetcher.begin(tp, timestamp=EARLIEST)
            return
        for topic in sorted({tp.topic for tp in partitions}):
            view = await self._context.cluster.view(topic)
            committed: set[int] = set()
            if not view.elastic or self._context.subscription is None:
                every = [TopicPartition(topic, number) for number in sorted(view.leaders)]
                found = await self._committed(every, identity)
                committed = {
                    tp.partition for tp, at in found.items() if isinstance(at, OffsetAndMetadata) and at.offset >= 0
                }
            if self._context.identity() != identity:
                return
            # Of a subscribed group our coordinator has committed where it begins in later partitions: without a
            # commit, only partitions that this member has seen appear are later ones.
            seen = None if self._driver.first_seen is None else self._driver.first_seen.get(topic, frozenset())
            if seen is not None and self._driver.first_ids.get(topic, view.topic_id) != view.topic_id:
                seen = frozenset()
            for tp in partitions:
                if tp.topic == topic and self._context.fetcher.arrivals(tp) == grants[tp]:
                    later = appeared_later(tp.partition, view, committed, seen)
                    self._context.fetcher.begin(tp, timestamp=EARLIEST if later else LATEST)
