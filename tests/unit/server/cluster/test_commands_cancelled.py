"""A client hangs up: its request's task is cancelled at every await of every command, and no command is half done."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import reduce
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.controller import nodes
from anabranch.machines.controller.broker_configs import AlterBrokerConfigs
from anabranch.machines.controller.configs import AlterConfigs, ConfigChange, ConfigOperation, ReplaceConfigs
from anabranch.machines.controller.effects import SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.group_configs import SESSION_TIMEOUT, AlterGroupConfigs
from anabranch.machines.controller.nodes import EVERY_BROKER, PutNode
from anabranch.machines.controller.reaper import LogRange
from anabranch.machines.controller.resize import ResizeTopic
from anabranch.machines.controller.state import ControllerState, apply
from anabranch.machines.controller.topics import CreateTopic, DeleteTopic
from anabranch.machines.controller.views import idle
from anabranch.machines.keyspace import Interval
from anabranch.machines.progress import NEVER_REWRITTEN, Rewritten
from anabranch.server.cluster.commands import Commands
from anabranch.server.cluster.controller import Controller
from anabranch.server.cluster.view import ClusterUpdate, ClusterView
from anabranch.server.coordinators.groups import group_configs
from anabranch.server.settings import Settings
from tests.simulation.virtual_time import VirtualClock, run, running_loop
from tests.support.metadata import MemoryMetadataStore, MemoryTree

TIMEOUT_MS = 30_000
Command = Callable[[Commands], Awaitable[object]]


async def pause() -> None:
    for _ in range(2):
        await asyncio.sleep(0)


class PromptPeers:
    """Brokers that carry out every order, after a few turns of the loop."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self.offline: set[int] = set()
        """Partitions with a log that cannot be opened."""

    async def take_roles(self, broker: int, order: SendLeaderAndIsr) -> Mapping[int, ErrorCode]:
        await pause()
        partitions = (role.partition for role in order.roles)
        return {p: ErrorCode.KAFKA_STORAGE_ERROR if p in self.offline else ErrorCode.NONE for p in partitions}

    async def stop_replicas(self, broker: int, order: SendStopReplica) -> Mapping[int, ErrorCode]:
        await pause()
        return {partition: ErrorCode.NONE for partition, _ in order.partitions}

    async def prepare(self, update: ClusterUpdate) -> None:
        await pause()

    def publish(self, update: ClusterUpdate) -> None:
        self._view.update(update)

    async def apply_configs(self, update: ClusterUpdate) -> None:
        await pause()

    async def retiring_ranges(self, topic: str) -> Mapping[int, LogRange]:
        return {}

    def epoch_ends(self, topic: str, epochs: Mapping[int, int]) -> Mapping[int, int]:
        return {}

    def opened(self, topic: str) -> int:
        return 1 << 20

    def is_open(self, topic: str, partition: int) -> bool:
        return True

    def log_start(self, topic: str, partition: int) -> int:
        return 0

    def rewritten(self, topic: str, partition: int) -> Rewritten:
        return NEVER_REWRITTEN

    def log_end(self, topic: str, partition: int) -> int:
        return 0

    def load(self, topic: str, partition: int, held: Interval) -> Sequence[float]:
        return ()

    async def next_records(self, topic: str, offsets: Mapping[int, int]) -> Mapping[int, int]:
        return offsets


class World:
    """A controller with a topic `there` of 2 partitions, grown to 4, and the tree that outlives it."""

    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.view = ClusterView()
        self.peers = PromptPeers(self.view)
        self.controller = Controller(MemoryMetadataStore(self.tree, pause), self.peers, VirtualClock(running_loop()))
        self.commands = Commands(
            self.controller,
            self.view,
            default_partition_count=3,
            deletes_topics=True,
            broker_settings={},
            group_configs=group_configs(Settings()),
        )

    async def start(self) -> World:
        await self.controller.start(1, None, ("PLAINTEXT://localhost:9092",), unclean=False)
        await self.commands.create_topic(CreateTopic("there", UUID(int=1), 2), TIMEOUT_MS)
        await self.commands.resize_topic(ResizeTopic("there", 4), TIMEOUT_MS)
        return self

    async def hold_up(self) -> None:
        """Begin a resize that an offline partition holds up."""
        self.peers.offline = {1}
        with pytest.raises(ApiError, match="It waits for partition 1 on broker 1, for 1 s: its log cannot be opened"):
            await self.commands.resize_topic(ResizeTopic("there", 6), 1_000)
        (running,) = self.commands.resizes(None)
        assert (running.from_count, running.to_count, running.cancelable) == (4, 6, True)

    def folded(self) -> ControllerState:
        """The state that a new term would load."""
        records = (PutNode(path, entry.data) for path, entry in sorted(self.tree.nodes.items()) if entry.data)
        return reduce(apply, records, ControllerState())

    def check(self) -> None:
        """What is on disk is what the controller knows, and what clients see."""
        state = self.controller.state
        assert self.folded() == state
        assert [it.name for it in self.view.topics()] == sorted(state.topics.keys() - state.deleting)
        for name in state.topics:
            found = self.view.find(name)
            assert found is not None and found.topic == state.topics[name]
            assert self.view.configs(name) == state.configs.get(name, {})
        assert {group: dict(self.view.group_configs(group)) for group in self.view.configured_groups()} == dict(
            state.group_configs
        )


