"""The fetcher's state: topics and partitions with their positions, fetch sessions, requests on the wire.

The functions of `assigning`, `requesting`, `receiving` and `delivering` change the state; shared steps are its methods.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import NO_TOPIC_ID, TopicPartition
from anabranch.machines.clients.fetching.values import (
    EARLIEST,
    LATEST,
    Fetched,
    FetcherSettings,
    FetchFrom,
    Lookup,
    RecordFilter,
    TopicView,
)
from anabranch.machines.clients.key_ranges import KeyRanges, pieces, places
from anabranch.machines.key_ranges import joined
from anabranch.machines.keyspace import Interval
from anabranch.machines.lineage import Frontier
from anabranch.machines.partition.sharing import Asked


@dataclass(slots=True, eq=False)
class Partition:
    """An assigned partition."""

    topic: Topic
    number: int
    position: int | None = None
    wanted_timestamp: int = LATEST
    """The timestamp to look up while the partition has no position."""
    fetch_offset: int = 0
    held: deque[Fetched] = field(default_factory=deque)
    held_size: int = 0
    paused: bool = False
    """Whether the application has paused it."""
    refused: bool = False
    """Not read because its broker gives no part of its records."""
    is_nowhere: bool = False
    """Not read because its position is not in the log, and `auto.offset.reset` is none: until another one is set."""
    retry_at_ms: int = 0
    failures: int = 0
    looking_up: int = 0
    """The id of the lookup in flight for the position; 0 if none."""
    awaiting: bool = False
    """The starting position is not known yet: the group's committed offset is being read."""
    topic_id: UUID | None = None
    """The topic's id, if known: another topic of the same name is not read."""
    high_watermark: int = -1
    log_start: int = -1
    committed: int | None = None
    """The group's committed offset, as far as this member knows."""
    told: int | None = None
    """The group's progress as told by the coordinator: what follows the committed offset without a record counts."""
    start: int | None = None
    """The first position: it counts as read up to here while nothing is committed."""
    anew_from: int | None = None
    """Where it begins if nothing is committed, as it has begun there before."""
    reset_at: int = 0
    """Where a lookup made it begin, as nothing was committed."""
    is_sought: bool = False
    """Whether the application has set the position, and was handed nothing from there."""
    handed_end: int = 0
    """The offset after the last record handed out."""
    flushed: int = 0
    """The application has flushed its state of the records before this offset."""
    finished: int | None = None
    """All records before are processed, where the application says which ones are; None where handed out is done."""
    announced: int = -1
    """The application was told of all segments with a gate that begin at this offset or before."""
    origin: FetchFrom | None = None
    """What was last to be fetched."""
    sought: KeyRanges = ()
    """The places of the key space for which the position is being looked up; all of the share without any."""
    share: KeyRanges = ()
    """The places of the key space of which this consumer reads the records; all without any."""
    arriving: KeyRanges = ()
    """Granted ranges beside the share, of which is not known yet where the group is in them."""
    arrivals: int = 0
    """Names the assignment, or the last grant: what was asked, or known, before says nothing about it."""
    floor: Frontier | None = None
    """By key, the offset below which the records are not read (again); None where the position says it."""
    is_sifted: bool = False
    """Whether the consumer leaves out by itself what lies below the floor: its broker gives no part of the records."""
    done: Frontier | None = None
    """By key, the offset below which all is processed, where that is more than the position says."""
    committed_by_key: Frontier | None = None
    """The group's committed offsets by key, as far as this member of those that share the partition knows."""
    passed: Frontier | None = None
    """By key, how far owners are known to have come, where that is not as far as the group has committed."""
    gone: Frontier | None = None
    """By key, how far this member may say that it has come: not to where it begins behind a gate that is closed, as
    others have finished what lies before; None: to where it stands."""
    wanted: Asked | None = None
    """What is wanted: the share, and the filter of the consumer; None for all records."""
    asked: Asked | None = None
    """What is asked for now: of what is wanted, the keys that are not read at the fetch offset."""
    asked_until: int | None = None
    """The offset from which on more keys are asked for."""
    name: TopicPartition = field(init=False)

    def __post_init__(self) -> None:
        self.name = TopicPartition(self.topic.name, self.number)

    def stand(self, offset: int) -> None:
        """Set the position, without a hand-out: skipped records are not read."""
        if self.start is None or self.handed_end <= self.start:
            self.start = self.handed_end = self.flushed = offset
        else:
            self.start = min(self.start, offset)
            self.handed_end = max(self.handed_end, offset)
            self.flushed = min(self.flushed, offset)
        self.position = self.fetch_offset = offset
        self.is_nowhere = False
        self.finished = None
        self.announced = offset - 1
        self.topic.limits = None
        self.ask_from_here()

    @property
    def is_still(self) -> bool:
        """Whether no records are fetched and handed out, whatever there are."""
        return self.paused or self.refused or self.is_nowhere

    @property
    def is_of_another_topic(self) -> bool:
        """Whether the topic was deleted and created again since the partition was granted: its records are gone."""
        if self.topic_id is None or self.topic.view is None:
            return False
        ids = (self.topic_id, self.topic.view.topic_id)
        return NO_TOPIC_ID not in ids and ids[0] != ids[1]

    @property
    def processed(self) -> int | None:
        """The offset before which the application has processed all records."""
        return self.position if self.finished is None else self.finished

    def ask(self, filter: RecordFilter | None) -> None:
        """Ask for the records of the share that pass a filter, from the position on."""
        wanted = None
        if self.share or filter is not None:
            few = filter or RecordFilter()
            wanted = Asked(places(self.share), few.keys, few.keys_refused, few.size_min, few.size_max)
        if wanted != self.wanted:
            self.refused = False
            self.wanted = wanted
            self.held.clear()
            self.held_size = 0
            if self.position is not None:
                self.fetch_offset = self.position
        self.ask_from_here()

    def ask_from_here(self) -> None:
        """Ask for the keys that are not read at the fetch offset, up to where one more is not."""
        asked, self.asked_until = self.wanted, None
        if self.floor is not None and not (self.is_sifted and asked is None):
            steps = pieces(self.floor, places(self.share))
            self.asked_until = min((at for _, _, at in steps if at > self.fetch_offset), default=None)
            if self.asked_until is not None:
                here = joined((Interval(start, end) for start, end, at in steps if at <= self.fetch_offset))
                asked = (
                    Asked(here or places(self.share)) if asked is None else asked._replace(ranges=here or asked.ranges)
                )
        if asked != self.asked:
            self.asked = asked

    def forget(self) -> None:
        """Drop the fetched records, and ignore responses in flight."""
        self.held.clear()
        self.held_size = 0
        self.looking_up = 0
        self.sought = ()
        self.retry_at_ms = 0
        self.awaiting = False
        self.topic.limits = None


