"""Reading a shard's logs into an empty machine, in steps."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from anabranch.base.errors import DecodeError
from anabranch.runtime.clock import Clock
from anabranch.runtime.events import EventLogger
from anabranch.server.coordinators.record_codec import Machine, RecordCodec
from anabranch.server.coordinators.replay import BULK_FROM_SIZE, Replay
from anabranch.server.partitions.partition import Partition
from anabranch.storage.interface import OfflineLogError, Slice, fetched

if TYPE_CHECKING:  # It needs NumPy, which a broker does without until a log is large.
    from anabranch.server.coordinators.bulk_replay import BulkReplay

events = EventLogger("shard")
RECORD_WEIGHT = 60
"""What a record weighs, beside the bytes of its value."""
APPLY_STEP = 20_000
"""The weight of what is applied before other tasks run: what goes beyond, such as 5,000 partitions, is in a thread."""
HELD_STEP = 300
"""Records of open transactions that are applied before other tasks run."""
RecordT = TypeVar("RecordT")
MachineT = TypeVar("MachineT", bound=Machine[Any])


class Loading(Generic[MachineT, RecordT]):
    """One attempt to read the logs."""

    def __init__(
        self,
        partition: Partition,
        find_beside: Callable[[], Partition | None],
        machine: MachineT,
        codec: RecordCodec[RecordT],
        clock: Clock,
    ) -> None:
        """`machine` is empty; `find_beside` finds the partition of the second log."""
        self.records = 0
        """The records that the logs have."""
        self.is_deferred = False
        """Whether the machine has records that are still to be applied (`RecordCodec.catch_up`)."""
        self._partition = partition
        self._find_beside = find_beside
        self._machine = machine
        self._codec = codec
        self._clock = clock

    async def machine(self) -> MachineT:
        """The machine with both logs applied. OSError, OfflineLogError, DecodeError where the first cannot be read."""
        machine = self._machine
        self.records = await self._read(self._partition, machine)
        if self._codec.is_beside is not None:
            beside = self._find_beside()
            if beside is not None:
                await self._read_beside(beside, machine)
                if beside.log.end == 0 and self._codec.beside_empty is not None:
                    self._codec.beside_empty(machine)
        return machine

    async def _read_beside(self, partition: Partition, machine: MachineT) -> None:
        """Apply the second log, or go on without it."""
        try:
            self.records += await self._read(partition, machine)
        except (OSError, OfflineLogError, DecodeError) as error:
            events.error(
                "log beside the coordinator's not read: work above committed offsets will be delivered again",
                partition=partition.name,
                reason=error,
            )

    async def _read(self, partition: Partition, machine: MachineT) -> int:
        """Apply a log; return the number of its records. Nothing is applied of one that cannot be read."""
        if partition.offline_reason is not None:
            raise OSError(0, partition.offline_reason)
        partition.log.resume(self._clock.now_ms())
        codec = self._codec
        slices = await fetched(partition.log.slices())
        replay: Replay | BulkReplay | None = None
        try:
            if sum(len(piece) for piece in slices) >= BULK_FROM_SIZE:
                replay = await self._in_bulk(machine, slices, partition)
            if replay is None:
                replay = Replay()
                await _exhausted(replay.scan(slices))
        except DecodeError as error:
            raise DecodeError(
                f"{error}. It was sound when it was written; restore the segment of {partition.name} with this offset "
                "from a copy."
            ) from error
        weight = 0
        for key, value in replay.latest.items():
            weight += RECORD_WEIGHT + len(value)
            if weight <= APPLY_STEP:
                _fold(codec.decode, machine, key, value)
            else:
                await _in_thread(_fold, codec.decode, machine, key, value)
                weight = 0
        for applied, held in enumerate(await _in_thread(replay.held), start=1):
            record = codec.decode(held.key, held.value)
            if record is not None:
                machine.apply(record, producer_id=held.producer_id)
            if not applied % HELD_STEP:
                await asyncio.sleep(0)
        return replay.records

    async def _in_bulk(self, machine: MachineT, slices: Sequence[Slice], partition: Partition) -> BulkReplay | None:
        """Read a large log; None if it cannot be read in this way."""
        bulk = await _in_thread(import_module, "anabranch.server.coordinators.bulk_replay")
        is_first = partition is self._partition
        index = None if self._codec.make_index is None or not is_first else self._codec.make_index()
        replay: BulkReplay = bulk.BulkReplay(index)
        try:
            await _exhausted(replay.scan(slices))
        except bulk.UnsuitedError:
            return None
        if self._codec.adopt is not None and is_first:
            self._codec.adopt(machine, index)
            self.is_deferred = True
        return replay


async def _in_thread(work: Callable[..., Any], *given: object) -> Any:
    """The result of work that is long, or not known to be short."""
    return await asyncio.get_running_loop().run_in_executor(None, work, *given)


async def _exhausted(windows: Iterator[None]) -> None:
    """Read all windows, in threads: one has more than 5,000 records where these are small."""
    done = object()
    while await _in_thread(next, windows, done) is not done:
        pass


def _fold(
    decode: Callable[[bytes, bytes | None], RecordT | None], machine: Machine[RecordT], key: bytes, value: bytes | None
) -> None:
    """Apply a record of the log that is being read."""
    record = decode(key, value)
    if record is not None:
        machine.apply(record)
