"""When groups' beginnings in topics are written down, and their positions in partitions that appeared later (`starts`).

    a group subscribes to a topic       ->  its beginning, and positions, if the topic was resized
    a group unsubscribes from a topic   ->  its beginning: a resize may follow while nothing else tells of the group
    a topic is resized                  ->  positions of all groups that subscribe to it, or have committed offsets;
                                            others have them written when they subscribe again
    the shard is loaded                 ->  the same, as a resize may have come before: right before the broker ended

Groups are settled a few at a time, and a large topic in several decisions: a shard may have many, and what is written
is found by the next decision. A classic group is settled whole before its next generation is handed out. Until its turn
a group of the consumer protocol is handed no partition without its position, as the gatekeeper writes the same position
when it hands a partition out. A position that would overtake what an open transaction has committed is not written
before that has ended, nor one in a log that is not open; who asks for it meanwhile is told to ask again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from itertools import islice

from anabranch.machines.groups import classic, shares
from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.consumer.target import subscriptions
from anabranch.machines.groups.first_offsets import FirstOffsets
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.offsets import Offsets
from anabranch.machines.groups.positions import Position, position_record
from anabranch.machines.groups.records import CoordinatorRecord, OffsetCommitKey
from anabranch.machines.groups.regex import Regexes
from anabranch.machines.groups.starts import NOT_NOTED, Start, Starts, start_record
from anabranch.machines.lineage import NO_CUTS
from anabranch.machines.outcome import Draft, Outcome

GROUPS_AT_A_TIME = 20
PARTITIONS_AT_A_TIME = 400
"""Partitions of settled groups after which the other groups wait for the next decision."""
PAUSE_MS = 5
OWED_MAX_MS = 30_000
"""How long a client that asks for a position which is to be written is told to ask again: less than most wait."""
SILENT_MS = 600_000
ASKED_MAX = 1_000
HELD_LOOKED_AT_MAX = 1_000
"""Held partitions that are looked at when a transaction ends; of more all are settled again."""
Group = ConsumerGroup | ClassicGroup


class Settling:
    """The groups of a shard that are to be settled."""

    def __init__(self, groups: Mapping[str, Group], offsets: Offsets, starts: Starts, regexes: Regexes) -> None:
        self._groups = groups
        self._offsets = offsets
        self._starts = starts
        self._regexes = regexes
        self._first_offsets = FirstOffsets(offsets, starts, regexes)
        self._left: dict[str, None] = {}
        """Groups, the next one first."""
        self._topics: dict[str, None] = {}
        """The resized topics that these are settled in."""
        self._subscribed: dict[str, frozenset[str]] = {}
        """By group: the topics that it subscribes to, as of its last change."""
        self._held: dict[str, dict[tuple[str, int], None]] = {}
        """By group: partitions of which an open transaction has committed offsets."""
        self._unopened: dict[str, dict[str, set[int]]] = {}
        """By topic and group: partitions whose log is not open."""
        self._late: dict[str, dict[str, None]] = {}
        """By classic group: the topics in which it is not written yet where partitions that waited begin."""
        self._asked: dict[str, dict[tuple[str, int], tuple[int, int]]] = {}
        """By group: partitions that it was told to ask for again, with the times of the first and the last question."""
        self._asked_max = ASKED_MAX
        """So many groups are remembered before those are dropped that ask no more."""

    def subscribed(self, group: Group, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """Write down where a group begins in topics that it subscribes to from now on, or does not any more."""
        group_id, by_name = group.group_id, self._offsets.image.by_name
        before, now = self._subscribed.get(group_id, frozenset()), self.look(group)
        keys = [record.key for record in draft.records] if now - before else []
        written = {(key.topic, key.partition) for key in keys if isinstance(key, OffsetCommitKey)}
        if isinstance(group, ClassicGroup) and group_id in self._left:
            del self._left[group_id]
            for topic in filter(None, map(by_name.get, sorted(self._topics.keys() & now & before))):
                self._settle(group_id, topic, draft, now_ms, begun=True)
        for topic in filter(None, map(by_name.get, sorted(now - before))):
            begun = self._offsets.has_begun(group_id, topic)
            self._settle(group_id, topic, draft, now_ms, begun=begun, written=written)
        if isinstance(group, ClassicGroup):
            becomes_one = isinstance(self._groups.get(group_id), ConsumerGroup)
            for topic in filter(None, map(by_name.get, sorted(now if becomes_one else now - before))):
                draft.write(*self._of_waited(group_id, topic, now_ms, written))
        for topic in filter(None, map(by_name.get, sorted(before - now))):
            if self._starts.get(group_id, topic.topic_id) is not None:
                continue
            if topic.was_resized:
                self._settle(group_id, topic, draft, now_ms, begun=True)
            else:
                draft.write(start_record(group_id, topic.topic_id, Start(dict.fromkeys(topic.readable, NOT_NOTED))))

    def marked(self, outcome: Outcome[None, CoordinatorRecord], now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """The outcome of a transaction's end; groups that may have waited for it are settled next."""
        draft: Draft[CoordinatorRecord] = Draft()
        draft.add(outcome)
        held = ((group_id, *at) for group_id, some in self._held.items() for at in some)
        some = list(islice(held, HELD_LOOKED_AT_MAX + 1))
        if len(some) > HELD_LOOKED_AT_MAX or not all(self._offsets.positions.unstable(*at) for at in some):
            self._left.update(dict.fromkeys(self._held))
            self._held.clear()
            draft.set_timer(("settle",), now_ms)
        return draft.outcome(None)

    def look(self, group: Group) -> frozenset[str]:
        """Note, and return, the topics that a group subscribes to now."""
        now = self._subscription(group) if group.members else frozenset()
        if now:
            self._subscribed[group.group_id] = now
        else:
            self._subscribed.pop(group.group_id, None)
        return now

    def topics_changed(self, before: Image, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """Begin to settle the groups of topics that were resized, and forget the beginnings in topics that are gone."""
        image = self._offsets.image
        differing = sorted(image.differences(before))
        earlier = [before.by_name.get(name) for name in differing]
        if any(topic is not None and topic.topic_id not in image.by_id for topic in earlier):
            draft.write(*self._starts.of_topics_gone(image.by_id))
        changed = [
            name
            for name, was in zip(differing, earlier, strict=True)
            if (topic := image.by_name.get(name)) is not None
            and topic.was_resized
            and _partitions(was) != _partitions(topic)
        ]
        if changed:
            self._topics.update(dict.fromkeys(changed))
            self._leave_all()
        again = [self._unopened.pop(name) for name in differing if name in self._unopened]
        for groups in again:  # A log may be open again.
            self._left.update(dict.fromkeys(groups))
        if changed or again:
            self._some(draft, now_ms)

    def loaded(self, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        """Begin to settle all groups, those with members first."""
        self._held.clear()
        for group in self._groups.values():
            self.look(group)
        if not (self._groups or self._offsets.positions.groups_most or self._starts.groups()):
            return  # Most shards, for which a look at each topic would be long, too.
        resized = [name for name, topic in self._offsets.image.by_name.items() if topic.was_resized]
        if resized:
            self._topics.update(dict.fromkeys(resized))
            self._leave_all()
            self._some(draft, now_ms)

    def _leave_all(self) -> None:
        """Have all groups settled, also those that only have offsets."""
        self._left.update(dict.fromkeys(group_id for group_id, group in self._groups.items() if group.members))
        self._left.update(dict.fromkeys(sorted(self._offsets.positions.names() | self._starts.groups())))

    def is_owed(self, group_id: str, name: str, number: int, now_ms: int) -> bool:
        """Whether a group is told to ask again for its position in a partition: it is to be given one, and has none.

        Not for longer than `OWED_MAX_MS` from the first question on; after `SILENT_MS` without any that begins anew.
        """
        at = name, number
        if not self._owes(group_id, name, number):
            self._asked.get(group_id, {}).pop(at, None)
            return False
        if group_id not in self._asked and len(self._asked) >= self._asked_max:
            self._drop_silent(now_ms)
        asked = self._asked.setdefault(group_id, {})
        first_ms, last_ms = asked.get(at, (now_ms, now_ms))
        if now_ms - last_ms >= SILENT_MS:
            first_ms = now_ms
        asked[at] = first_ms, now_ms
        return now_ms - first_ms < OWED_MAX_MS

    def _drop_silent(self, now_ms: int) -> None:
        for group_id, asked in list(self._asked.items()):
            if all(now_ms - last_ms >= SILENT_MS for _, last_ms in asked.values()):
                del self._asked[group_id]
        self._asked_max = max(ASKED_MAX, 2 * len(self._asked))

    def _owes(self, group_id: str, name: str, number: int) -> bool:
        at, topic = (name, number), self._offsets.image.by_name.get(name)
        position = self._offsets.current(group_id, *at)
        if topic is None or not topic.has(number):
            return False
        if at in self._held.get(group_id, ()) or number in self._unopened.get(name, {}).get(group_id, ()):
            return True
        if position is not None:  # One that is the log start at least is known where the log is open.
            return not position.is_begun and not topic.is_open(number)
        is_left = group_id in self._left and name in self._topics
        return is_left and not self._starts.existed(group_id, topic, number)

    def drop(self, group_id: str) -> None:
        """Forget a group that is no more."""
        for known in (self._left, self._subscribed, self._held, self._late, self._asked):
            known.pop(group_id, None)
        for groups in self._unopened.values():
            groups.pop(group_id, None)
        self._unopened = {name: groups for name, groups in self._unopened.items() if groups}

    def decide_more(self, now_ms: int) -> Outcome[None, CoordinatorRecord]:
        """Settle some of the groups that are left."""
        draft: Draft[CoordinatorRecord] = Draft()
        self._some(draft, now_ms)
        return draft.outcome(None)

    def _some(self, draft: Draft[CoordinatorRecord], now_ms: int) -> None:
        image, settled = self._offsets.image, 0
        for group_id in list(islice(self._left, GROUPS_AT_A_TIME)):
            if settled >= PARTITIONS_AT_A_TIME:
                break
            del self._left[group_id]
            settled += self._offsets.positions.unread_count(group_id)
            subscribed = self._subscribed_before_or_now(self._groups.get(group_id))
            positions = self._offsets.positions.of_group(group_id)
            begun = {image.name_of(topic_id) for topic_id in self._starts.topics_of(group_id)}
            names = {*subscribed, *(name for name, _ in positions), *begun} & self._topics.keys()
            settled += len(positions) + len(names)
            for topic in filter(None, map(image.by_name.get, sorted(names))):
                if topic.name in subscribed or self._offsets.has_begun(group_id, topic):
                    settled += len(topic.readable)
                    self._settle(group_id, topic, draft, now_ms, begun=True, records_max=PARTITIONS_AT_A_TIME)
                    if topic.name in self._late.get(group_id, ()):
                        draft.write(*self._of_waited(group_id, topic, now_ms))
                else:
                    draft.write(*self._starts.trim(group_id, topic))
        if self._left:
            draft.set_timer(("settle",), now_ms + PAUSE_MS)
        elif not self._held and not self._unopened:
            self._topics.clear()

    def _settle(
        self,
        group_id: str,
        topic: TopicImage,
        draft: Draft[CoordinatorRecord],
        now_ms: int,
        *,
        begun: bool,
        records_max: int | None = None,
        written: Set[tuple[str, int]] = frozenset(),
    ) -> None:
        """Settle a group in a topic; where that takes more than `records_max` records, it stays among those left.

        `written`: partitions whose position this decision writes already, as it hands them out.
        """

        def lacks(number: int) -> bool:
            return (topic.name, number) not in written and self._lacks(group_id, topic, number)

        def lifted(number: int) -> Position | None:
            return None if (topic.name, number) in written else self._lifted(group_id, topic, number)

        records = self._starts.settle(group_id, topic, lacks, lifted, now_ms, begun=begun)
        draft.write(*islice(records, records_max))
        if next(records, None) is not None:
            self._left[group_id] = None

    def _of_waited(
        self, group_id: str, topic: TopicImage, now_ms: int, written: Set[tuple[str, int]] = frozenset()
    ) -> Iterator[CoordinatorRecord]:
        """Positions in partitions that waited: whoever is given one begins it as its reset says, without a position.

        Where that cannot be said yet, it is when the group is settled in the topic.
        """
        start = self._starts.get(group_id, topic.topic_id)
        late = self._late.get(group_id, {})
        late.pop(topic.name, None)
        if start is None or not start.waited:
            return
        reads_from_end = self._first_offsets.reads_from_end(group_id, topic, stands_late=False)
        for number in sorted(start.waited):
            if not topic.has(number) or (topic.name, number) in written:
                continue
            if self._lacks(group_id, topic, number):
                offset = self._first_offsets.of_classic(group_id, topic, number, reads_from_end=reads_from_end)
                if offset is not None:
                    position = Position(offset, committed_at_ms=now_ms, topic_id=topic.topic_id, is_begun=False)
                    yield position_record(group_id, topic.name, number, position)
            elif self._offsets.current(group_id, topic.name, number) is None:
                self._late.setdefault(group_id, {})[topic.name] = None

    def _lacks(self, group_id: str, topic: TopicImage, number: int) -> bool:
        """Whether a group has no position in a partition, nor may get one by an open transaction.

        Where the log of the partition is not open, its log start is not known.
        """
        return self._offsets.current(group_id, topic.name, number) is None and self._may_write(group_id, topic, number)

    def _may_write(self, group_id: str, topic: TopicImage, number: int) -> bool:
        """Whether a position may be written: where not, the group is settled again when that has changed."""
        if not topic.is_open(number) or (topic.lineage is not None and number in topic.lineage.unknown):
            self._unopened.setdefault(topic.name, {}).setdefault(group_id, set()).add(number)
        elif self._offsets.positions.unstable(group_id, topic.name, number):
            self._held.setdefault(group_id, {})[topic.name, number] = None
        else:
            return True
        self._topics[topic.name] = None
        return False

    def moved_by_marker(self, group_id: str, partition: tuple[str, int]) -> None:
        """Note that a transaction's marker has changed a position: it may be one of a former life, which is none."""
        topic = self._offsets.image.by_name.get(partition[0])
        if topic is not None and topic.has(partition[1]) and self._offsets.current(group_id, *partition) is None:
            self._held.setdefault(group_id, {})[partition] = None
            self._topics[topic.name] = None

    def _lifted(self, group_id: str, topic: TopicImage, number: int) -> Position | None:
        """The position of a group in a partition that was emptied before it came back: where what came since begins.

        Its clients would take what they have committed for an offset out of range, and one that reads from the end
        would skip what came. Where it was emptied is not known any more once the old layouts are folded away: what
        retention has deleted since counts as that.
        """
        was = self._offsets.current(group_id, topic.name, number)
        if was is None or not was.is_begun or topic.lineage is None:
            return None
        start, cuts = topic.log_start(number), topic.lineage.cuts.get(number, NO_CUTS)
        if topic.is_open(number) and (was.offset >= start or any(end > start for end in cuts.ends)):
            return None
        if not self._may_write(group_id, topic, number):
            return None
        held = self._offsets.individual.of(group_id, (topic.name, number), was)
        return was.at(shares.through(shares.at_least(was.stands, start), held.reaches), was.passes)

    def _subscribed_before_or_now(self, group: Group | None) -> frozenset[str]:
        """The topics of a group, and those of a classic group's last generation: between two it may not be readable.

        A member that joins may lack the last generation's protocol, or change its subscription and change it back.
        """
        if group is None:
            return frozenset()
        before = self._subscribed.get(group.group_id, frozenset())
        return before | self._subscription(group) if group.members else before

    def _subscription(self, group: Group) -> frozenset[str]:
        if isinstance(group, ConsumerGroup):
            return subscriptions(group, self._offsets.image, self._regexes)
        return classic.subscribed_topics(group) or frozenset()


def _partitions(topic: TopicImage | None) -> object:
    if topic is None:
        return None
    return topic.topic_id, topic.was_resized, topic.readable, len(topic.partitions), topic.lives
