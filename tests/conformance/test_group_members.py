"""Groups of each kind of client: joining, sharing, committing, leaving, and coming back under the same name."""

from __future__ import annotations

from tests.conformance.kinds import KINDS, each_kind
from tests.conformance.members.group import Group, Kind
from tests.conformance.members.process import Workers


@each_kind()
def test_members_come_and_go_and_every_record_is_read_once(kind: Kind, group: Group) -> None:
    first, second = group.join(kind), group.join(kind)
    group.settles(4)
    group.produce(100)
    group.reads_all()
    assert set(group.counts().values()) == {1}
    third = group.join(kind, process=1)
    group.settles(4)
    group.produce(100)
    group.reads_all()
    group.leave(first)
    group.settles(4, [second, third])
    group.produce(100)
    group.reads_all()
    group.leave(second, third)
    group.produce(50)
    fourth = group.join(kind)
    group.reads_all()
    if kind.tells_commits:
        assert len(fourth.received) == 50


@each_kind(that="is_static")
def test_a_static_member_bounces_and_nothing_moves(kind: Kind, group: Group) -> None:
    stays, goes = group.join(kind, instance="stays"), group.join(kind, instance="goes")
    group.settles(4)
    had, kept = goes.owned, stays.owned
    group.produce(40)
    group.reads_all()
    group.leave(goes)
    back = group.join(kind, instance="goes")
    group.settles(4)
    assert back.owned == had
    group.produce(40)
    group.reads_all()
    assert set(group.counts().values()) == {1}
    assert stays.owned == kept


@each_kind(that="has_patterns")
def test_a_pattern_takes_in_topics_that_appear(kind: Kind, group: Group) -> None:
    first = group.join(kind, topics=[], pattern=f"{group.group_id}(-[a-z]+)?")
    second = group.join(kind, topics=[], pattern=f"{group.group_id}(-[a-z]+)?")
    group.settles(4)
    group.add_topic("more", 4)
    group.settles(4)
    assert {topic for topic, _ in first.owned | second.owned} == set(group.topics)
    group.produce(80)
    group.reads_all()
    assert set(group.counts().values()) == {1}


def test_partitions_are_given_away_only_when_their_owner_has_let_go_of_them(group: Group, workers: Workers) -> None:
    """The answer that takes them away from a Java member is late."""
    java, confluent = (next(it for it in KINDS if str(it) == f"{name}-consumer") for name in ("java", "confluent"))
    group.join(java)
    group.settles(4)
    group.produce(40)
    group.reads_all()
    assert workers.tap is not None
    workers.tap.late_s = 0.6
    group.join(confluent)
    group.settles(4)
    workers.tap.late_s = 0.0
    group.produce(40)
    group.reads_all()
