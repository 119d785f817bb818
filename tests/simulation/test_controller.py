"""The controller among brokers, producers and a reader, with faults everywhere; and dying at every single point."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest import mock
from uuid import UUID

import pytest

from anabranch.machines.controller import folding, plan, resize, roles, topics, views
from anabranch.machines.controller.layouts import without
from anabranch.machines.controller.leadership import Taken
from anabranch.machines.controller.nodes import Phase
from anabranch.machines.controller.plan import Plan
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas
from tests.simulation.controller_cluster import no_error_of_ours
from tests.simulation.controller_rules import TOPIC
from tests.simulation.controller_world import World
from tests.simulation.virtual_time import run, running_loop
from tests.support.thorough import thorough

STEPS = 650
FOUND_OUT = (
    r"still takes those before|is stuck|moved from|lies in the segment of|were lost|after record|is refused|"
    r"are forgotten|is not where layout|went back from|Unexpected"
)
SEEDS_PER_TEST = 6


async def _life(seed: int, steps: int) -> World:
    world = World(running_loop(), brokers=1 + seed % 3)
    with no_error_of_ours(world.loop):
        await world.begin(initial=1 + seed // 3 % 3)
        reconsidered_at = world.chance.randrange(steps // 2)
        for number in range(steps):
            if number == reconsidered_at:
                reconsidered = world.cluster.begin(world.reconsider())
            await world.step()
        while not reconsidered.done():
            await world.step()
        await world.heal()
        await world.drain()
    return world


def live(seed: int, steps: int = STEPS) -> World:
    """A life with faults, in which a resize is canceled, then one without; then everything is read."""
    try:
        return run(_life(seed, steps), seed)
    except BaseException as error:
        error.add_note(f"live({seed}, {steps})")
        raise


@pytest.mark.parametrize("first", range(0, thorough(48, 24), SEEDS_PER_TEST))
def test_whatever_fails_a_resize_ends_and_every_key_is_read_in_order(first: int) -> None:
    lives = [live(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    assert sum(world.layouts_made for world in lives) >= 2 * SEEDS_PER_TEST
    assert sum(world.cluster.crashes for world in lives) >= 2 * SEEDS_PER_TEST
    assert all(world.cancels for world in lives)
    assert sum(len(line) for world in lives for line in world.delivered.values()) >= 50 * SEEDS_PER_TEST


def test_a_seed_reproduces_a_life_byte_for_byte() -> None:
    one, two = live(11), live(11)
    assert one.cluster.tree.nodes == two.cluster.tree.nodes
    assert one.cluster.tree.journal == two.cluster.tree.journal
    assert one.delivered == two.delivered
    assert one.loop.steps == two.loop.steps


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
    """A leader answers with a log's end as final before the end is on the disk."""
    return mock.patch.object(Taken, "final_end", new_callable=mock.PropertyMock, return_value=False)


def acknowledging_early() -> AbstractContextManager[object]:
    """A producer's records are acknowledged before they are on the disk."""
    commit = Replicas.commit

    def early(replicas: Replicas, partition: Partition) -> asyncio.Future[None]:
        commit(replicas, partition)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    return mock.patch.object(Replicas, "commit", early)


def not_folding() -> AbstractContextManager[object]:
    """A partition that is opened again knows no producer."""
    return mock.patch.object(Partition, "take_table", lambda self, folded, now_ms: setattr(self, "_now_ms", now_ms))


def folding_blindly() -> AbstractContextManager[object]:
    """Layouts are folded away although logs hold records of them."""
    return mock.patch.object(folding, "kept", lambda layouts, held, newest: layouts[-1:])


def canceling_late() -> AbstractContextManager[object]:
    """A resize is canceled in its last phase too, in which records may be placed by its count."""
    return mock.patch.object(resize, "may_undo", lambda topic: topic.resize is not None)


def canceling_under_the_same_epochs() -> AbstractContextManager[object]:
    """A canceled resize leaves the leader epochs as they are."""
    return mock.patch.object(Plan, "undo", _undo_without_epochs)


def _undo_without_epochs(undone: Plan) -> None:
    topic, running = undone.topic, undone.topic.resize
    assert running is not None
    members = undone.members(running.phase)
    layouts = topic.layouts[:-1]
    undone.write(replace(topic, layouts=layouts, ended=without(topic.ended, layouts[-1].number), resize=None))
    undone.send_roles(members)


