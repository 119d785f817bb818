"""Incremental fetches (KIP-227): what a reader asked for is remembered, so that it only ever says what changed.

A session goes through epochs: 0 makes it, every request then carries the next one, -1 ends it.

    request                    answer
    id 0, epoch -1             everything asked for, no session
    any id, epoch 0            everything asked for, under a new session if there is room; the old one ends
    id n, epoch -1             everything asked for; session n ends
    id n, epoch e > 0          what has news among the session's partitions, after the request's changes

A partition has news when it has records or an error, or when its high watermark or log start moved since the reader
was last told. Partitions that had records go to the back, so that none starves behind a busy one. The rule: at most
`slots` sessions; a new one takes the place of one unused for two minutes, or of a smaller one that is two minutes old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import COUNT_NOT_SAID, NO_LEADER_EPOCH, NO_TOPIC_ID

FINAL_EPOCH = -1
INITIAL_EPOCH = 0
EPOCH_MAX = 2**31 - 1
EVICTION_AGE_MS = 120_000
NOT_TOLD = -2
"""No offset that was ever sent: the reader has yet to be told."""

Key = tuple[str | UUID, int]


@dataclass(slots=True)
class Target:
    """One partition that a reader wants, and what it was last told about it."""

    topic: str
    topic_id: UUID
    """NO_TOPIC_ID where the request names topics (up to version 12); then `topic` is empty where it uses ids."""
    partition: int
    offset: int
    size_max: int
    leader_epoch: int = NO_LEADER_EPOCH
    last_fetched_epoch: int = NO_LEADER_EPOCH
    undeleted_partition_count: int = COUNT_NOT_SAID
    told_high_watermark: int = NOT_TOLD
    told_log_start: int = NOT_TOLD

    @property
    def key(self) -> Key:
        """What it is remembered by."""
        return (self.topic if self.topic_id == NO_TOPIC_ID else self.topic_id, self.partition)

    def has_news(self, *, size: int, error: int, high_watermark: int, log_start: int) -> bool:
        """Whether an incremental answer must mention it; remembers that the reader is told."""
        news = (
            size > 0
            or error != ErrorCode.NONE
            or high_watermark != self.told_high_watermark
            or log_start != self.told_log_start
        )
        if error != ErrorCode.NONE:
            self.told_high_watermark = NOT_TOLD
        else:
            self.told_high_watermark = high_watermark
        self.told_log_start = log_start
        return news


@dataclass(slots=True)
class Session:
    """What one reader wants, in the order in which it is served."""

    id: int
    uses_topic_ids: bool
    created_ms: int
    used_ms: int
    epoch: int = 1
    """The epoch that the next request must carry."""
    targets: dict[Key, Target] = field(default_factory=dict)

    def put(self, target: Target) -> None:
        """Add a partition, or change what is wanted of it, keeping its place and what the reader was told."""
        known = self.targets.get(target.key)
        if known is not None:
            target.told_high_watermark = known.told_high_watermark
            target.told_log_start = known.told_log_start
        self.targets[target.key] = target

    def to_the_back(self, target: Target) -> None:
        """Serve the others first next time."""
        key = target.key
        if self.targets.pop(key, None) is not None:
            self.targets[key] = target


@dataclass(frozen=True, slots=True)
class Context:
    """How one fetch is answered."""

    targets: Sequence[Target]
    session: Session | None
    incremental: bool

    @property
    def session_id(self) -> int:
        """The id that the answer carries; 0 is none."""
        return 0 if self.session is None else self.session.id


class FetchSessions:
    """The sessions of one broker. `draw(bound)` draws from 0 to bound, exclusive."""

    def __init__(self, slots: int, draw: Callable[[int], int]) -> None:
        self._slots = slots
        self._draw = draw
        self._sessions: dict[int, Session] = {}
        """In order of use, the longest unused first."""
        self.evictions = 0

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def partitions(self) -> int:
        """Partitions remembered over all sessions."""
        return sum(len(session.targets) for session in self._sessions.values())

    def begin(
        self,
        session_id: int,
        epoch: int,
        targets: Sequence[Target],
        forgotten: Iterable[Key],
        *,
        uses_topic_ids: bool,
        now_ms: int,
    ) -> Context | ErrorCode:
        """Say what a fetch is to be answered with, or with which error."""
        if epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self._sessions.pop(session_id, None)
            session = None
            if epoch == INITIAL_EPOCH and targets:
                session = self._create(targets, uses_topic_ids, now_ms)
            return Context(targets, session, incremental=False)
        session = self._sessions.get(session_id)
        if session is None:
            return ErrorCode.FETCH_SESSION_ID_NOT_FOUND
        if session.epoch != epoch:
            return ErrorCode.INVALID_FETCH_SESSION_EPOCH
        if session.uses_topic_ids != uses_topic_ids:
            return ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR
        for target in targets:
            session.put(target)
        for key in forgotten:
            session.targets.pop(key, None)
        if not session.targets:
            del self._sessions[session_id]
            return Context((), None, incremental=True)
        session.epoch = 1 if epoch == EPOCH_MAX else epoch + 1
        session.used_ms = now_ms
        self._sessions[session_id] = self._sessions.pop(session_id)
        return Context(list(session.targets.values()), session, incremental=True)

    def _create(self, targets: Sequence[Target], uses_topic_ids: bool, now_ms: int) -> Session | None:
        if len(self._sessions) >= self._slots and not self._evict(len(targets), now_ms):
            return None
        while True:
            session_id = 1 + self._draw(EPOCH_MAX)
            if session_id not in self._sessions:
                break
        session = Session(session_id, uses_topic_ids, created_ms=now_ms, used_ms=now_ms)
        for target in targets:
            session.put(target)
        self._sessions[session_id] = session
        return session

    def _evict(self, size: int, now_ms: int) -> bool:
        if not self._sessions:
            return False
        oldest = next(iter(self._sessions.values()))
        if now_ms - oldest.used_ms <= EVICTION_AGE_MS:
            old_enough = [it for it in self._sessions.values() if now_ms - it.created_ms > EVICTION_AGE_MS]
            oldest = min(old_enough, key=lambda session: len(session.targets), default=oldest)
            if oldest not in old_enough or len(oldest.targets) >= size:
                return False
        del self._sessions[oldest.id]
        self.evictions += 1
        return True
