"""Rates of the group coordinators' metrics: over a window, whoever reads them and however often."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import pytest

from anabranch.machines.groups.consumer.group import ConsumerGroup, Member
from anabranch.machines.groups.views import states
from anabranch.runtime.metrics import SAMPLES_PER_STEP, Family, Metrics
from anabranch.server.coordinators.group_metrics import PREFIX, READS_MAX, WINDOW_S, Rate, _describe_groups
from anabranch.server.coordinators.groups import Groups


class World:
    """A count and the time."""

    def __init__(self) -> None:
        self.now_s = 1_000.0
        self.count = 5.0
        self.rate = Rate(lambda: self.count, lambda: self.now_s)

    def after(self, seconds: float, more: float) -> float:
        self.now_s += seconds
        self.count += more
        return self.rate.read()


def test_a_rate_is_of_the_events_since_the_first_read() -> None:
    world = World()
    assert world.rate.read() == 0
    assert world.rate.read() == 0, "no time has passed"
    assert world.after(10, 20) == 2
    assert world.after(10, 0) == 1


def test_events_older_than_the_window_count_no_more() -> None:
    world = World()
    world.rate.read()
    world.after(10, 300)
    for _ in range(4):
        last = world.after(10, 0)
    assert last == 0
    assert world.after(10, 30) == pytest.approx(30 / WINDOW_S, rel=0.35)


@pytest.mark.parametrize("readers", [1, 7, 1_000])
def test_many_readers_change_nothing_and_cost_bounded_memory(readers: int) -> None:
    world = World()
    for _ in range(100):
        rates = {world.after(0, 0) for _ in range(readers)}
        assert len(rates) == 1
        world.after(1, 3)
    assert world.rate.read() == pytest.approx(3)
    assert len(world.rate._reads) <= READS_MAX + 1


def test_a_partition_that_was_loaded_again_gives_no_negative_rate() -> None:
    world = World()
    world.rate.read()
    world.after(10, 100)
    assert world.after(1, -105) == 0
    assert world.after(1, 4) == 4


def test_the_loop_goes_on_while_the_groups_are_counted_by_their_states() -> None:
    """To find the state of a group all its members are looked at, for each of three metrics."""
    count, members = 40, SAMPLES_PER_STEP // 4
    groups = {}
    looked = 0

    class Counted(ConsumerGroup):
        def state(self) -> object:  # type: ignore[override]
            nonlocal looked
            looked += len(self.members)
            return super().state()

    for number in range(count):
        groups[f"g{number}"] = Counted(f"g{number}", members={f"m{at}": Member(f"m{at}") for at in range(members)})
    shard = SimpleNamespace(active=True, machine=SimpleNamespace(states=lambda: states(groups)))
    metrics = Metrics()
    _describe_groups(cast(Groups, [shard]), metrics)
    steps: list[int] = []

    async def run() -> list[Family]:
        for name in [*metrics._gauges]:
            if not name.endswith("group_count"):
                del metrics._gauges[name]
        reading = asyncio.create_task(metrics.families())
        while not reading.done():
            before = looked
            await asyncio.sleep(0)
            steps.append(looked - before)
        return reading.result()

    found = {family.name: [*family.samples] for family in asyncio.run(run())}
    assert found[f"{PREFIX}group_count"] == [({"protocol": "consumer"}, count), ({"protocol": "classic"}, 0)]
    assert sum(value for _, value in found[f"{PREFIX}consumer_group_count"]) == count
    assert looked == 3 * count * members and max(steps) <= SAMPLES_PER_STEP
