"""The assignors of classic leaders: known results, and what must hold for any group."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.base.errors import DecodeError
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.membership.strategies import (
    STRATEGIES,
    Assignment,
    Counts,
    PartitionCounts,
    Subscriber,
    assign,
    assignment_of,
    is_cooperative,
    strategies_of,
    subscriber_of,
    subscription_bytes,
)

TOPICS = ("a", "b", "c")


def members(**topics: str) -> list[Subscriber]:
    return [Subscriber(name, frozenset(wanted)) for name, wanted in topics.items()]


def counts(**totals: int) -> dict[str, PartitionCounts]:
    return {topic: PartitionCounts(total) for topic, total in totals.items()}


def brief(given: Assignment) -> dict[str, str]:
    return {name: " ".join(f"{tp.topic}{tp.partition}" for tp in sorted(tps)) for name, tps in given.items()}


def test_range_gives_each_topic_in_runs_the_first_members_one_more() -> None:
    assert brief(assign("range", members(x="ab", y="ab", z="ab"), counts(a=4, b=2))) == {
        "x": "a0 a1 b0",
        "y": "a2 b1",
        "z": "a3",
    }
    assert brief(assign("range", members(x="a", y="ab"), counts(a=3, b=1))) == {"x": "a0 a1", "y": "a2 b0"}


def test_round_robin_goes_around_and_passes_over_who_does_not_subscribe() -> None:
    assert brief(assign("roundrobin", members(x="ab", y="ab"), counts(a=3, b=3))) == {"x": "a0 a2 b1", "y": "a1 b0 b2"}
    given = assign("roundrobin", members(x="a", y="ab", z="abc"), counts(a=1, b=2, c=3))
    assert brief(given) == {"x": "a0", "y": "b0", "z": "b1 c0 c1 c2"}


def test_static_members_come_first_by_their_instance_ids() -> None:
    group = [
        Subscriber("a-dynamic", frozenset("a")),
        Subscriber("z", frozenset("a"), instance_id="2"),
        Subscriber("y", frozenset("a"), instance_id="1"),
    ]
    assert brief(assign("range", group, counts(a=3))) == {"y": "a0", "z": "a1", "a-dynamic": "a2"}


def next_round(strategy: str, group: list[Subscriber], given: Assignment, generation: int) -> list[Subscriber]:
    return [Subscriber(one.member_id, one.topics, frozenset(given.get(one.member_id, ())), generation) for one in group]


def test_sticky_moves_as_little_as_balance_needs() -> None:
    group = members(x="ab", y="ab")
    sizes = counts(a=4, b=2)
    before = assign("sticky", group, sizes)
    group = [*next_round("sticky", group, before, 1), *members(z="ab")]
    after = assign("sticky", group, sizes)
    assert sorted(len(tps) for tps in after.values()) == [2, 2, 2]
    assert all(set(after[name]) <= set(before[name]) for name in ("x", "y"))


def test_cooperative_sticky_hands_over_in_two_rounds() -> None:
    group = members(x="a")
    first = assign("cooperative-sticky", group, counts(a=4))
    group = [*next_round("", group, first, 1), *members(y="a")]
    second = assign("cooperative-sticky", group, counts(a=4))
    assert brief(second) == {"x": "a0 a1", "y": ""}
    third = assign("cooperative-sticky", next_round("", group, second, 2), counts(a=4))
    assert brief(third) == {"x": "a0 a1", "y": "a2 a3"}


def test_of_two_claims_the_later_generations_counts() -> None:
    a0, a1 = TopicPartition("a", 0), TopicPartition("a", 1)
    stale = Subscriber("x", frozenset("a"), frozenset({a0, a1}), 3)
    fresh = Subscriber("y", frozenset("a"), frozenset({a0}), 4)
    assert brief(assign("sticky", [stale, fresh], counts(a=2))) == {"x": "a1", "y": "a0"}


@st.composite
def groups(draw: st.DrawFn) -> tuple[list[Subscriber], Counts]:
    size = st.integers(0, 9).flatmap(lambda total: st.builds(PartitionCounts, st.just(total), st.integers(0, total)))
    counts = draw(st.fixed_dictionaries(dict.fromkeys(TOPICS, size)))
    every = [TopicPartition(topic, number) for topic in TOPICS for number in range(10)]
    group = [
        Subscriber(
            f"m{index}",
            frozenset(draw(st.sets(st.sampled_from(TOPICS), min_size=1))),
            frozenset(draw(st.sets(st.sampled_from(every), max_size=8))),
            draw(st.integers(-1, 3)),
        )
        for index in range(draw(st.integers(1, 6)))
    ]
    return group, counts


@given(groups(), st.sampled_from(STRATEGIES))
def test_everything_is_given_once_to_who_subscribes(case: tuple[list[Subscriber], Counts], name: str) -> None:
    group, counts = case
    wanted = {
        TopicPartition(topic, number)
        for topic, count in counts.items()
        for number in range(count.total)
        if any(topic in one.topics for one in group)
    }
    topics = {one.member_id: one.topics for one in group}
    for _ in range(3):
        result = assign(name, group, counts)
        given_ = [tp for tps in result.values() for tp in tps]
        assert len(given_) == len(set(given_)) and set(given_) <= wanted
        assert all(tp.topic in topics[member_id] for member_id, tps in result.items() for tp in tps)
        if name != "cooperative-sticky":
            break
        for one in group:
            for other in group:
                if one is not other and one.owned & other.owned == frozenset():
                    assert not set(result[one.member_id]) & other.owned
        group = next_round(name, group, result, 4)
    assert set(given_) == wanted


def loads(result: Assignment, counts: Counts, *, retiring: bool) -> dict[str, int]:
    """The number of each member's live, or retiring, partitions."""
    return {
        name: sum((tp.partition in counts[tp.topic].lists[1]) is retiring for tp in tps) for name, tps in result.items()
    }