@dataclass(slots=True, eq=False)
class Topic:
    """A topic with assigned partitions."""

    name: str
    follow: bool
    """Whether new partitions are added to the assignment."""
    view: TopicView | None = None
    partitions: dict[int, Partition] = field(default_factory=dict)
    limits: dict[int, int | None] | None = None
    """The offset at which each partition must stop; None if the gates must be evaluated again."""
    stale: bool = True
    asked: bool = False
    ask_at_ms: int = 0
    failures: int = 0
    awaiting: bool = False
    """Whether partitions begin only after `Fetcher.begin`."""
    granted: bool = False
    """Whether partitions are granted one by one to a member of a group."""
    elsewhere: dict[int, int] = field(default_factory=dict)
    """For a granted topic, the group's positions in partitions that other members read."""
    lifted: dict[int, int] = field(default_factory=dict)
    """For a granted topic, by partition the offset up to which it counts as read because gates open by time."""
    bound: set[int] = field(default_factory=set)
    """Partitions in `lifted` that count no further, until the coordinator says so."""
    unsure: set[int] = field(default_factory=set)
    """Partitions that were in `lifted` until no gate needed them: the coordinator takes it that they still are."""
    needs: dict[int, list[int]] = field(default_factory=dict)
    """What gates wait on at `limits`: by partition the offsets that the group must have read up to (`gating.need`)."""
    share: tuple[Interval, ...] = ()
    """The share of every partition of a topic that is followed."""
    gated: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By partition, where segments with a gate begin; computed once per view."""


@dataclass(slots=True)
class Session:
    """A fetch session with one broker (KIP-227)."""

    session_id: int = 0
    epoch: int = 0
    known: dict[TopicPartition, FetchFrom] = field(default_factory=dict)
    """What the broker was asked for, and asks itself from then on."""
    anew: set[TopicPartition] = field(default_factory=set)
    """Partitions of `known` to ask for again although nothing has changed: the last answer was no use."""
    busy: int = 0
    """The id of the request in flight; 0 if none."""
    retry_at_ms: int = 0
    failures: int = 0

    def ask_anew(self, tp: TopicPartition) -> None:
        """Ask for a partition with the next fetch even if nothing has changed."""
        if tp in self.known:
            self.anew.add(tp)


@dataclass(slots=True)
class FetchingState:
    """The fetching state of one consumer."""

    settings: FetcherSettings
    topics: dict[str, Topic] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    requests: dict[int, tuple[int, Mapping[TopicPartition, FetchFrom]]] = field(default_factory=dict)
    lookups: dict[int, Lookup] = field(default_factory=dict)
    request_ids: int = 0
    turn: int = 0
    wake_at_ms: int | None = None
    errors: dict[str, ApiError] = field(default_factory=dict)
    """For the application, by their texts: while it does not poll, the same ones come again and again."""
    milestone: bool = False
    """Whether a position has passed the end of a layout."""
    filter: RecordFilter | None = None
    """Which records the application wants."""
    announcing: bool = False
    """Whether the application is told before the first record of a segment with a gate."""

    def partitions(self) -> Iterator[Partition]:
        """All assigned partitions."""
        return (partition for topic in self.topics.values() for partition in topic.partitions.values())

    def find(self, tp: TopicPartition) -> Partition | None:
        """Return a partition, if assigned."""
        topic = self.topics.get(tp.topic)
        return None if topic is None else topic.partitions.get(tp.partition)

    def partition(self, tp: TopicPartition) -> Partition:
        """Return an assigned partition. Raises `ApiError` for any other."""
        partition = self.find(tp)
        if partition is None:
            raise ApiError(
                ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{tp} is not assigned to this consumer; assign it first"
            )
        return partition

    @property
    def reset_timestamp(self) -> int:
        """The timestamp for `auto.offset.reset`."""
        return EARLIEST if self.settings.auto_offset_reset == "earliest" else LATEST

    def tell(self, error: ApiError) -> None:
        """Note an error for the application."""
        self.errors.setdefault(str(error), error)

    def new_id(self) -> int:
        """Return a new request id."""
        self.request_ids += 1
        return self.request_ids

    def wake(self, at_ms: int) -> None:
        """Drain again at `at_ms` at the latest."""
        if self.wake_at_ms is None or at_ms < self.wake_at_ms:
            self.wake_at_ms = at_ms

    def backoff_ms(self, failures: int) -> int:
        """Return the delay in ms after a number of failures in a row."""
        return min(self.settings.retry_backoff_ms << min(failures - 1, 16), self.settings.retry_backoff_max_ms)

    def ask_later(self, topic: Topic, now_ms: int) -> None:
        """Refresh the topic's metadata after a delay."""
        topic.stale = True
        topic.failures += 1
        topic.ask_at_ms = now_ms + self.backoff_ms(topic.failures)

    def mark_stale(self, partition: Partition, now_ms: int) -> None:
        """Refresh the topic's metadata at once; use the partition's leader again after a delay."""
        partition.topic.stale = True
        partition.failures += 1
        if partition.failures > 1:
            partition.retry_at_ms = now_ms + self.backoff_ms(partition.failures - 1)
