"""Lineages of topics: the layouts from Metadata, and each partition's cuts from its leader (ADR 0032).

The rule: what makes a lineage belongs together. Every answer names the topic's id and the layout that rules; where they
are not those of the metadata, the topic was resized meanwhile, and everything is asked for again. Cuts never change, so
a partition is asked only for those of later layouts than are known. The end of a partition without a leader, or whose
log cannot be opened, is unknown: gates that wait for it stay closed, and the others do not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from anabranch.base.errors import ApiError, DecodeError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.controller.layouts import EpochRun, Runs
from anabranch.machines.cuts import NO_CUTS, behind, decode_cuts, joined, lineage_of
from anabranch.machines.lineage import Cuts, Lineage
from anabranch.protocol.messages.partition_leader_epochs_for_partitions import (
    PartitionLeaderEpochsForPartitionsRequest,
    PartitionLeaderEpochsForPartitionsRequestTopic,
    PartitionLeaderEpochsForPartitionsResponse,
    PartitionLeaderEpochsForPartitionsResponsePartition,
)

if TYPE_CHECKING:
    from anabranch.client.cluster.metadata import TopicInfo

TOPICS_REMEMBERED_MAX = 1_000
"""Topics whose cuts are remembered; those that were asked for longest ago are forgotten."""

Ask = Callable[..., Awaitable[Any]]
"""Sends a request to the broker `node_id`, and returns the response."""


class _Known(NamedTuple):
    """The cuts of a partition for the layouts below `layout`."""

    layout: int
    cuts: Cuts


NOTHING_KNOWN = _Known(0, NO_CUTS)


@dataclass(slots=True)
class _Reading:
    """One reading of a topic's lineage."""

    info: TopicInfo
    known: dict[int, _Known]
    unknown: dict[int, int]

    @property
    def newest(self) -> int:
        return self.info.layouts[-1].number


class Lineages:
    """The lineages that a client has read."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._topics: dict[UUID, dict[int, _Known]] = {}

    async def read(self, info: TopicInfo) -> Lineage:
        """Return the lineage of a topic as `info` describes it.

        Raises ApiError: INVALID_PARTITION_METADATA, which is retriable, if `info` is outdated.
        """
        if len(info.layouts) == 1:
            return lineage_of(info.initial_partition_count, info.layouts, {}, {})
        known = self._topics.pop(info.topic_id, {}) if info.topic_id != NO_TOPIC_ID else {}
        reading = _Reading(info, {p: known[p] for p in info.partitions if p in known}, {})
        try:
            for leader, partitions in _by_leader(info).items():
                if leader < 0:
                    reading.unknown.update(dict.fromkeys(partitions, info.layouts[0].number))
                else:
                    await self._read_from(leader, reading, partitions)
        finally:
            self._remember(info.topic_id, reading.known)
        cuts = {partition: known.cuts for partition, known in reading.known.items() if known.cuts.ends}
        return lineage_of(info.initial_partition_count, info.layouts, cuts, reading.unknown)

    def _remember(self, topic_id: UUID, known: dict[int, _Known]) -> None:
        if topic_id != NO_TOPIC_ID:
            self._topics[topic_id] = known
            while len(self._topics) > TOPICS_REMEMBERED_MAX:
                del self._topics[next(iter(self._topics))]

    async def _read_from(self, leader: int, reading: _Reading, partitions: Iterable[int]) -> None:
        """Ask a leader for partitions, again for those that an answer has no room for."""
        name = reading.info.name
        left = dict.fromkeys(p for p in partitions if reading.known.get(p, NOTHING_KNOWN).layout < reading.newest)
        while left:
            since: dict[int, list[int]] = {}
            for partition in left:
                since.setdefault(reading.known.get(partition, NOTHING_KNOWN).layout, []).append(partition)
            topics = [
                PartitionLeaderEpochsForPartitionsRequestTopic(topic=name, partitions=asked, first_layout=layout)
                for layout, asked in since.items()
            ]
            request = PartitionLeaderEpochsForPartitionsRequest(topics=topics, cuts=True)
            response: PartitionLeaderEpochsForPartitionsResponse = await self._ask(request, node_id=leader)
            answered = 0
            for topic in response.topics:
                if topic.error_code:
                    code = ErrorCode.of(topic.error_code)
                    raise ApiError(code, f"broker {leader} does not return the lineage of {name}")
                if topic.layout < 0:
                    text = f"broker {leader} is of an earlier version, which returns no cuts of {name}: upgrade it"
                    raise ApiError(ErrorCode.UNSUPPORTED_VERSION, text)
                if (topic.topic_id, topic.layout) != (reading.info.topic_id, reading.newest):
                    raise outdated(name)
                for result in topic.partitions:
                    if result.partition in left:
                        del left[result.partition]
                        answered += 1
                        _take(reading, result)
            if not answered:
                raise ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, f"broker {leader} returns no cuts of {name}")

    async def epochs(self, info: TopicInfo, partitions: Iterable[int]) -> dict[int, Runs]:
        """Return the leader epochs that ended with each layout, of a few partitions; of those that have a leader."""
        found: dict[int, Runs] = {}
        for leader, led in _by_leader(info).items():
            asked = [partition for partition in partitions if partition in led]
            if leader < 0 or not asked:
                continue
            topic = PartitionLeaderEpochsForPartitionsRequestTopic(
                topic=info.name, partitions=asked, first_layout=info.layouts[-1].number
            )
            request = PartitionLeaderEpochsForPartitionsRequest(topics=[topic], cuts=True, epochs=True)
            response: PartitionLeaderEpochsForPartitionsResponse = await self._ask(request, node_id=leader)
            for answered in response.topics:
                for result in answered.partitions:
                    runs = (EpochRun(it.layout, it.leader_epoch, it.count) for it in result.ended_epochs)
                    found[result.partition] = tuple(runs)
        return found


def _take(reading: _Reading, result: PartitionLeaderEpochsForPartitionsResponsePartition) -> None:
    """Take what a leader answers about one partition."""
    name, number, code = reading.info.name, result.partition, ErrorCode.of(result.error_code)
    if code is ErrorCode.KAFKA_STORAGE_ERROR:
        reading.unknown[number] = reading.known.pop(number, NOTHING_KNOWN).layout
        return
    if code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
        raise outdated(name)
    if code is not ErrorCode.NONE:
        raise ApiError(code, f"the leader of {name}-{number} does not return its cuts")
    known = reading.known.get(number, NOTHING_KNOWN)
    earlier, later = behind(known.cuts, result.log_start), decode_cuts(result.cut_layouts, result.cut_ends)
    if later.layouts and not known.layout <= later.layouts[0] <= later.layouts[-1] < reading.newest:
        raise DecodeError(f"cuts of {name}-{number} of layouts {later.layouts[0]} to {later.layouts[-1]}")
    if earlier.ends and later.ends and later.ends[0] <= earlier.ends[-1]:  # The log lost records that were read.
        del reading.known[number]
        raise outdated(name)
    reading.known[number] = _Known(reading.newest, joined(earlier, later))


def outdated(name: str) -> ApiError:
    """The error where answers about a topic are not of one layout."""
    return ApiError(ErrorCode.INVALID_PARTITION_METADATA, f"{name} was resized while it was looked at")


def _by_leader(info: TopicInfo) -> Mapping[int, list[int]]:
    found: dict[int, list[int]] = {}
    for number, partition in info.partitions.items():
        found.setdefault(partition.leader, []).append(number)
    return found
