"""Samples of appended records: of which partitions, how many, and at what cost."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.machines.keyspace import SPACE, Interval, interval
from anabranch.machines.partition.load import UNOBSERVED
from anabranch.machines.partition.sharing import Stretch
from anabranch.records.batch import parse_header
from anabranch.records.compression import Compression
from anabranch.records.filtering import scatter
from anabranch.runtime.chance import Chance
from anabranch.runtime.clock import Clock
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions import load as load_module
from anabranch.server.partitions.load import COST_PARTS, INTERVAL_MS, LoadSampling
from anabranch.server.partitions.partition import Partition
from tests.support.batches import make_keyed_batch
from tests.support.replicas import NOW_MS, LocalReplicas


class SteadyClock(Clock):
    """A monotonic clock that a test sets."""

    ms = 0

    def monotonic_ms(self) -> int:
        return self.ms


class World:
    """Partitions whose load is sampled."""

    def __init__(self, path: Path, partitions: int = 1, **configs: str) -> None:
        self.local = LocalReplicas(path, initial=partitions, **configs)
        self.local.resize(partitions)
        self.clock = SteadyClock()
        self.held: Interval | None = SPACE
        self.metrics = Metrics()
        self.sampling = LoadSampling(
            self.local.replicas, lambda: scatter, self._stretch_of, self.clock, Chance(1), self.metrics
        )

    def _stretch_of(self, partition: Partition, offset: int) -> Stretch | None:
        return None if self.held is None else Stretch(1, self.held, None)

    def run(self) -> None:
        self.clock.ms += 1000
        self.local.runner.run(self.sampling.run())

    def append(self, keys: int, *, partition: int = 0, value: bytes = b"v", compressed: bool = False) -> None:
        codec = Compression.ZSTD if compressed else Compression.NONE
        data = make_keyed_batch([(b"k%d" % n, value) for n in range(keys)], compression=codec)
        self.local[partition].append(data, parse_header(data), NOW_MS)

    def records(self, partition: int = 0) -> float:
        """Records per second, as they are known."""
        return sum(self.sampling.of(self.local[partition]).records)


@pytest.fixture
def accepting(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, 3, accept_range_fetch="true")
    yield world
    world.sampling.close()
    world.local.close()


def test_a_sample_stands_for_all_that_was_appended(accepting: World) -> None:
    accepting.append(1000)  # Before it was observed.
    accepting.run()
    assert accepting.records() == 0
    for keys in (50, 100, 150):
        accepting.append(keys)
    accepting.run()
    assert accepting.records() == pytest.approx(300, rel=0.01)
    accepting.run()
    assert accepting.records() == pytest.approx(150, rel=0.01)
    assert accepting.sampling.of(accepting.local[1]).observed_ms == 2000


def test_topics_without_fetches_of_ranges_are_not_looked_at(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.run()
    world.append(100)
    world.run()
    assert (len(world.sampling), world.sampling.of(world.local[0])) == (0, UNOBSERVED)
    world.local.configs["accept.range.fetch"] = "true"
    world.local.apply_settings()
    world.run()
    world.append(100)
    world.run()
    assert world.records() == pytest.approx(100, rel=0.01)
    del world.local.configs["accept.range.fetch"]
    world.local.apply_settings()
    world.append(100)
    world.run()
    assert world.records() == pytest.approx(50, rel=0.01)  # Nothing is added.
    world.sampling.close()
    world.local.close()


def test_partitions_are_sampled_in_turns(accepting: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "SAMPLED_MAX", 1)
    for _ in range(3):
        accepting.run()
    for partition in range(3):
        accepting.append(100, partition=partition)
    for known in (1, 2, 3):
        accepting.run()
        assert sum(accepting.records(partition) > 0 for partition in range(3)) == known


def test_histograms_have_a_bound(accepting: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "HISTOGRAMS_MAX", 2)
    accepting.run()
    assert len(accepting.sampling) == 2
    accepting.run()
    assert [accepting.sampling.of(accepting.local[n]) is UNOBSERVED for n in range(3)] == [False, False, True]


def test_nothing_counts_while_a_resize_runs_and_it_counts_afterwards(accepting: World) -> None:
    accepting.run()
    accepting.append(100)
    accepting.held = None
    accepting.run()
    assert accepting.records() == 0
    accepting.held = interval(1, 2, 1)
    accepting.run()
    assert accepting.sampling.of(accepting.local[0]).held == interval(1, 2, 1)
    assert accepting.records() > 40


def test_a_batch_that_expands_too_far_is_left_out_and_its_cost_makes_the_next_run_late(
    accepting: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_module, "EXPANDED_SIZE_MAX", 1 << 20)
    accepting.run()
    accepting.append(4, value=bytes(1 << 20), compressed=True)
    accepting.run()
    assert accepting.records() == 0
    assert accepting.sampling._spent_s > 0
    accepting.append(40, compressed=True)
    accepting.run()
    assert accepting.records() > 10
    accepting.sampling._spent_s = 0.1
    assert accepting.sampling.pause_ms() == 100 * COST_PARTS
    accepting.run()
    assert accepting.sampling.pause_ms() == INTERVAL_MS


def test_a_partition_that_is_gone_is_forgotten(accepting: World) -> None:
    accepting.run()
    assert len(accepting.sampling) == 3
    accepting.local.resize(1, survivors=False)
    accepting.local.remove(2)
    accepting.run()
    accepting.run()
    assert len(accepting.sampling) == 2
