"""A group that commits by ranges: its coordinator, and two logs that can lose what is not durable."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.image import Image
from anabranch.machines.groups.ranged import DURABLE_EFFECTS, FOLD_KEY
from anabranch.machines.groups.records import decode_record, encode_record, is_individual
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.groups.transaction_ranges import FoldedRanges
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.outcome import CancelTimer, Outcome, Parked, SetTimer
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from anabranch.protocol.messages.offset_fetch import OffsetFetchRequestGroup, OffsetFetchRequestTopics
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from anabranch.server.coordinators.replay import Replay
from tests.support.groups import topic_id, topics

PLACES = [SPACE_END // 7 * number for number in range(8)]
"""Keys of the model; intervals of keys begin and end at them."""
Log = list[tuple[tuple[bytes, bytes | None], ...]]
"""Batches; that of a marker has one record without a key, whose value says whether the transaction is committed."""


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
        self.producers: list[int] = []
        """Of each batch of the first log the producer id, or -1."""
        self.answers: dict[Hashable, Any] = {}
        self.tickets = 0
        self.durable = [0, 0]
        self.timers: dict[Hashable, int] = {}
        self.waiting: list[Any] = []
        """Effects that wait until everything is durable."""
        self.effects: list[Any] = []

    # -- the shell -----------------------------------------------------------------------------------------------------

    def submit(self, decide: Callable[[Coordinator], Outcome[Any, Any]]) -> Any:
        """Decide, append to the second log and to the first, apply."""
        outcome = decide(self.coordinator)
        producer_id = -1 if outcome.producer is None else outcome.producer[0]
        for number, log in ((1, self.logs[1]), (0, self.logs[0])):
            batch = tuple(encode_record(it) for it in outcome.records if is_individual(it) == bool(number))
            if batch:
                log.append(batch)
                self.producers += [] if number else [producer_id]
        for record in outcome.records:
            read = decode_record(*encode_record(record))
            assert read == record
            self.coordinator.apply(read, producer_id=producer_id)
        for answer in outcome.answers:
            self.answers[answer.ticket] = answer.reply
        for timer in outcome.timers:
            match timer:
                case SetTimer(key, at_ms):
                    self.timers[key] = at_ms
                case CancelTimer(key):
                    self.timers.pop(key, None)
        self.waiting += outcome.effects
        while due := [key for key in self.timers if key[0] in ("fold", "folded", "purgatory")]:  # type: ignore[index]
            for key in due:
                if self.timers.pop(key, None) is not None:
                    self.submit(lambda machine, key=key: machine.on_timer(key, self.now_ms))
        return outcome.reply

    def sync(self) -> None:
        """Make everything durable, and perform the effects that waited for it, once."""
        self.durable = [len(log) for log in self.logs]
        waiting, self.waiting = self.waiting, []
        for effect in waiting:
            if isinstance(effect, DURABLE_EFFECTS):
                self.submit(lambda machine, effect=effect: machine.ranged.decide_durable(effect))
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

    def crash(self, chance: random.Random | None = None, *, lose_second: bool = False) -> None:
        """Lose some of what is not durable of each log, and load what is left."""
        for number, log in enumerate(self.logs):
            kept = self.durable[number] if chance is None else chance.randint(self.durable[number], len(log))
            del log[kept:]
        del self.producers[len(self.logs[0]) :]
        if lose_second:
            self.logs[1].clear()
        self.durable = [len(log) for log in self.logs]
        self.waiting = []
        self.load()

    def load(self) -> None:
        """Have another coordinator take over."""
        self.timers.clear()
        self.coordinator = machine = Coordinator(self.settings, self.image)
        for number, log in enumerate(self.logs):
            replay = Replay()
            for at, batch in enumerate(log):
                producer_id = -1 if number else self.producers[at]
                for offset, (key, value) in enumerate(batch):
                    if not key:
                        replay.end(producer_id, committed=value == b"1")
                    elif producer_id >= 0:
                        replay.undecided.setdefault(producer_id, {})[key] = (at * 1_000 + offset, value)
                    else:
                        replay.put(key, value)
            found = [(key, value, -1) for key, value in replay.latest.items()]
            for key, value, producer_id in [*found, *((it.key, it.value, it.producer_id) for it in replay.held())]:
                record = decode_record(key, value)
                assert record is not None
                machine.apply(record, producer_id=producer_id)
        self.submit(lambda machine: machine.loaded(self.now_ms))

    # -- transactions --------------------------------------------------------------------------------------------------

    def commit_later(
        self,
        producer_id: int,
        ranges: Sequence[tuple[int, int]] = (),
        shares: Sequence[KeyRangeOffset] = (),
        *,
        offset: int = -1,
        member: str = "",
        epoch: int = -1,
        metadata: str = "",
    ) -> Any:
        """TxnOffsetCommit: the answer to the partition, or the ticket under which it will be in `answers`."""
        part = TxnOffsetCommitRequestPartition(
            partition_index=0,
            committed_offset=offset,
            committed_metadata=metadata,
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
            key_range_offsets=list(shares),
        )
        request = TxnOffsetCommitRequest(
            group_id="g",
            producer_id=producer_id,
            member_id=member,
            generation_id=epoch,
            topics=[TxnOffsetCommitRequestTopic(name="foo", partitions=[part])],
        )
        self.tickets += 1
        ticket, caller = self.tickets, Caller("client", "/host", 4, "fresh", 0)
        self.submit(lambda machine: machine.name_ranges(request, self.now_ms))
        reply = self.submit(lambda machine: machine.txn_offset_commit(request, caller, ticket, self.now_ms))
        return ticket if isinstance(reply, Parked) else reply.topics[0].partitions[0]

    def code_of(self, ticket: Hashable) -> ErrorCode | None:
        """The answer to a request that waited; None while it waits."""
        reply = self.answers.get(ticket)
        return None if reply is None else ErrorCode(reply.topics[0].partitions[0].error_code)

    def end(self, producer_id: int, *, committed: bool, durable: bool = True) -> None:
        """Write the marker of a transaction. `durable`: what follows from it is, too, one step after the other."""
        self.logs[0].append(((b"", b"1" if committed else b"0"),))
        self.producers.append(producer_id)
        self.coordinator.apply_marker(producer_id, 0, committed)
        self.submit(lambda machine: machine.marked(producer_id, self.now_ms))
        self.submit(lambda machine: machine.on_timer(FOLD_KEY, self.now_ms))
        while durable and any(isinstance(effect, FoldedRanges) for effect in self.waiting):
            self.sync()

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
        metadata: str = "",
    ) -> Any:
        """OffsetCommit; the answer to the partition."""
        part = OffsetCommitRequestPartition(
            partition_index=partition,
            committed_offset=offset,
            committed_metadata=metadata,
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
            key_range_offsets=list(shares),
        )
        request = OffsetCommitRequest(
            wants_stable_offset=True,
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

    def fetched(self, partition: int = 0, topic: str = "foo", *, stable: bool = False) -> Any:
        """OffsetFetch of the partition."""
        asked = OffsetFetchRequestGroup(
            group_id="g", topics=[OffsetFetchRequestTopics(name=topic, partition_indexes=[partition])]
        )
        return self.coordinator.offset_fetch(asked, stable, 9, self.now_ms).topics[0].partitions[0]

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
