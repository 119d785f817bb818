"""The controller's shell: what is persisted is applied, and the tree alone makes the state again."""

from __future__ import annotations

import asyncio
import errno
import gc
import threading
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.controller.effects import Accepted, CommandReply, Decision, SendLeaderAndIsr, SendStopReplica
from anabranch.machines.controller.layouts import Layout
from anabranch.machines.controller.nodes import BrokerNode, Topic
from anabranch.machines.controller.reaper import LogRange
from anabranch.machines.controller.resize import ResizeTopic, decide_resize_topic
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.terms import decide_register_broker
from anabranch.machines.controller.topics import CreateTopic, DeleteTopic, decide_create_topic, decide_delete_topic
from anabranch.machines.keyspace import Interval
from anabranch.machines.progress import NEVER_REWRITTEN, Rewritten
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import Disk
from anabranch.runtime.metrics import Metrics
from anabranch.server.cluster import controller as controller_module
from anabranch.server.cluster.controller import LARGE_TOPIC, TOPICS_AT_A_TIME, Controller
from anabranch.server.cluster.peers import LocalPeers
from anabranch.server.cluster.view import ClusterUpdate, ClusterView
from anabranch.server.partitions.replicas import Replicas
from anabranch.server.partitions.topic_settings import topic_settings
from anabranch.storage.directory import DataDirectory
from tests.simulation.virtual_time import VirtualClock, run, running_loop
from tests.support.metadata import MemoryMetadataStore, MemoryTree

TIMEOUT_MS = 30_000


async def _no_pause() -> None:
    await asyncio.sleep(0)


class World:
    """A tree that outlives controllers, and the directory of the one broker."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tree = MemoryTree()
        self.pause: Callable[[], Awaitable[None]] = _no_pause
        self.lives = 0

    async def start(self) -> Controller:
        disk, clock = Disk(), Clock()
        self.lives += 1
        directory = DataDirectory(self.path / str(self.lives), disk)
        replicas = Replicas(
            directory,
            disk=disk,
            clock=clock,
            metrics=Metrics(),
            settings_of=lambda topic: topic_settings({}, NOT_SET, "os"),
        )
        self.view = ClusterView()
        store = MemoryMetadataStore(self.tree, lambda: self.pause())
        controller = Controller(store, LocalPeers(replicas, self.view), clock)
        await controller.start(1, None, ("PLAINTEXT://localhost:9092",), unclean=False)
        return controller


async def create(controller: Controller, name: str, partitions: int = 1) -> None:
    command = CreateTopic(name, UUID(int=len(controller.state.topics) + 1), partitions)
    reply = await controller.command(
        lambda state: decide_create_topic(state, command), TIMEOUT_MS, partitions=partitions
    )
    assert isinstance(reply, Accepted)


def test_a_new_term_has_the_state_that_the_tree_says(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(tmp_path)
        first = await world.start()
        await create(first, "a", 3)
        await create(first, "a-b")
        await create(first, "gone")
        await first.command(lambda state: decide_delete_topic(state, DeleteTopic("gone")), TIMEOUT_MS)
        await first.stop()
        second = await world.start()
        assert second.state.topics == first.state.topics
        assert second.state.topics.keys() == {"a", "a-b"}
        assert second.state.partitions.keys() == first.state.partitions.keys()
        assert second.state.controller_epoch == first.state.controller_epoch + 1
        await second.stop()

    asyncio.run(story())


def nodes_of(world: World, topic: str) -> list[str]:
    """The nodes of a topic's partitions."""
    return [path for path in world.tree.nodes if path.startswith(f"/brokers/topics/{topic}/partitions/")]


