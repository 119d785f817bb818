"""The coordinators over one internal topic: a shard for each of its partitions, found by the hash of a key.

The topic is made when a client first looks for a coordinator. Its logs are read after the broker has started, one
after the other, those of requested keys first; until then the answer is COORDINATOR_LOAD_IN_PROGRESS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any, Generic, TypeVar
from uuid import UUID

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.controller.topics import CreateTopic
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLogger
from anabranch.server.cluster.commands import Commands
from anabranch.server.cluster.view import ClusterView
from anabranch.server.coordinators.record_codec import Machine, RecordCodec
from anabranch.server.coordinators.shard import Shard
from anabranch.server.coordinators.shard_state import MESSAGES, ShardState
from anabranch.server.coordinators.turns import APART_MAX
from anabranch.server.partitions.partition import Partition
from anabranch.server.partitions.replicas import Replicas

events = EventLogger("coordinators")
CREATE_TIMEOUT_MS = 10_000
KEYS_REMEMBERED_MAX = 20_000
KEY_LENGTH_REMEMBERED_MAX = 255
"""Characters: clients may ask for any keys, of up to 32,767 bytes."""
LONG_KEYS = "anabranch.server.coordinators.long_keys"

MachineT = TypeVar("MachineT", bound=Machine[Any])
RecordT = TypeVar("RecordT")


@lru_cache(KEYS_REMEMBERED_MAX)
def _hash_of_short(text: str) -> int:
    found = 0
    if text.isascii():
        for unit in text.encode():
            found = (31 * found + unit) & 0xFFFF_FFFF
    else:
        units = text.encode("utf-16-be", "surrogatepass")
        for position in range(0, len(units), 2):
            found = (31 * found + (units[position] << 8 | units[position + 1])) & 0xFFFF_FFFF
    return found


def _hash_of_long(text: str) -> int:
    from anabranch.server.coordinators.long_keys import hash_of_units  # A start needs no NumPy.

    return hash_of_units(text)


def java_hash(text: str) -> int:
    """Java's `String.hashCode`: over UTF-16 units, as a signed 32-bit number."""
    found = _hash_of_short(text) if len(text) <= KEY_LENGTH_REMEMBERED_MAX else _hash_of_long(text)
    return found - (1 << 32) if found >> 31 else found


def coordinator_partition(key: str, count: int) -> int:
    """Return the partition, of `count`, with the coordinator of `key`, as in Apache Kafka."""
    hashed = java_hash(key)
    return (0 if hashed == -(1 << 31) else abs(hashed)) % count


@dataclass(frozen=True, slots=True)
class ShardServices:
    """The parts of the broker that every set of shards uses."""

    commands: Commands
    view: ClusterView
    replicas: Replicas
    clock: Clock
    new_id: Callable[[], UUID]
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(APART_MAX))
    """What they do in threads at a time."""


