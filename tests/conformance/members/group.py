"""A group under test: its members of any kind, what they say, and what must hold of it.

At the end, whatever happened: no partition was ever owned by two members at a time; every record was handed out; and a
record came again only where the member that had it before had not committed it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from confluent_kafka import Producer

from anabranch.client import sync
from tests.conformance.members.process import Worker, Workers, until
from tests.conformance.members.worker import At
from tests.support.heartbeat_tap import HeartbeatTap

_numbers = itertools.count()
SESSION_TIMEOUT_MS = 10_000
ALWAYS = 1 << 63


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of member: a library, a protocol and, unless the library's default will do, an assignor."""

    library: str
    protocol: str
    assignor: str | None = None
    is_static: bool = True
    """Whether it can be a static member."""
    has_patterns: bool = True
    """Whether it can subscribe to topics that do not exist yet by a pattern."""
    follows_resizes: bool = True
    """Whether it goes on when its topics grow and shrink."""
    comes_back: bool = True
    """Whether it joins again, and owns only what it is given then, when the coordinator does not know it any more."""
    migrates: bool = True
    """Whether its subscription can be read, so that a group that it is in can move to the consumer protocol."""
    tells_commits: bool = True
    """Whether it tells when its commits are done."""
    is_exact: bool = True
    """Whether what it has committed is never handed to it again."""
    is_hasty: bool = False
    """Whether it may still report to own nothing while it is being given its partitions, or let go without a word.

    Then some can be another's, for a moment, while it tells its user that it has them.
    """
    is_example: bool = False
    """Whether it stands for all others in tests of what does not depend on the kind."""

    def __str__(self) -> str:
        return "-".join(filter(None, (self.library, self.protocol, self.assignor)))


class Commit(NamedTuple):
    """A commit that the coordinator took."""

    since: int
    """When its member was about to send it, by the monotonic clock in ns."""
    until: int
    """When its member knew that it was taken."""
    offsets: Mapping[At, int]
    """What it committed of each partition: the offset of the next record."""


class Member:
    """A member as it tells of itself."""

    def __init__(self, name: str, kind: Kind, worker: Worker) -> None:
        self.name = name
        self.kind = kind
        self.worker = worker
        self.owned: frozenset[At] = frozenset()
        self.received: list[tuple[At, int, str]] = []
        self.handed_ns: list[int] = []
        """When it was handed each of them."""
        self.commits: list[Commit] = []
        self.committed: dict[int, Commit] = {}
        """By what it has committed what it received, by index."""
        self._undone: set[int] = set()
        self._committing: set[int] = set()
        """What of that is being committed, even if its partitions are taken away before the answer is there."""
        self._committing_since = 0
        self.refused: list[str] = []
        self.is_gone = False
        self._spans: list[tuple[int, int, frozenset[At]]] = []
        self._since = 0

    def __repr__(self) -> str:
        owned = " ".join(f"{topic}-{number}" for topic, number in sorted(self.owned))
        return f"<{self.name} ({self.kind}): {owned or '-'}; {len(self.received)} records; {self.refused[-1:]}>"

    def hear(self, event: dict[str, Any]) -> None:
        """Take in what the worker says of it."""
        what = event["event"]
        if what == "owns":
            self._own(frozenset((topic, number) for topic, number in event["partitions"]), event["at"])
        elif what == "records":
            first = len(self.received)
            self.handed_ns += [event["at"]] * len(event["records"])
            self.received += [((topic, number), offset, value) for topic, number, offset, value in event["records"]]
            mine = {it for it in range(first, len(self.received)) if self.received[it][0] in self.owned}
            self._undone |= mine  # a library may still hand out what it fetched before its partitions were another's
        elif what == "committing":
            self._committing_since = event["at"]
            self._committing = {it for it in self._undone if self._reaches(event["offsets"], it)}
        elif what == "committed":
            now = {it for it in self._undone | self._committing if self._reaches(event["offsets"], it)}
            offsets = {(topic, number): end for topic, number, end in event["offsets"]}
            self.commits.append(Commit(self._committing_since, event["at"], offsets))
            self.committed |= dict.fromkeys(now, self.commits[-1])
            self._undone -= now
            self._committing.clear()
        elif what == "refused":
            self.refused.append(event["why"])
            self._committing.clear()
            if not event.get("again"):
                self._undone.clear()
        elif what == "left":
            self.is_gone = True
        elif what == "failed":
            self.refused.append(event["why"])
            self.is_gone = True

    @property
    def done(self) -> set[int]:
        """Which of what it received it has committed, by index."""
        return set(self.committed)

    @property
    def may_have_done(self) -> set[int]:
        """Which of what it received may be committed: of who died while he committed, nobody knows."""
        return self.done | self._committing if self.is_gone else self.done

    def _reaches(self, offsets: Iterable[tuple[str, int, int]], index: int) -> bool:
        """Whether a commit of these offsets is one of what it received at that index."""
        at, offset, _ = self.received[index]
        return any((topic, number) == at and offset < end for topic, number, end in offsets)

    def _own(self, owned: frozenset[At], at: int) -> None:
        if self._since:
            self._spans.append((self._since, at, self.owned))
        self.owned, self._since = owned, at
        self._undone = {it for it in self._undone if self.received[it][0] in owned}

    def silent(self, at: int) -> None:
        """From here on it owns nothing that it could know of, until it says so again."""
        self._own(frozenset(), at)

    def used(self, at: At, since: int, until: int) -> bool:
        """Whether it was handed records of a partition in that time."""
        return any(self.received[it][0] == at and since <= when < until for it, when in enumerate(self.handed_ns))

    def spans(self) -> list[tuple[int, int, frozenset[At]]]:
        """What it owned, from when to when."""
        return [*self._spans, (self._since, ALWAYS, self.owned)]


