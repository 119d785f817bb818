"""The reader's mind, without clock or socket: what is fetched from where, and what may be handed out when.

Every assigned partition has a position, the next offset to hand out, and holds what was fetched beyond it. Positions
move as records are handed out, and the gates of `machines.lineage` are asked with the positions of all partitions that
are read: at a closed gate a partition stops at exactly the first record that must wait, and keeps what it holds.

The rule it keeps: nothing is handed out whose layout is not known. A fetch says leader epoch and count; a leader that
accepts both rules by our last layout, so of its answer the batches up to that epoch are taken, and no later ones (a
resize may have come before the answer). A refusal, and a later epoch, make the topic stale: it is looked at again, and
positions outlive that. Partitions that appear start at their log start; removed ones leave.

Fetching is incremental (KIP-227), one request per broker at a time, sent while what came before is still being read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_LEADER_EPOCH, NO_TOPIC_ID, TopicPartition
from anabranch.machines.lineage import BEYOND, Lineage

EARLIEST, LATEST = -2, -1
"""Timestamps that ask ListOffsets for the log start and the log end."""
PARTITION_SIZE_MIN = 1024 * 1024
EPOCH_MAX = (1 << 31) - 1
FAILURES_UNTIL_MISSING = 4
"""Looks at a topic that is not there, until the reader is told: a topic that was just made may take a moment."""
SESSION_EPOCH_MAX = (1 << 31) - 1

STALE = frozenset(
    {
        ErrorCode.INVALID_PARTITION_METADATA,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
        ErrorCode.INCONSISTENT_TOPIC_ID,
        ErrorCode.LEADER_NOT_AVAILABLE,
        ErrorCode.REPLICA_NOT_AVAILABLE,
        ErrorCode.KAFKA_STORAGE_ERROR,
    }
)
"""Answers that mean: what we know of the topic is out of date."""
SESSION_LOST = frozenset(
    {
        ErrorCode.FETCH_SESSION_ID_NOT_FOUND,
        ErrorCode.INVALID_FETCH_SESSION_EPOCH,
        ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR,
    }
)

_BATCH = Struct(">qiIBIhi")
"""Base offset, length, leader epoch, magic, CRC, attributes, last offset delta: how a record batch begins."""
_BATCH_HEADER_SIZE = 61
_LENGTH_END = 12


@dataclass(frozen=True, slots=True)
class TopicView:
    """What is known of a topic: one consistent look at its layouts, leaders and epochs."""

    name: str
    topic_id: UUID
    lineage: Lineage
    leaders: Mapping[int, int]
    """Partition to node, for every partition there is; -1 where none leads."""
    epochs: Mapping[int, int]
    elastic: bool
    ordered: bool = True
    """Whether gates apply: false where the topic or the reader says that order does not matter."""

    @property
    def said(self) -> int:
        """What a fetch says of the count."""
        return self.lineage.count if self.elastic else COUNT_NOT_SAID


@dataclass(frozen=True, slots=True)
class FetchFrom:
    """What a fetch request says about one partition."""

    offset: int
    leader_epoch: int
    size_max: int
    topic_id: UUID
    count: int


@dataclass(frozen=True, slots=True)
class Fetch:
    """Send a fetch to `node`; partitions that are part of the session and did not change are left out."""

    request_id: int
    node: int
    session_id: int
    session_epoch: int
    partitions: Mapping[TopicPartition, FetchFrom]
    forgotten: Sequence[TopicPartition]


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ask `node` for the offset at a timestamp, of each partition: (timestamp, leader epoch)."""

    request_id: int
    node: int
    partitions: Mapping[TopicPartition, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a broker said about one fetched partition."""

    error: ErrorCode
    data: memoryview | None = None
    high_watermark: int = -1
    last_stable_offset: int = -1
    log_start_offset: int = -1
    aborted: Sequence[tuple[int, int]] = ()
    """(producer id, first offset) of aborted transactions, for readers of committed records only."""


@dataclass(frozen=True, slots=True, eq=False)
class Fetched:
    """Whole record batches of one partition; `data` may end in a piece of one more."""

    data: memoryview
    next_offset: int
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions, whose records are to be left out."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Records that may be handed out now: those of `fetched` at offsets `start` to `end`, `end` exclusive."""

    topic: str
    partition: int
    fetched: Fetched
    start: int
    end: int


@dataclass(slots=True)
class Work:
    """What the shell is to do now; `wake_at_ms` is when to ask again if nothing happens before."""

    fetches: list[Fetch] = field(default_factory=list)
    lookups: list[Lookup] = field(default_factory=list)
    refresh: list[str] = field(default_factory=list)
    wake_at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class FetcherSettings:
    """The consumer's settings that decide what is fetched when, by Kafka's names."""

    fetch_max_bytes: int = 50 * 1024 * 1024
    max_partition_fetch_bytes: int = 8 * 1024 * 1024
    auto_offset_reset: str = "latest"
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000


@dataclass(slots=True, eq=False)
class _Partition:
    topic: _Topic
    number: int
    position: int | None = None
    wanted_timestamp: int = LATEST
    """Where to begin, while there is no position."""
    fetch_offset: int = 0
    held: deque[Fetched] = field(default_factory=deque)
    held_size: int = 0
    paused: bool = False
    retry_at_ms: int = 0
    failures: int = 0
    looking_up: int = 0
    """The request that looks for a position, if one does."""
    awaiting: bool = False
    """Where to begin is not known yet: the group's committed offset is being asked for."""
    topic_id: UUID | None = None
    """The topic that is meant, where it is known by its id: another one of the same name is not read."""
    high_watermark: int = -1
    log_start: int = -1

    @property
    def name(self) -> TopicPartition:
        return TopicPartition(self.topic.name, self.number)


@dataclass(slots=True, eq=False)
class _Topic:
    name: str
    follow: bool
    """Partitions that appear are read as well."""
    view: TopicView | None = None
    partitions: dict[int, _Partition] = field(default_factory=dict)
    limits: dict[int, int | None] | None = None
    """How far the gates are open; None when it must be found out again."""
    stale: bool = True
    asked: bool = False
    ask_at_ms: int = 0
    failures: int = 0
    awaiting: bool = False
    """Partitions begin where `begin` says."""
    granted: bool = False
    """Partitions are granted one by one to a member of a group."""
    elsewhere: dict[int, int] = field(default_factory=dict)
    """Of a granted topic: how far the group has come in partitions that other members read."""


@dataclass(slots=True)
class _Session:
    """A fetch session with one broker (KIP-227)."""

    session_id: int = 0
    epoch: int = 0
    known: dict[TopicPartition, FetchFrom] = field(default_factory=dict)
    busy: int = 0
    """The request that is on its way, if one is."""
    retry_at_ms: int = 0
    failures: int = 0


class Fetcher:
    """Feed it what happens, `drain` it and do what it says, hand out what is `ready`."""

    def __init__(self, settings: FetcherSettings) -> None:
        self._settings = settings
        self._topics: dict[str, _Topic] = {}
        self._sessions: dict[int, _Session] = {}
        self._requests: dict[int, tuple[int, Mapping[TopicPartition, FetchFrom]]] = {}
        self._lookups: dict[int, Lookup] = {}
        self._request_ids = 0
        self._turn = 0
        self._wake_at_ms: int | None = None
        self._errors: list[ApiError] = []
        self._milestone = False

    # -- what the reader wants ----------------------------------------------------------------------------------------

    def assign(
        self, partitions: Iterable[TopicPartition], whole_topics: Iterable[str] = (), *, awaiting: bool = False
    ) -> None:
        """Read exactly these; what was read before and stays keeps its position.

        With `awaiting`, the rest begins when `begin` has said where, as that which is granted does.
        """
        wanted: dict[str, set[int] | None] = dict.fromkeys(whole_topics)
        for tp in partitions:
            numbers = wanted.setdefault(tp.topic, set())
            if numbers is not None:
                numbers.add(tp.partition)
        for gone in self._topics.keys() - wanted.keys():
            del self._topics[gone]
        for name, numbers in wanted.items():
            topic = self._topics.get(name)
            if topic is None or topic.follow != (numbers is None):
                kept = {} if topic is None else topic.partitions
                topic = self._topics[name] = _Topic(name, follow=numbers is None, awaiting=awaiting)
                for partition in kept.values():
                    partition.topic = topic
                topic.partitions = kept
            if numbers is None:
                continue
            topic.partitions = {
                number: topic.partitions.get(number)
                or _Partition(topic, number, wanted_timestamp=self._reset(), awaiting=awaiting)
                for number in sorted(numbers)
            }
            topic.limits = None

    def grant(self, partitions: Iterable[tuple[TopicPartition, UUID | None]]) -> None:
        """Read these too, as a member of a group, each as soon as `begin` has said where to begin."""
        for tp, topic_id in partitions:
            topic = self._topics.setdefault(tp.topic, _Topic(tp.topic, follow=False, granted=True))
            assert topic.granted
            if tp.partition not in topic.partitions:
                topic.partitions[tp.partition] = _Partition(topic, tp.partition, awaiting=True, topic_id=topic_id)
            topic.limits = None

    def withdraw(self, partitions: Iterable[TopicPartition]) -> None:
        """Stop reading these, and drop what was fetched of them."""
        for tp in partitions:
            topic = self._topics.get(tp.topic)
            if topic is not None:
                topic.partitions.pop(tp.partition, None)
                topic.limits = None
                if not topic.partitions:
                    del self._topics[tp.topic]

    def awaiting(self) -> tuple[TopicPartition, ...]:
        """The granted partitions of which nobody has said where to begin."""
        return tuple(
            part.name for topic in self._topics.values() for part in topic.partitions.values() if part.awaiting
        )

    def begin(self, tp: TopicPartition, *, offset: int | None = None, timestamp: int = LATEST) -> None:
        """Say where a granted partition begins, unless the reader has chosen a place meanwhile."""
        partition = self._find(tp)
        if partition is None or not partition.awaiting:
            return
        if offset is None:
            self.seek_to_timestamp(tp, timestamp)
        else:
            self.seek(tp, offset)

    def elsewhere(self, topic: str, positions: Mapping[int, int]) -> None:
        """Learn how far the group has come in partitions of a granted topic that other members read."""
        found = self._topics.get(topic)
        if found is not None:
            found.elsewhere.update(positions)
            found.limits = None

    def waits(self) -> tuple[TopicPartition, ...]:
        """The partitions of other members that gates of granted ones wait on."""
        found: set[TopicPartition] = set()
        for topic in self._topics.values():
            view = topic.view
            if not topic.granted or view is None or not view.ordered or view.lineage.current == 0:
                continue
            gates = view.lineage.gates(_positions(topic, view))
            for number in topic.partitions:
                names = (TopicPartition(topic.name, wait.partition) for wait in gates.waits(number))
                found.update(tp for tp in names if tp.partition not in topic.partitions)
        return tuple(sorted(found))

    def milestone(self) -> bool:
        """Whether a position passed the end of a layout since this was last asked: others may wait for its commit."""
        milestone, self._milestone = self._milestone, False
        return milestone

    def view(self, topic: str) -> TopicView | None:
        """What is known of a topic that is read."""
        found = self._topics.get(topic)
        return None if found is None else found.view

    def positions(self) -> dict[TopicPartition, int]:
        """The next offset to hand out of every partition that has one."""
        return {
            part.name: part.position
            for topic in self._topics.values()
            for part in topic.partitions.values()
            if part.position is not None
        }

    def seek(self, tp: TopicPartition, offset: int) -> None:
        """Go on at `offset`."""
        partition = self._partition(tp)
        self._forget(partition)
        partition.position = partition.fetch_offset = offset

    def seek_to_timestamp(self, tp: TopicPartition, timestamp: int) -> None:
        """Go on at the first record at or after a timestamp in ms, or at `EARLIEST` or `LATEST`."""
        partition = self._partition(tp)
        self._forget(partition)
        partition.position = None
        partition.wanted_timestamp = timestamp

    def pause(self, tp: TopicPartition) -> None:
        """Hand out nothing of this partition; its position stays, and still counts for the gates of others."""
        self._partition(tp).paused = True

    def resume(self, tp: TopicPartition) -> None:
        """Undo `pause`."""
        self._partition(tp).paused = False

    @property
    def assignment(self) -> tuple[TopicPartition, ...]:
        """The partitions that are read now."""
        return tuple(partition.name for topic in self._topics.values() for partition in topic.partitions.values())

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that are read."""
        return tuple(self._topics)

    @property
    def all_known(self) -> bool:
        """Whether every topic was looked at."""
        return all(topic.view is not None for topic in self._topics.values())

    @property
    def paused(self) -> tuple[TopicPartition, ...]:
        """The partitions that are paused."""
        return tuple(part.name for topic in self._topics.values() for part in topic.partitions.values() if part.paused)

    def position(self, tp: TopicPartition) -> int | None:
        """The next offset to hand out, or None while it is being looked up."""
        return self._partition(tp).position

    def high_watermark(self, tp: TopicPartition) -> int:
        """The high watermark that the last fetch told, or -1."""
        return self._partition(tp).high_watermark

    # -- what happens -------------------------------------------------------------------------------------------------

    def topic_known(self, view: TopicView, now_ms: int) -> None:
        """Learn a topic anew: partitions that appeared join, those that were removed leave, gates are asked again."""
        topic = self._topics.get(view.name)
        if topic is None:
            return
        first = topic.view is None
        again = topic.view is not None and NO_TOPIC_ID not in (topic.view.topic_id, view.topic_id)
        if again and topic.view is not None and topic.view.topic_id != view.topic_id:
            self._made_anew(topic)
        topic.view, topic.limits = view, None
        topic.asked = topic.stale = False
        if topic.follow:
            for number in sorted(view.leaders):
                if number not in topic.partitions:
                    start = self._reset() if first else EARLIEST
                    new = _Partition(topic, number, wanted_timestamp=start, awaiting=topic.awaiting)
                    topic.partitions[number] = new
            for number in topic.partitions.keys() - view.leaders.keys():
                del topic.partitions[number]
        elif topic.granted:
            pass  # what is there no more, the group's coordinator takes back
        elif first and (absent := topic.partitions.keys() - view.leaders.keys()):
            names = ", ".join(str(number) for number in sorted(absent))
            has = f"it has {len(view.leaders)}, of numbers up to {max(view.leaders, default=-1)}"
            text = f"topic {view.name} has no partition {names}: {has}. Assign others."
            self._errors.append(ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, text))
            for number in absent:
                del topic.partitions[number]
        else:
            for number in topic.partitions.keys() - view.leaders.keys():
                del topic.partitions[number]
        if any(view.leaders.get(number, -1) < 0 for number in topic.partitions):
            self._ask_later(topic, now_ms)
        else:
            topic.failures = 0

    def _made_anew(self, topic: _Topic) -> None:
        """The topic was deleted, and another one of its name created: none of its records were read."""
        topic.elsewhere = {}
        for partition in topic.partitions.values():
            if not partition.awaiting and partition.topic_id is None:
                self._forget(partition)
                partition.position, partition.wanted_timestamp = None, EARLIEST

    def topic_unknown(self, name: str, error: ApiError, now_ms: int) -> None:
        """Learn that a topic could not be looked at."""
        topic = self._topics.get(name)
        if topic is None:
            return
        topic.asked = False
        self._ask_later(topic, now_ms)
        missing = error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and topic.failures >= FAILURES_UNTIL_MISSING
        if (missing and not topic.granted) or not error.retriable:
            self._errors.append(error)

    def answered(
        self,
        request_id: int,
        error: ErrorCode,
        session_id: int,
        answers: Mapping[TopicPartition, Answer],
        now_ms: int,
    ) -> None:
        """Learn a broker's answer to a fetch."""
        node, asked = self._requests.pop(request_id, (-1, {}))
        session = self._sessions.get(node)
        if session is None or session.busy != request_id:
            return
        session.busy = 0
        if error is not ErrorCode.NONE:
            self._sessions[node] = _Session()
            if error not in SESSION_LOST:
                self._sessions[node].retry_at_ms = now_ms + self._backoff(1)
            return
        session.failures = 0
        session.session_id = session_id
        if session_id == 0:
            session.epoch, session.known = 0, {}
        else:
            session.epoch = session.epoch % SESSION_EPOCH_MAX + 1
        for tp, answer in answers.items():
            partition = self._find(tp)
            if partition is None:
                continue
            said = asked.get(tp)
            if said is None or partition.topic_id not in (None, said.topic_id):
                continue
            if partition.position is not None and said.offset == partition.fetch_offset:
                self._take(partition, said, answer, now_ms)
                if answer.error is not ErrorCode.NONE:
                    session.known.pop(tp, None)

    def lost(self, request_id: int, now_ms: int) -> None:
        """Learn that a request, fetch or lookup, will not be answered."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None:
            for tp in lookup.partitions:
                partition = self._find(tp)
                if partition is not None and partition.looking_up == request_id:
                    partition.looking_up = 0
                    self._stale(partition, now_ms)
            return
        node, asked = self._requests.pop(request_id, (-1, {}))
        session = self._sessions.get(node)
        if session is None or session.busy != request_id:
            return
        failures = session.failures + 1
        self._sessions[node] = _Session(failures=failures, retry_at_ms=now_ms + self._backoff(failures))
        for name in {tp.topic for tp in asked}:
            topic = self._topics.get(name)
            if topic is not None:
                topic.stale = True

    def found(self, request_id: int, answers: Mapping[TopicPartition, tuple[ErrorCode, int]], now_ms: int) -> None:
        """Learn the offsets that a lookup found; -1 means that no record is that young: the log end it is."""
        lookup = self._lookups.pop(request_id, None)
        if lookup is None:
            return
        for tp in lookup.partitions:
            partition = self._find(tp)
            if partition is None or partition.looking_up != request_id:
                continue
            partition.looking_up = 0
            error, offset = answers.get(tp, (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1))
            if error is ErrorCode.NONE and offset >= 0:
                partition.position = partition.fetch_offset = offset
                partition.failures = 0
                partition.topic.limits = None
                self._milestone = True
            elif error is ErrorCode.NONE:
                partition.wanted_timestamp = LATEST
            elif error in STALE or error.retriable:
                self._stale(partition, now_ms)
            else:
                self._errors.append(ApiError(error, f"no offset could be found for {tp}"))
                partition.retry_at_ms = now_ms + self._settings.retry_backoff_max_ms

    def stands_at(self, part: Ready) -> bool:
        """Whether the first record of `part` is still the next one to hand out of its partition."""
        partition = self._find(TopicPartition(part.topic, part.partition))
        return partition is not None and partition.position == part.start

    def all_handed_out(self, parts: Sequence[Ready]) -> bool:
        """Say that all records of `parts` were handed out; False, and nothing moves, if the reader went elsewhere."""
        reached: dict[tuple[str, int], int] = {}
        for part in parts:
            name = (part.topic, part.partition)
            if part.start != reached[name] if name in reached else not self.stands_at(part):
                return False
            reached[name] = part.end
        for part in parts:
            self.handed_out(part, part.end)
        return True

    def handed_out(self, part: Ready, offset: int) -> None:
        """Say that the records of `part`, at which its partition stands, were handed out below `offset`."""
        partition = self._partition(TopicPartition(part.topic, part.partition))
        assert partition.position == part.start, (partition.name, partition.position, part.start)
        assert part.start <= offset <= part.end
        partition.position = offset
        view = partition.topic.view
        if view is not None and view.lineage.current:
            ends = (ends.get(part.partition, -1) for ends in view.lineage.ends)
            self._milestone = self._milestone or any(part.start < end <= offset for end in ends)
        while partition.held and partition.held[0].next_offset <= offset:
            partition.held_size -= len(partition.held.popleft().data)
        limits = partition.topic.limits
        if limits is not None and any(limit is not None for limit in limits.values()):
            partition.topic.limits = None

    def grow_old(self) -> None:
        """Look at every topic again, though nothing seems wrong: partitions may have appeared."""
        for topic in self._topics.values():
            topic.stale = True

    # -- what to do ---------------------------------------------------------------------------------------------------

    def errors(self) -> list[ApiError]:
        """What the reader must be told; each is told once."""
        errors, self._errors = self._errors, []
        return errors

    def drain(self, now_ms: int) -> Work:
        """Say everything there is to do at `now_ms`; what was said once is not said again."""
        work = Work()
        self._wake_at_ms = None
        wanted: dict[int, dict[TopicPartition, FetchFrom]] = {node: {} for node in self._sessions}
        lookups: dict[int, dict[TopicPartition, tuple[int, int]]] = {}
        for topic in self._topics.values():
            self._look_at(topic, now_ms, work)
            if topic.view is not None:
                for partition in topic.partitions.values():
                    self._want(topic.view, partition, now_ms, wanted, lookups)
        for node, partitions in lookups.items():
            lookup = Lookup(self._new_id(), node, partitions)
            self._lookups[lookup.request_id] = lookup
            for tp in partitions:
                self._partition(tp).looking_up = lookup.request_id
            work.lookups.append(lookup)
        for node, froms in wanted.items():
            fetch = self._fetch(node, froms, now_ms)
            if fetch is not None:
                work.fetches.append(fetch)
        work.wake_at_ms = self._wake_at_ms
        return work

    def ready(self) -> list[Ready]:
        """The records that may be handed out at these positions; the gates are asked once for all of them.

        A partition's parts are in order; which partition comes first changes from call to call.
        """
        groups: list[list[Ready]] = []
        for topic in self._topics.values():
            if topic.view is None or not any(partition.held for partition in topic.partitions.values()):
                continue
            if topic.limits is None:
                topic.limits = _limits(topic, topic.view)
            for partition in topic.partitions.values():
                group = _ready(partition, topic.limits.get(partition.number))
                if group:
                    groups.append(group)
        self._turn += 1
        first = self._turn % len(groups) if groups else 0
        return [part for group in (*groups[first:], *groups[:first]) for part in group]

    # -- inside -------------------------------------------------------------------------------------------------------

    def _reset(self) -> int:
        return EARLIEST if self._settings.auto_offset_reset == "earliest" else LATEST

    def _new_id(self) -> int:
        self._request_ids += 1
        return self._request_ids

    def _find(self, tp: TopicPartition) -> _Partition | None:
        topic = self._topics.get(tp.topic)
        return None if topic is None else topic.partitions.get(tp.partition)

    def _partition(self, tp: TopicPartition) -> _Partition:
        partition = self._find(tp)
        if partition is None:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{tp} is not assigned to this consumer; assign it first"
            )
        return partition

    def _forget(self, partition: _Partition) -> None:
        """Drop what was fetched, and the answers that are on their way."""
        partition.held.clear()
        partition.held_size = 0
        partition.looking_up = 0
        partition.retry_at_ms = 0
        partition.awaiting = False
        partition.topic.limits = None

    def _wake(self, at_ms: int) -> None:
        if self._wake_at_ms is None or at_ms < self._wake_at_ms:
            self._wake_at_ms = at_ms

    def _backoff(self, failures: int) -> int:
        return min(self._settings.retry_backoff_ms << min(failures - 1, 16), self._settings.retry_backoff_max_ms)

    def _ask_later(self, topic: _Topic, now_ms: int) -> None:
        topic.stale = True
        topic.failures += 1
        topic.ask_at_ms = now_ms + self._backoff(topic.failures)

    def _stale(self, partition: _Partition, now_ms: int) -> None:
        partition.topic.stale = True
        partition.failures += 1
        if partition.failures > 1:
            partition.retry_at_ms = now_ms + self._backoff(partition.failures - 1)

    def _look_at(self, topic: _Topic, now_ms: int, work: Work) -> None:
        if not topic.stale or topic.asked:
            return
        if now_ms < topic.ask_at_ms:
            self._wake(topic.ask_at_ms)
            return
        topic.asked = True
        topic.ask_at_ms = now_ms + self._settings.retry_backoff_ms
        work.refresh.append(topic.name)

    def _want(
        self,
        view: TopicView,
        partition: _Partition,
        now_ms: int,
        wanted: dict[int, dict[TopicPartition, FetchFrom]],
        lookups: dict[int, dict[TopicPartition, tuple[int, int]]],
    ) -> None:
        node = view.leaders.get(partition.number, -1)
        if node < 0 or partition.awaiting or (partition.topic.stale and partition.failures):
            return
        if partition.topic_id is not None and partition.topic_id != view.topic_id:
            if not partition.topic.stale:
                self._ask_later(partition.topic, now_ms)
                self._wake(partition.topic.ask_at_ms)
            return
        if now_ms < partition.retry_at_ms:
            self._wake(partition.retry_at_ms)
            return
        epoch = view.epochs.get(partition.number, NO_LEADER_EPOCH)
        if partition.position is None:
            if not partition.looking_up:
                lookups.setdefault(node, {})[partition.name] = (partition.wanted_timestamp, epoch)
            return
        size_max = self._size_max()
        if partition.paused or partition.held_size >= size_max:
            return
        origin = FetchFrom(partition.fetch_offset, epoch, size_max, view.topic_id, view.said)
        wanted.setdefault(node, {})[partition.name] = origin

    def _size_max(self) -> int:
        """Bytes to fetch of one partition at a time: what is held in all stays below twice `fetch.max.bytes`."""
        partitions = max(1, sum(len(topic.partitions) for topic in self._topics.values()))
        share = max(PARTITION_SIZE_MIN, self._settings.fetch_max_bytes // partitions)
        return min(self._settings.max_partition_fetch_bytes, share)

    def _fetch(self, node: int, wanted: dict[TopicPartition, FetchFrom], now_ms: int) -> Fetch | None:
        session = self._sessions.setdefault(node, _Session())
        if session.busy or not wanted:
            return None
        if now_ms < session.retry_at_ms:
            self._wake(session.retry_at_ms)
            return None
        if session.session_id == 0:
            told, forgotten = wanted, []
        else:
            told = {tp: said for tp, said in wanted.items() if session.known.get(tp) != said}
            forgotten = [tp for tp in session.known if tp not in wanted]
        session.known = dict(wanted)
        session.busy = self._new_id()
        self._requests[session.busy] = (node, wanted)
        return Fetch(session.busy, node, session.session_id, session.epoch, told, forgotten)

    def _take(self, partition: _Partition, said: FetchFrom, answer: Answer, now_ms: int) -> None:
        """Hold what was fetched, or note why nothing was."""
        code = answer.error
        if code is ErrorCode.NONE:
            partition.failures = 0
            partition.high_watermark = answer.high_watermark
            partition.log_start = answer.log_start_offset
            if answer.data is not None and len(answer.data) > 0:
                self._hold(partition, said, answer)
        elif code is ErrorCode.OFFSET_OUT_OF_RANGE and partition.held:
            partition.retry_at_ms = now_ms + self._settings.retry_backoff_ms
        elif code is ErrorCode.OFFSET_OUT_OF_RANGE:
            self._out_of_range(partition)
        elif code in STALE:
            self._stale(partition, now_ms)
        elif code.retriable:
            partition.failures += 1
            partition.retry_at_ms = now_ms + self._backoff(partition.failures)
        else:
            self._errors.append(ApiError(code, f"{partition.name} cannot be read at offset {partition.fetch_offset}"))
            partition.retry_at_ms = now_ms + self._settings.retry_backoff_max_ms

    def _hold(self, partition: _Partition, said: FetchFrom, answer: Answer) -> None:
        assert answer.data is not None
        elastic = said.count != COUNT_NOT_SAID
        size, next_offset, later = _reach(answer.data, said.leader_epoch if elastic else EPOCH_MAX)
        if later:
            partition.topic.stale = True
        if next_offset > partition.fetch_offset:
            data = answer.data[:size]
            partition.held.append(Fetched(data, next_offset, tuple(answer.aborted)))
            partition.held_size += size
            partition.fetch_offset = next_offset
        elif not later:
            text = f"{partition.name} has no whole record batch at offset {partition.fetch_offset}"
            self._errors.append(ApiError(ErrorCode.CORRUPT_MESSAGE, f"{text}, as far as the broker sent it"))

    def _out_of_range(self, partition: _Partition) -> None:
        """The offset is gone or never was: begin again where `auto.offset.reset` says (what was held has been read)."""
        if self._settings.auto_offset_reset in ("earliest", "latest"):
            self._forget(partition)
            partition.wanted_timestamp = self._reset()
            partition.position = None
            return
        text = (
            f"offset {partition.fetch_offset} of {partition.name} is not in its log, and auto.offset.reset is "
            f"'{self._settings.auto_offset_reset}'. Seek to an offset that is there, or set it to earliest or latest."
        )
        self._errors.append(ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, text))
        partition.paused = True


def _ready(partition: _Partition, limit: int | None) -> list[Ready]:
    found: list[Ready] = []
    if partition.paused or partition.position is None:
        return found
    start = partition.position
    for fetched in partition.held:
        end = fetched.next_offset if limit is None else min(limit, fetched.next_offset)
        if end <= start:
            break
        found.append(Ready(partition.topic.name, partition.number, fetched, start, end))
        start = end
    return found


def _limits(topic: _Topic, view: TopicView) -> dict[int, int | None]:
    """How far each partition of the topic may be read at the positions of all of them."""
    if not view.ordered or view.lineage.current == 0:
        return {}
    return view.lineage.deliverable(_positions(topic, view))


def _positions(topic: _Topic, view: TopicView) -> dict[int, int]:
    """How far each partition was read: of those that others read as far as is known, of those that nobody does, all."""
    if topic.granted:
        positions = dict(topic.elsewhere)
    else:
        positions = dict.fromkeys((number for ends in view.lineage.ends for number in ends), BEYOND)
    for number, partition in topic.partitions.items():
        positions.pop(number, None)
        if partition.position is not None:
            positions[number] = partition.position
    return positions


def _reach(data: memoryview, epoch_max: int) -> tuple[int, int, bool]:
    """Walk over the whole batches of leader epochs up to `epoch_max`.

    Returns their size, the offset after the last of them, and whether one of a later epoch follows.
    """
    at, last, size = 0, -1, len(data)
    later = False
    while at + _BATCH_HEADER_SIZE <= size:
        _, length, leader_epoch, _, _, _, _ = _BATCH.unpack_from(data, at)
        if at + _LENGTH_END + length > size or length < _BATCH_HEADER_SIZE - _LENGTH_END:
            break
        if leader_epoch > epoch_max:
            later = True
            break
        last = at
        at += _LENGTH_END + length
    if last < 0:
        return 0, -1, later
    base_offset, _, _, _, _, _, last_delta = _BATCH.unpack_from(data, last)
    return at, base_offset + last_delta + 1, later
