"""A plug-in assignor that fails, or is uninstalled, at a real broker: the other groups of its shard notice nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from tests.support.broker import BrokerProcess
from tests.support.group_client import GroupClient

MODULE = """
import pathlib
import numpy as np

def assign(spec):
    if pathlib.Path({flag!r}).exists():
        raise ZeroDivisionError("a bug of the plug-in")
    return np.zeros(len(spec.owner), np.int32)
"""
SESSION_MS = 1_500
OTHERS = ("a", "z")


class World:
    """A broker with the plug-in `fickle`, which fails while a file exists; all groups are in one shard."""

    def __init__(self, tmp_path: Path) -> None:
        self.flag = tmp_path / "fails"
        packages = tmp_path / "packages"
        information = packages / "fickle-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text("Metadata-Version: 2.1\nName: fickle\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text("[anabranch.group_assignors]\nfickle = fickle_assignor:assign\n")
        (packages / "fickle_assignor.py").write_text(MODULE.format(flag=str(self.flag)))
        self.broker = BrokerProcess(
            tmp_path / "data",
            **{
                "offsets.topic.num.partitions": 1,
                "group.consumer.assignors": "uniform,fickle",
                "group.consumer.min.session.timeout.ms": SESSION_MS,
                "group.consumer.min.heartbeat.interval.ms": 100,
                "group.consumer.heartbeat.interval.ms": 100,
            },
        )
        self.broker.import_paths.append(packages)

        self.client: GroupClient | None = None

    def restart(self) -> GroupClient:
        self.stop()
        self.broker.start()
        self.client = GroupClient(self.broker.port)
        self.client.ready("g")
        return self.client

    def stop(self) -> None:
        """Kill the broker, if it runs."""
        if self.client is not None:
            self.client.close()
        if self.broker.alive:
            self.broker.kill()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.stop()


def until(true: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def targets(client: GroupClient, group: str) -> dict[str, int]:
    """How many partitions each member of a group has in its target."""
    return {
        member.member_id: sum(len(topic.partitions) for topic in member.target_assignment.topic_partitions)
        for member in client.described(group).members
    }


def test_a_plug_in_that_raises_harms_no_other_group_also_after_a_crash(world: World) -> None:
    client = world.restart()
    client.create("t", 2)
    for group in ("a", "g", "z"):
        for member in ("m1", "m2"):
            fields = {"server_assignor": "fickle"} if group == "g" else {}
            assert client.beat(group, member, 0, topics=["t"], **fields).error_code == ErrorCode.NONE
    assert targets(client, "g") == {"m1": 2, "m2": 0}

    world.flag.touch()
    client.resize("t", 4)
    (error,) = world.broker.until_said("error", "assignor failed; the group keeps its assignment")
    assert (error["group"], error["assignor"]) == ("g", "fickle")
    for group in OTHERS:
        until(lambda group=group: targets(client, group) == {"m1": 2, "m2": 2}, f"{group} gets the new partitions")
    assert targets(client, "g") == {"m1": 2, "m2": 0}
    assert client.beat("g", "m1", 1).error_code == ErrorCode.NONE

    world.broker.settings["group.consumer.session.timeout.ms"] = SESSION_MS
    client = world.restart()
    for group in ("a", "g", "z"):
        until(lambda group=group: not client.described(group).members, f"members of {group} end without heartbeats")
    assert not world.broker.said("error", "coordinator stopped: decision failed")


def test_a_group_whose_plug_in_is_uninstalled_gets_the_default_and_its_members_may_not_choose_it(world: World) -> None:
    client = world.restart()
    client.create("t", 2)
    for member in ("m1", "m2"):
        client.beat("g", member, 0, topics=["t"], server_assignor="fickle")
    assert targets(client, "g") == {"m1": 2, "m2": 0}
    world.broker.import_paths.clear()
    world.broker.settings["group.consumer.assignors"] = "uniform"
    client = world.restart()
    client.resize("t", 4)
    until(lambda: targets(client, "g") == {"m1": 2, "m2": 2}, "the broker's default assigns")
    (warning,) = world.broker.until_said("warning", "assignor not offered; the group uses the broker's default")
    assert (warning["group"], warning["assignor"]) == ("g", "fickle")
    assert client.described("g").assignor_name == "uniform"
    refused = client.beat("g", "m3", 0, topics=["t"], server_assignor="fickle")
    assert refused.error_code == ErrorCode.UNSUPPORTED_ASSIGNOR
