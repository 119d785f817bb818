"""The requests to send: metadata refreshes, offset lookups, and one fetch per broker at a time.

Fetching is incremental (KIP-227); the next fetch is sent while the application still reads the last batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_LEADER_EPOCH, TopicPartition
from anabranch.machines.clients.fetching.state import FetchingState, Partition, Session, Topic
from anabranch.machines.clients.fetching.values import ConsumerWork, Fetch, FetchFrom, Lookup, TopicView

PARTITION_SIZE_MIN = 1024 * 1024
SESSION_EPOCH_MAX = (1 << 31) - 1
SESSION_LOST = frozenset(
    {
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)


def request(state: FetchingState, now_ms: int) -> ConsumerWork:
    """Return all requests to send now."""
    work = ConsumerWork()
    state.wake_at_ms = None
    busy = [node for node, session in state.sessions.items() if session.busy]
    readable: list[tuple[int, TopicView, Partition]] = []
    lookups: dict[int, dict[TopicPartition, tuple[int, int]]] = {}
    for topic in state.topics.values():
        if topic.stale and not topic.asked:
            _refresh(state, topic, now_ms, work)
        view = topic.view
        for partition in topic.partitions.values() if view is not None else ():
            assert view is not None
            node = _usable_leader(state, view, partition, now_ms)
            if node is None:
                continue
            if partition.position is not None:
                if node not in busy and not partition.is_still:
                    readable.append((node, view, partition))
            elif not partition.looking_up:
                epoch = view.epochs.get(partition.number, NO_LEADER_EPOCH)
                lookups.setdefault(node, {})[partition.name] = (partition.wanted_timestamp, epoch)
    for node, partitions in lookups.items():
        lookup = Lookup(state.new_id(), node, partitions)
        state.lookups[lookup.request_id] = lookup
        for tp in partitions:
            state.partition(tp).looking_up = lookup.request_id
        work.lookups.append(lookup)
    for node, origins in _wanted(state, readable).items() if readable else ():
        fetch = _fetch(state, node, origins, now_ms)
        if fetch is not None:
            work.fetches.append(fetch)
    work.wake_at_ms = state.wake_at_ms
    return work


def _refresh(state: FetchingState, topic: Topic, now_ms: int, work: ConsumerWork) -> None:
    if now_ms < topic.ask_at_ms:
        state.wake(topic.ask_at_ms)
        return
    topic.asked = True
    topic.ask_at_ms = now_ms + state.settings.retry_backoff_ms
    work.refresh.append(topic.name)


def _usable_leader(state: FetchingState, view: TopicView, partition: Partition, now_ms: int) -> int | None:
    """Return the leader to ask for records or a position; None if the partition must wait."""
    topic, node = partition.topic, view.leaders.get(partition.number, -1)
    if node < 0:
        if not topic.stale:  # It is newer than the view, and no other partition's fetch may tell.
            topic.stale = True
            state.wake(max(now_ms, topic.ask_at_ms))
        return None
    if partition.awaiting or (partition.failures and topic.stale):
        return None
    if partition.topic_id is not None and partition.topic_id != view.topic_id:
        if not topic.stale:
            state.ask_later(topic, now_ms)
            state.wake(topic.ask_at_ms)
        return None
    if now_ms < partition.retry_at_ms:
        state.wake(partition.retry_at_ms)
        return None
    return node


def _wanted(
    state: FetchingState, readable: Iterable[tuple[int, TopicView, Partition]]
) -> dict[int, dict[TopicPartition, FetchFrom]]:
    """Return by broker what the next fetch asks for: readable partitions, unless much of them is kept already."""
    wanted: dict[int, dict[TopicPartition, FetchFrom]] = {node: {} for node in state.sessions}
    size_max = _size_max(state)
    for node, view, partition in readable:
        if partition.held_size < size_max:
            epoch = view.epochs.get(partition.number, NO_LEADER_EPOCH)
            wanted.setdefault(node, {})[partition.name] = _origin(view, partition, epoch, size_max)
    return wanted


def _origin(view: TopicView, partition: Partition, epoch: int, size_max: int) -> FetchFrom:
    """Return what to fetch; the same object as the last time while nothing arrives, and the metadata is the same."""
    last, count = partition.origin, view.sent_count
    if (
        last is None
        or last.offset != partition.fetch_offset
        or last.leader_epoch != epoch
        or last.size_max != size_max
        or last.topic_id is not view.topic_id
        or last.count != count
        or last.asked is not partition.asked
    ):
        last = partition.origin = FetchFrom(
            partition.fetch_offset, epoch, size_max, view.topic_id, count, partition.asked
        )
    return last


def _size_max(state: FetchingState) -> int:
    """Return the fetch size per partition in bytes: all kept batches stay below twice `fetch.max.bytes`."""
    partitions = max(1, sum([len(topic.partitions) for topic in state.topics.values()]))
    share = max(PARTITION_SIZE_MIN, state.settings.fetch_max_bytes // partitions)
    return min(state.settings.max_partition_fetch_bytes, share)


def _fetch(state: FetchingState, node: int, wanted: dict[TopicPartition, FetchFrom], now_ms: int) -> Fetch | None:
    session = state.sessions.get(node)
    if session is None:
        session = state.sessions[node] = Session()
    if session.busy or not wanted:
        return None
    if now_ms < session.retry_at_ms:
        state.wake(session.retry_at_ms)
        return None
    if session.session_id == 0:
        changed, forgotten = wanted, []
    else:
        known, anew = session.known, session.anew
        changed = {
            tp: origin
            for tp, origin in wanted.items()
            if tp in anew or ((before := known.get(tp)) is not origin and before != origin)
        }
        forgotten = [(tp, before.topic_id) for tp, before in known.items() if _is_another(before, wanted.get(tp))]
    session.known = dict(wanted)
    session.anew.clear()
    session.busy = state.new_id()
    state.requests[session.busy] = (node, wanted)
    return Fetch(session.busy, node, session.session_id, session.epoch, changed, forgotten)


def _is_another(before: FetchFrom, origin: FetchFrom | None) -> bool:
    """Whether a partition is not fetched any more: a topic that was created again is another one."""
    if origin is None:
        return True
    return origin.topic_id is not before.topic_id and origin.topic_id != before.topic_id


def session_answered(
    state: FetchingState, request_id: int, error: ErrorCode, session_id: int, now_ms: int
) -> tuple[Session, Mapping[TopicPartition, FetchFrom]] | None:
    """Complete a fetch: return its session and the requested offsets, or None if the response must be ignored."""
    node, asked = state.requests.pop(request_id, (-1, {}))
    session = state.sessions.get(node)
    if session is None or session.busy != request_id:
        return None
    session.busy = 0
    if error is not ErrorCode.NONE:
        state.sessions[node] = Session()
        if error not in SESSION_LOST:
            state.sessions[node].retry_at_ms = now_ms + state.backoff_ms(1)
        return None
    session.failures = 0
    session.session_id = session_id
    if session_id == 0:
        session.epoch, session.known = 0, {}
        session.anew.clear()
    else:
        session.epoch = session.epoch % SESSION_EPOCH_MAX + 1
    return session, asked


def lost(state: FetchingState, request_id: int, now_ms: int) -> None:
    """Handle a lost request: refresh its topics, and use the broker again after a delay."""
    lookup = state.lookups.pop(request_id, None)
    if lookup is not None:
        for tp in lookup.partitions:
            partition = state.find(tp)
            if partition is not None and partition.looking_up == request_id:
                partition.looking_up = 0
                state.mark_stale(partition, now_ms)
        return
    node, asked = state.requests.pop(request_id, (-1, {}))
    session = state.sessions.get(node)
    if session is None or session.busy != request_id:
        return
    failures = session.failures + 1
    state.sessions[node] = Session(failures=failures, retry_at_ms=now_ms + state.backoff_ms(failures))
    for name in {tp.topic for tp in asked}:
        topic = state.topics.get(name)
        if topic is not None:
            topic.stale = True
