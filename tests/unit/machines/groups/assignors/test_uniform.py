"""The uniform assignor, in groups small enough to look at."""

from __future__ import annotations

import numpy as np

from anabranch.machines.groups.assignors import Assignors
from tests.support.assigned_group import AssignedGroup, topic


def group(*members: str, topics: str = "a b") -> AssignedGroup:
    made = AssignedGroup("uniform")
    for member in members:
        made.join(member, topics.split())
    return made


def test_each_topic_is_spread_over_the_members() -> None:
    two = group("m1", "m2")
    two.put(topic("a", 3), topic("b", 2))
    two.plan()
    assert two.owned("m1") == {("a", 0), ("a", 2), ("b", 1)}
    assert two.owned("m2") == {("a", 1), ("b", 0)}


def test_a_member_that_joins_gets_its_share_and_no_one_else_gets_anything() -> None:
    three = group("m1", "m2")
    three.put(topic("a", 6))
    three.plan()
    before = dict(three.target)
    three.join("m3", ["a"])
    changes = three.plan()
    assert [len(three.owned(member)) for member in ("m1", "m2", "m3")] == [2, 2, 2]
    assert changes.keys() == {"m1", "m2", "m3"}
    assert all(set(changes[member][0][1]) < set(before[member][0][1]) for member in ("m1", "m2"))


def test_a_member_that_leaves_only_gives_what_it_had() -> None:
    four = group("m1", "m2", "m3", "m4")
    four.put(topic("a", 8))
    four.plan()
    before = {member: four.owned(member) for member in four.target}
    four.leave("m2")
    four.plan()
    assert all(before[member] <= four.owned(member) for member in ("m1", "m3", "m4"))
    assert sorted(len(four.owned(member)) for member in four.target) == [2, 3, 3]


def test_with_more_members_than_partitions_some_own_nothing_and_say_so() -> None:
    three = group("m1", "m2", "m3")
    three.put(topic("a", 2))
    assert three.plan()["m3"] == ()


def test_live_and_retiring_partitions_are_balanced_as_two_lists() -> None:
    two = group("m1", "m2")
    two.put(topic("a", 3, retiring=3))
    two.plan()
    assert (two.loads(live=True), two.loads(live=False)) == ({"m1": 2, "m2": 1}, {"m1": 1, "m2": 2})


def test_a_partition_that_begins_to_retire_stays_unless_the_lists_become_uneven() -> None:
    two = group("m1", "m2")
    two.put(topic("a", 8))
    two.plan()
    before = two.owners()
    two.put(topic("a", 4, retiring=4))
    assert two.plan() == {}
    two.put(topic("a", 5, retiring=3))
    two.plan()
    assert two.owners() == before


def test_members_that_subscribe_to_less_get_more_of_it() -> None:
    mixed = group("both")
    mixed.join("only-a", ["a"])
    mixed.put(topic("a", 4), topic("b", 4))
    mixed.plan()
    assert mixed.owned("only-a") == {("a", index) for index in range(4)}
    assert mixed.owned("both") == {("b", index) for index in range(4)}


def test_what_no_other_subscribes_to_stays_however_uneven() -> None:
    mixed = group("m1", "m2", topics="a")
    mixed.join("m3", ["a", "b"])
    mixed.put(topic("a", 2), topic("b", 9))
    mixed.plan()
    assert [len(mixed.owned(member)) for member in ("m1", "m2", "m3")] == [1, 1, 9]


def test_a_member_that_subscribes_to_less_gives_only_that() -> None:
    two = group("m1", "m2")
    two.put(topic("a", 4), topic("b", 4))
    two.plan()
    before = two.owners()
    two.join("m2", ["a"])
    two.plan()
    owners = two.owners()
    assert {owners["b", index] for index in range(4)} == {"m1"}
    assert {partition for partition in owners if before[partition] == "m2" and partition[0] == "a"} <= two.owned("m2")
    assert len(two.owned("m1")) == len(two.owned("m2")) == 4


def test_it_is_even_when_many_deals_are_cut_short() -> None:
    """With very many members each gets several partitions of a topic at once."""
    many = AssignedGroup("uniform")
    for number in range(12_000):
        many.join(f"m{number}", ["a", "b"])
    many.put(topic("a", 20_003), topic("b", 20_000))
    many.plan()
    sizes = np.bincount([sum(len(indexes) for _, indexes in each) for each in many.target.values()])
    assert list(sizes) == [0, 0, 0, 7_997, 4_003]


def test_members_and_classes_beyond_16_bits_are_sorted_too() -> None:
    many = AssignedGroup("uniform")
    for number in range(70_000):
        many.join(f"m{number}", ["a"] if number % 3 else ["a", "b"])
    many.put(topic("a", 40_000), topic("b", 40_000))
    many.plan()
    taken = [sum(len(indexes) for _, indexes in many.target[f"m{number}"]) for number in range(70_000)]
    assert sum(taken) == 80_000
    assert (min(taken[::3]), max(taken[::3])) == (1, 2)
    assert max(taken[1::3] + taken[2::3]) == 1


def test_the_name() -> None:
    assert Assignors().get("uniform").__module__.endswith("uniform")