class Group:
    """A group of one test."""

    def __init__(self, workers: Workers, group_id: str, *topics: str) -> None:
        self.group_id = group_id
        self.topics = topics
        self.members: list[Member] = []
        self._workers = workers
        self._sessions_last = True
        """Whether sessions are too long for a busy machine to end them, so that members stay members."""
        self._produced: set[str] = set()
        settings = {"bootstrap.servers": workers.address, "linger.ms": 1, "topic.metadata.refresh.interval.ms": 300}
        self._producer = Producer({**settings, "log_level": 0})

    # -- what happens --------------------------------------------------------------------------------------------------

    def join(self, kind: Kind, *, process: int = 0, **asked: object) -> Member:
        """Let one more member join; those with equal `process` share one."""
        worker = self._workers.get(kind.library, process)
        member = Member(f"m{next(_numbers)}", kind, worker)
        worker.listen(member.name, member.hear)
        self.members.append(member)
        settings = {
            "group": self.group_id,
            "protocol": kind.protocol,
            "assignor": kind.assignor,
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "topics": self.topics,
            "reset": "earliest",
            **asked,
        }
        self._sessions_last &= settings["session_timeout_ms"] == SESSION_TIMEOUT_MS
        worker.tell(member=member.name, do="open", **settings)
        return member

    def leave(self, *members: Member) -> None:
        """Let members leave as their users let them."""
        for member in members:
            member.worker.tell(member=member.name, do="leave")
        until(lambda: all(member.is_gone for member in members), lambda: f"{members} should leave")

    def pause(self, member: Member) -> None:
        """Stop a member's process; with it all that are in it."""
        member.silent(member.worker.pause())

    def go_on(self, member: Member) -> None:
        """Let a member's process go on."""
        member.worker.go_on()

    def configure(self, configs: Mapping[str, str]) -> None:
        """Set configs of the group."""
        with sync.Admin(self._workers.address) as admin:
            admin.alter_configs("group", self.group_id, configs)

    def add_topic(self, name: str, partitions: int) -> None:
        """Create one more topic."""
        self.topics = (*self.topics, f"{self.topics[0]}-{name}")
        with sync.Admin(self._workers.address) as admin:
            admin.create_topics(self.topics[-1], partitions=partitions)

    def resize(self, partitions: int) -> None:
        """Give the topics more partitions, or fewer."""
        with sync.Admin(self._workers.address) as admin:
            for topic in self.topics:
                admin.resize(topic, partitions)

    def kill(self, member: Member) -> None:
        """Kill a member's process."""
        at = member.worker.kill()
        member.silent(at)
        member.is_gone = True

    def produce(self, count: int, partitions: Sequence[int] | None = None) -> None:
        """Produce that many records more, to all partitions or to these, and wait until they are there."""
        failed: list[object] = []
        for number in range(count):
            value = str(len(self._produced))
            self._produced.add(value)
            at = {} if partitions is None else {"partition": partitions[number % len(partitions)]}
            topic = self.topics[number % len(self.topics)]
            self._producer.produce(
                topic, value, value, on_delivery=lambda error, _: error and failed.append(error), **at
            )
        assert self._producer.flush(30) == 0 and not failed, failed

    def produce_at_once(self, count: int, partitions: Sequence[int]) -> None:
        """Produce to partitions that have only just appeared, before members can know of them."""
        with sync.Producer(self.address) as producer:
            for number in range(count):
                value = str(len(self._produced))
                self._produced.add(value)
                producer.send(self.topics[0], value, key=value, partition=partitions[number % len(partitions)])

    # -- what is waited for --------------------------------------------------------------------------------------------

    @property
    def address(self) -> str:
        """Where the broker is."""
        return self._workers.address

    @property
    def present(self) -> list[Member]:
        return [member for member in self.members if not member.is_gone]

    def settles(self, partitions: int, members: Iterable[Member] | None = None, *, fair: bool = True) -> None:
        """Wait until all partitions of the topics are owned by these members, or all, once and each by a fair share."""
        among = self.present if members is None else list(members)
        everything = Counter((topic, number) for topic in self.topics for number in range(partitions))
        least = partitions * len(self.topics) // len(among) if fair else 0

        def settled() -> bool:
            owned = Counter(at for member in self.present for at in member.owned)
            return owned == everything and all(len(member.owned) >= least for member in among)

        until(settled, lambda: f"{self.members} should share {partitions} partitions")

    def reads_all(self, *, beyond: Mapping[At, int] | None = None) -> None:
        """Wait until every record has been handed out, and all that can tell have committed what they have.

        With `beyond`, only so many records as there are from those offsets on.
        """
        skipped = sum((beyond or {}).values())

        def read() -> bool:
            found = {value for member in self.members for _, _, value in member.received}
            return len(found) >= len(self._produced) - skipped

        def missing() -> object:
            lost = self._produced - {value for member in self.members for _, _, value in member.received}
            return f"{self.members} should have read {sorted(map(int, lost))[:20]}, {len(lost)} in all"

        until(read, missing)
        until(self._all_committed, lambda: f"{self.members} should commit what they read")

    def _all_committed(self) -> bool:
        """Whether all that was read is known to be committed, but for what was read by who could not commit it."""
        done = {member.received[index][2] for member in self.members for index in member.may_have_done}
        return all(
            value in done or not member.kind.tells_commits for member in self.members for _, _, value in member.received
        )

    def counts(self) -> Counter[str]:
        """How often each record was handed out."""
        return Counter(value for member in self.members for _, _, value in member.received)

    # -- what must hold ------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """See that all that must hold held."""
        if self._sessions_last:
            check_owners(self.members, self._workers.tap)
        check_deliveries(self.members, self._workers.tap)

    def close(self) -> None:
        """Let all leave who are still there."""
        for member in self.present:
            member.worker.tell(member=member.name, do="leave")
        until(lambda: not self.present, lambda: f"{self.present} should leave")


