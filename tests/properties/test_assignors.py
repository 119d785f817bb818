"""Assignors on random groups with random histories: complete, balanced, sticky, and a function of the present alone."""

from __future__ import annotations

from typing import Any, TypeAlias

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.machines.groups.assignors.planner import Planner
from tests.support.assigned_group import AssignedGroup, FakeTopic, TopicPartition, topic

NAMES = tuple("abcdef")
ASSIGNORS = ("uniform", "range")
Step: TypeAlias = tuple[Any, ...]
thorough = settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])

topics = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=len(NAMES)).map(
    lambda sizes: [topic(name, *size) for name, size in zip(NAMES, sizes, strict=False)]
)
member_ids = st.text("abcxyz019-", min_size=1, max_size=5)
subscription = st.frozensets(st.sampled_from((*NAMES, "no-such-topic")), max_size=len(NAMES))
instance = st.none() | st.sampled_from(("i1", "i2", "i3", "i4"))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("join"), member_ids, subscription, instance),
        st.tuples(st.just("leave"), st.integers(0, 99)),
        st.tuples(st.just("topic"), st.sampled_from(NAMES), st.integers(1, 12), st.integers(0, 6), st.integers(0, 1)),
        st.tuples(st.just("drop"), st.sampled_from(NAMES)),
        st.tuples(st.just("plan")),
        st.tuples(st.just("forget"), st.integers(0, 99)),
    ),
    max_size=25,
)


def take(group: AssignedGroup, step: Step) -> None:
    match step:
        case ("join", member, subscribed, instance_id):
            group.join(member, subscribed, instance_id)
        case ("leave", number) if group.subscribers:
            group.leave(sorted(group.subscribers)[number % len(group.subscribers)])
        case ("topic", name, live, retiring, life):
            group.put(topic(name, live, retiring, life))
        case ("drop", name):
            group.topics = {other: each for other, each in group.topics.items() if other != name}
        case ("plan",):
            group.plan()
        case ("forget", number) if group.target:
            del group.target[sorted(group.target)[number % len(group.target)]]


def balanced(group: AssignedGroup) -> bool:
    """Whether no partition has another subscriber with two fewer, in either list."""
    owners = group.owners()
    for live in (True, False):
        loads = group.loads(live=live)
        for name, index in group.assignable(live=live, retiring=not live):
            others = (loads[member] for member, each in group.subscribers.items() if name in each.topics)
            if loads[owners[name, index]] - min(others) > 1:
                return False
    return True


@pytest.mark.parametrize("assignor", ASSIGNORS)
@thorough
@given(history=steps)
def test_after_any_history_everything_is_assigned_once_to_a_subscriber(assignor: str, history: list[Step]) -> None:
    group = AssignedGroup(assignor)
    for step in history:
        take(group, step)
    group.plan()
    group.check()
    if assignor == "uniform":
        assert balanced(group)
    assert group.plan() == {}


@pytest.mark.parametrize("assignor", ASSIGNORS)
@thorough
@given(history=steps)
def test_a_planner_that_saw_everything_says_what_a_new_one_says(assignor: str, history: list[Step]) -> None:
    group = AssignedGroup(assignor)
    for step in history:
        take(group, step)
        if step[0] != "plan":
            said = group.ask()
            assert said == group.ask(Planner())
            assert list(said) == list(group.ask(Planner()))


@thorough
@given(made=topics, members=st.sets(member_ids, min_size=1, max_size=9), joiner=member_ids)
def test_equal_subscriptions_are_even_and_a_join_moves_partitions_only_to_the_new_member(
    made: list[FakeTopic], members: set[str], joiner: str
) -> None:
    group = AssignedGroup()
    group.put(*made)
    for member in members - {joiner}:
        group.join(member, NAMES)
    group.plan()
    before = group.owners()
    group.join(joiner, NAMES)
    group.plan()
    group.check()
    moved_to = {member for partition, member in group.owners().items() if before.get(partition, member) != member}
    assert moved_to <= {joiner}
    for live in (True, False):
        loads = group.loads(live=live).values()
        assert max(loads) - min(loads) <= 1