class ShardSet(Generic[MachineT, RecordT]):
    """The shards over the partitions of one internal topic."""

    def __init__(
        self,
        topic: str,
        *,
        partition_count: int,
        configs: Mapping[str, str],
        make: Callable[[int], MachineT],
        codec: Callable[[], RecordCodec[RecordT]],
        modules: Sequence[str],
        services: ShardServices,
    ) -> None:
        """`make` gives the empty machine of a partition; it and `codec` are called when a log is about to be read.

        `modules` are those that they need. They are loaded in a thread before, as that takes long.
        """
        self.topic = topic
        self._partition_count = partition_count
        self._configs = configs
        self._make = make
        self._codec = codec
        self._modules = modules
        self._commands = services.commands
        self._view = services.view
        self._replicas = services.replicas
        self._clock = services.clock
        self._new_id = services.new_id
        self._room = services.room
        self._shards: dict[int, Shard[MachineT, RecordT]] = {}
        self._count = 0
        self._asked_for: dict[int, None] = {}
        """Partitions that were requested and are not loaded yet, in the order of the requests."""
        self._loading: asyncio.Task[None] | None = None
        self._creating: asyncio.Task[None] | None = None

    def __iter__(self) -> Iterator[Shard[MachineT, RecordT]]:
        return iter(list(self._shards.values()))  # Also in threads, while another is made.

    @property
    def exists(self) -> bool:
        """Whether the topic exists."""
        return self._count > 0 or self._view.find(self.topic) is not None

    @property
    def is_loaded(self) -> bool:
        """Whether the shards exist, or have been loading since the start."""
        return self._count > 0 or self._loading is not None

    def shard_of(self, key: str) -> Shard[MachineT, RecordT]:
        """The shard that coordinates `key`. ApiError before it exists."""
        number = coordinator_partition(key, self.count())
        shard = self.shard(number)
        if shard.state is ShardState.LOADING:
            self._asked_for[number] = None
        return shard

    def count(self) -> int:
        """The number of shards. ApiError before they exist."""
        if self._count:
            return self._count
        if self.exists:
            raise ApiError(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, "The broker has just started; try again.")
        raise ApiError(ErrorCode.NOT_COORDINATOR, "No client has looked for this coordinator yet.")

    def shard(self, number: int) -> Shard[MachineT, RecordT]:
        """The shard of a partition. ApiError before it exists, and if its log could not be opened."""
        shard = self._shards.get(number)
        if shard is not None:
            return shard
        if number >= self.count() or self._replicas.get(self.topic, number) is None:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "The coordinator's log could not be opened.")
        shard = self._shards[number] = self._made(number)
        shard.load_soon()
        return shard

    async def ensure(self) -> None:
        """Create the topic if it does not exist, and load its shards. ApiError if that fails, or the broker stops.

        All callers wait for one task, which goes on when they are gone: a topic that exists is always loaded.
        """
        if self.is_loaded:
            return
        if self._creating is None:
            self._creating = asyncio.get_running_loop().create_task(self._create(), name=f"create {self.topic}")
            self._creating.add_done_callback(self._created)
        creating = self._creating
        await asyncio.wait([creating])
        if creating.cancelled():
            raise ApiError(ShardState.UNLOADED.value, MESSAGES[ShardState.UNLOADED])
        try:
            creating.result()
        finally:
            del creating  # Or what it failed with holds this frame, and the frame holds it.

    async def _create(self) -> None:
        if not self.exists:
            command = CreateTopic(self.topic, self._new_id(), self._partition_count, configs=self._configs)
            await self._create_topic(command)
        await self._load_all()

    async def _create_topic(self, command: CreateTopic) -> None:
        try:
            await self._commands.create_internal_topic(command, CREATE_TIMEOUT_MS)
        except ApiError as error:
            if error.code is ErrorCode.NOT_CONTROLLER:  # The broker is stopping.
                raise ApiError(ShardState.UNLOADED.value, MESSAGES[ShardState.UNLOADED]) from error
            events.error("internal topic not created", topic=command.name, reason=error)
            message = f"The topic {command.name} could not be created: {error}"
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, message) from error

    def _created(self, task: asyncio.Task[None]) -> None:
        self._creating = None
        if not task.cancelled():
            task.exception()  # Its callers raise it; where they are gone, it is logged already.

    def start(self) -> None:
        """Load every shard in the background, if the topic exists."""
        if self.exists:
            self._loading = asyncio.get_running_loop().create_task(self._load_all(), name=f"load {self.topic}")

    def unload(self) -> None:
        """Decide nothing more."""
        for task in (self._loading, self._creating):
            if task is not None:
                task.cancel()
        for shard in self:
            shard.unload()

    async def _load_all(self) -> None:
        for module in (LONG_KEYS, *self._modules):
            await asyncio.get_running_loop().run_in_executor(None, import_module, module)
        topic = self._view.find(self.topic)
        assert topic is not None
        count = topic.undeleted_partition_count
        left = dict.fromkeys(number for number in range(count) if self._replicas.get(self.topic, number) is not None)
        shards = {number: self._made(number) for number in left}
        self._shards, self._count = shards, count
        while left:
            number = next((asked for asked in self._asked_for if asked in left), next(iter(left)))
            del left[number]
            self._asked_for.pop(number, None)
            await shards[number].load()
        self._asked_for.clear()
        loaded = sum(shard.records_loaded for shard in shards.values())
        if loaded:
            events.info("coordinators loaded", topic=self.topic, partitions=count, records=loaded)

    def _made(self, number: int) -> Shard[MachineT, RecordT]:
        partition = self._replicas.get(self.topic, number)
        assert partition is not None
        return Shard(
            partition,
            lambda: self._make(number),
            self._codec(),
            commit=self._replicas.commit,
            clock=self._clock,
            prepare=self._prepare,
            perform=self._perform,
            beside=lambda: self._beside(number),
            want_beside=self._want_beside,
            room=self._room,
        )

    def _beside(self, number: int) -> Partition | None:
        """The partition of a second log; a set of shards that has none needs none."""

    def _want_beside(self) -> None:
        """Have the topic of the second log made soon: something is to be written there."""

    def _prepare(self, machine: MachineT) -> None:
        """Complete a loaded machine with the state that is not in its log."""

    def _perform(self, effect: Any) -> None:
        """Perform an effect of an outcome whose records are durable."""
        raise AssertionError(effect)