@pytest.mark.parametrize(
    ("sabotage", "first"),
    [
        (closing_last, 0),
        (opening_first, 0),
        (not_waiting, 80),
        (forgetting, 5),
        (answering_early, 16),
        (acknowledging_early, 0),
        (not_folding, 0),
        (folding_blindly, 0),
        (canceling_late, 13),
        (canceling_under_the_same_epochs, 5),
    ],
)
def test_a_cluster_that_does_a_step_wrong_is_found_out(
    sabotage: Callable[[], AbstractContextManager[object]], first: int
) -> None:
    """`first`: about where the first seed is that finds it out."""

    def lives() -> None:
        for seed in range(first, first + 200):
            live(seed, steps=400)

    with sabotage(), pytest.raises(AssertionError, match=FOUND_OUT):
        lives()


Script = Callable[[World], Awaitable[None]]


class Crash:
    """Where a controller dies: before a step of its process, or before an operation of a transaction."""

    def __init__(self, at: int, *, tearing: bool = False, wire_lost: bool = False) -> None:
        self.at = at
        self.tearing = tearing
        self.wire_lost = wire_lost

    def __str__(self) -> str:
        what = "operation" if self.tearing else "step"
        return f"a crash at {what} {self.at}, requests {'lost' if self.wire_lost else 'delivered'}"


def scripted(script: Script, crash: Crash | None = None, steps: list[tuple[int, int]] | None = None) -> World:
    """Run a script without any fault but one crash of the controller.

    `steps` records, before every step of the controller's process, its durable effects so far:
    operations of the tree, and orders.
    """

    async def main() -> World:
        world = World(running_loop(), brokers=2, faults=False)
        await world.begin(2)
        await world.heal()
        cluster = world.cluster
        cluster.wire_lost = crash is not None and crash.wire_lost
        assert cluster.process is not None
        if crash is not None and crash.tearing:
            cluster.tree.tear_in = crash.at
        elif crash is not None:
            cluster.process.kill_in(crash.at)
        if steps is not None:
            cluster.process.watch(lambda: steps.append((len(cluster.tree.journal), cluster.sent)))
        with no_error_of_ours(world.loop):
            await script(world)
            if steps is not None:
                cluster.process.watch(lambda: None)
            world.check()
            await world.heal()
        return world

    return run(main(), 0)


def points(script: Script) -> Iterator[tuple[Crash, World]]:
    """The world after a crash at every point of a script, with and without the messages on the wire.

    Crashes between which the controller did nothing that outlives it are one: the first and the last of them are tried.
    """
    steps: list[tuple[int, int]] = []
    scripted(script, steps=steps)
    bounds = zip([None, *steps], steps, [*steps[1:], None], strict=False)
    at = [n for n, (before, here, after) in enumerate(bounds) if not before == here == after]
    operations = steps[-1][0] - steps[0][0]
    assert len(at) > 8
    assert operations > 8
    crashes = [Crash(n, wire_lost=lost) for n in at for lost in (False, True)]
    for crash in (*crashes, *(Crash(n, tearing=True) for n in range(operations))):
        world = scripted(script, crash)
        assert world.cluster.crashes == 1, str(crash)
        yield crash, world


def shape(world: World) -> Mapping[str, Mapping[str, object]]:
    """The tree and the logs, without the controller's and the brokers' epochs, which identify the writer."""
    tree = {
        path: re.sub(rb'"controller_epoch":\d+', b'"controller_epoch":0', data)
        for path, data in world.cluster.tree.nodes.items()
        if path != "/controller_epoch" and not path.startswith("/brokers/ids/")
    }
    logs = {
        f"{machine.broker_id}/{partition.name}": (
            partition.log.log_start,
            partition.log.end,
            partition.log.epochs.entries,
        )
        for machine, partition in world.partitions()
    }
    return {"tree": tree, "logs": logs}


def resized(*counts: int) -> Script:
    """Resize once and again; a controller that died between is followed by one that is asked again."""

    async def script(world: World) -> None:
        for count in counts:
            for _ in range(3):
                await world.elect()
                await world.register()
                if world.state is not None and world.state.topics[TOPIC].undeleted_partition_count == count:
                    break
                await world.try_resize(count)
            await settle(world)

    return script


async def settle(world: World) -> None:
    """Let everything that was sent arrive, and be answered; where the controller died, another one comes."""
    for _ in range(40):
        await world.elect()
        await world.register()
        if world.settled:
            return
        await world.pause(0.1)


