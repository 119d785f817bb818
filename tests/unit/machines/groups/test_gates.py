"""Gates as a coordinator sees them: committed offsets, log starts, and owners that have nothing to commit."""

from __future__ import annotations

from anabranch.machines.groups.consumer.group import ConsumerGroup, Member, MemberMetadata
from anabranch.machines.groups.gates import OwnedSince, closed_partitions, gates_of
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.positions import Position
from anabranch.machines.lineage import Lineage
from tests.support.groups import topic_id

FOO = topic_id("foo")
GREW = TopicImage(FOO, "foo", (0, 1), lineage=Lineage.of_ends(1, (1, 2), ({0: 5},)))
TIMEOUT_MS = 60_000


def group(owner: str | None = "A") -> ConsumerGroup:
    made = ConsumerGroup("g")
    if owner is not None:
        made.members[owner] = Member(owner, MemberMetadata(rebalance_timeout_ms=TIMEOUT_MS))
        made.holders[FOO, 0] = owner
    return made


def closed(
    positions: dict[int, int], *, by: ConsumerGroup | None = None, since: OwnedSince | None = None, now_ms: int = 0
) -> frozenset[int]:
    def committed(_: str, partition: int) -> Position | None:
        return Position(positions[partition]) if partition in positions else None

    return closed_partitions(by or group(), GREW, committed, {} if since is None else since, now_ms)


def test_a_child_waits_until_its_parent_is_committed_to_the_cut() -> None:
    assert closed({0: 4}) == {1}
    assert closed({0: 5}) == frozenset()


def test_a_parent_without_a_commit_stands_at_its_log_start() -> None:
    assert closed({}) == {1}
    emptied = TopicImage(
        FOO, "foo", (0, 1), lineage=GREW.lineage, log_start=lambda partition: 5 if not partition else 0
    )
    assert closed_partitions(group(), emptied, lambda *_: None, {}, 0) == frozenset()


def test_an_owner_that_commits_nothing_for_its_rebalance_timeout_has_nothing_to_commit() -> None:
    since: OwnedSince = {}
    assert closed({}, since=since, now_ms=1_000) == {1}
    assert closed({}, since=since, now_ms=1_000 + TIMEOUT_MS - 1) == {1}
    assert closed({}, since=since, now_ms=1_000 + TIMEOUT_MS) == frozenset()


def test_another_owner_has_the_whole_timeout_again() -> None:
    since: OwnedSince = {}
    closed({}, since=since, now_ms=0)
    assert closed({}, by=group("B"), since=since, now_ms=TIMEOUT_MS) == {1}
    assert closed({}, by=group("B"), since=since, now_ms=2 * TIMEOUT_MS) == frozenset()


def test_a_partition_without_an_owner_waits_however_long_it_takes() -> None:
    since: OwnedSince = {}
    closed({}, since=since, now_ms=0)
    assert closed({}, by=group(None), since=since, now_ms=10 * TIMEOUT_MS) == {1}
    assert not since


def test_partitions_that_do_not_exist_wait_and_flat_topics_have_no_gates() -> None:
    image = Image(1, {"foo": GREW, "bar": TopicImage(topic_id("bar"), "bar", (0,))})
    waits = gates_of(group(), image, lambda *_: Position(5), {}, 0)
    assert not waits(FOO, 1) and not waits(topic_id("bar"), 0)
    assert waits(FOO, 2) and waits(topic_id("none"), 0)
