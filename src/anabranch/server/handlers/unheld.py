"""Commits of what others hold: what another member has claimed of a partition is not committed (ADR 0053)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any, Generic, TypeVar

from anabranch.base.errors import ApiError, ErrorCode, shortened
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from anabranch.server.context import BrokerContext
from anabranch.server.partitions.partition import Partition

Request = TypeVar("Request", OffsetCommitRequest, TxnOffsetCommitRequest)

OFFSET_MAX = (1 << 63) - 2
QUOTED_MAX = 100
"""Characters of a member id in a sentence, of which a commit gets one for each partition: members choose their ids."""


class Unheld(Generic[Request]):
    """What of a commit no other member holds: `look` says it, directly before the commit is decided.

    Claims that wait for their turn do so before the commit or behind it, so that nobody gets any of it in between.
    """

    def __init__(
        self, broker: BrokerContext, request: Request, refuse: Callable[[Request, ErrorCode, str], Any]
    ) -> None:
        """`refuse` makes the response to a request with a code for all of it."""
        self._broker = broker
        self._request: Request = request
        self._refuse: Callable[[Request, ErrorCode, str], Any] = refuse
        self._others: Mapping[tuple[int, int], str] = {}
        """The partitions that others hold something of, by their places in the request, with the reason."""
        self.rest: Request = request
        """The request without these."""

    def look(self) -> None:
        """Look at what others hold now."""
        self.rest, self._others = self._request, _held_by_others(self._broker, self._request)
        if self._others:
            self.rest = copy(self._request)
            topics: Sequence[Any] = self._request.topics
            self.rest.topics = [self._without(place, topic) for place, topic in enumerate(topics)]

    def _without(self, place: int, topic: Any) -> Any:
        its = copy(topic)
        its.partitions = [part for number, part in enumerate(topic.partitions) if (place, number) not in self._others]
        return its

    def refused(self, code: ErrorCode, message: str) -> Any:
        """The response to what nobody else holds where it does not count."""
        return self._refuse(self.rest, code, message)

    def whole(self, committed: Any) -> Any:
        """The response to the request; `committed` is the one to what nobody else holds."""
        if not self._others:
            return committed
        made = self._refuse(self._request, ErrorCode.INVALID_RECORD_STATE, "")
        for place, (topic, its) in enumerate(zip(made.topics, committed.topics, strict=True)):
            found = iter(its.partitions)
            for number, refused in enumerate(topic.partitions):
                if (place, number) in self._others:
                    refused.error_message = self._others[place, number]
                else:
                    topic.partitions[number] = next(found)
        return made


def _held_by_others(
    broker: BrokerContext, request: OffsetCommitRequest | TxnOffsetCommitRequest
) -> dict[tuple[int, int], str]:
    """The partitions of a commit, by their places in the request, that must not count, with the reason.

    Nothing is refused here of a request that the coordinator refuses as a whole, or while it is not there.
    """
    if not len(broker.slices):
        return {}
    from anabranch.machines.groups import individual

    asked: dict[Partition, list[tuple[int, int, tuple[int, int]]]] = {}
    """First and last offset of what is committed, with its place."""
    topics: Sequence[OffsetCommitRequestTopic | TxnOffsetCommitRequestTopic] = request.topics
    for place, topic in enumerate(topics):
        topic_id = topic.topic_id if isinstance(topic, OffsetCommitRequestTopic) else NO_TOPIC_ID
        name = topic.name if topic_id == NO_TOPIC_ID else broker.view.name_of(topic_id)
        parts: Sequence[OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition] = topic.partitions
        for number, part in enumerate(parts):
            partition = None if name is None else broker.replicas.get(name, part.partition_index)
            if partition is None:
                continue
            if part.offset_ranges:
                try:
                    ranges = individual.checked((it.start, it.end) for it in part.offset_ranges)
                except individual.WrongRangesError:  # The coordinator refuses them.
                    continue
            elif part.key_range_offsets:
                ranges = [(0, OFFSET_MAX)]
            else:
                ranges = [(0, part.committed_offset - 1)]
            asked.setdefault(partition, []).extend((first, last, (place, number)) for first, last in ranges)
    found: dict[tuple[int, int], str] = {}
    for partition, named in asked.items():
        named.sort()
        try:
            holders = broker.slices.holders_of(
                request.group_id, partition, request.member_id, [(first, last) for first, last, _ in named]
            )
        except ApiError:
            continue
        for (_, _, at), held in zip(named, holders, strict=True):
            if held is not None and at not in found:
                holder = shortened(held.member_id, QUOTED_MAX)
                found[at] = (
                    f"Offsets {held.start} to {held.end} are with member {holder}, which fetches them without keys: "
                    "this commit does not count."
                )
    if found and broker.memberships.commit_error(request) is not ErrorCode.NONE:
        return {}  # The coordinator refuses all of it, for that reason.
    return found