@pytest.mark.parametrize("broken", [False, True], ids=["the broker stops", "the store fails"])
def test_a_deletion_of_many_nodes_that_is_cut_short_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, broken: bool
) -> None:
    monkeypatch.setattr(controller_module, "DELETED_AT_A_TIME", 20)
    monkeypatch.setattr(controller_module, "RETRY_AFTER_FAILURE_MS", 0)

    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()
        await create(controller, "wide", LARGE_TOPIC)
        await create(controller, "other")
        before, cut = len(nodes_of(world, "wide")), False

        async def pause() -> None:
            nonlocal cut
            if not cut and len(nodes_of(world, "wide")) < before // 2:
                cut = True
                if broken:
                    raise OSError(errno.ENOSPC, "full")
                controller.refuse_commands()

        world.pause = pause
        delete = controller.command(lambda state: decide_delete_topic(state, DeleteTopic("wide")), TIMEOUT_MS)
        if broken:
            await delete
        else:
            with pytest.raises(ApiError) as refused:
                await delete
            assert refused.value.code is ErrorCode.REQUEST_TIMED_OUT
            await controller.stop()
            assert 0 < len(nodes_of(world, "wide")) < before // 2
            assert {"/brokers/topics/wide", "/admin/delete_topics/wide"} <= world.tree.nodes.keys()
            assert len(controller.state.partitions["wide"]) == LARGE_TOPIC, "what is not done is not applied"
            world.pause = _no_pause
            controller = await world.start()
            assert "wide" in controller.state.topics, "a start does not wait for the rest"
            await controller.wait_at_most(lambda state: "wide" not in state.topics, TIMEOUT_MS)
        assert controller.state.topics.keys() == {"other"}
        assert not [path for path in world.tree.nodes if "wide" in path]
        await create(controller, "wide", 2)
        await controller.stop()

    asyncio.run(story())
    assert broken == any(record.levelname == "ERROR" for record in caplog.records)


@pytest.mark.parametrize("pauses", [1, 2], ids=["before the store's transaction", "after the store's transaction"])
def test_a_step_whose_caller_is_cancelled_is_persisted_and_applied(tmp_path: Path, pauses: int) -> None:
    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()
        paused, go_on, left = asyncio.Event(), asyncio.Event(), pauses

        async def pause() -> None:
            nonlocal left
            left -= 1
            if left == 0:
                paused.set()
                await go_on.wait()

        world.pause = pause
        request = asyncio.ensure_future(create(controller, "a"))
        await paused.wait()
        request.cancel()
        await asyncio.wait([request])
        assert request.cancelled()
        following = asyncio.ensure_future(create(controller, "b"))
        await asyncio.sleep(0)
        go_on.set()
        await following
        assert controller.state.topics.keys() == {"a", "b"}
        assert {"/brokers/topics/a", "/brokers/topics/b"} <= world.tree.nodes.keys()
        await controller.stop()

    asyncio.run(story())


def test_a_step_that_is_refused_when_its_caller_is_gone_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    unretrieved: list[dict[str, Any]] = []

    async def story() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unretrieved.append(context))
        world = World(tmp_path)
        controller = await world.start()
        paused, go_on = asyncio.Event(), asyncio.Event()

        async def pause() -> None:
            paused.set()
            await go_on.wait()
            raise OSError(errno.ENOSPC, "no space")

        world.pause = pause
        request = asyncio.ensure_future(create(controller, "a"))
        await paused.wait()
        request.cancel()
        await asyncio.wait([request])
        go_on.set()
        await controller.stop()
        gc.collect()

    asyncio.run(story())
    assert not unretrieved
    assert [record.message for record in caplog.records].count("step of a cancelled request failed") == 1


class FullError(OSError):
    """Built-in errors take no weak references."""


def test_what_a_step_fails_with_is_no_cycle(tmp_path: Path) -> None:
    """A broker sets such cycles aside for good (`runtime.collector`)."""

    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()

        async def refuse() -> None:
            raise FullError(errno.ENOSPC, "no space")

        world.pause = refuse
        gc.disable()
        try:
            failed = [await _failing(controller) for _ in range(3)]
            await asyncio.sleep(0)
            assert [each() for each in failed] == [None] * 3
        finally:
            gc.enable()
        world.pause = _no_pause
        await controller.stop()

    async def _failing(controller: Controller) -> weakref.ref[BaseException]:
        try:
            await create(controller, "a")
        except FullError as error:
            return weakref.ref(error)
        raise AssertionError("the store did not refuse")

    asyncio.run(story())


