"""The planner: what it answers, what it notices, and what it does with an assignor or a target that is wrong."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from anabranch.machines.groups.assignors import Subscriber
from anabranch.machines.groups.assignors.planner import Planner
from anabranch.machines.groups.assignors.spec import NOBODY, AssignorError, Ints, Spec
from tests.support.assigned_group import AssignedGroup, topic


def small() -> AssignedGroup:
    group = AssignedGroup()
    group.put(topic("a", 4), topic("b", 2))
    group.join("m1", ["a", "b"])
    group.join("m2", ["a", "b"])
    return group


def test_assignments_are_by_topic_name_with_ascending_partitions_in_the_members_order() -> None:
    group = small()
    a, b = group.topics["a"].topic_id, group.topics["b"].topic_id
    assert list(group.ask().items()) == [("m1", ((a, (0, 2)), (b, (0,)))), ("m2", ((a, (1, 3)), (b, (1,))))]


def test_only_what_changes_is_answered() -> None:
    group = small()
    group.plan()
    assert group.plan() == {}
    group.put(topic("b", 3))
    assert len(group.plan()) == 1


def test_what_was_answered_and_not_installed_is_answered_again() -> None:
    group = small()
    assert group.ask() == group.ask()
    group.plan()
    group.join("m3", ["a"])
    assert group.ask() == group.ask(Planner()) == group.ask()


def test_of_an_answer_installed_in_part_the_rest_is_answered_again() -> None:
    group = small()
    group.plan()
    group.join("m3", ["a"])
    changes = group.ask()
    group.target["m3"] = changes["m3"]
    again = group.ask()
    assert again == group.ask(Planner())
    assert again == {member: changes[member] for member in changes if member != "m3"}


def test_a_group_without_members_or_topics() -> None:
    group = AssignedGroup()
    assert group.plan() == {}
    group.join("m1", ["a"])
    assert group.plan() == {"m1": ()}
    group.put(topic("a", 1))
    assert group.plan() != {}
    group.leave("m1")
    assert group.plan() == {}
    group.join("m2", ["a"])
    assert group.plan().keys() == {"m2"}


def test_a_topic_created_again_is_another_topic() -> None:
    group = small()
    group.plan()
    group.put(topic("a", 4, life=1))
    changes = group.plan()
    assert changes.keys() == {"m1", "m2"}
    assert all(group.topics["a"].topic_id in dict(assignment) for assignment in changes.values())
    group.check()


def test_a_topic_that_is_deleted_is_taken_from_its_owners() -> None:
    group = small()
    group.plan()
    del group.topics["b"]
    assert group.plan().keys() == {"m1", "m2"}
    group.check()


def test_a_member_that_left_and_came_back_under_its_id_starts_from_its_target() -> None:
    group = small()
    group.plan()
    target = group.target["m2"]
    group.leave("m2")
    group.plan()
    group.join("m2", ["a", "b"])
    group.target["m2"] = target
    group.plan()
    group.check()


def test_partitions_may_be_numbered_with_gaps() -> None:
    group = AssignedGroup()
    odd = topic("a", 1)
    group.put(type(odd)("a", odd.topic_id, (1, 5, 7), (6, 9)))
    group.join("m1", ["a"])
    group.join("m2", ["a"])
    group.plan()
    group.check()
    assert sorted(len(group.owned(member)) for member in group.target) == [2, 3]


def test_a_topic_without_partitions_is_nobodys() -> None:
    group = AssignedGroup()
    group.put(topic("a", 0), topic("b", 1))
    group.join("m1", ["a", "b"])
    assert group.plan() == {"m1": ((group.topics["b"].topic_id, (0,)),)}


def test_of_two_that_claim_a_partition_the_later_keeps_it() -> None:
    group = small()
    group.plan()
    group.target["m2"] = group.target["m1"]
    assert group.plan().keys() == {"m1"}
    group.check()


def test_many_sets_of_topics_that_are_subscribed_to_no_more_are_forgotten() -> None:
    group = AssignedGroup()
    group.put(*(topic(f"t{number}", 2) for number in range(40)))
    for number in range(400):
        group.join("m1", [f"t{number % 40}", f"t{number // 10}"])
        group.plan()
        group.check()
    assert len(group.planner._sets) < 20


def none_at_all(spec: Spec) -> Ints:
    return np.full(len(spec.owner), NOBODY, np.int32)


def the_first(spec: Spec) -> Ints:
    return np.zeros(len(spec.owner), np.int32)


def a_stranger(spec: Spec) -> Ints:
    return np.full(len(spec.owner), spec.members, np.int32)


def too_few(spec: Spec) -> Ints:
    return np.zeros(len(spec.owner) - 1, np.int32)


@pytest.mark.parametrize("assignor", [none_at_all, the_first, a_stranger, too_few])
def test_an_assignor_that_is_wrong_is_named_and_changes_nothing(assignor: object) -> None:
    group = small()
    group.subscribers["m1"] = Subscriber(frozenset({"a"}))
    with pytest.raises(AssignorError):
        group.planner.plan(assignor, group.subscribers, group.topics, group.target)  # type: ignore[arg-type]
    assert gc.isenabled()
    group.plan()
    group.check()
