"""The partitions to read: assigned or granted ones, followed through every change of their topics."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.machines.clients.fetching import sharing
from anabranch.machines.clients.fetching.gating import progress
from anabranch.machines.clients.fetching.state import FetchingState, Partition, Topic
from anabranch.machines.clients.fetching.values import EARLIEST, TopicView
from anabranch.machines.clients.key_ranges import KeyRanges
from anabranch.machines.lineage import Lineage

Shares = Mapping[TopicPartition | str, KeyRanges]
"""By partition, or by topic for all its partitions, the places of the key space that are read."""
NO_SHARES: Shares = {}
NO_RANGES: Mapping[TopicPartition, KeyRanges] = {}
FAILURES_UNTIL_MISSING = 4
"""Failed refreshes of a missing topic before an error is raised: a new topic may take a moment to appear."""


def assign(
    state: FetchingState,
    partitions: Iterable[TopicPartition],
    whole_topics: Iterable[str],
    *,
    awaiting: bool,
    shares: Shares = NO_SHARES,
) -> None:
    """Replace the assignment; a partition that stays assigned keeps its position, also with another share."""
    wanted: dict[str, set[int] | None] = dict.fromkeys(whole_topics)
    for tp in partitions:
        numbers = wanted.setdefault(tp.topic, set())
        if numbers is not None:
            numbers.add(tp.partition)
    for gone in state.topics.keys() - wanted.keys():
        del state.topics[gone]
    for name, numbers in wanted.items():
        topic = state.topics.get(name)
        if topic is None or topic.follow != (numbers is None):
            kept = {} if topic is None else topic.partitions
            topic = state.topics[name] = Topic(name, follow=numbers is None, awaiting=awaiting)
            for partition in kept.values():
                partition.topic = topic
            topic.partitions = kept
        topic.share = shares.get(name, ())
        if numbers is None:
            for partition in topic.partitions.values():
                _give_share(state, partition, topic.share)
            continue
        topic.partitions = {
            number: topic.partitions.get(number)
            or Partition(
                topic, number, wanted_timestamp=state.reset_timestamp, awaiting=awaiting, arrivals=state.new_id()
            )
            for number in sorted(numbers)
        }
        for partition in topic.partitions.values():
            _give_share(state, partition, shares.get(partition.name, ()))
        topic.limits = None


def _give_share(state: FetchingState, partition: Partition, share: KeyRanges) -> None:
    if share != partition.share:
        partition.topic.limits = None
        partition.arrivals = state.new_id()
    partition.share = share
    partition.ask(state.filter)


def begin_anew(state: FetchingState, tp: TopicPartition) -> bool:
    """Have a partition that is assigned by hand begin where its group has committed; what was fetched is dropped.

    Where it has committed nothing, the partition begins where it did before, or with the first record that its log
    still has. One of which what is committed is being asked, or whose position the application has set, stays as it
    is; whether it does not.
    """
    topic = state.topics[tp.topic]
    before = topic.partitions[tp.partition]
    if before.awaiting or before.is_sought:
        return False
    made = Partition(topic, tp.partition, wanted_timestamp=state.reset_timestamp, awaiting=True)
    made.arrivals, made.paused = state.new_id(), before.paused
    if before.start is not None:
        made.anew_from = max(before.start, before.log_start)
    elif before.wanted_timestamp == EARLIEST:  # Of a topic that was created again, whatever the reset says.
        made.anew_from = max(0, before.log_start)
    topic.partitions[tp.partition] = made
    _give_share(state, made, before.share)
    topic.limits = None
    return True


def grant(
    state: FetchingState,
    partitions: Iterable[tuple[TopicPartition, UUID | None]],
    shares: Mapping[TopicPartition, KeyRanges] = NO_RANGES,
) -> None:
    """Add granted partitions, or ranges; each is fetched once its starting position is known."""
    for tp, topic_id in partitions:
        topic = state.topics.setdefault(tp.topic, Topic(tp.topic, follow=False, granted=True))
        assert topic.granted
        keys = shares.get(tp, ())
        partition = topic.partitions.get(tp.partition)
        if partition is None:
            granted = Partition(topic, tp.partition, awaiting=True, topic_id=topic_id, share=keys)
            granted.arrivals = state.new_id()
            granted.ask(state.filter)
            topic.partitions[tp.partition] = granted
        elif keys:
            sharing.add(state, partition, keys)
        topic.limits = None


def withdraw(
    state: FetchingState,
    partitions: Iterable[TopicPartition],
    shares: Mapping[TopicPartition, KeyRanges] = NO_RANGES,
) -> None:
    """Remove partitions, or ranges of them, from the assignment, and drop their fetched records."""
    for tp in partitions:
        topic = state.topics.get(tp.topic)
        if topic is not None:
            partition = topic.partitions.get(tp.partition)
            topic.limits = None
            if partition is not None and tp in shares and sharing.take(state, partition, shares[tp]):
                continue
            if partition is not None:
                del topic.partitions[tp.partition]
            if partition is not None and partition.committed is not None:
                read = sharing.of_all_keys(partition) if partition.share else progress(partition)
                assert read is not None
                topic.elsewhere[tp.partition] = max(read, topic.elsewhere.get(tp.partition, read))
            if not topic.partitions:
                del state.topics[tp.topic]


def learn(state: FetchingState, topic: Topic, view: TopicView, now_ms: int) -> None:
    """Apply a new view: add new partitions, drop removed ones, and evaluate the gates again."""
    known = topic.view
    ids = set() if known is None else {known.topic_id, view.topic_id}
    is_other = len(ids) == 2 and NO_TOPIC_ID not in ids
    if is_other:
        _begin_recreated(state, topic)
    elif known is not None and topic.granted:
        _drop_folded(topic, known.lineage, view.lineage)
    topic.view, topic.limits, topic.gated = view, None, {}
    topic.asked = topic.stale = False
    if topic.follow:
        _follow(state, topic, view, first=known is None)
    elif not topic.granted:  # The coordinator revokes granted partitions that were removed.
        _drop_removed(state, topic, view, first=known is None or is_other)
    if view.lineage.unknown or any(
        view.leaders.get(number, -1) < 0 or partition.is_of_another_topic
        for number, partition in topic.partitions.items()
    ):
        state.ask_later(topic, now_ms)
    else:
        topic.failures = 0


def _drop_folded(topic: Topic, before: Lineage, after: Lineage) -> None:
    """Drop fetched records of layouts of which no log holds a record any more: what they wait for, nobody can tell."""
    for partition in topic.partitions.values():
        position = partition.position
        if partition.held and position is not None and before.layout_at(partition.number, position) < after.first:
            partition.forget()
            partition.fetch_offset = position
            partition.ask_from_here()


def _begin_recreated(state: FetchingState, topic: Topic) -> None:
    """Reset the positions of a topic that was deleted and created again: none of its records were read."""
    topic.elsewhere, topic.lifted, topic.bound = {}, {}, set()
    for partition in topic.partitions.values():
        if partition.anew_from is not None:
            partition.anew_from = 0
        if partition.awaiting and partition.topic_id is None:
            partition.arrivals = state.new_id()  # What is being asked is of the other topic.
        if not partition.awaiting and partition.topic_id is None:
            partition.forget()
            partition.position, partition.wanted_timestamp = None, EARLIEST
            partition.committed = partition.told = partition.start = None
            partition.floor = partition.done = partition.committed_by_key = None
            partition.passed = partition.gone = None
            partition.handed_end, partition.log_start, partition.high_watermark = 0, -1, -1


def _follow(state: FetchingState, topic: Topic, view: TopicView, *, first: bool) -> None:
    for number in sorted(view.leaders):
        if number not in topic.partitions:
            start = state.reset_timestamp if first else EARLIEST
            new = Partition(
                topic,
                number,
                wanted_timestamp=start,
                awaiting=topic.awaiting,
                share=topic.share,
                arrivals=state.new_id(),
            )
            new.ask(state.filter)
            topic.partitions[number] = new
    for number in topic.partitions.keys() - view.leaders.keys():
        del topic.partitions[number]


def _drop_removed(state: FetchingState, topic: Topic, view: TopicView, *, first: bool) -> None:
    absent = topic.partitions.keys() - view.leaders.keys()
    if first and absent:
        names = ", ".join(str(number) for number in sorted(absent))
        has = f"it has {len(view.leaders)}, of numbers up to {max(view.leaders, default=-1)}"
        text = f"topic {view.name} has no partition {names}: {has}. Assign others."
        state.tell(ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text))
    for number in absent:
        del topic.partitions[number]


def learn_unknown(state: FetchingState, topic: Topic, error: ApiError, now_ms: int) -> None:
    """Handle a failed metadata request; add an error for the application if retrying cannot help."""
    topic.asked = False
    state.ask_later(topic, now_ms)
    missing = error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and topic.failures >= FAILURES_UNTIL_MISSING
    if (missing and not topic.granted) or not error.retriable:
        state.tell(error)


def appeared_later(partition: int, view: TopicView, committed: Collection[int], seen: Collection[int] | None) -> bool:
    """Whether a partition without a committed offset appeared after its group first subscribed to the topic.

    `committed`: the topic's partitions with a committed offset; `seen`: those that existed when this member began.
    """
    if seen is not None and partition not in seen:
        return True
    if not committed:
        return False
    if view.elastic:
        return partition >= view.lineage.initial
    return partition > max(committed)
