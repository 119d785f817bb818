"""Fetches without keys (Fetch with claims, ADR 0053): the leader chooses where each one reads.

Of each claimed partition the group's next slice is reserved, then read as any fetch reads; it ends where the records
that were found end. Where no partition has a slice, the fetch waits for records, or for slices that become free.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.controller.leadership import refuse_read
from anabranch.machines.partition.fetching import FetchBudget
from anabranch.machines.partition.slices import Claimant, Refused, Slice, Slices
from anabranch.protocol.messages.fetch import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchedSlice,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from anabranch.records.batch import headers
from anabranch.runtime.turns import in_turns, turn_end
from anabranch.server.context import BrokerContext, Large, large_or_not
from anabranch.server.partitions.fetch_sessions import FetchContext, Target
from anabranch.server.partitions.fetching import Fetch, PartitionRead
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.slice_waits import Waiter

READ_COMMITTED = 1
CLAIMS_MAX = 1_000
"""Partitions of one fetch."""
AT_A_TIME = 50
"""Partitions that are claimed, or read, before other work has its turn: 3 ms."""
WORK_AT_A_TIME = 500
"""Slices that claims free or pass over before other work has its turn: 2 ms."""
CLAIMING_S = 1.0
"""A fetch looks for further slices for so long at least, though the time that it may wait is over."""
LOOKS_MAX = 2_000
"""Steps that one claim takes to find a slice, each a turn of the loop."""
RECHECK_S = 0.25
"""A waiting fetch looks so often whether members with slices are gone."""
END_SESSION = -1
READ_SIZE_MIN = 64 * 1024
RECORD_SIZE_GUESS = 2 * 1024
"""Of larger records a slice has fewer than could be claimed: what is read and not sent is bounded."""


def has_claims(request: FetchRequest) -> bool:
    """Whether a fetch claims slices: one that has more partitions than it may have does so among the first."""
    if not request.member_id or len(request.topics) > CLAIMS_MAX:
        return False
    parts = (part for topic in request.topics for part in topic.partitions)
    return any(part.claim is not None for part in islice(parts, CLAIMS_MAX + 1))


@dataclass(slots=True)
class _Asked:
    """A partition of a fetch that is to be claimed of."""

    at: tuple[int, int]
    """Its place in the request."""
    topic: FetchTopic
    part: FetchPartition
    looks: int = 0
    has_begun: bool = False
    """Whether the group was made to begin, if it had committed nothing."""

    @property
    def ends(self) -> bool:
        """Whether the member ends its session here, in place of a claim."""
        return self.part.claim is not None and self.part.claim.sequence == END_SESSION


class _Claimed(NamedTuple):
    """A reserved slice, to be read."""

    asked: _Asked
    partition: Partition
    slices: Slices
    found: Slice
    target: Target


class _Beginning(NamedTuple):
    """A claim of a group that has committed nothing of the partition: it has to begin somewhere first."""

    partition: Partition


def handle_claims(broker: BrokerContext, request: FetchRequest) -> FetchResponse | Awaitable[FetchResponse | Large]:
    """Answer a fetch with slices, as soon as there is one. The request may be freed when this returns."""
    if len(request.topics) > CLAIMS_MAX or sum(len(topic.partitions) for topic in request.topics) > CLAIMS_MAX:
        return FetchResponse(error_code=ErrorCode.INVALID_REQUEST, session_id=0)
    return _handle_claims(broker, _needed(request))


def _needed(request: FetchRequest) -> FetchRequest:
    """A copy of a fetch with the fields that claims have."""
    return FetchRequest(
        max_wait_ms=request.max_wait_ms,
        max_bytes=request.max_bytes,
        isolation_level=request.isolation_level,
        group_id=request.group_id,
        member_id=request.member_id,
        generation_id_or_member_epoch=request.generation_id_or_member_epoch,
        topics=[
            FetchTopic(
                topic=topic.topic,
                topic_id=topic.topic_id,
                undeleted_partition_count=topic.undeleted_partition_count,
                partitions=[
                    FetchPartition(
                        partition=part.partition,
                        fetch_offset=part.fetch_offset,
                        partition_max_bytes=part.partition_max_bytes,
                        current_leader_epoch=part.current_leader_epoch,
                        claim=part.claim,
                    )
                    for part in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )


async def _handle_claims(broker: BrokerContext, request: FetchRequest) -> FetchResponse | Large:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + max(0, request.max_wait_ms) / 1000
    waited_for: tuple[Partition, ...] = ()
    while True:
        began = broker.slices.waits.changes
        attempt = _Attempt(broker, request, deadline)
        await attempt.make(waited_for)
        left_s = deadline - loop.time()
        if attempt.urgent or left_s <= 0 or broker.fetches.stopping:
            break
        done: asyncio.Future[None] = loop.create_future()
        waiter = Waiter(request.member_id, attempt.looked_at, began, done)
        # Nobody may have watched as records came.
        wait_s = 0 if attempt.is_outdated else min(left_s, RECHECK_S)
        await _changed(broker, request.group_id, waiter, done, wait_s)
        waited_for = waiter.partitions
        if waiter.has_ended:
            broker.slices.waits.pass_on(request.group_id, waited_for)
            break
    return large_or_not(attempt.response, attempt.answers)


class _Attempt:
    """One look at all partitions of a fetch."""

    def __init__(self, broker: BrokerContext, request: FetchRequest, deadline: float) -> None:
        """`deadline`: when to answer, as the time of the loop."""
        self._broker = broker
        self._deadline = deadline
        self._request = request
        self._committed = request.isolation_level == READ_COMMITTED
        self._answers: dict[tuple[int, int], PartitionData] = {}
        self.looked_at: dict[Partition, int] = {}
        """The partitions that may have records later, and where their records ended."""
        self._left: dict[Partition, bool] = {}
        """Those of which something may be left for others, and whether a slice of them was reserved."""
        self.urgent = False
        """Whether to answer now."""
        self._work = 0
        """What the claims of this stretch have freed or passed over."""

    @property
    def answers(self) -> int:
        """The number of partitions in the answer."""
        return len(self._answers)

    @property
    def is_outdated(self) -> bool:
        """Whether a partition has more records since this looked at it."""
        return any(limit < self._limit(partition) for partition, limit in self.looked_at.items())

    async def make(self, waited_for: Iterable[Partition]) -> None:
        """Reserve, read, and keep of each slice what was read.

        `waited_for`: the partitions that this fetch may have been woken for, in place of others.
        """
        claimed: dict[tuple[int, int], _Claimed] = {}
        try:
            try:
                await self._claim_all(claimed)
            finally:
                self._wake_others(waited_for)
            await self._read(claimed)
        finally:
            for each in claimed.values():
                each.slices.cancel(each.found)
                self._broker.slices.waits.changed(self._request.group_id, each.partition)

    def _wake_others(self, waited_for: Iterable[Partition]) -> None:
        """Have other fetches look at what this one has left, or did not come to look at."""
        waits, group_id = self._broker.slices.waits, self._request.group_id
        waits.pass_on(group_id, [partition for partition in waited_for if partition not in self.looked_at])
        for partition, is_reserved in self._left.items():
            if is_reserved:
                waits.changed(group_id, partition)
            else:
                waits.pass_on(group_id, [partition])

    def _limit(self, partition: Partition) -> int:
        """Where the records end that this fetch may have."""
        return partition.last_stable_offset if self._committed else partition.log.high_watermark

    def _asked(self) -> Iterator[_Asked]:
        for place, topic in enumerate(self._request.topics):
            for number, part in enumerate(topic.partitions):
                yield _Asked((place, number), topic, part)

    def _refuse(self, asked: _Asked, code: ErrorCode, message: str) -> None:
        self.urgent = True
        self._answers[asked.at] = PartitionData(
            partition_index=asked.part.partition, error_code=code, high_watermark=-1, records=b"", error_message=message
        )

    async def _claim_all(self, claimed: dict[tuple[int, int], _Claimed]) -> None:
        """Claim of each partition, in stretches of which none takes long, and each has one turn of the group's shard.

        With something claimed, the partitions that are left when the time is over are answered as if they had nothing.
        """
        loop = asyncio.get_running_loop()
        until = max(self._deadline, loop.time() + CLAIMING_S)
        left = deque(sorted(self._asked(), key=lambda asked: not asked.ends))
        while left:
            if claimed and loop.time() >= until:
                self._pass_over(left)
            else:
                await self._claim_some(left, claimed)
            if left:
                await asyncio.sleep(0)

    async def _claim_some(self, left: deque[_Asked], claimed: dict[tuple[int, int], _Claimed]) -> None:
        """Claim of the next partitions in one turn; they are taken out of `left`, unless another look has to follow."""
        try:
            async with self._broker.memberships.undisturbed(self._request.group_id):
                beginning = self._claim_stretch(left, claimed)
            if beginning is not None:
                await self._begin(beginning.partition, left[0].part.fetch_offset)
                left[0].has_begun = True
        except ApiError as error:
            self._refuse(left.popleft(), error.code, error.message)

    def _claim_stretch(self, left: deque[_Asked], claimed: dict[tuple[int, int], _Claimed]) -> _Beginning | None:
        self._work, over, now = 0, turn_end(), asyncio.get_running_loop().time
        for _ in range(min(AT_A_TIME, len(left))):
            asked = left[0]
            asked.looks += 1
            try:
                found = self._claim(asked)
            except ApiError as error:
                self._refuse(asked, error.code, error.message)
            else:
                if found is None or isinstance(found, _Beginning):
                    return found
                if isinstance(found, _Claimed):
                    claimed[asked.at] = found
                else:
                    self._answers[asked.at] = found
            left.popleft()
            if self._work >= WORK_AT_A_TIME or now() >= over:
                break
        return None

    def _pass_over(self, left: deque[_Asked]) -> None:
        """Answer for the next partitions without a claim."""
        for _ in range(min(AT_A_TIME, len(left))):
            asked = left.popleft()
            try:
                partition, _ = self._located(asked)
            except ApiError as error:
                self._refuse(asked, error.code, error.message)
            else:
                self._answers[asked.at] = self._nothing(partition)

    def _located(self, asked: _Asked) -> tuple[Partition, Target]:
        """The partition, and what to read of it. ApiError with the reason why it cannot be claimed of."""
        topic, part, claim = asked.topic, asked.part, asked.part.claim
        if claim is None:
            raise ApiError(ErrorCode.INVALID_REQUEST, "A fetch claims slices of all its partitions, or of none.")
        target = Target(
            topic.topic,
            topic.topic_id,
            part.partition,
            part.fetch_offset,
            min(part.partition_max_bytes, max(READ_SIZE_MIN, claim.records_max * RECORD_SIZE_GUESS)),
            part.current_leader_epoch,
            undeleted_partition_count=topic.undeleted_partition_count,
        )
        partition = self._broker.fetches.locate(target)
        if isinstance(partition, ErrorCode):
            raise ApiError(partition, "The partition is not here.")
        role = partition.leadership
        if role is None or partition.offline_reason is not None:
            raise ApiError(partition.unavailable(), f"{partition.name} cannot be read now.")
        refused = refuse_read(role, target.undeleted_partition_count, target.leader_epoch)
        if refused is not ErrorCode.NONE:
            raise ApiError(refused, f"{partition.name} is not read so by its leader.")
        if not partition.settings.accepts_range_fetch:
            raise ApiError(
                ErrorCode.TOPIC_RANGE_FETCH_NOT_ALLOWED,
                f"Topic {partition.name.topic} is not shared: its accept.range.fetch is false.",
            )
        return partition, target

    def _claim(self, asked: _Asked) -> _Claimed | PartitionData | _Beginning | None:
        """Reserve the next slice of a partition; an answer where there is none now. ApiError with the reason.

        None where another look has to follow.
        """
        if asked.looks > LOOKS_MAX:
            raise ApiError(
                ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "The slices of the partition change too fast; try again."
            )
        partition, target = self._located(asked)
        broker, request, claim = self._broker, self._request, asked.part.claim
        assert claim is not None
        group_id, member_id = request.group_id, request.member_id
        broker.memberships.check_member(group_id, member_id, request.generation_id_or_member_epoch)
        log = partition.log
        limit = self._limit(partition)
        if asked.ends:
            broker.slices.of(group_id, partition).end_session(member_id)
            broker.slices.waits.end(group_id, member_id, partition)
            broker.slices.waits.changed(group_id, partition)
            self.urgent = True
            return self._nothing(partition)
        topic_name, number = partition.name
        where = group_id, topic_name, partition.topic_id, number
        progress = broker.memberships.committed(*where, log.log_start)
        if progress is None:
            if not asked.has_begun:
                return _Beginning(partition)
            raise ApiError(ErrorCode.OFFSET_NOT_AVAILABLE, f"Group {group_id} has no offset of {partition.name}.")
        if not progress.is_known:
            return None
        if progress.stable > log.end:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"Group {group_id} has committed offset {progress.stable} of {partition.name}, which ends at "
                f"{log.end}: reset its offsets.",
            )
        by = Claimant(member_id, request.generation_id_or_member_epoch, claim.session, claim.sequence)
        slices = broker.slices.of(group_id, partition)
        live = broker.memberships.live(group_id)
        found = slices.claim(by, progress, limit, claim.records_max, live, broker.slices.now_ms, log.log_start)
        self._work += slices.work
        if isinstance(found, Refused):
            raise ApiError(found.code, found.message)
        if slices.is_behind:
            return None
        self.looked_at[partition] = limit
        if slices.may_have_open(limit):
            self._left[partition] = found is not None
        if found is None:
            return self._nothing(partition)
        target.offset = max(found.start, log.log_start)
        return _Claimed(asked, partition, slices, found, target)

    async def _begin(self, partition: Partition, offset: int) -> None:
        request, log = self._request, partition.log
        if not log.log_start <= offset <= log.end:
            raise ApiError(
                ErrorCode.OFFSET_OUT_OF_RANGE,
                f"Group {request.group_id} has committed nothing of {partition.name}, and offset {offset} is none to "
                f"begin at: it has {log.log_start} to {log.end}.",
            )
        await self._broker.memberships.begin(
            request.group_id, request.member_id, request.generation_id_or_member_epoch, partition.name, offset
        )

    async def _read(self, claimed: dict[tuple[int, int], _Claimed]) -> None:
        """Read the reserved slices, one after the other; those that were read are taken out of `claimed`.

        Each has a budget of its own, so that no records mean that there are none, and never that there is no room.
        """
        request, fetches = self._request, self._broker.fetches
        room = min(request.max_bytes, fetches.size_max)
        async for at, each in in_turns([*claimed.items()], AT_A_TIME):
            if each.target.offset > each.found.end:  # All of its records were deleted.
                self._take(at, claimed.pop(at), None)
                continue
            if room <= 0:
                self._answers[at] = self._nothing(each.partition)
                continue
            budget = FetchBudget(1, room, fetches.size_max)
            fetch = Fetch(fetches, FetchContext([each.target], None, False), budget, committed=self._committed)
            fetch.read()
            if fetch.coming:
                await fetch.wait(0)
            (read,) = fetch.answer()
            assert read is not None
            if read.error is not ErrorCode.NONE:
                self._refuse(each.asked, read.error, f"{each.partition.name} could not be read: {read.error.name}.")
            else:
                room -= read.size
                self._take(at, claimed.pop(at), read)

    def _take(self, at: tuple[int, int], each: _Claimed, read: PartitionRead | None) -> None:
        """Answer a slice that was read, as far as its records were found."""
        found, end, size = each.found, each.found.end, 0
        data = memoryview(b"")
        if read is not None and read.found is not None:
            view = read.found.view()
            for position, header in headers(view):
                if position and header.base_offset > end:
                    break
                size, reached = position + header.size, header.next_offset - 1
                if reached >= end:
                    break
            else:
                end = max(found.start, min(end, reached if size else end))
            data = view[:size]
        is_whole = end >= found.end
        if not each.slices.shrink(found, end, size):  # It ended while it was read.
            self._answers[at] = self._nothing(each.partition)
            return
        if not is_whole:
            self._broker.slices.waits.changed(self._request.group_id, each.partition)
        self.urgent = True
        self._broker.slices.claims.add()
        answer = self._nothing(each.partition)
        answer.records = data
        answer.slice = FetchedSlice(start=found.start, end=found.end, sequence=found.sequence)
        if self._committed and read is not None:
            answer.aborted_transactions = [
                AbortedTransaction(producer_id=line.producer_id, first_offset=line.first_offset)
                for line in read.aborted
            ]
        self._answers[at] = answer

    def _nothing(self, partition: Partition) -> PartitionData:
        """The answer where there is no slice."""
        return PartitionData(
            partition_index=partition.name.partition,
            error_code=ErrorCode.NONE,
            high_watermark=partition.log.high_watermark,
            last_stable_offset=partition.last_stable_offset,
            log_start_offset=partition.log.log_start,
            records=b"",
        )

    def response(self) -> FetchResponse:
        """The answer with what was found."""
        return FetchResponse(
            session_id=0,
            responses=[
                FetchableTopicResponse(
                    topic=topic.topic,
                    topic_id=topic.topic_id,
                    partitions=[self._answers[place, number] for number in range(len(topic.partitions))],
                )
                for place, topic in enumerate(self._request.topics)
            ],
        )


async def _changed(
    broker: BrokerContext, group_id: str, waiter: Waiter, done: asyncio.Future[None], wait_s: float
) -> None:
    """Wait until it is the turn of this fetch to look again, the time is over, or the broker stops."""
    waits = broker.slices.waits
    timer = asyncio.get_running_loop().call_later(wait_s, waiter.wake)
    broker.fetches.waiting.add(done)
    waits.park(group_id, waiter)
    try:
        await done
    except asyncio.CancelledError:
        if not done.cancelled():  # It was woken, and does not come to look.
            waits.pass_on(group_id, waiter.partitions)
        raise
    finally:
        timer.cancel()
        broker.fetches.waiting.discard(done)
        waits.leave(group_id, waiter)
