"""Commits of many ranges (OffsetCommit, TxnOffsetCommit), some hundreds at a time.

Each stretch is a commit of its own: what counts of it counts, whatever becomes of the rest, and a client may commit all
of it again. The topic of individual commits is made when somebody first commits some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from copy import copy
from typing import Any, Protocol, TypeVar

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.limits import FRONTIER_STEPS_MAX, RANGES_PER_COMMIT_MAX
from anabranch.server.context import BrokerContext

RANGES_AT_A_TIME = 300
"""Ranges that are decided before other work has its turn: 3 ms."""


class Commit(Protocol):
    """A request of OffsetCommit or TxnOffsetCommit."""

    topics: Any


Request = TypeVar("Request", bound=Commit)
Response = TypeVar("Response")


def ranges_of(part: Any) -> int:
    """The number of ranges that the commit of one partition has."""
    return len(part.offset_ranges) + len(part.key_range_offsets)


def in_ranges(
    broker: BrokerContext,
    request: Request,
    commit: Callable[[Request], Response | Awaitable[Response]],
    refuse: Callable[[Request, ErrorCode, str], Response],
) -> Response | Awaitable[Response]:
    """Commit a request, in stretches if it has many ranges; `refuse` makes the response to one with a code for all.

    `commit` is called once for each stretch, some time after the one before: what has to hold then it looks at itself.
    """
    count = sum(ranges_of(part) for topic in request.topics for part in topic.partitions)
    if not count or (count <= RANGES_AT_A_TIME and broker.groups.takes_individual):
        return commit(request)
    if count > RANGES_PER_COMMIT_MAX:
        message = f"{count} ranges are committed at once; {RANGES_PER_COMMIT_MAX} can be."
        return refuse(request, ErrorCode.INVALID_REQUEST, message)
    return _in_stretches(broker, request, commit, refuse)


async def _in_stretches(
    broker: BrokerContext,
    request: Any,
    commit: Callable[[Any], Any],
    refuse: Callable[[Any, ErrorCode, str], Any],
) -> Any:
    try:
        await broker.groups.ensure_individual()
    except ApiError as error:
        return refuse(request, error.code, error.message)
    # Apart from the loop, where 60,000 ranges would take too long, and once for all stretches of a partition.
    wrong = await asyncio.get_running_loop().run_in_executor(None, _wrong, request)
    whole = refuse(request, ErrorCode.NONE, "")
    for topic, answered in zip(request.topics, whole.topics, strict=True):
        for number, asked in enumerate(topic.partitions):
            if id(asked) in wrong:
                found = answered.partitions[number]
                found.error_code, found.error_message = wrong[id(asked)]
                continue
            for stretch in _stretches(asked):
                answer = commit(_only(request, topic, stretch))
                if hasattr(answer, "__await__"):
                    answer = await answer
                answered.partitions[number] = found = answer.topics[0].partitions[0]
                if found.error_code:
                    break
                await asyncio.sleep(0)
    return whole


def _wrong(request: Any) -> dict[int, tuple[ErrorCode, str]]:
    """The partitions whose ranges cannot be, by identity, with the error."""
    from anabranch.machines.groups import individual, shares

    found: dict[int, tuple[ErrorCode, str]] = {}
    for topic in request.topics:
        for part in topic.partitions:
            try:
                individual.checked((it.start, it.end) for it in part.offset_ranges)
                shares.checked((it.start, it.end, it.offset) for it in part.key_range_offsets)
            except individual.WrongRangesError as error:
                found[id(part)] = ErrorCode.INVALID_REQUEST, str(error)
                continue
            if len(part.key_range_offsets) > FRONTIER_STEPS_MAX:
                message = f"{len(part.key_range_offsets)} ranges of keys are committed at once: too many."
                found[id(part)] = ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED, message
            part.offset_ranges = sorted(part.offset_ranges, key=lambda it: it.start)
    return found


def _stretches(part: Any) -> Iterator[Any]:
    """The commit of one partition as several, with some of its ranges of offsets each."""
    ranges, keys = part.offset_ranges, part.key_range_offsets
    for begin in range(0, max(1, len(ranges)), RANGES_AT_A_TIME):
        made = copy(part)
        made.offset_ranges = ranges[begin : begin + RANGES_AT_A_TIME]
        made.key_range_offsets = keys if not begin else []
        yield made


def _only(request: Any, topic: Any, part: Any) -> Any:
    made, its = copy(request), copy(topic)
    its.partitions = [part]
    made.topics = [its]
    return made