@given(groups())
def test_sticky_is_balanced_in_each_list_and_stays_where_it_is(case: tuple[list[Subscriber], Counts]) -> None:
    group, counts = case
    result = assign("sticky", group, counts)
    for retiring in (False, True):
        load = loads(result, counts, retiring=retiring)
        for one in group:
            for other in group:
                movable = [
                    tp
                    for tp in result[one.member_id]
                    if tp.topic in other.topics and (tp.partition in counts[tp.topic].lists[1]) is retiring
                ]
                assert not movable or load[one.member_id] - load[other.member_id] <= 1
    again = assign("sticky", next_round("", group, result, 9), counts)
    assert {name: set(tps) for name, tps in again.items()} == {name: set(tps) for name, tps in result.items()}


@given(groups(), st.sampled_from(STRATEGIES))
def test_with_equal_subscriptions_each_list_is_even_within_one(
    case: tuple[list[Subscriber], Counts], name: str
) -> None:
    group, counts = case
    topics = frozenset("a") if name == "range" else frozenset(TOPICS)
    group = [replace(one, topics=topics) for one in group]
    result = assign(name, group, counts)
    if name == "cooperative-sticky":
        result = assign(name, next_round("", group, result, 9), counts)
    for retiring in (False, True):
        load = loads(result, counts, retiring=retiring).values()
        assert max(load) - min(load) <= 1


@given(groups())
def test_members_that_tie_get_retiring_partitions_where_they_have_fewer_live_ones(
    case: tuple[list[Subscriber], Counts],
) -> None:
    group, counts = case
    group = [replace(one, topics=frozenset(TOPICS), owned=frozenset()) for one in group]
    for name in ("sticky", "roundrobin"):
        load = [len(tps) for tps in assign(name, group, counts).values()]
        assert max(load) - min(load) <= 1


def test_live_and_retiring_partitions_are_ranges_of_their_own() -> None:
    group = members(x="a", y="a")
    sizes = {"a": PartitionCounts(8, 4)}
    assert brief(assign("range", group, sizes)) == {"x": "a0 a1 a4 a5", "y": "a2 a3 a6 a7"}
    assert brief(assign("roundrobin", group, {"a": PartitionCounts(5, 2)})) == {"x": "a0 a2 a4", "y": "a1 a3"}


def test_a_shrink_evens_out_the_live_partitions() -> None:
    group = members(x="a", y="a")
    before = assign("range", group, counts(a=8))
    assert brief(before) == {"x": "a0 a1 a2 a3", "y": "a4 a5 a6 a7"}
    group = next_round("", group, before, 1)
    shrunk = {"a": PartitionCounts(8, 4)}
    assert brief(assign("sticky", group, shrunk)) == {"x": "a0 a1 a6 a7", "y": "a2 a3 a4 a5"}
    assert brief(assign("cooperative-sticky", group, shrunk)) == {"x": "a0 a1", "y": "a4 a5"}


@given(st.binary(max_size=200))
def test_any_bytes_are_a_subscription_or_an_error(data: bytes) -> None:
    for read in (lambda: subscriber_of("m", None, "sticky", data), lambda: assignment_of(data)):
        with suppress(DecodeError):
            read()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_subscription_is_read_as_it_was_written(strategy: str) -> None:
    partitions = frozenset({TopicPartition("a", 1), TopicPartition("b", 0)})
    said = subscriber_of("m", "i", strategy, subscription_bytes(strategy, frozenset("ab"), partitions, 7, "r"))
    assert (said.topics, said.instance_id, said.generation) == (frozenset("ab"), "i", 7)
    assert said.owned == (partitions if "sticky" in strategy else frozenset())


def test_strategies_have_kafkas_names() -> None:
    java = "org.apache.kafka.clients.consumer."
    assert strategies_of(f"{java}RangeAssignor,{java}CooperativeStickyAssignor") == ("range", "cooperative-sticky")
    assert strategies_of("round-robin, sticky") == ("roundrobin", "sticky")
    assert is_cooperative(["cooperative-sticky"]) and not is_cooperative(["range", "cooperative-sticky"])
    with pytest.raises(ValueError, match=r"there is no 'fair'; it can be range"):
        strategies_of("fair")
    with pytest.raises(ValueError, match=r"is empty"):
        strategies_of([])
