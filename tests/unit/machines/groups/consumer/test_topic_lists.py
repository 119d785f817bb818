"""What a group's members subscribe to: equal subscriptions are one object, and one that no member has is not kept."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from anabranch.machines.groups.consumer.group import ConsumerGroup, MemberMetadata, member_record


@pytest.mark.parametrize("seed", range(5))
def test_the_lists_are_those_of_the_members(seed: int) -> None:
    chance = Random(seed)
    group = ConsumerGroup("g")
    for _ in range(300):
        regex = chance.choice([None, "a.*", "b.*"])
        said = MemberMetadata(topics=tuple(f"t{number}" for number in range(chance.randrange(6))), regex=regex)
        gone = chance.random() < 0.3
        group.apply(member_record("g", f"m{chance.randrange(8)}", None if gone else said))
        lists = {member.described.topics for member in group.members.values()}
        assert set(group.topic_lists) == lists
        assert group.names == sum(map(len, lists))
        said_by = Counter(member.described.regex for member in group.members.values())
        assert group.patterns == {regex: count for regex, count in said_by.items() if regex is not None}
        assert len({id(member.described.topics) for member in group.members.values()}) == len(lists)
        copied = group.copy()
        copied.apply(member_record("g", "other", MemberMetadata(topics=("new",), regex="new")))
        assert set(group.topic_lists) == lists, "a copy to try things on changes nothing"
        assert "new" not in group.patterns
