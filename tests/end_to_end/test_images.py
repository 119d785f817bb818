"""What the group coordinators see of topics, at a broker in this process: it follows every change, and only those."""

from __future__ import annotations

import asyncio
from pathlib import Path

from anabranch.machines.groups.image import Image
from anabranch.machines.lineage import Lineage
from anabranch.protocol.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from anabranch.server.broker import Broker
from anabranch.server.cluster.images import Images
from anabranch.server.cluster.peers import LocalPeers
from anabranch.server.settings import Settings
from tests.support.wire import WireClient, batch

TOPIC = 2


def alter(client: WireClient, topic: str, name: str, value: str) -> None:
    config = AlterableConfig(name=name, config_operation=0, value=value)
    resource = AlterConfigsResource(resource_type=TOPIC, resource_name=topic, configs=[config])
    (answer,) = client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses
    assert not answer.error_code, answer


def test_an_image_follows_topics_through_their_lives(tmp_path: Path) -> None:
    async def story() -> None:
        settings = {"listeners": "127.0.0.1:0", "metrics.listener": "", "log.dirs": str(tmp_path), "durability": "os"}
        broker = Broker(Settings.of(settings))
        await broker.start()
        images = Images(broker.context.view, LocalPeers(broker.context.replicas, broker.context.view))
        client = await asyncio.to_thread(WireClient, broker.address.port)
        seen: list[Image] = [images.newest()]

        async def after(action: object, *arguments: object) -> Image:
            assert callable(action)
            await asyncio.to_thread(action, *arguments)
            seen.append(images.newest())
            return seen[-1]

        try:
            assert (seen[0].version, dict(seen[0].by_name)) == (0, {})
            image = await after(client.create, "t", 2)
            first = image.by_name["t"]
            assert (list(first.partitions), list(first.retiring), first.lineage) == ([0, 1], [], None)
            assert image.name_of(first.topic_id) == "t"
            image = await after(client.create, "other", 1)
            assert image.by_name["t"] is first
            assert image.version > seen[-2].version

            await after(lambda: [client.produce("t", number % 2, batch([b"x"])) for number in range(6)])
            assert seen[-1] is image
            await after(alter, client, "t", "retention.ms", "100000000")
            assert seen[-1] is image

            image = await after(client.resize, "t", 4)
            grown = image.by_name["t"]
            assert list(grown.partitions) == [0, 1, 2, 3]
            assert grown.lineage is not None
            assert grown.lineage == Lineage.of_ends(2, (2, 4), ({0: 3, 1: 3},))
            image = await after(lambda: [client.produce("t", 3, batch([b"x"])), client.resize("t", 3)])
            shrunk = image.by_name["t"]
            assert (list(shrunk.partitions), list(shrunk.retiring)) == ([0, 1, 2], [3])
            assert shrunk.lineage is not None
            assert shrunk.lineage.counts == (2, 4, 3)
            assert shrunk.log_start(0) == 0

            image = await after(alter, client, "t", "enable.ordered.delivery", "false")
            assert image.by_name["t"].lineage is None
            assert image.by_name["other"] is seen[-2].by_name["other"]
            gone = DeleteTopicsRequest(topics=[DeleteTopicState(name="t")], timeout_ms=10_000)
            image = await after(client.call, gone)
            assert list(image.by_name) == ["other"]
            assert [it.version for it in seen] == sorted(it.version for it in seen)
        finally:
            client.close()
            assert await broker.stop()

    asyncio.run(story())


def test_a_coordinator_hears_of_a_resize_before_any_request_of_a_client_that_knows_of_it(tmp_path: Path) -> None:
    """Were it to come first, a `latest` member that was handed a new partition would begin at its end."""

    async def story() -> None:
        settings = {"listeners": "127.0.0.1:0", "metrics.listener": "", "log.dirs": str(tmp_path), "durability": "os"}
        broker = Broker(Settings.of(settings))
        await broker.start()
        client = await asyncio.to_thread(WireClient, broker.address.port)
        seen: list[tuple[int, int]] = []

        def look(update: object) -> None:  # Called when Metadata shows the resize, before anything else can run.
            topic = broker.context.view.topic("t")
            assert topic is not None
            known = broker.context.groups.shard_of("g").machine.image.by_name["t"]
            seen.append((topic.layouts[-1].count, len(known.partitions)))

        try:
            await asyncio.to_thread(client.create, "t", 2)
            await asyncio.to_thread(client.call, FindCoordinatorRequest(coordinator_keys=["g"]))
            while not broker.context.groups.shard_of("g").active:
                await asyncio.sleep(0.01)
            broker.context.view.watch(look)
            await asyncio.to_thread(client.resize, "t", 4)
            assert seen[-1][0] == 4
            assert all(shown == known for shown, known in seen), seen
        finally:
            client.close()
            assert await broker.stop()

    asyncio.run(story())