def test_a_step_that_the_store_refuses_changes_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()
        version = world.view.version

        async def refuse() -> None:
            raise OSError(errno.ENOSPC, "no space")

        world.pause = refuse
        with pytest.raises(OSError, match="no space"):
            await create(controller, "a")
        assert (world.view.version, controller.state.topics.keys()) == (version, set())
        world.pause = _no_pause
        await create(controller, "a")
        await controller.stop()

    asyncio.run(story())


class ForgetfulPeers:
    """Brokers of which one refuses its first order; the others are taken down, by leader epoch, and carried out."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    async def take_roles(self, broker: int, order: SendLeaderAndIsr) -> Mapping[int, ErrorCode]:
        self.epochs += [role.leader_epoch for role in order.roles]
        if len(self.epochs) == 1:
            raise OSError(errno.EIO, "refused")
        return {role.partition: ErrorCode.NONE for role in order.roles}

    async def stop_replicas(self, broker: int, order: SendStopReplica) -> Mapping[int, ErrorCode]:
        raise NotImplementedError

    async def prepare(self, update: ClusterUpdate) -> None:
        pass

    def publish(self, update: ClusterUpdate) -> None:
        pass

    async def apply_configs(self, update: ClusterUpdate) -> None:
        pass

    async def retiring_ranges(self, topic: str) -> Mapping[int, LogRange]:
        return {}

    async def held_layouts(self, topic: str) -> None:
        return None

    def cuts(self, topic: Topic, partition: int) -> None:
        return None

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


def start_and_create(peers: ForgetfulPeers, meanwhile: Callable[[Controller], Awaitable[None]]) -> None:
    async def story() -> None:
        store = MemoryMetadataStore(MemoryTree(), _no_pause)
        controller = Controller(store, peers, VirtualClock(running_loop()))
        await controller.start(1, None, (), unclean=False)
        await controller.submit(lambda state: decide_create_topic(state, CreateTopic("a", UUID(int=1), 1)))
        await asyncio.sleep(0.1)
        assert peers.epochs == [0]
        await meanwhile(controller)
        await asyncio.sleep(5)
        await controller.stop()

    run(story(), 0)


def test_an_order_that_failed_is_given_again() -> None:
    async def nothing(controller: Controller) -> None:
        pass

    peers = ForgetfulPeers()
    start_and_create(peers, nothing)
    assert peers.epochs == [0, 0]


def test_an_order_that_failed_is_not_given_again_once_it_is_outdated() -> None:
    async def start_again(controller: Controller) -> None:
        broker = BrokerNode(1, controller.state.brokers[1].epoch + 1)
        await controller.submit(lambda state: decide_register_broker(state, broker, unclean=True))

    peers = ForgetfulPeers()
    start_and_create(peers, start_again)
    assert peers.epochs == [0, 1]


def test_decisions_about_large_topics_are_made_in_a_thread_and_readers_keep_their_state(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()
        await create(controller, "small", 2)
        here, deciders = threading.get_ident(), list[int]()
        small_state = controller.state

        def deciding(command: CreateTopic) -> Callable[[ControllerState], Decision[CommandReply]]:
            def decide(state: ControllerState) -> Decision[CommandReply]:
                deciders.append(threading.get_ident())
                return decide_create_topic(state, command)

            return decide

        command = CreateTopic("large", UUID(int=7), LARGE_TOPIC)
        await controller.command(deciding(command), TIMEOUT_MS, partitions=LARGE_TOPIC)
        assert deciders and here not in deciders
        assert small_state.topics.keys() == {"small"} and controller.state.topics.keys() == {"small", "large"}
        held, nodes_held = controller.state, dict(controller.state.partitions["large"])
        resize = ResizeTopic("large", LARGE_TOPIC + 1)
        await controller.command(lambda state: decide_resize_topic(state, resize), TIMEOUT_MS)
        assert held.partitions["large"] == nodes_held != controller.state.partitions["large"]
        assert len(controller.state.partitions["large"]) == LARGE_TOPIC + 1
        assert len(world.view.topic("large").view.partitions) == LARGE_TOPIC + 1  # type: ignore[union-attr]
        await controller.stop()
        again = await world.start()
        assert again.state.partitions["large"].keys() == controller.state.partitions["large"].keys()
        await again.submit(deciding(CreateTopic("later", UUID(int=8), 1)))
        assert here not in deciders
        await again.stop()

    asyncio.run(story())


def test_what_a_step_about_a_large_topic_leaves_behind_is_freed_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To free 100,000 records and changes of nodes took 13 ms of the event loop."""
    made: list[str] = []
    freed: list[tuple[str, int]] = []

    class Left:
        """Something that a step has made; it is noted where it is freed."""

        def __init__(self, what: str) -> None:
            self.what = what
            made.append(what)

        def __del__(self) -> None:
            freed.append((self.what, threading.get_ident()))

    def leaving(name: str) -> None:
        work = getattr(controller_module, name)

        def done(*arguments: Any) -> Any:
            found = work(*arguments)
            if name == "_decided":
                decision, paths = found
                return decision, Paths(paths)
            if name == "_operations":
                return Operations(found)
            return Change(*found)

        monkeypatch.setattr(controller_module, name, done)

    class Paths(frozenset[str]):
        def __init__(self, _: object) -> None:
            self.left = Left("paths")

    class Operations(list[Any]):
        def __init__(self, found: Any) -> None:
            super().__init__(found)
            self.left = Left("operations")

    class Change(controller_module._Change):
        def __init__(self, *_: object) -> None:
            self.left = Left("change")

    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()
        for name in ("_decided", "_operations", "_changed"):
            leaving(name)
        await create(controller, "wide", LARGE_TOPIC)
        await controller.stop()
        await asyncio.get_running_loop().shutdown_default_executor()

    asyncio.run(story())
    gc.collect()
    assert {"paths", "operations", "change"} == set(made)
    assert sorted(what for what, _ in freed) == sorted(made)
    assert threading.get_ident() not in {thread for _, thread in freed}, freed