def _set(name: str, value: str) -> ConfigChange:
    return ConfigChange(name, ConfigOperation.SET, value)


COMMANDS: Mapping[str, Command] = {
    "create": lambda it: it.create_topic(
        CreateTopic("new", UUID(int=2), 3, configs={"segment.ms": "7000"}), TIMEOUT_MS
    ),
    "create internal": lambda it: it.create_internal_topic(
        CreateTopic("__consumer_offsets", UUID(int=2), 2), TIMEOUT_MS
    ),
    "delete": lambda it: it.delete_topic(DeleteTopic("there"), TIMEOUT_MS),
    "delete by id": lambda it: it.delete_topic(DeleteTopic(topic_id=UUID(int=1)), TIMEOUT_MS),
    "grow": lambda it: it.resize_topic(ResizeTopic("there", 6), TIMEOUT_MS),
    "shrink": lambda it: it.resize_topic(ResizeTopic("there", 2), TIMEOUT_MS),
    "alter configs": lambda it: it.alter_configs(AlterConfigs("there", [_set("retention.ms", "5")]), TIMEOUT_MS),
    "replace configs": lambda it: it.replace_configs(ReplaceConfigs("there", {"segment.ms": "5000"}), TIMEOUT_MS),
    "cancel": lambda it: it.cancel_resize("there"),
    "alter broker configs": lambda it: it.alter_broker_configs(
        AlterBrokerConfigs(EVERY_BROKER, [_set("log.retention.ms", "5000")])
    ),
    "alter group configs": lambda it: it.alter_group_configs(AlterGroupConfigs("g", [_set(SESSION_TIMEOUT, "50000")])),
}
AGAIN = {"create": ErrorCode.TOPIC_ALREADY_EXISTS, "create internal": ErrorCode.TOPIC_ALREADY_EXISTS}
AGAIN |= {"delete": ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "delete by id": ErrorCode.UNKNOWN_TOPIC_ID}
AGAIN |= {"grow": ErrorCode.INVALID_PARTITIONS, "shrink": ErrorCode.INVALID_PARTITIONS}
AGAIN |= {"cancel": ErrorCode.NO_REASSIGNMENT_IN_PROGRESS}
"""The answer to a command that is given again after it has been carried out; the others succeed again."""


async def cancel_after(turns: int, command: Command, again: ErrorCode | None) -> bool:
    """Cancel the command after so many turns of the loop; return whether its task was still there to be cancelled."""
    world = await World().start()
    if again is ErrorCode.NO_REASSIGNMENT_IN_PROGRESS:
        await world.hold_up()
    before = world.folded()
    request = asyncio.ensure_future(command(world.commands))
    for _ in range(turns):
        await asyncio.sleep(0)
    was_running = not request.done()
    request.cancel()
    await asyncio.wait([request])
    for name in ("there", "new"):
        await world.controller.wait_until(lambda state, name=name: idle(state, name), running_loop().time() + 60)  # type: ignore[misc]
    await asyncio.sleep(1)
    world.check()
    begun = world.folded() != before
    assert begun or was_running
    if turns > 1:
        assert begun, "a command that has reached its step is carried out"
    answered: ErrorCode | None = None
    try:
        await command(world.commands)
    except ApiError as error:
        answered = error.code
    assert answered is (again if begun else None)
    world.check()
    assert nodes.deletion_path("there") not in world.tree.nodes, "no deletion is left half done"
    await world.controller.stop()
    return was_running


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_cancelled_at_any_await_is_done_wholly_or_not_at_all(name: str) -> None:
    turns = 0
    while run(cancel_after(turns, COMMANDS[name], AGAIN.get(name)), 0):
        turns += 1
    assert turns > 4, "there are awaits to be cancelled at"
