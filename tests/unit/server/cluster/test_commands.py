"""Commands: what the broker adds to the controller's decisions, and every failure as an ApiError."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable
from pathlib import Path
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.controller.configs import AlterConfigs, ConfigChange, ConfigOperation, ReplaceConfigs
from anabranch.machines.controller.effects import Accepted, Validated
from anabranch.machines.controller.group_configs import SESSION_TIMEOUT, AlterGroupConfigs
from anabranch.machines.controller.resize import ResizeTopic
from anabranch.machines.controller.topics import CreateTopic, DeleteTopic
from anabranch.server.cluster.commands import Commands
from anabranch.server.coordinators.groups import group_configs
from anabranch.server.settings import Settings
from tests.unit.server.cluster.test_controller import World

TIMEOUT_MS = 30_000
OFFSETS = "__consumer_offsets"
ID = UUID(int=7)


async def commands_of(world: World, *, deletes_topics: bool = True) -> Commands:
    controller = await world.start()
    return Commands(
        controller,
        world.view,
        default_partition_count=3,
        deletes_topics=deletes_topics,
        broker_settings={},
        group_configs=group_configs(Settings()),
    )


async def refused(command: Awaitable[object]) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        await command
    return caught.value.code


def test_a_topic_is_made_resized_configured_and_deleted(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(tmp_path)
        commands = await commands_of(world)
        assert isinstance(await commands.create_topic(CreateTopic("t", ID, validate_only=True), TIMEOUT_MS), Validated)
        assert world.view.topic("t") is None
        assert isinstance(await commands.create_topic(CreateTopic("t", ID), TIMEOUT_MS), Accepted)
        topic = world.view.topic("t")
        assert topic is not None
        assert topic.undeleted_partition_count == 3, "the broker's default"
        await commands.resize_topic(ResizeTopic("t", 5), TIMEOUT_MS)
        topic = world.view.topic("t")
        assert topic is not None
        assert topic.undeleted_partition_count == 5
        change = ConfigChange("retention.ms", ConfigOperation.SET, "5")
        await commands.alter_configs(AlterConfigs("t", [change]), TIMEOUT_MS)
        assert world.view.configs("t") == {"retention.ms": "5"}
        await commands.replace_configs(ReplaceConfigs("t", {"segment.bytes": "2000000"}), TIMEOUT_MS)
        assert world.view.configs("t") == {"segment.bytes": "2000000"}
        change = ConfigChange(SESSION_TIMEOUT, ConfigOperation.SET, "50000")
        await commands.alter_group_configs(AlterGroupConfigs("g", [change]))
        assert world.view.group_configs("g") == {SESSION_TIMEOUT: "50000"}
        await commands.delete_topic(DeleteTopic(topic_id=ID), TIMEOUT_MS)
        assert world.view.find("t") is None

    asyncio.run(story())


def test_topics_of_the_broker_itself_are_neither_made_nor_deleted_for_clients(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(tmp_path)
        commands = await commands_of(world)
        create = CreateTopic(OFFSETS, ID, 1)
        assert await refused(commands.create_topic(create, TIMEOUT_MS)) is ErrorCode.INVALID_TOPIC_EXCEPTION
        unknown = await refused(commands.delete_topic(DeleteTopic(OFFSETS), TIMEOUT_MS))
        assert unknown is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert isinstance(await commands.create_internal_topic(create, TIMEOUT_MS), Accepted)
        for delete in (DeleteTopic(OFFSETS), DeleteTopic(topic_id=ID)):
            assert await refused(commands.delete_topic(delete, TIMEOUT_MS)) is ErrorCode.INVALID_TOPIC_EXCEPTION

    asyncio.run(story())


def test_a_broker_that_deletes_no_topics_says_so(tmp_path: Path) -> None:
    async def story() -> None:
        commands = await commands_of(World(tmp_path), deletes_topics=False)
        await commands.create_topic(CreateTopic("t", ID), TIMEOUT_MS)
        for name in ("t", "unknown"):
            code = await refused(commands.delete_topic(DeleteTopic(name), TIMEOUT_MS))
            assert code is ErrorCode.TOPIC_DELETION_DISABLED

    asyncio.run(story())


def test_refusals_and_a_store_that_refuses_are_errors_of_the_api(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(tmp_path)
        commands = await commands_of(world)
        await commands.create_topic(CreateTopic("t", ID), TIMEOUT_MS)
        again = CreateTopic("t", UUID(int=8))
        assert await refused(commands.create_topic(again, TIMEOUT_MS)) is ErrorCode.TOPIC_ALREADY_EXISTS
        bad = AlterGroupConfigs("g", [ConfigChange("unknown", ConfigOperation.SET, "1")])
        assert await refused(commands.alter_group_configs(bad)) is ErrorCode.INVALID_CONFIG

        async def refuse() -> None:
            raise OSError(errno.ENOSPC, "no space")

        world.pause = refuse
        good = AlterGroupConfigs("g", [ConfigChange(SESSION_TIMEOUT, ConfigOperation.SET, "50000")])
        for command in (
            commands.create_topic(CreateTopic("u", UUID(int=9)), TIMEOUT_MS),
            commands.resize_topic(ResizeTopic("t", 5), TIMEOUT_MS),
            commands.delete_topic(DeleteTopic("t"), TIMEOUT_MS),
            commands.alter_group_configs(good),
        ):
            assert await refused(command) is ErrorCode.KAFKA_STORAGE_ERROR
        assert [it.name for it in world.view.topics()] == ["t"]

    asyncio.run(story())