SCRIPTS = {
    "expand": resized(5),
    "shrink": resized(5, 3),
    "open again": resized(5, 3, 4),
    "shrink again": resized(6, 4, 3),
    "grow while retiring": resized(6, 3, 4, 8),
}


def canceled(*counts: int) -> Script:
    """Resize, cancel the last of the resizes in its first phase, and, where it was finished, undo it by another."""

    async def script(world: World) -> None:
        await resized(*counts[:-1])(world)
        before = counts[-2]
        world.cluster.begin(world.resize(counts[-1]))
        await world.pause(0.002)
        for _ in range(3):
            await world.elect()
            await world.register()
            await world.try_cancel()
            if world.state is not None and views.idle(world.state, TOPIC):
                break
        await settle(world)
        await resized(before)(world)

    return script


@pytest.mark.parametrize("counts", [(5, 7), (5, 3), (4, 3, 5), (6, 3, 2)], ids=str)
def test_a_controller_may_die_at_any_point_of_a_canceled_resize(counts: tuple[int, ...]) -> None:
    world = scripted(canceled(*counts))
    assert world.cancels == 1 and world.topic is not None
    assert world.topic.undeleted_partition_count == counts[-2]
    for crash, found in points(canceled(*counts)):
        topic = found.topic
        assert topic is not None and topic.resize is None, str(crash)
        assert topic.undeleted_partition_count == counts[-2], str(crash)
        roles_taken = {led.name.partition: led.leadership for _, led in found.partitions()}
        for partition, role in roles_taken.items():
            assert role is not None and role.undeleted_partition_count == counts[-2], (str(crash), partition)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_controller_may_die_at_any_point_of_a_resize(name: str) -> None:
    wanted = shape(scripted(SCRIPTS[name]))
    for crash, world in points(SCRIPTS[name]):
        assert shape(world) == wanted, str(crash)


async def reaped(world: World) -> None:
    """Shrink, remove the empty partitions, create them again."""
    await resized(5, 3)(world)
    for _ in range(4):
        await world.try_reap()
        await settle(world)
    await resized(5)(world)


async def folded(world: World) -> None:
    """Resize without records, and fold the layouts that have none."""
    await resized(5, 3, 4)(world)
    for _ in range(4):
        await world.elect()
        await world.register()
        await world.try_fold()
        await settle(world)
    await resized(5)(world)


def test_a_controller_may_die_at_any_point_of_a_folding() -> None:
    wanted = shape(scripted(folded))
    tree = json.loads(wanted["tree"][f"/brokers/topics/{TOPIC}"])  # type: ignore[arg-type]
    assert tree["layouts"] == [[3, 4], [4, 5]], "numbers stay"
    for crash, world in points(folded):
        assert shape(world) == wanted, str(crash)


def test_a_controller_may_die_at_any_point_of_a_removal_and_return() -> None:
    wanted = shape(scripted(reaped))
    tree = json.loads(wanted["tree"][f"/brokers/topics/{TOPIC}"])  # type: ignore[arg-type]
    assert sorted(map(int, tree["partitions"])) == [0, 1, 2, 3, 4]
    assert not tree["removed"]
    for crash, world in points(reaped):
        assert shape(world) == wanted, str(crash)


async def remade(world: World) -> None:
    """Delete the topic in the middle of a resize, make one of its name."""
    command = topics.CreateTopic(TOPIC, UUID(int=8), 3, configs={"retention.ms": "1000"})
    world.cluster.begin(world.resize(4))
    await world.pause(0.003)
    for _ in range(4):
        await world.elect()
        await world.register()
        if world.state is not None and TOPIC in world.state.topics:
            await world.cluster.submit(lambda state: topics.decide_delete_topic(state, topics.DeleteTopic(TOPIC)))
        await settle(world)
    for _ in range(4):
        await world.elect()
        await world.register()
        await world.cluster.submit(lambda state: topics.decide_create_topic(state, command))
        await settle(world)


def test_a_controller_may_die_at_any_point_of_a_deletion_and_a_new_topic_of_that_name() -> None:
    wanted = shape(scripted(remade))
    assert f"/admin/delete_topics/{TOPIC}" not in wanted["tree"]
    for crash, world in points(remade):
        assert shape(world) == wanted, str(crash)
