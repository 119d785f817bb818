"""Runs that once failed although no group had broken a rule, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from anabranch.machines.clients.membership.steps import Owned, Revoke, Subscription
from anabranch.protocol.messages.sync_group import SyncGroupResponse
from tests.simulation.groups_client import Client
from tests.simulation.groups_stories import (
    a_broker_fails_while_a_partition_waits,
    a_classic_group_comes_back_after_a_resize,
    a_group_comes_back_after_a_resize,
    a_partition_is_removed_and_made_again_while_nobody_reads,
    a_partition_re_opens_that_its_owner_has_not_read,
    a_static_member_comes_back_while_a_member_computes,
    a_topic_is_granted_again_to_a_member_that_was_told_of_its_parent,
    an_owner_that_comes_back_has_all_its_time,
    another_owner_has_all_its_time,
    records_are_compacted_away_under_a_slow_owner,
    records_are_deleted_under_a_slow_owner,
    records_before_a_gate_are_compacted_away,
    records_before_a_gate_are_deleted,
    the_first_records_behind_a_gate_were_deleted,
    the_order_is_given_up_while_a_partition_waits_that_was_taken_away,
    unread_records_were_deleted,
)
from tests.simulation.groups_world import World

READS = Subscription(frozenset({"a"}))
A0, A1 = Owned("a", 0), Owned("a", 1)


class QuietWorld(World):
    """A world without incidents but those of a test: one group, one topic with two partitions."""

    def __init__(self) -> None:
        super().__init__(0, groups=1, strategies=(("cooperative-sticky",),), faults=0.0, initial_delay_ms=0)
        self.heal()
        self._new_topic("a")
        while len(self.image.by_name["a"].partitions) != 2:
            self._new_topic("a")

    def subscription(self) -> Subscription:
        return READS

    def start(self, group_id: str = "g0", **given: Any) -> Client:
        return super().start(group_id, classic=True, **given)

    def converge(self) -> None:
        while self.missing() is not None:
            self.run_until(self.now_ms + 10)


@pytest.fixture
def world() -> Iterator[QuietWorld]:
    world = QuietWorld()
    yield world
    world.end()


def test_a_group_has_not_converged_while_an_application_has_yet_to_let_go_of_a_partition(world: QuietWorld) -> None:
    """A cooperative group needs a second generation when the first one has revoked a partition."""
    first = world.start()
    world.converge()
    assert first.machine.owned == {A0, A1}
    first.is_slow = True

    second = world.start()
    while not isinstance(first.due, Revoke):
        world.run_until(world.now_ms + 1)
    while not second.is_in:
        assert isinstance(first.due, Revoke), "the application was not slow enough"
        world.run_until(world.now_ms + 1)

    assert first.machine.owned == {A0, A1} and second.machine.owned == frozenset()
    assert world.missing() == f"g0: {first.name} has yet to carry out {first.due}"
    world.converge()
    assert len(first.machine.owned) == len(second.machine.owned) == 1


def test_an_answer_that_a_leaving_member_ignores_does_not_move_what_it_holds_to_a_new_topic_of_that_name(
    world: QuietWorld,
) -> None:
    client = world.start()
    world.converge()
    former = world.image.by_name["a"].topic_id
    assert client.holds == {(former, 0), (former, 1)}
    world.run_until(world.now_ms + 1_000)

    client.is_slow = True
    world._new_topic("a")
    client.leave()
    while not isinstance(client.due, Revoke):
        world.run_until(world.now_ms + 1)
    # Its answer was on the way when it began to leave: by now the machine waits for no answer.
    new = {"a": world.image.by_name["a"].topic_id}
    late = SyncGroupResponse()
    client.noted(late, (client.standing, None, new))
    client.machine.on_response(1, late, world.now_ms)

    assert client.machine.owned == {A0, A1}, "it has yet to let go"
    assert client.holds == {(former, 0), (former, 1)}, "nobody gave it anything of the new topic"


@pytest.mark.parametrize(
    "story",
    [
        unread_records_were_deleted,
        another_owner_has_all_its_time,
        an_owner_that_comes_back_has_all_its_time,
        a_static_member_comes_back_while_a_member_computes,
        a_group_comes_back_after_a_resize,
        a_classic_group_comes_back_after_a_resize,
        a_partition_is_removed_and_made_again_while_nobody_reads,
        a_topic_is_granted_again_to_a_member_that_was_told_of_its_parent,
        the_first_records_behind_a_gate_were_deleted,
        records_are_deleted_under_a_slow_owner,
        records_before_a_gate_are_deleted,
        records_before_a_gate_are_compacted_away,
        the_order_is_given_up_while_a_partition_waits_that_was_taken_away,
        a_partition_re_opens_that_its_owner_has_not_read,
        a_broker_fails_while_a_partition_waits,
    ],
)
def test_a_story_of_a_group_that_reads_in_order_ends_well(story: Callable[[], None]) -> None:
    story()


@pytest.mark.parametrize("stock", [False, True])
def test_a_story_of_records_that_are_compacted_away_under_a_slow_owner_ends_well(stock: bool) -> None:
    records_are_compacted_away_under_a_slow_owner(stock=stock)
