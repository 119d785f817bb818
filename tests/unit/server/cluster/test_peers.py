"""The peers of a cluster of one process: orders reach its partitions, and its leaders answer for their logs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.effects import Role, SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.layouts import EpochRun, Layout
from anabranch.machines.controller.nodes import Topic
from anabranch.machines.controller.reaper import LogRange
from anabranch.records.batch import parse_header
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import Disk
from anabranch.runtime.metrics import Metrics
from anabranch.server.cluster.peers import LocalPeers, Peers
from anabranch.server.cluster.view import ClusterUpdate, ClusterView
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.directory import DataDirectory
from tests.support.wire import batch

TOPIC_ID = UUID(int=1)


class Broker:
    """The partitions of a broker, and its peers."""

    def __init__(self, path: Path) -> None:
        self.view = ClusterView()
        self.replicas = Replicas(
            DataDirectory(path, Disk()),
            disk=Disk(),
            clock=Clock(),
            metrics=Metrics(),
            settings_of=lambda topic: topic_settings(self.view.configs(topic), NOT_SET, "os"),
        )
        self.peers: Peers = LocalPeers(self.replicas, self.view)

    def run(self, story: Coroutine[object, object, None]) -> None:
        async def until_closed() -> None:
            await story
            assert await self.replicas.close()

        asyncio.run(until_closed())

    async def take(self, count: int, *epochs: int, layout: int = 0) -> dict[int, ErrorCode]:
        roles = tuple(
            Role(number, 1, epoch, layout, number >= count, (1,), (1,)) for number, epoch in enumerate(epochs)
        )
        order = SendLeaderAndIsr(1, 1, 1, "t", TOPIC_ID, 1, count, roles)
        return dict(await self.peers.take_roles(1, order))

    def append(self, number: int, records: int) -> None:
        partition = self.replicas.get("t", number)
        assert partition is not None
        for _ in range(records):
            data = batch([b"x"])
            partition.append(data, parse_header(data), 0)


def resized(times: int) -> Topic:
    """The topic after as many resizes, each of which ended an epoch of partition 0."""
    layouts = tuple(Layout(number, 1 + number % 2) for number in range(times + 1))
    return Topic("t", TOPIC_ID, {0: (1,)}, 1, layouts, {0: (EpochRun(0, 0, times),)})


def test_roles_are_taken_and_replicas_stopped(tmp_path: Path) -> None:
    broker = Broker(tmp_path)

    async def story() -> None:
        assert await broker.take(2, 0, 0) == {0: ErrorCode.NONE, 1: ErrorCode.NONE}
        assert [str(partition.name) for partition in broker.replicas] == ["t-0", "t-1"]
        order = SendStopReplica(1, 1, 1, "t", TOPIC_ID, ((1, 0),), topic_deleted=True)
        assert dict(await broker.peers.stop_replicas(1, order)) == {1: ErrorCode.NONE}
        assert [str(partition.name) for partition in broker.replicas] == ["t-0"]

    broker.run(story())


def test_leaders_tell_the_cuts_of_their_logs_and_nothing_of_a_log_that_cannot_be_opened(tmp_path: Path) -> None:
    broker = Broker(tmp_path)

    def cuts(topic: Topic, partition: int = 0) -> list[tuple[int, int]] | None:
        found = broker.peers.cuts(topic, partition)
        return None if found is None else list(zip(*found, strict=True))

    async def story() -> None:
        await broker.take(1, 0, 0)
        broker.append(0, 3)
        assert cuts(resized(1)) is None, "the leader does not serve the new layout yet"
        await broker.take(1, 1, 0, layout=1)
        broker.append(0, 2)
        assert cuts(resized(1)) == [(0, 3)]
        await broker.take(1, 2, 0, layout=2)
        await broker.take(1, 3, 0, layout=3)
        assert cuts(resized(2)) == [(0, 3), (1, 5)]
        assert cuts(resized(3)) == [(0, 3), (1, 5)], "nothing was appended under layout 2"
        assert cuts(resized(1)) == [(0, 3)], "an image of before the resize"
        partition = broker.replicas.get("t", 0)
        assert partition is not None
        await partition.log.commit()
        await (partition.log.delete_before(4) or asyncio.sleep(0))
        assert cuts(resized(3)) == [(1, 5)]
        partition.take_offline("damaged")
        assert cuts(resized(3)) is None
        assert cuts(resized(3), partition=7) is None
        assert broker.peers.log_start("t", 0) == 4
        assert broker.peers.log_start("u", 0) == 0

    broker.run(story())


def test_only_retiring_partitions_report_their_ranges(tmp_path: Path) -> None:
    broker = Broker(tmp_path)

    async def story() -> None:
        await broker.take(2, 0, 0)
        broker.append(1, 2)
        assert await broker.peers.retiring_ranges("t") == {}
        await broker.take(1, 1, 1, layout=1)
        assert await broker.peers.retiring_ranges("t") == {1: LogRange(0, 2, 1)}

    broker.run(story())


def test_published_configs_apply_to_the_logs(tmp_path: Path) -> None:
    broker = Broker(tmp_path)

    async def story() -> None:
        await broker.take(1, 0)
        partition = broker.replicas.get("t", 0)
        assert partition is not None
        update = ClusterUpdate(configs={"t": {"max.message.bytes": "77", "segment.bytes": "1000000"}})
        broker.peers.publish(update)
        await broker.peers.apply_configs(update)
        assert partition.settings.message_size_max == 77
        assert partition.log.config.segment_bytes == 1_000_000
        broker.peers.publish(ClusterUpdate(configs={"t": {}}))
        await broker.peers.apply_configs(ClusterUpdate(configs={"t": {}}))
        assert partition.settings.message_size_max > 77

    broker.run(story())
