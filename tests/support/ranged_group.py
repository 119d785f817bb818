"""A group that commits by ranges: its coordinator, and two logs that can lose what is not durable."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.individual_store import BuriedRanges
from anabranch.machines.groups.records import decode_record, encode_record, is_individual
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.outcome import CancelTimer, Outcome, SetTimer
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from tests.support.groups import topic_id, topics

PLACES = [SPACE_END // 7 * number for number in range(8)]
"""Keys of the model; intervals of keys begin and end at them."""
Log = list[tuple[tuple[bytes, bytes | None], ...]]
"""Batches."""


def keys(first: int, last: int, offset: int) -> KeyRangeOffset:
    """The keys from one of `PLACES` to another."""
    return KeyRangeOffset(start=PLACES[first], end=PLACES[last], offset=offset)


class RangedGroup:
    """Group `g` in partition 0 of topic `foo`."""

    def __init__(self, image: Image | None = None, **settings: Any) -> None:
        self.settings = GroupSettings(**settings)
        self.image = image or topics(foo=2)
        self.coordinator = Coordinator(self.settings, self.image)
        self.now_ms = 1_000_000
        self.logs: tuple[Log, Log] = ([], [])
        self.durable = [0, 0]
        self.timers: dict[Hashable, int] = {}
        self.waiting: list[Any] = []
        """Effects that wait until everything is durable."""
        self.effects: list[Any] = []

    # -- the shell -----------------------------------------------------------------------------------------------------

    def submit(self, decide: Callable[[Coordinator], Outcome[Any, Any]]) -> Any:
        """Decide, append to the second log and to the first, apply."""
        outcome = decide(self.coordinator)
        for number, log in ((1, self.logs[1]), (0, self.logs[0])):
            batch = tuple(encode_record(it) for it in outcome.records if is_individual(it) == bool(number))
            if batch:
                log.append(batch)
        for record in outcome.records:
            read = decode_record(*encode_record(record))
            assert read == record
            self.coordinator.apply(read)
        for timer in outcome.timers:
            match timer:
                case SetTimer(key, at_ms):
                    self.timers[key] = at_ms
                case CancelTimer(key):
                    self.timers.pop(key, None)
        self.waiting += outcome.effects
        return outcome.reply

    def sync(self) -> None:
        """Make everything durable, and perform the effects that waited for it, once."""
        self.durable = [len(log) for log in self.logs]
        waiting, self.waiting = self.waiting, []
        for effect in waiting:
            if isinstance(effect, BuriedRanges):
                self.submit(lambda machine, effect=effect: machine.ranged.decide_tombstones(effect))
            else:
                self.effects.append(effect)

    def settle(self) -> None:
        """Sync until nothing waits."""
        while self.waiting or self.durable != [len(log) for log in self.logs]:
            self.sync()

    def ring(self) -> None:
        """Let the timers of ranges ring until none is set."""
        while ("ranges",) in self.timers:
            del self.timers["ranges",]
            self.submit(lambda machine: machine.on_timer(("ranges",), self.now_ms))
            self.settle()

    def crash(self, chance: random.Random | None = None, *, lose_second: bool = False, compact: bool = True) -> None:
        """Lose some of what is not durable of each log, and load what is left."""
        for number, log in enumerate(self.logs):
            kept = self.durable[number] if chance is None else chance.randint(self.durable[number], len(log))
            del log[kept:]
        if lose_second:
            self.logs[1].clear()
        self.durable = [len(log) for log in self.logs]
        self.waiting = []
        self.load(compact=compact)

    def load(self, *, compact: bool = True) -> None:
        """Have another coordinator take over."""
        self.timers.clear()
        self.coordinator = machine = Coordinator(self.settings, self.image)
        for log in self.logs:
            latest: dict[bytes, bytes | None] = {}
            for key, value in (pair for batch in log for pair in batch):
                latest.pop(key, None)
                latest[key] = value
            pairs = latest.items() if compact else (pair for batch in log for pair in batch)
            for key, value in pairs:
                if value is not None or not compact:
                    record = decode_record(key, value)
                    assert record is not None
                    machine.apply(record)
        self.submit(lambda machine: machine.loaded(self.now_ms))

    # -- requests ------------------------------------------------------------------------------------------------------

    def commit(
        self,
        offset: int = -1,
        ranges: Sequence[tuple[int, int]] = (),
        shares: Sequence[KeyRangeOffset] = (),
        *,
        member: str = "",
        epoch: int = -1,
        partition: int = 0,
        topic: str = "foo",
    ) -> Any:
        """OffsetCommit; the answer to the partition."""
        part = OffsetCommitRequestPartition(
            partition_index=partition,
            committed_offset=offset,
            committed_metadata="",
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
            key_range_offsets=list(shares),
        )
        request = OffsetCommitRequest(
            group_id="g",
            member_id=member,
            generation_id_or_member_epoch=epoch,
            topics=[OffsetCommitRequestTopic(name=topic, topic_id=topic_id(topic), partitions=[part])],
        )
        caller = Caller("client", "/host", 9, "fresh", 0)
        reply = self.submit(lambda machine: machine.offset_commit(request, caller, self.now_ms))
        return reply.topics[0].partitions[0]

    def committed(self, offset: int = -1, *args: Any, **fields: Any) -> int:
        """OffsetCommit, durably and with success; the stable offset."""
        found = self.commit(offset, *args, **fields)
        assert found.error_code == ErrorCode.NONE, (ErrorCode(found.error_code), found.error_message)
        self.settle()
        return int(found.last_stable_offset)

    def fetched(self, partition: int = 0, topic: str = "foo") -> Any:
        """OffsetFetch of the partition."""
        asked = OffsetFetchRequestGroup(
            group_id="g", topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=[partition])]
        )
        return self.coordinator.offset_fetch(asked, False, 9, self.now_ms).topics[0].partitions[0]

    def ranges(self) -> list[tuple[int, int]]:
        """The ranges of offsets that a consumer is told."""
        return [(it.start, it.end) for it in self.fetched().committed_range_offsets]

    def processed(self, size: int) -> set[tuple[int, int]]:
        """The (offset, key) below `size` that a consumer is told are processed."""
        found = self.fetched()
        shares = found.key_range_offsets or [keys(0, 7, found.committed_offset)]
        said = {
            (offset, place)
            for share in shares
            for place in PLACES
            if share.start <= place <= share.end
            for offset in range(min(size, share.offset))
        }
        done = {offset for it in found.committed_range_offsets for offset in range(it.start, it.end + 1)}
        return said | {(offset, place) for offset in done for place in PLACES}
