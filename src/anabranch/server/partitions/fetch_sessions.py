"""Fetch sessions (KIP-227): a session remembers its partitions, so that a request names only the changes.

A session goes through epochs: 0 makes it, every request then carries the next one, -1 ends it.

    request                    response
    id 0, epoch -1             every partition of the request, no session
    any id, epoch 0            every partition of the request, under a new session if there is room; the old one ends
    id n, epoch -1             every partition of the request; session n ends
    id n, epoch e > 0          the changed ones of the session's partitions, after the request's changes

A partition has changed when it has records or an error, or when its high watermark or log start is not the one that
was last sent. Partitions that had records go to the back, so that none starves behind a busy one. The rule: at most
`slots` sessions; a new one replaces one unused for two minutes, or a smaller one that is two minutes old. They hold at
most `size_max` bytes together: the largest one goes first, whose reader names its partitions anew.

The first OBJECTS_MAX partitions of a session are kept as objects, which a fetch needs at once. Those beyond are kept as
bytes, in a half of the memory, and become objects for each fetch, which is handled in steps then.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from struct import Struct
from typing import Any, TypeVar
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_LEADER_EPOCH, NO_TOPIC_ID
from anabranch.base.limits import FETCH_SESSIONS_SIZE_MAX
from anabranch.machines.partition.sharing import Asked

FINAL_EPOCH = -1
INITIAL_EPOCH = 0
EPOCH_MAX = 2**31 - 1
EVICTION_AGE_MS = 120_000
NOT_SENT = -2
"""In place of an offset that was sent: none was."""

OBJECTS_MAX = 150
"""Partitions of a session that are kept as objects."""
TARGET_SIZE, PACKED_SIZE, TOPIC_SIZE = 400, 170, 200
"""Bytes of memory that a session takes for a partition as an object, for one as bytes, and for a topic beside its name;
no less than was measured: 390, 158 and 188."""

CHANGES_AT_A_TIME = 200
"""Partitions that a session takes, or forgets, before other work has its turn."""
Key = tuple[str | UUID, int]
Element = TypeVar("Element")


@dataclass(slots=True)
class Target:
    """One partition of a fetch, and the offsets that were last sent of it."""

    topic: str
    topic_id: UUID
    """NO_TOPIC_ID where the request names topics (up to version 12); then `topic` is empty where it uses ids."""
    partition: int
    offset: int
    size_max: int
    leader_epoch: int = NO_LEADER_EPOCH
    last_fetched_epoch: int = NO_LEADER_EPOCH
    undeleted_partition_count: int = COUNT_NOT_SAID
    asked: Asked | ErrorCode | None = None
    """What is wanted of the records, if not all; why that cannot be answered."""
    sent_high_watermark: int = NOT_SENT
    sent_log_start: int = NOT_SENT

    @property
    def key(self) -> Key:
        """The key of the partition in its session."""
        return (self.topic if self.topic_id == NO_TOPIC_ID else self.topic_id, self.partition)

    @property
    def size(self) -> int:
        """The bytes of memory that it takes in its session as an object."""
        return TARGET_SIZE + (self.asked.size if isinstance(self.asked, Asked) else 0)

    def packed(self) -> bytes:
        """What bytes can keep of it: all but its key, and what is wanted of its records."""
        return _PACKED.pack(
            self.offset,
            self.sent_high_watermark,
            self.sent_log_start,
            self.size_max,
            self.leader_epoch,
            self.last_fetched_epoch,
            self.undeleted_partition_count,
        )

    def note_sent(self, *, size: int, error: int, high_watermark: int, log_start: int) -> bool:
        """Record the values sent of the partition; return whether an incremental response must include it."""
        changed = (
            size > 0
            or error != ErrorCode.NONE
            or high_watermark != self.sent_high_watermark
            or log_start != self.sent_log_start
        )
        if error != ErrorCode.NONE:
            self.sent_high_watermark = NOT_SENT
        else:
            self.sent_high_watermark = high_watermark
        self.sent_log_start = log_start
        return changed


_PACKED = Struct("<qqqiiii")
_PARTITION = (1 << 32) - 1
Kept = Target | bytes


@dataclass(slots=True)
class Session:
    """The partitions of one reader, in the order in which they are read."""

    id: int
    uses_topic_ids: bool
    created_ms: int
    used_ms: int
    epoch: int = 1
    """The epoch that the next request must carry."""
    kept: dict[int, Kept] = field(default_factory=dict)
    """By the number of the topic in the session, and below it the 32 bits of the partition."""
    size: int = 0
    """Bytes of memory."""
    _topics: dict[str | UUID, int] = field(default_factory=dict)
    _keys: list[str | UUID] = field(default_factory=list)
    """The names or ids of topics by their number; none is forgotten before the session ends."""

    def __len__(self) -> int:
        return len(self.kept)

    def put(self, target: Target) -> None:
        """Add a partition, or replace it, keeping its place and the offsets that were sent of it."""
        topic, partition = target.key
        topic_number = self._topics.get(topic)
        if topic_number is None:
            topic_number = self._topics[topic] = len(self._keys)
            self._keys.append(topic)
            self.size += TOPIC_SIZE + (len(topic) if isinstance(topic, str) else 0)
        number = topic_number << 32 | partition & _PARTITION
        known = self.kept.get(number)
        if known is not None:
            if isinstance(known, bytes):
                _, target.sent_high_watermark, target.sent_log_start, *_ = _PACKED.unpack(known)
            else:
                target.sent_high_watermark = known.sent_high_watermark
                target.sent_log_start = known.sent_log_start
            self.size -= _size(known)
        made = target.packed() if len(self.kept) >= OBJECTS_MAX and target.asked is None else target
        self.kept[number] = made
        self.size += _size(made)

    def drop(self, key: Key) -> None:
        """Forget a partition."""
        known = self.kept.pop(self._number(key), None)
        if known is not None:
            self.size -= _size(known)

    def sent(self, target: Target) -> None:
        """Keep the offsets that were sent of a partition."""
        number = self._number(target.key)
        known = self.kept.get(number)
        if isinstance(known, bytes):
            offset, _, _, *rest = _PACKED.unpack(known)
            self.kept[number] = _PACKED.pack(offset, target.sent_high_watermark, target.sent_log_start, *rest)

    def to_the_back(self, target: Target) -> None:
        """Read the other partitions first next time."""
        number = self._number(target.key)
        known = self.kept.pop(number, None)
        if known is not None:
            self.kept[number] = known

    def targets_in_steps(self) -> Iterator[list[Target]]:
        """All partitions as they are now, some at a time."""
        numbers, kept = list(self.kept), list(self.kept.values())
        for at in range(0, len(kept), CHANGES_AT_A_TIME):
            some = slice(at, at + CHANGES_AT_A_TIME)
            yield [self._target(*each) for each in zip(numbers[some], kept[some], strict=True)]

    def _number(self, key: Key) -> int:
        """The key of a partition, negative if its topic is not in the session."""
        topic, partition = key
        return self._topics.get(topic, -1) << 32 | partition & _PARTITION

    def _target(self, number: int, kept: Kept) -> Target:
        if not isinstance(kept, bytes):
            return kept
        topic = self._keys[number >> 32]
        partition = number & _PARTITION
        offset, high_watermark, log_start, size_max, epoch, last_epoch, count = _PACKED.unpack(kept)
        return Target(
            topic if isinstance(topic, str) else "",
            NO_TOPIC_ID if isinstance(topic, str) else topic,
            partition if partition < 1 << 31 else partition - (1 << 32),
            offset,
            size_max,
            epoch,
            last_epoch,
            count,
            None,
            high_watermark,
            log_start,
        )


def _size(kept: Kept) -> int:
    return PACKED_SIZE if isinstance(kept, bytes) else kept.size


@dataclass(frozen=True, slots=True)
class FetchContext:
    """The partitions that one fetch reads, and the session that it belongs to."""

    targets: Sequence[Target]
    session: Session | None
    incremental: bool

    @property
    def session_id(self) -> int:
        """The session id of the response; 0 is none."""
        return 0 if self.session is None else self.session.id


class FetchSessions:
    """The sessions of one broker. `draw(bound)` draws from 0 to bound, exclusive."""

    def __init__(
        self,
        slots: int,
        draw: Callable[[int], int],
        size_max: int = FETCH_SESSIONS_SIZE_MAX,
        free: Callable[[dict[Any, Any]], object] = dict.clear,
    ) -> None:
        """`free` clears what a session has held, of which there may be much, at once or later."""
        self._free = free
        self._slots = slots
        self._size_max = size_max
        self.size = 0
        """Bytes of memory of all sessions."""
        self._draw = draw
        self._sessions: dict[int, Session] = {}
        """In order of use, the longest unused first."""
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def size_of(self, session_id: int) -> int:
        """The partitions of a session; 0 without one."""
        session = self._sessions.get(session_id)
        return 0 if session is None else len(session)

    @property
    def partitions(self) -> int:
        """Partitions remembered over all sessions."""
        return sum(len(session) for session in self._sessions.values())

    def begin(
        self,
        session_id: int,
        epoch: int,
        targets: Sequence[Target],
        forgotten: Iterable[Key],
        *,
        uses_topic_ids: bool,
        now_ms: int,
    ) -> FetchContext | ErrorCode:
        """Take a fetch into its session; FETCH_SESSION_ID_NOT_FOUND or another error where it does not fit."""
        once = [*targets]
        keep_last(once)
        return ended(
            self.begin_in_steps(session_id, epoch, once, forgotten, uses_topic_ids=uses_topic_ids, now_ms=now_ms)
        )

    def begin_in_steps(
        self,
        session_id: int,
        epoch: int,
        targets: Sequence[Target],
        forgotten: Iterable[Key],
        *,
        uses_topic_ids: bool,
        now_ms: int,
    ) -> Generator[None, None, FetchContext | ErrorCode]:
        """As `begin` with targets that differ; other work may have its turn after every CHANGES_AT_A_TIME of them."""
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self._end(session_id)
            made = Session(0, uses_topic_ids, created_ms=now_ms, used_ms=now_ms)
            if epoch == INITIAL_EPOCH:
                for some in _stretches(targets):
                    for target in some:
                        made.put(target)
                    yield
            kept = self._keep(made, now_ms) if len(made) else None
            return FetchContext(targets, kept, incremental=False)
        session = self._sessions.get(session_id)
        if session is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if session.uses_topic_ids != uses_topic_ids:
            return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
        session.epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        for some in _stretches(targets):
            before = session.size
            for target in some:
                session.put(target)
            self.size += session.size - before
            yield
            if self._sessions.get(session_id) is not session:
                return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        left = iter(forgotten)
        while keys := list(islice(left, CHANGES_AT_A_TIME)):
            before = session.size
            for key in keys:
                session.drop(key)
            self.size += session.size - before
            yield
            if self._sessions.get(session_id) is not session:
                return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if not len(session):
            self._end(session_id)
            return FetchContext((), None, incremental=True)
        session.used_ms = now_ms
        self._sessions[session_id] = self._sessions.pop(session_id)
        found: list[Target] = []
        for some in session.targets_in_steps():
            if found:
                yield
            found += some
        while self.size > self._size_max:
            self._evict_one(max(self._sessions.values(), key=lambda it: it.size))
        return FetchContext(found, session, incremental=True)

    def _keep(self, session: Session, now_ms: int) -> Session | None:
        """Keep a session that was made, under an id of its own; None if there is no room for it."""
        if len(self._sessions) >= self._slots and not self._evict(len(session), now_ms):
            return None
        while self.size + session.size > self._size_max:
            largest = max(self._sessions.values(), key=lambda it: it.size, default=None)
            if largest is None or largest.size <= session.size:
                return None
            self._evict_one(largest)
        while True:
            session.id = 1 + self._draw(EPOCH_MAX)
            if session.id not in self._sessions:
                break
        self.size += session.size
        self._sessions[session.id] = session
        return session

    def _end(self, session_id: int) -> None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self.size -= session.size
            self._free(session.kept)

    def _evict_one(self, session: Session) -> None:
        self._end(session.id)
        self.evictions += 1

    def _evict(self, size: int, now_ms: int) -> bool:
        if not self._sessions:
            return False
        oldest = next(iter(self._sessions.values()))
        if now_ms - oldest.used_ms <= EVICTION_AGE_MS:
            old_enough = [it for it in self._sessions.values() if now_ms - it.created_ms > EVICTION_AGE_MS]
            oldest = min(old_enough, key=len, default=oldest)
            if oldest not in old_enough or len(oldest) >= size:
                return False
        self._evict_one(oldest)
        return True


def keep_last(targets: list[Target]) -> None:
    """Keep of the targets of one partition the last one, in the place of the first."""
    once = {target.key: target for target in targets}
    if len(once) < len(targets):
        targets[:] = once.values()


def ended(begun: Generator[None, None, FetchContext | ErrorCode]) -> FetchContext | ErrorCode:
    """Take all steps of `begin_in_steps` at once."""
    while True:
        try:
            next(begun)
        except StopIteration as end:
            found: FetchContext | ErrorCode = end.value
            return found


def _stretches(elements: Sequence[Element]) -> Iterator[Sequence[Element]]:
    return (elements[at : at + CHANGES_AT_A_TIME] for at in range(0, len(elements), CHANGES_AT_A_TIME))