Span = tuple[int, int, frozenset[At], Member]
"""From when to when a member owned what."""


def check_owners(members: Iterable[Member], tap: HeartbeatTap | None = None) -> None:
    """See that no partition was owned by two members at a time.

    A member whose heartbeats the `tap` has noted may tell its user that it owns what it has just disowned there: that
    is no fault of the coordinator, which has given the partition to another one afterwards.
    """
    for one, other in itertools.combinations(_spans(members), 2):
        both = {at for at in _both(one, other) if _counts(one, at) and _counts(other, at)}
        if tap is not None:
            both = {at for at in both if not (_disowned(tap, one, other, at) or _disowned(tap, other, one, at))}
        assert not both, f"{one[3]} and {other[3]} both owned {sorted(both)}: {one[:2]}, {other[:2]}"


def check_deliveries(members: Sequence[Member], tap: HeartbeatTap | None = None) -> None:
    """See that no record was handed to one member after another one had committed it.

    A member that tells its user that it owns what it has disowned, as the `tap` has noted on the wire, reads and
    commits beside the owner, and the coordinator takes what it commits at its epoch. So nothing is sure of what it was
    handed then, unless it had committed that before the owner was given the partition; nor of what the owner had
    committed before a commit of its sets the group's offset back.
    """
    strays = [] if tap is None else list(_strays(tap, members))
    sure: dict[tuple[At, int], Member] = {}
    for member in members:
        for index, commit in member.committed.items() if member.kind.is_exact else ():
            at, offset, _ = member.received[index]
            if any(stray.unsettles(member, index, commit) for stray in strays):
                continue
            other = sure.setdefault((at, offset), member)
            assert other is member, f"{at} @ {offset} was committed by {other} and by {member}"