def test_others_have_their_turn_while_many_topics_are_looked_at(tmp_path: Path) -> None:
    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()
        for number in range(5 * TOPICS_AT_A_TIME):
            topic = Topic(f"t{number}", UUID(int=number + 1), {0: (1,)}, 1, (Layout(0, 1),))
            controller.state.topics[topic.name] = topic
        for inspect in (controller.inspect_all_layouts, controller.inspect_all_retiring):
            inspecting, turns = asyncio.create_task(inspect()), 0
            while not inspecting.done():
                turns += 1
                await asyncio.sleep(0)
            assert turns > 5
        await controller.stop()

    asyncio.run(story())


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), AssertionError("a defect")])
def test_a_topic_that_cannot_be_inspected_does_not_keep_those_behind_it_from_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    inspected: list[str] = []

    async def inspect(self: Controller, topic: str) -> None:
        inspected.append(topic)
        if topic == "t0":
            raise error

    async def story() -> None:
        world = World(tmp_path)
        controller = await world.start()
        for number in range(3):
            layouts = Layout(0, 2), Layout(1, 1)
            topic = Topic(f"t{number}", UUID(int=number + 1), {0: (1,), 1: (1,)}, 1, layouts, {1})
            controller.state.topics[topic.name] = topic
        for name in ("inspect_retiring", "inspect_layouts"):
            monkeypatch.setattr(Controller, name, inspect)
        await controller.inspect_all_retiring()
        await controller.inspect_all_layouts()
        assert inspected == ["t0", "t1", "t2"] * 2
        assert controller.inspections_failed == 2
        for _ in range(2 * controller_module.LINES_MAX):
            await controller.inspect_all_retiring()
        said = [record.getMessage() for record in caplog.records]
        assert said == ["topic not inspected"] * controller_module.LINES_MAX
        monkeypatch.undo()
        controller.state.topics.clear()
        await controller.stop()

    asyncio.run(story())
