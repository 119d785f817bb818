"""Committing and deleting committed offsets: the answers of OffsetCommit and OffsetDelete.

A commit as a member requires the member's epoch or generation; a group without members accepts any commit. What a
commit by ranges does, and what a plain one does to those, is decided by `ranged_commits`. How offsets are fetched is in
`offset_fetches`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.base.limits import FRONTIER_STEPS_MAX
from anabranch.machines.groups import classic, ranged_commits
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.committers import read_of_deleted_topics, request_error
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.individual import Range, WrongRangesError
from anabranch.machines.groups.individual_store import IndividualCommits, range_record
from anabranch.machines.groups.offset_room import OffsetRoom
from anabranch.machines.groups.positions import Position, Positions, position_record
from anabranch.machines.groups.ranged_commits import RangedCommit
from anabranch.machines.groups.ranges_on_wire import commit_of
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.groups.shared_commits import refusal
from anabranch.machines.groups.transaction_ranges import Change, TransactionRanges, fold
from anabranch.machines.outcome import Draft, Outcome
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

Group = ConsumerGroup | ClassicGroup

TOPIC_IDS_SINCE = 10
NO_MEMBER = -1
"""The epoch, or generation, of a commit by no member; that of a static member which has left for a while is lower."""
REPEATED_MAX = 10_000
"""Partitions of groups that are remembered as those of which it was logged that offsets were committed again."""


class Answered(NamedTuple):
    """The answer to the commit of one partition."""

    partition: int
    code: ErrorCode
    stable: int = -1
    """The stable offset after it; a client tells by it that the coordinator takes commits by ranges."""
    message: str | None = None


class RangesRepeated(NamedTuple):
    """Effect: log that a group commits offsets that it had committed; once for each partition."""

    group_id: str
    topic: str
    partition: int
    repeated: Range


class RangesFull(NamedTuple):
    """A commit was refused, as a group has too many ranges in a partition: what lies below them."""

    topic: TopicImage
    partition: int
    gap: Range
    ranges: int


class Offsets:
    """The positions of a shard's groups, in existing topics."""

    def __init__(self, settings: GroupSettings, image: Image) -> None:
        self.settings = settings
        self.image = image
        self.positions = Positions()
        self.on_commit: Callable[[str, TopicImage, int, Position], None] = lambda *_: None
        """Called with group, topic, partition and offset of every commit, which is then written."""
        self.individual = IndividualCommits()
        self.in_transactions = TransactionRanges()
        self.on_full: Callable[[str, RangesFull, Draft[CoordinatorRecord], int], None] = lambda *_: None
        """Called with the group and the time when a commit by ranges is refused for their number."""
        self._repeated: set[tuple[str, str, int]] = set()
        self.room = OffsetRoom(settings)
        self.counts: Counter[str] = Counter()
        """Offsets so far: `commit` (also of transactions), `expiration`, `deletion` (by OffsetDelete)."""

    def commit(
        self, group: Group | None, request: OffsetCommitRequest, version: int, now_ms: int
    ) -> Outcome[OffsetCommitResponse, CoordinatorRecord]:
        """Make a group's progress durable."""
        error = request_error(group, request, version)
        self.room.begin(self.positions.id_size(request.group_id))
        by_id = version >= TOPIC_IDS_SINCE
        missing = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        draft: Draft[CoordinatorRecord] = Draft()
        by_member = request.generation_id_or_member_epoch != NO_MEMBER
        answers = []
        for topic in request.topics:
            known = self.image.by_id.get(topic.topic_id) if by_id else self.image.by_name.get(topic.name)
            known = None if error else known
            found = self._commit(
                request.group_id,
                known,
                topic.partitions,
                error or missing,
                now_ms,
                draft,
                member=(group, request.member_id) if by_member else None,
                by_name=not by_id,
            )
            told = {it.partition_index for it in topic.partitions if it.offset_ranges or it.key_range_offsets}
            answers.append(
                OffsetCommitResponseTopic(
                    name=topic.name,
                    topic_id=topic.topic_id,
                    partitions=[
                        OffsetCommitResponsePartition(
                            partition_index=it.partition,
                            error_code=it.code,
                            last_stable_offset=it.stable if request.wants_stable_offset or it.partition in told else -1,
                            error_message=it.message,
                        )
                        for it in found
                    ],
                )
            )
        if error is ErrorCode.NONE and isinstance(group, ClassicGroup):
            session = classic.session_timer(group, request.member_id, now_ms)
            if session is not None:
                draft.set_timer(session.key, session.at_ms)
        return draft.outcome(OffsetCommitResponse(topics=answers))

    def commit_in_transaction(
        self, group: Group | None, request: TxnOffsetCommitRequest, now_ms: int
    ) -> Outcome[TxnOffsetCommitResponse, CoordinatorRecord]:
        """Make a group's progress part of a producer's transaction."""
        self.room.begin(self.positions.id_size(request.group_id, request.producer_id))
        error = request_error(group, request)
        later = not error and self._is_beside_another(request)
        draft: Draft[CoordinatorRecord] = Draft()
        by_member = request.generation_id != NO_MEMBER
        answers = []
        for topic in request.topics:
            known = self.image.by_name.get(topic.name)
            missing = ErrorCode.COORDINATOR_LOAD_IN_PROGRESS if later else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            known = None if error or later else known
            found = self._commit(
                request.group_id,
                known,
                topic.partitions,
                error or missing,
                now_ms,
                draft,
                member=(group, request.member_id) if by_member else None,
                producer_id=request.producer_id,
            )
            answers.append(
                TxnOffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=[
                        TxnOffsetCommitResponsePartition(
                            partition_index=it.partition,
                            error_code=it.code,
                            last_stable_offset=it.stable,
                            error_message=it.message,
                        )
                        for it in found
                    ],
                )
            )
        if draft.records:
            draft.producer = request.producer_id, request.producer_epoch
        return draft.outcome(TxnOffsetCommitResponse(topics=answers))

    def _is_beside_another(self, request: TxnOffsetCommitRequest) -> bool:
        """Whether a transaction has to wait for another one that has committed in one of the partitions.

        An offset is a state of all keys, and does not wait together with ranges of others: whichever came last would
        take the place of the other. Nothing of such a request counts, so that no two transactions wait for each other
        while they hold what they have said.
        """
        group_id, producer_id = request.group_id, request.producer_id
        for topic in request.topics:
            for part in topic.partitions:
                at = topic.name, part.partition_index
                if part.offset_ranges or part.key_range_offsets:
                    waits = self.positions.unstable(group_id, *at, but=producer_id)
                else:
                    waits = self.in_transactions.of_others(group_id, at, producer_id)
                if waits:
                    return True
        return False

    def _commit(
        self,
        group_id: str,
        topic: TopicImage | None,
        parts: Sequence[OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition],
        error: ErrorCode,
        now_ms: int,
        draft: Draft[CoordinatorRecord],
        *,
        member: tuple[Group | None, str] | None,
        by_name: bool = True,
        producer_id: int = -1,
    ) -> Iterator[Answered]:
        """Add the records of a topic's commits; the answers. `error` is the code where the topic is None.

        `member`: the group and the member that commits; None for a commit by no member.
        """
        ranged = {part.partition_index for part in parts if part.offset_ranges or part.key_range_offsets}
        once = Counter(part.partition_index for part in parts) if ranged else ()
        former = read_of_deleted_topics(*member, topic, self.image) if member is not None and by_name else ()
        for part in parts:
            index, metadata = part.partition_index, part.committed_metadata or ""
            if topic is None:
                yield Answered(index, error)
            elif index in former:
                message = "The member read this partition of a topic of this name that was deleted."
                yield Answered(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, message=message)
            elif not topic.ever_had(index):
                yield Answered(index, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            elif len(metadata) > self.settings.offset_metadata_max_bytes:
                yield Answered(index, ErrorCode.OFFSET_METADATA_TOO_LARGE)
            elif member is not None and (foreign := refusal(*member, topic.topic_id, part)):
                yield Answered(index, ErrorCode.STALE_MEMBER_EPOCH, message=foreign)
            elif no_room := self.room.refusal(
                group_id,
                self.positions.get(group_id, topic.name, index) if producer_id < 0 else None,
                metadata,
                draft,
            ):
                yield Answered(index, ErrorCode.INVALID_COMMIT_OFFSET_SIZE, message=no_room)
            elif index not in ranged:
                by_member = member is not None
                yield self._commit_plain(group_id, topic, part, producer_id, now_ms, draft, by_member=by_member)
            elif isinstance(once, Counter) and once[index] > 1:
                message = "A request that commits ranges of a partition can name the partition once."
                yield Answered(index, ErrorCode.INVALID_REQUEST, message=message)
            elif isinstance(part, TxnOffsetCommitRequestPartition):
                yield self._commit_ranges_later(group_id, topic, part, producer_id, now_ms, draft)
            else:
                yield self._commit_ranges(group_id, topic, part, now_ms, draft)

    def _commit_plain(
        self,
        group_id: str,
        topic: TopicImage,
        part: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition,
        producer_id: int,
        now_ms: int,
        draft: Draft[CoordinatorRecord],
        *,
        by_member: bool,
    ) -> Answered:
        index, offset = part.partition_index, part.committed_offset
        before = self._pending(group_id, topic, index, producer_id) or self.current(group_id, topic.name, index)
        if max(offset, 0) < topic.life(index).begins:  # It is late, and tells nothing of the present life.
            return Answered(index, ErrorCode.NONE, -1 if before is None else before.offset)
        metadata = part.committed_metadata or ""
        position = Position(offset, part.committed_leader_epoch, metadata, now_ms, topic.topic_id)
        held = self.individual.of(group_id, (topic.name, index), before)
        position = ranged_commits.plain(before, held, position, by_member=by_member)
        self.on_commit(group_id, topic, index, position)
        draft.write(position_record(group_id, topic.name, index, position))
        self.counts["commit"] += 1
        return Answered(index, ErrorCode.NONE, position.offset)

    def named(self, group: Group | None, request: TxnOffsetCommitRequest, now_ms: int) -> list[CoordinatorRecord]:
        """The positions to write, outside of the transaction, before it commits ranges: they name what goes with them.

        They also say where a group begins that has committed nothing, whatever becomes of the transaction. None is
        written that would overtake what an open transaction has committed.
        """
        records: list[CoordinatorRecord] = []
        if request_error(group, request) or not self.settings.individual_commits:
            return records
        by_member = request.generation_id != NO_MEMBER
        for topic in request.topics:
            known = self.image.by_name.get(topic.name)
            for part in topic.partitions:
                index = part.partition_index
                if known is None or not known.ever_had(index) or not (part.offset_ranges or part.key_range_offsets):
                    continue
                if self.positions.unstable(request.group_id, known.name, index):
                    continue
                if by_member and refusal(group, request.member_id, known.topic_id, part):
                    continue
                before = self._stands(request.group_id, known, index, part.committed_offset)
                if before is None and self.room.is_full:
                    continue  # It is refused below.
                if before is None:
                    base = part.committed_offset if part.committed_offset >= 0 else known.log_start(index)
                    before = ranged_commits.begun_at(base, known.topic_id)
                if not before.ranges_since:
                    after = before._replace(ranges_since=max(1, now_ms), committed_at_ms=now_ms)
                    records.append(position_record(request.group_id, known.name, index, after))
        return records

    def must_wait(self, group: Group | None, request: TxnOffsetCommitRequest) -> bool:
        """Whether a commit in a transaction waits as it leaves a gap below its ranges; a refused one never does."""
        if not (self.settings.gaps_are_waited_for and self.settings.individual_commits):
            return False
        if request_error(group, request):
            return False
        for topic in request.topics:
            known = self.image.by_name.get(topic.name)
            for part in topic.partitions:
                at = (topic.name, part.partition_index)
                if known is None or not part.offset_ranges:
                    continue
                position = self.positions.pending(request.group_id, *at, request.producer_id)
                position = position or self._stands(request.group_id, known, part.partition_index)
                if position is None:
                    continue
                with contextlib.suppress(WrongRangesError):
                    added = commit_of(part, position.offset).offset_ranges
                    held = self.individual.of(request.group_id, at, position)
                    if added[0][0] >= position.offset and self.in_transactions.leaves_gap(
                        request.group_id, at, position, held, added
                    ):
                        return True
        return False

    def _commit_ranges_later(
        self,
        group_id: str,
        topic: TopicImage,
        part: TxnOffsetCommitRequestPartition,
        producer_id: int,
        now_ms: int,
        draft: Draft[CoordinatorRecord],
    ) -> Answered:
        """Add the record of a commit by ranges that counts with its transaction; `named` goes before.

        Where the transaction itself has committed an offset before, its ranges go with that.
        """
        index = part.partition_index
        before = self._pending(group_id, topic, index, producer_id)
        if before is not None and not before.ranges_since:
            before = before._replace(ranges_since=max(1, now_ms))
            draft.write(position_record(group_id, topic.name, index, before))
        before = before or self._stands(group_id, topic, index, part.committed_offset)
        commit = self._checked(part, topic.log_start(index), -1 if before is None else before.offset)
        if isinstance(commit, Answered):
            return commit
        if before is None or not before.ranges_since:
            # What was named is deleted, or was set anew, since: all is to be sent, and named, again.
            return Answered(index, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
        lowest = commit.lowest
        if lowest is not None and lowest < before.offset:
            message = f"Offset {lowest} lies below the stable offset {before.offset}: all before it is processed."
            return Answered(index, ErrorCode.INDIVIDUAL_COMMIT_TOO_OLD, before.offset, message)
        at = (topic.name, index)
        if self.in_transactions.would_be_many(group_id, at, before, commit):
            message = "Too many individual commits: the keys of the partition would have too many offsets of their own."
            return Answered(index, ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED, before.offset, message)
        draft.write(self.in_transactions.record(group_id, at, producer_id, commit, before, now_ms))
        self.counts["commit"] += 1
        return Answered(index, ErrorCode.NONE, before.offset)

    def fold(self, change: Change, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """Add the records that make a change of a committed transaction part of its position."""
        name, index = change.partition
        topic = self.image.by_name.get(name)
        if topic is not None:
            before = self._stands(change.group_id, topic, index)
            held = self.individual.of(change.group_id, change.partition, before)
            decided = fold(before, held, change, now_ms)
            if decided is not None:
                self._write(change.group_id, topic, index, decided, draft)

    def _checked(
        self, part: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition, log_start: int, stable: int
    ) -> RangedCommit | Answered:
        """The commit by ranges, or why there is none."""
        index = part.partition_index
        if not self.settings.individual_commits:
            message = "This broker takes no commits by ranges: accept.individual.commit is false."
            return Answered(index, ErrorCode.INDIVIDUAL_COMMIT_NOT_ALLOWED, stable, message)
        if len(part.key_range_offsets) > FRONTIER_STEPS_MAX:
            message = f"Too many individual commits: {len(part.key_range_offsets)} ranges of keys at once."
            return Answered(index, ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED, stable, message)
        try:
            return commit_of(part, log_start)
        except WrongRangesError as error:
            return Answered(index, ErrorCode.INVALID_REQUEST, stable, str(error))

    def _write(
        self,
        group_id: str,
        topic: TopicImage,
        index: int,
        counted: ranged_commits.Counted,
        draft: Draft[CoordinatorRecord],
    ) -> None:
        """Add the records of a commit that counts."""
        position = counted.position
        if counted.is_changed:
            self.on_commit(group_id, topic, index, position)
            draft.write(position_record(group_id, topic.name, index, position))
        for start, end in counted.put:
            draft.write(range_record(group_id, (topic.name, index), start, end, position.ranges_since))
        for start in counted.removed:
            draft.write(range_record(group_id, (topic.name, index), start))

    def _commit_ranges(
        self,
        group_id: str,
        topic: TopicImage,
        part: OffsetCommitRequestPartition,
        now_ms: int,
        draft: Draft[CoordinatorRecord],
    ) -> Answered:
        """Add the records of a commit by ranges."""
        index = part.partition_index
        before = self._stands(group_id, topic, index, part.committed_offset)
        stable = -1 if before is None else before.offset
        commit = self._checked(part, topic.log_start(index), stable)
        if isinstance(commit, Answered):
            return commit
        held = self.individual.of(group_id, (topic.name, index), before)
        room = min(
            self.settings.ranges_per_partition_max - len(held), self.settings.ranges_max - self.settings.ranges_held()
        )
        decided = ranged_commits.decide(before, held, commit, room, topic.topic_id, now_ms)
        if isinstance(decided, ranged_commits.Refused):
            first = held.first()
            if decided.code is ErrorCode.MAX_INDIVIDUAL_COMMIT_REACHED and first is not None:
                full = RangesFull(topic, index, (decided.stable, first[0] - 1), len(held))
                self.on_full(group_id, full, draft, now_ms)
            return Answered(index, decided.code, decided.stable, decided.message)
        if decided.repeated is not None and (group_id, topic.name, index) not in self._repeated:
            if len(self._repeated) >= REPEATED_MAX:
                self._repeated.clear()
            self._repeated.add((group_id, topic.name, index))
            draft.perform(RangesRepeated(group_id, topic.name, index, decided.repeated))
        self._write(group_id, topic, index, decided, draft)
        self.counts["commit"] += 1
        return Answered(index, ErrorCode.NONE, decided.position.offset)

    def is_unstable(self, group_id: str, topic: str, partition: int) -> bool:
        """Whether a transaction has committed something that is not part of the position yet."""
        changes = self.in_transactions.of(group_id, (topic, partition))
        return self.positions.unstable(group_id, topic, partition) or next(changes, None) is not None

    def may_be_taken(self, group_id: str, partition: tuple[str, int]) -> bool:
        """Whether a transaction has committed something of a partition, or one of the group waits to do so."""
        return group_id in self.in_transactions.purgatory or self.is_unstable(group_id, *partition)

    def has_pending(self, group_id: str) -> bool:
        """Whether a transaction has committed anything for the group that is not part of its positions yet."""
        return self.positions.has_pending(group_id) or self.in_transactions.of_group(group_id)

    def current(self, group_id: str, topic: str, partition: int) -> Position | None:
        """A group's position in the topic that has the name now."""
        position = self.positions.get(group_id, topic, partition)
        return position if position is not None and self.is_current(topic, partition, position) else None

    def _pending(self, group_id: str, topic: TopicImage, partition: int, producer_id: int) -> Position | None:
        """The position that the open transaction of a producer has committed, in what the partition is now."""
        position = self.positions.pending(group_id, topic.name, partition, producer_id)
        return position if position is not None and self.is_current(topic.name, partition, position) else None

    def _stands(self, group_id: str, topic: TopicImage, partition: int, base: int = -1) -> Position | None:
        """A group's position, from where clients begin.

        While the log is not open, who commits says by `base` what it was told.
        """
        position = self.current(group_id, topic.name, partition)
        return position and position.told(topic.log_start(partition) if topic.is_open(partition) else base)

    def has_begun(self, group_id: str, topic: TopicImage) -> bool:
        """Whether a group has a position in an existing topic."""
        ids = (topic.topic_id, NO_TOPIC_ID)
        positions = self.positions.of_group(group_id)
        if len(positions) < topic.size:  # A first member of a wide topic finds none to look at.
            return any(
                name == topic.name and position.topic_id in ids and topic.has(number)
                for (name, number), position in positions.items()
            )
        found = (positions.get((topic.name, number)) for number in topic.readable)
        return any(position is not None and position.topic_id in ids for position in found)

    def is_current(self, topic: str, partition: int, position: Position) -> bool:
        """Whether a position is of the topic that has the name now, and of the partition's present life."""
        now = self.image.by_name.get(topic)
        if now is None:
            return True
        if position.topic_id not in (NO_TOPIC_ID, now.topic_id):
            return False
        return position.offset >= now.life(partition).begins

    def delete(
        self, group: Group | None, request: OffsetDeleteRequest, read: frozenset[str] | None
    ) -> Outcome[OffsetDeleteResponse, CoordinatorRecord]:
        """Delete positions, except in topics that members `read` (None: unknown, refused)."""
        if not request.group_id:
            return Outcome(OffsetDeleteResponse(error_code=ErrorCode.INVALID_GROUP_ID))
        if group is None and request.group_id not in self.positions:
            return Outcome(OffsetDeleteResponse(error_code=ErrorCode.GROUP_ID_NOT_FOUND))
        if read is None:
            return Outcome(OffsetDeleteResponse(error_code=ErrorCode.NON_EMPTY_GROUP))
        draft: Draft[CoordinatorRecord] = Draft()
        answers = []
        for topic in request.topics:
            busy = ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC if topic.name in read else ErrorCode.NONE
            parts = []
            for part in topic.partitions:
                index = part.partition_index
                if busy is ErrorCode.NONE and self.positions.get(request.group_id, topic.name, index) is not None:
                    draft.write(position_record(request.group_id, topic.name, index, None))
                    self.counts["deletion"] += 1
                parts.append(OffsetDeleteResponsePartition(partition_index=index, error_code=busy))
            answers.append(OffsetDeleteResponseTopic(name=topic.name, partitions=parts))
        return draft.outcome(OffsetDeleteResponse(topics=answers))

    def of_topics_gone(self, before: Image) -> Iterator[CoordinatorRecord]:
        """The tombstones of positions in topics of `before` that are deleted."""
        gone = {
            name
            for name in self.image.differences(before)
            if (was := before.by_name.get(name)) is not None and self.image.id_of(name) != was.topic_id
        }
        if not gone:
            return
        for group_id in sorted(self.positions.groups()):
            for (topic, partition), position in list(self.positions.entries(group_id)):
                if topic in gone and position.topic_id != self.image.id_of(topic):
                    yield position_record(group_id, topic, partition, None)

    def all_of(self, group_id: str) -> Iterator[CoordinatorRecord]:
        """The tombstones of every position of a group."""
        for (topic, partition), _ in self.positions.entries(group_id):
            yield position_record(group_id, topic, partition, None)

    def expired(
        self, group: Group | None, group_id: str, read: frozenset[str], now_ms: int, records_max: int
    ) -> tuple[list[CoordinatorRecord], int]:
        """At most `records_max` tombstones of positions unused for too long, and the number of its positions."""
        oldest_ms = now_ms - self.settings.offsets_retention_ms
        empty_since_ms = -1
        if isinstance(group, ClassicGroup) and group.protocol_type:
            empty_since_ms = group.state_changed_ms
        records: list[CoordinatorRecord] = []
        entries = list(self.positions.entries(group_id))
        for (topic, partition), position in entries:
            used_ms = max(position.committed_at_ms, empty_since_ms)
            if topic in read or used_ms > oldest_ms or self.is_unstable(group_id, topic, partition):
                continue
            if len(records) >= records_max:
                break
            records.append(position_record(group_id, topic, partition, None))
        self.counts["expiration"] += len(records)
        return records, len(entries)