@thorough
@given(made=topics, members=st.sets(member_ids, min_size=2, max_size=9), number=st.integers(0, 9))
def test_equal_subscriptions_a_leave_moves_only_what_the_leaver_had(
    made: list[FakeTopic], members: set[str], number: int
) -> None:
    group = AssignedGroup()
    group.put(*made)
    for member in members:
        group.join(member, NAMES)
    group.plan()
    before = group.owners()
    leaver = sorted(members)[number % len(members)]
    group.leave(leaver)
    group.plan()
    group.check()
    assert all(before[partition] in (member, leaver) for partition, member in group.owners().items())


@thorough
@given(counts=st.lists(st.integers(1, 12), min_size=1, max_size=6), members=st.integers(1, 9), added=st.integers(1, 12))
def test_equal_subscriptions_new_partitions_move_none_that_was_there(
    counts: list[int], members: int, added: int
) -> None:
    group = AssignedGroup()
    group.put(*(topic(name, count) for name, count in zip(NAMES, counts, strict=False)))
    for number in range(members):
        group.join(f"m{number}", NAMES)
    group.plan()
    before = group.owners()
    group.put(topic(NAMES[0], counts[0] + added))
    group.plan()
    group.check()
    assert before.items() <= group.owners().items()


def ranges(group: AssignedGroup) -> dict[str, set[TopicPartition]]:
    """The range assignor, one partition at a time."""
    order = sorted(
        group.subscribers,
        key=lambda member: (
            (each := group.subscribers[member]).instance_id is None,
            each.instance_id or member,
            member,
        ),
    )
    owned: dict[str, set[TopicPartition]] = {member: set() for member in group.subscribers}
    for name, each in group.topics.items():
        subscribers = [member for member in order if name in group.subscribers[member].topics]
        for partitions in (list(each.partitions), list(each.retiring)):
            end = 0
            for place, member in enumerate(subscribers):
                begin, end = (
                    end,
                    end + len(partitions) // len(subscribers) + (place < len(partitions) % len(subscribers)),
                )
                owned[member].update((name, index) for index in partitions[begin:end])
    return owned


@thorough
@given(history=steps)
def test_range_agrees_with_a_simple_model(history: list[Step]) -> None:
    group = AssignedGroup("range")
    for step in history:
        take(group, step)
    group.plan()
    assert {member: group.owned(member) for member in group.target} == ranges(group)


@thorough
@given(history=steps)
def test_the_order_in_which_a_coordinator_lists_members_and_topics_does_not_matter(history: list[Step]) -> None:
    group = AssignedGroup()
    for step in history:
        take(group, step)
    said = group.ask()
    turned = AssignedGroup(
        topics=dict(reversed(group.topics.items())),
        subscribers=dict(reversed(group.subscribers.items())),
        target=dict(reversed(group.target.items())),
    )
    assert turned.ask() == said


@thorough
@given(made=topics, claims=st.lists(st.lists(st.tuples(st.sampled_from(NAMES), st.integers(-1, 20))), max_size=6))
def test_any_target_is_set_right(made: list[FakeTopic], claims: list[list[TopicPartition]]) -> None:
    """Partitions claimed twice, claimed but not there, of topics unknown: as a client's assignment may leave it."""
    group = AssignedGroup()
    group.put(*made)
    ids = {name: topic(name, 1).topic_id for name in NAMES}
    for number, claim in enumerate(claims):
        group.join(f"m{number}", NAMES)
        indexes = {name: tuple(sorted({index for each, index in claim if each == name})) for name, _ in sorted(claim)}
        group.target[f"m{number}"] = tuple((ids[name], each) for name, each in indexes.items())
    assert group.ask() == group.ask(Planner())
    group.plan()
    if claims:
        group.check()
        assert balanced(group)
