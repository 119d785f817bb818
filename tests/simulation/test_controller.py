"""The controller among brokers, producers and a reader, with faults everywhere; and dying at every single point."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock
from uuid import UUID

import pytest

from anabranch.machines.controller import plan, roles, topics
from anabranch.machines.controller.leadership import Taken
from anabranch.machines.controller.nodes import Phase
from anabranch.machines.controller.plan import Plan
from tests.simulation.controller_world import TOPIC, World

STEPS = 1_000
FOUND_OUT = r"still takes those before|is stuck|moved from|lies in the segment of|were lost"
SEEDS_PER_TEST = 6


def live(seed: int, steps: int = STEPS) -> World:
    """A life with faults, then without; then everything is read."""
    world = World(seed, brokers=1 + seed % 3)
    world.begin(initial=1 + seed // 3 % 3)
    for _ in range(steps):
        world.step()
    world.heal()
    world.drain()
    return world


@pytest.mark.parametrize("first", range(0, 48, SEEDS_PER_TEST))
def test_whatever_fails_a_resize_ends_and_every_key_is_read_in_order(first: int) -> None:
    lives = [live(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    assert sum(world.layouts_made for world in lives) >= 2 * SEEDS_PER_TEST
    assert sum(world.crashes for world in lives) >= 2 * SEEDS_PER_TEST
    assert sum(len(line) for world in lives for line in world.delivered.values()) >= 50 * SEEDS_PER_TEST


def test_a_seed_reproduces_a_life_byte_for_byte() -> None:
    one, two = live(11), live(11)
    assert one.tree == two.tree
    assert one.journal == two.journal
    assert one.delivered == two.delivered


def closing_last() -> AbstractContextManager[object]:
    """Survivors take appends under the new count before the retiring partitions stop to take them under the old one."""
    return mock.patch.dict(roles.PHASES, {roles.SHRINK: (Phase.CUT, Phase.CLOSE)})


def opening_first() -> AbstractContextManager[object]:
    """New partitions take appends before the old ones ended the layout that they come after."""
    return mock.patch.dict(roles.PHASES, {roles.EXPAND: (Phase.OPEN, Phase.CUT)})


def not_waiting() -> AbstractContextManager[object]:
    """A phase begins before the leaders of the last one have answered."""
    return mock.patch.object(Plan, "confirmed", return_value=True)


def forgetting() -> AbstractContextManager[object]:
    """A partition that is made again begins at offset 0."""
    due = roles.due_node
    return mock.patch.object(plan, "due_node", lambda *given: replace(due(*given), start_offset=0))


def answering_early() -> AbstractContextManager[object]:
    """A leader says that a log's end is final before it is on the disk."""
    return mock.patch.object(Taken, "final_end", new_callable=mock.PropertyMock, return_value=False)


@pytest.mark.parametrize("sabotage", [closing_last, opening_first, not_waiting, forgetting, answering_early])
def test_a_cluster_that_does_a_step_wrong_is_found_out(
    sabotage: Callable[[], AbstractContextManager[object]],
) -> None:
    def lives() -> None:
        for seed in range(200):
            live(seed, steps=400)

    with sabotage(), pytest.raises(AssertionError, match=FOUND_OUT):
        lives()


def scripted(script: Callable[[World], None], crash_at: int | None = None, *, lost: bool = False) -> World:
    """Run a script without any fault but one: the controller dies at its `crash_at`-th point."""
    world = World(0, brokers=2, faults=False)
    world.begin(2)
    world.heal()
    with mock.patch.object(world.chance, "random", return_value=0.0 if lost else 1.0):
        world.crash_in = crash_at
        script(world)
        world.check()
        world.heal()
        world.check_replay()
    return world


def points(script: Callable[[World], None]) -> Iterator[tuple[int, bool, World]]:
    """The world after a crash at every point of a script, with and without what was on the wire."""
    for lost in (False, True):
        for point in range(1_000):
            world = scripted(script, point, lost=lost)
            if world.crashes == 0:
                assert point > 8
                break
            yield point, lost, world


def shape(world: World) -> dict[str, object]:
    """The tree and the logs, without the controller epochs, which tell who wrote."""
    tree = {
        path: re.sub(rb'"controller_epoch":\d+', b'"controller_epoch":0', data)
        for path, data in world.tree.items()
        if path != "/controller_epoch"
    }
    logs = {
        f"{broker.broker_id}/{partition}": (log.start, log.end, log.epochs)
        for broker in world.brokers.values()
        for partition, log in broker.logs.items()
    }
    return {"tree": tree, "logs": logs}


def resized(*counts: int) -> Callable[[World], None]:
    """Resize once and again; whoever died between is followed by one who is asked again."""

    def script(world: World) -> None:
        for count in counts:
            for _ in range(3):
                if world.state is None:
                    world.elect()
                if world.state is not None and world.state.topics[TOPIC].undeleted_partition_count == count:
                    break
                world.resize(count)
            settle(world)

    return script


def settle(world: World) -> None:
    """Let everything that was sent arrive, and be answered; where the controller died, another one comes."""
    for _ in range(20):
        for broker in world.brokers.values():
            while broker.inbox:
                world.deliver_request(broker)
        while world.answers:
            world.deliver_answer()
        if world.state is None:
            world.elect()


SCRIPTS = {
    "expand": resized(5),
    "shrink": resized(5, 3),
    "open again": resized(5, 3, 4),
    "shrink again": resized(6, 4, 3),
    "grow while retiring": resized(6, 3, 4, 8),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_controller_may_die_at_any_point_of_a_resize(name: str) -> None:
    wanted = shape(scripted(SCRIPTS[name]))
    for point, lost, world in points(SCRIPTS[name]):
        assert shape(world) == wanted, f"after a crash at point {point}, requests {'lost' if lost else 'delivered'}"


def reaped(world: World) -> None:
    """Shrink, remove what is empty, make it again."""
    resized(5, 3)(world)
    for _ in range(4):
        world.report()
        world.reap()
        settle(world)
    resized(5)(world)


def test_a_controller_may_die_at_any_point_of_a_removal_and_return() -> None:
    wanted = shape(scripted(reaped))
    tree = json.loads(dict(wanted["tree"])[f"/brokers/topics/{TOPIC}"])  # type: ignore[call-overload]
    assert sorted(map(int, tree["partitions"])) == [0, 1, 2, 3, 4]
    assert not tree["removed"]
    for point, lost, world in points(reaped):
        assert shape(world) == wanted, f"after a crash at point {point}, requests {'lost' if lost else 'delivered'}"


def remade(world: World) -> None:
    """Delete the topic in the middle of a resize, make one of its name."""
    command = topics.CreateTopic(TOPIC, UUID(int=8), 3, configs={"retention.ms": "1000"})
    world.resize(4)
    for _ in range(4):
        if world.state is None:
            world.elect()
        if world.state is not None and world.state.topics.get(TOPIC, None) is not None:
            world.submit(lambda state: topics.decide_delete_topic(state, topics.DeleteTopic(TOPIC)))
        settle(world)
    for _ in range(4):
        if world.state is None:
            world.elect()
        world.submit(lambda state: topics.decide_create_topic(state, command))
        settle(world)


def test_a_controller_may_die_at_any_point_of_a_deletion_and_a_new_topic_of_that_name() -> None:
    wanted = shape(scripted(remade))
    assert f"/admin/delete_topics/{TOPIC}" not in wanted["tree"]  # type: ignore[operator]
    for point, lost, world in points(remade):
        assert shape(world) == wanted, f"after a crash at point {point}, requests {'lost' if lost else 'delivered'}"
