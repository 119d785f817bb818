"""Groups of each kind of client: joining, sharing, committing, leaving, and coming back under the same name."""

from __future__ import annotations

from tests.conformance.kinds import each_kind
from tests.conformance.members.group import Group, Kind


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
