"""The range assignor, in groups small enough to look at."""

from __future__ import annotations

import pytest

from tests.support.assigned_group import AssignedGroup, topic


def group(*members: str) -> AssignedGroup:
    made = AssignedGroup("range")
    for member in members:
        made.join(member, ["a", "b"])
    return made


def test_ranges_in_the_order_of_the_member_ids_the_first_have_one_more() -> None:
    two = group("m2", "m1")
    two.put(topic("a", 3), topic("b", 3))
    two.plan()
    assert two.owned("m1") == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}
    assert two.owned("m2") == {("a", 2), ("b", 2)}


@pytest.mark.parametrize("partitions", [1, 2, 3, 4, 7, 30])
def test_topics_with_as_many_partitions_are_split_alike(partitions: int) -> None:
    five = group(*"54321")
    five.put(topic("a", partitions), topic("b", partitions))
    five.plan()
    owners = five.owners()
    assert [owners["a", index] for index in range(partitions)] == [owners["b", index] for index in range(partitions)]


def test_static_members_come_first_by_their_instance_ids() -> None:
    three = group("a-dynamic")
    three.join("z", ["a"], instance_id="1")
    three.join("y", ["a"], instance_id="2")
    three.put(topic("a", 3))
    three.plan()
    assert [three.owners()["a", index] for index in range(3)] == ["z", "y", "a-dynamic"]


def test_a_static_member_that_comes_back_under_another_id_gets_the_same_range() -> None:
    two = group("m")
    two.join("z", ["a"], instance_id="1")
    two.put(topic("a", 4))
    two.plan()
    had = two.owned("z")
    two.leave("z")
    two.join("another", ["a"], instance_id="1")
    assert two.plan().keys() == {"another"}
    assert two.owned("another") == had


def test_each_topic_is_split_among_its_own_subscribers() -> None:
    mixed = group("m1", "m2")
    mixed.join("m3", ["b"])
    mixed.put(topic("a", 4), topic("b", 3))
    mixed.plan()
    assert mixed.owned("m1") == {("a", 0), ("a", 1), ("b", 0)}
    assert mixed.owned("m2") == {("a", 2), ("a", 3), ("b", 1)}
    assert mixed.owned("m3") == {("b", 2)}


def test_retiring_partitions_are_ranges_of_their_own() -> None:
    two = group("m1", "m2")
    two.put(topic("a", 2, retiring=3))
    two.plan()
    assert two.owned("m1") == {("a", 0), ("a", 2), ("a", 3)}
    assert two.owned("m2") == {("a", 1), ("a", 4)}