class Stray(NamedTuple):
    """A time in which a member told its user that it owned what it had disowned, and another one had it."""

    member: Member
    at: At
    since: int
    until: int
    given_ns: int
    """When the coordinator gave the partition to the other one."""

    def unsettles(self, member: Member, index: int, commit: Commit) -> bool:
        """Whether it may come again what a member was handed at that index and has committed by this."""
        at, offset, _ = member.received[index]
        if at != self.at:
            return False
        if member is self.member:
            return self.since <= member.handed_ns[index] < self.until and commit.until >= self.given_ns
        return any(commit.since < its.until and its.offsets[at] <= offset for its in self._commits())

    def _commits(self) -> Iterator[Commit]:
        """What it committed meanwhile of that partition."""
        for commit in self.member.commits:
            if self.at in commit.offsets and commit.since < self.until and commit.until >= self.given_ns:
                yield commit


def _strays(tap: HeartbeatTap, members: Iterable[Member]) -> Iterator[Stray]:
    for one, other in itertools.permutations(_spans(members), 2):
        for at in _both(one, other):
            if _disowned(tap, one, other, at):
                yield Stray(one[3], at, one[0], one[1], _given_ns(tap, other, at))


def _spans(members: Iterable[Member]) -> list[Span]:
    return [(*span, member) for member in members for span in member.spans()]


def _both(one: Span, other: Span) -> frozenset[At]:
    """What two members owned at a time."""
    at_a_time = one[3] is not other[3] and max(one[0], other[0]) < min(one[1], other[1])
    return one[2] & other[2] if at_a_time else frozenset()


def _disowned(tap: HeartbeatTap, span: Span, other: Span, at: At) -> bool:
    """Whether a member had said that it does not own a partition before another one was given it, and was not again."""
    return tap.disowned(span[3].name, at, _given_ns(tap, other, at), span[0])


def _given_ns(tap: HeartbeatTap, span: Span, at: At) -> int:
    """When the coordinator gave a member a partition that it owned in that time."""
    return tap.given_ns(span[3].name, at, span[0])


def _counts(span: Span, at: At) -> bool:
    """Whether a member owned a partition not only in name."""
    since, end, _, member = span
    return not member.kind.is_hasty or member.used(at, since, end)
