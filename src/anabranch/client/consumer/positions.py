"""The starting positions of a member's partitions.

Positions come from committed offsets. A failed read is retried, and never taken for a missing offset. A read is dropped
if the member's epoch has changed meanwhile: a partition may have been lost, read by others, and assigned again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.group_context import GroupContext, is_final
from anabranch.client.consumer.member_driver import MemberDriver
from anabranch.client.consumer.offsets import MemberIdentity, OffsetAndMetadata
from anabranch.machines.clients.fetching import EARLIEST, LATEST
from anabranch.machines.clients.fetching.assigning import appeared_later


class Positions:
    """Reads committed offsets for the fetcher."""

    def __init__(self, context: GroupContext, driver: MemberDriver) -> None:
        self._context = context
        self._settings = context.settings
        self._driver = driver

    async def _committed(
        self, partitions: Sequence[TopicPartition], identity: MemberIdentity
    ) -> Mapping[TopicPartition, OffsetAndMetadata | ErrorCode]:
        context = self._context
        stable = context.reads_stable
        return await context.offsets.fetch(partitions, context.topic_ids(partitions), identity, stable=stable)

    async def find(self) -> None:
        """Set the starting position of every partition that waits for one."""
        while awaiting := self._context.fetcher.awaiting():
            identity = self._context.identity()
            again = False
            try:
                found = await self._committed(awaiting, identity)
                if self._context.identity() != identity:
                    continue
                without: list[TopicPartition] = []
                awaited = set(self._context.fetcher.awaiting())
                for tp, result in found.items():
                    if isinstance(result, ErrorCode):
                        if not result.retriable:
                            raise ApiError(result, f"the committed offset of {tp} cannot be read")
                        again = True
                    elif result.offset >= 0:
                        self._context.note_committed(tp, result.offset)
                        self._context.fetcher.begin(tp, offset=result.offset)
                        if result.ranges and tp in awaited:
                            self._context.ranged.add(tp)
                            self._context.host.skip(tp, result.ranges)
                    else:
                        without.append(tp)
                if without:
                    await self._begin_without(without, identity)
            except (AnabranchError, OSError) as error:
                if is_final(error):
                    self._context.error = error
                    self._context.host.happened()
                    return
                again = True
            self._context.host.happened()
            if again or self._context.fetcher.awaiting() == awaiting:
                await self._context.epoch_or_pause(identity)

    async def _begin_without(self, partitions: list[TopicPartition], identity: MemberIdentity) -> None:
        """Set the starting positions of partitions without a committed offset, as long as `identity` is current."""
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
                if self._context.identity() != identity:
                    return
                committed = {
                    tp.partition for tp, at in found.items() if isinstance(at, OffsetAndMetadata) and at.offset >= 0
                }
            # Of a subscribed group our coordinator has committed where it begins in later partitions: without a
            # commit, only partitions that this member has seen appear are later ones.
            seen = None if self._driver.first_seen is None else self._driver.first_seen.get(topic, frozenset())
            for tp in partitions:
                if tp.topic == topic:
                    later = appeared_later(tp.partition, view, committed, seen)
                    self._context.fetcher.begin(tp, timestamp=EARLIEST if later else LATEST)
