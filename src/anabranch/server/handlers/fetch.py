"""Fetch (API 1): translates; `server.partitions.fetching` reads and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Generator, Iterable, Sequence
from functools import partial
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID
from anabranch.machines.held_memory import FetchMemory, FetchPart
from anabranch.machines.partition.fetching import FetchBudget
from anabranch.machines.partition.sharing import KEYS_MAX, RANGES_MAX, Asked, asked_of
from anabranch.protocol.messages.fetch import (
    AbortedTransaction,
    EpochEndOffset,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    LeaderIdAndEpoch,
    PartitionData,
)
from anabranch.runtime.loop_steps import timed
from anabranch.server.context import PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext
from anabranch.server.handlers.claims import handle_claims, has_claims
from anabranch.server.partitions.fetch_sessions import FetchContext, Key, Target, ended, keep_last
from anabranch.server.partitions.fetching import PARTITION_SIZE, Fetch, PartitionRead

READ_COMMITTED = 1
TOPIC_IDS_SINCE = 13
ELEMENTS_PER_PARTITION = 8
"""Ranges of keys, or keys, that take as long as a partition without any."""
ELEMENTS_COUNTED_MAX = 2_000
"""Beyond, a partition is refused, and not looked at."""


def handle_fetch(
    broker: BrokerContext, request: FetchRequest, call: RequestContext
) -> FetchResponse | Awaitable[FetchResponse | Large]:
    """Answer a fetch at once, or when enough records are found."""
    if (request.member_id or request.group_id) and has_claims(request):
        claims = handle_claims(broker, request)
        call.release()
        return claims
    if broker.fetches.sessions.size_of(request.session_id) + _effort_of(request) >= PARTITIONS_AT_A_TIME:
        targets: list[Target] = []
        reads: list[PartitionRead] = []
        part = FetchPart()
        handled = _handled_in_steps(broker, request, call, targets, reads, part)
        return _then_freed(broker, handled, (targets, reads), part)
    asked = _targets(request)
    keep_last(asked)
    context = ended(_begin(broker, request, call, asked, _forgotten(request, call)))
    if isinstance(context, ErrorCode):
        return FetchResponse(error_code=context, session_id=0)
    fetch = _fetch(broker, request, context)
    fetch.read()
    if fetch.complete or (request.max_wait_ms <= 0 and not fetch.coming):
        return _response(fetch, broker.settings.node_id)
    wait_max_ms = request.max_wait_ms
    call.release()
    return _waited(fetch, wait_max_ms, broker.settings.node_id)


def _begin(
    broker: BrokerContext, request: FetchRequest, call: RequestContext, targets: list[Target], forgotten: list[Key]
) -> Generator[None, None, FetchContext | ErrorCode]:
    """Take a fetch into its session, in steps."""
    return broker.fetches.sessions.begin_in_steps(
        request.session_id,
        request.session_epoch,
        targets,
        forgotten,
        uses_topic_ids=call.api_version >= TOPIC_IDS_SINCE,
        now_ms=broker.clock.now_ms(),
    )


async def _in_steps(begun: Generator[None, None, FetchContext | ErrorCode]) -> FetchContext | ErrorCode:
    while True:
        try:
            next(begun)
        except StopIteration as end:
            found: FetchContext | ErrorCode = end.value
            return found
        await asyncio.sleep(0)


def _fetch(
    broker: BrokerContext,
    request: FetchRequest,
    context: FetchContext,
    reads: list[PartitionRead] | None = None,
    part: FetchPart | None = None,
) -> Fetch:
    budget = FetchBudget(request.min_bytes, request.max_bytes, broker.fetches.size_max)
    committed = request.isolation_level == READ_COMMITTED
    return Fetch(broker.fetches, context, budget, committed=committed, reads=reads, part=part)


async def _then_freed(
    broker: BrokerContext,
    handled: Awaitable[FetchResponse | Large],
    lists: tuple[list[Target], list[PartitionRead]],
    part: FetchPart,
) -> FetchResponse | Large:
    """Handle a fetch, and then free what it held."""
    loop = asyncio.get_running_loop()
    try:
        return await handled
    finally:
        # So many objects take long to be freed, too.
        freed = loop.run_in_executor(None, _clear, lists)
        freed.add_done_callback(timed(loop, "Fetch", lambda _: broker.fetches.memory.free(part)))


async def _take_turn(broker: BrokerContext, request: FetchRequest, part: FetchPart) -> None:
    """Wait until there is memory for the partitions of a fetch, and of its session, which may grow meanwhile."""
    loop = asyncio.get_running_loop()
    memory, sessions = broker.fetches.memory, broker.fetches.sessions
    named = await loop.run_in_executor(None, _count, request)
    while part.size < (size := PARTITION_SIZE * (named + sessions.size_of(request.session_id))):
        memory.free(part)
        turn: asyncio.Future[None] = loop.create_future()
        memory.take(size, partial(_begin_turn, memory, part, size, turn))
        await turn


def _begin_turn(memory: FetchMemory, part: FetchPart, size: int, turn: asyncio.Future[None]) -> None:
    if turn.cancelled():
        memory.give(size)
    else:
        part.size = size
        turn.set_result(None)


def _count(request: FetchRequest) -> int:
    return sum(len(topic.partitions) for topic in request.topics)


def _clear(lists: Iterable[list[Any]]) -> None:
    for each in lists:
        each.clear()


async def _handled_in_steps(
    broker: BrokerContext,
    request: FetchRequest,
    call: RequestContext,
    targets: list[Target],
    reads: list[PartitionRead],
    part: FetchPart,
) -> FetchResponse | Large:
    """As `handle_fetch`, for so many partitions that other work must have its turn meanwhile.

    What is to be read is put into `targets`, what is read into `reads`, and their memory into `part`: the caller frees
    them.
    """
    await _take_turn(broker, request, part)
    memory = broker.fetches.memory
    await _target_in_steps(memory, request, targets, part)  # Nothing of the message is left in this frame by it.
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(None, keep_last, targets)
    forgotten = await loop.run_in_executor(None, _forgotten, request, call)
    context = await _in_steps(_begin(broker, request, call, targets, forgotten))
    if isinstance(context, ErrorCode):
        return FetchResponse(error_code=context, session_id=0)
    memory.hold(part, max(0, PARTITION_SIZE * len(context.targets) - part.size))  # The session has grown.
    fetch = _fetch(broker, request, context, reads, part)
    wait_max_ms = request.max_wait_ms
    call.release()
    del request
    await fetch.read_in_steps()
    if not fetch.complete and (wait_max_ms > 0 or fetch.coming):
        await fetch.wait(wait_max_ms)
    answer = _Answer(fetch, broker.settings.node_id)
    for place, read in enumerate(fetch.answer(), 1):
        if read is not None:
            answer.add(read)
        if place % PARTITIONS_AT_A_TIME == 0:
            await asyncio.sleep(0)
    response = answer.response
    return Large(lambda: response)


async def _target_in_steps(memory: FetchMemory, request: FetchRequest, targets: list[Target], part: FetchPart) -> None:
    effort = 0
    for topic in request.topics:
        effort += 1
        for asked in topic.partitions:
            targets += _targets_of(topic, (asked,))
            if targets[-1].asked is not None:
                memory.hold(part, targets[-1].size)
            effort += _effort(asked)
            if effort >= PARTITIONS_AT_A_TIME:
                effort = 0
                await asyncio.sleep(0)
        if effort >= PARTITIONS_AT_A_TIME:
            effort = 0
            await asyncio.sleep(0)


async def _waited(fetch: Fetch, wait_max_ms: int, node_id: int) -> FetchResponse:
    await fetch.wait(wait_max_ms)
    return _response(fetch, node_id)


def _targets(request: FetchRequest) -> list[Target]:
    return [target for topic in request.topics for target in _targets_of(topic, topic.partitions)]


def _targets_of(topic: FetchTopic, partitions: Sequence[FetchPartition]) -> list[Target]:
    return [
        Target(
            topic.topic,
            topic.topic_id,
            asked.partition,
            asked.fetch_offset,
            asked.partition_max_bytes,
            asked.current_leader_epoch,
            asked.last_fetched_epoch,
            topic.undeleted_partition_count,
            _asked(asked) if asked.key_ranges or asked.filter is not None else None,
        )
        for asked in partitions
    ]


def _effort_of(request: FetchRequest) -> int:
    """How many plain partitions take as long as this request; of a long one, no less than PARTITIONS_AT_A_TIME."""
    topics, forgotten = request.topics, request.forgotten_topics_data
    effort = len(topics) + len(forgotten)
    if effort < PARTITIONS_AT_A_TIME:
        for named in (topics, forgotten):
            for topic in named:
                effort += len(topic.partitions)
    if effort < PARTITIONS_AT_A_TIME:
        for topic in topics:
            for asked in topic.partitions:
                if asked.key_ranges or asked.filter is not None:
                    effort += _effort(asked) - 1
    return effort


def _effort(wanted: FetchPartition) -> int:
    """How many plain partitions take as long as this one."""
    elements = len(wanted.key_ranges)
    if wanted.filter is not None:
        elements += len(wanted.filter.keys_wanted) + len(wanted.filter.keys_refused)
    return 1 + min(elements, ELEMENTS_COUNTED_MAX) // ELEMENTS_PER_PARTITION


def _asked(wanted: FetchPartition) -> Asked | ErrorCode:
    """What is wanted of the records of a partition; the bytes of keys are copied, as those of a request change."""
    if len(wanted.key_ranges) > RANGES_MAX:
        return ErrorCode.INVALID_REQUEST
    ranges = [(each.start, each.end) for each in wanted.key_ranges]
    if wanted.filter is None:
        return asked_of(ranges)
    if len(wanted.filter.keys_wanted) + len(wanted.filter.keys_refused) > KEYS_MAX:
        return ErrorCode.INVALID_REQUEST
    wanted_keys, refused_keys = (
        [bytes(key) for key in keys] for keys in (wanted.filter.keys_wanted, wanted.filter.keys_refused)
    )
    return asked_of(ranges, wanted_keys, refused_keys, wanted.filter.size_min, wanted.filter.size_max)


def _forgotten(request: FetchRequest, call: RequestContext) -> list[Key]:
    uses_ids = call.api_version >= TOPIC_IDS_SINCE
    return [
        (topic.topic_id if uses_ids else topic.topic, partition)
        for topic in request.forgotten_topics_data
        for partition in topic.partitions
    ]


def _response(fetch: Fetch, node_id: int) -> FetchResponse:
    answer = _Answer(fetch, node_id)
    for read in fetch.answer():
        if read is not None:
            answer.add(read)
    return answer.response


class _Answer:
    """The answer to a fetch in the making."""

    def __init__(self, fetch: Fetch, node_id: int) -> None:
        self._topics: list[FetchableTopicResponse] = []
        self._partitions: list[PartitionData] = []
        self._node_id = node_id
        self._committed = fetch.committed
        self.response = FetchResponse(session_id=fetch.context.session_id, responses=self._topics)

    def add(self, read: PartitionRead) -> None:
        """Add what was read of one partition."""
        target, topics = read.target, self._topics
        if not topics or topics[-1].topic != target.topic or topics[-1].topic_id != target.topic_id:
            partitions = self._partitions = []
            topics.append(FetchableTopicResponse(topic=target.topic, topic_id=target.topic_id, partitions=partitions))
        self._partitions.append(_partition(read, self._node_id, committed=self._committed))


def _partition(read: PartitionRead, node_id: int, *, committed: bool) -> PartitionData:
    answer = PartitionData(
        partition_index=read.target.partition,
        error_code=read.error,
        high_watermark=read.high_watermark,
        last_stable_offset=read.last_stable_offset,
        log_start_offset=read.log_start,
        aborted_transactions=[
            AbortedTransaction(producer_id=line.producer_id, first_offset=line.first_offset) for line in read.aborted
        ]
        if committed
        else None,
        records=b"" if read.found is None else read.found.wire,
    )
    # Only readers that said a count: not every client skips tagged fields rightly.
    answer.folded = read.folded and read.target.undeleted_partition_count != COUNT_NOT_SAID
    answer.filtered_to = read.filtered_to
    if read.diverging is not None:
        answer.diverging_epoch = EpochEndOffset(epoch=read.diverging.epoch, end_offset=read.diverging.end_offset)
    if read.error is ErrorCode.FENCED_LEADER_EPOCH and read.partition is not None:
        answer.current_leader = LeaderIdAndEpoch(leader_id=node_id, leader_epoch=read.partition.leader_epoch)
    return answer
