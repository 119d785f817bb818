"""Commits by ranges: what they write, and what a commit and a load take where a partition has very many ranges.

Sections: bytes, live. They measure the coordinator's machine, the coding of its records and their replay, without any
socket or disk. A bound is a side that always takes as long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from uuid import UUID

from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.coordinator import Coordinator
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.machines.groups.ranged import DURABLE_EFFECTS
from anabranch.machines.groups.records import decode_record, encode_record, is_individual
from anabranch.machines.groups.settings import GroupSettings
from anabranch.machines.keyspace import SPACE, cuts
from anabranch.machines.outcome import Outcome
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetRange,
)
from anabranch.records.key_values import encode_pairs
from anabranch.runtime.collector import collector_paused
from anabranch.server.coordinators.bulk_replay import BulkReplay
from benchmarks.harness import Bar, Result, Scale, compare

MEMBERS = 4
COMMIT_EVERY = 1_000
"""Records of a member between two of its commits."""
BYTES_RATIO_MAX = 1 / 50
COMMIT_MS_MAX = 1.0
LOAD_MS_MAX = 2_000.0
TOPIC = TopicImage(UUID(int=1), "orders", (0,))
CALLER = Caller("client", "/host", 9, "fresh", 0)


class _Group:
    """A coordinator with one group, and the bytes of its two logs."""

    def __init__(self) -> None:
        self.coordinator = Coordinator(GroupSettings(), Image(1, {"orders": TOPIC}))
        self.logs = [bytearray(), bytearray()]
        self._ends = [0, 0]
        self.now_ms = 1_000_000

    def submit(self, outcome: Outcome[object, object]) -> None:
        """Append the records, apply them, and write the tombstones that follow."""
        for number in (1, 0):
            pairs = [encode_record(it) for it in outcome.records if is_individual(it) == bool(number)]  # type: ignore[arg-type]
            if pairs:
                batch = encode_pairs(pairs, self.now_ms)
                batch[:8] = self._ends[number].to_bytes(8)
                self._ends[number] += len(pairs)
                self.logs[number] += batch
        for record in outcome.records:
            self.coordinator.apply(record)  # type: ignore[arg-type]
        for effect in outcome.effects:
            if isinstance(effect, DURABLE_EFFECTS):
                self.submit(self.coordinator.ranged.decide_durable(effect))

    def commit(self, ranges: Sequence[tuple[int, int]] = (), shares: Sequence[tuple[int, int, int]] = ()) -> None:
        """Commit ranges."""
        part = OffsetCommitRequestPartition(
            partition_index=0,
            committed_offset=0,
            committed_metadata="",
            offset_ranges=[OffsetRange(start=start, end=end) for start, end in ranges],
            key_range_offsets=[KeyRangeOffset(start=start, end=end, offset=at) for start, end, at in shares],
        )
        topics = [OffsetCommitRequestTopic(name="orders", partitions=[part])]
        outcome = self.coordinator.offset_commit(OffsetCommitRequest(group_id="g", topics=topics), CALLER, self.now_ms)
        answer = outcome.reply.topics[0].partitions[0]
        assert not answer.error_code, answer.error_message
        self.submit(outcome)

    @property
    def size(self) -> int:
        """The bytes of both logs."""
        return sum(map(len, self.logs))


def _work(records: int) -> Iterator[tuple[int, list[int]]]:
    """Whose turn it is to commit, and the offsets that it has processed since: members are not in step."""
    chance = random.Random(7)
    owned: list[list[int]] = [[] for _ in range(MEMBERS)]
    for offset in range(records):
        owned[chance.randrange(MEMBERS)].append(offset)
    done = [0] * MEMBERS
    while any(at < len(mine) for at, mine in zip(done, owned, strict=True)):
        member = chance.randrange(MEMBERS)
        some = owned[member][done[member] : done[member] + COMMIT_EVERY]
        done[member] += len(some)
        if some:
            yield member, some


def _by_keys(records: int) -> Mapping[str, float]:
    group, shares = _Group(), cuts(SPACE, MEMBERS)
    for member, some in _work(records):
        group.commit(shares=[(*shares[member], some[-1] + 1)])
    return {"bytes per record": group.size / records}


def _by_offsets(records: int) -> Mapping[str, float]:
    group = _Group()
    for _, some in _work(records):
        for begin in range(0, len(some), 300):
            group.commit([(offset, offset) for offset in some[begin : begin + 300]])
    return {"bytes per record": group.size / records}


def written(scale: Scale) -> list[Result]:
    """The bytes that four members write to the offsets topics who share a partition by key."""
    records, sample = scale.choose((1_000_000, 100_000), (20_000, 20_000))
    return compare(
        "commits.bytes",
        what=f"{MEMBERS} members own a random fourth of the keys of a partition each, in turns at random, and commit "
        f"after {COMMIT_EVERY:,} records of theirs; batches of both topics, tombstones included. Ours: {records:,} "
        f"records, one offset for the member's range of keys. The proposal's: {sample:,} records, a range for each "
        "offset (they join where they touch)",
        sides={"key ranges": lambda: _by_keys(records), "single offsets": lambda: _by_offsets(sample)},
        bars=[Bar("bytes per record", "B", "less", BYTES_RATIO_MAX)],
        scale=scale,
    )


class _Log:
    def __init__(self, data: bytes) -> None:
        self._data = data

    def __len__(self) -> int:
        return len(self._data)

    def view(self) -> memoryview:
        """The bytes."""
        return memoryview(self._data)


def _live(count: int, commits: int) -> Mapping[str, float]:
    group, chance = _Group(), random.Random(5)
    offsets = list(range(2, 2 * count + 2, 2))
    chance.shuffle(offsets)
    for begin in range(0, count, 300):
        group.commit([(at, at) for at in sorted(offsets[begin : begin + 300])])
    assert group.coordinator.offsets.individual.count == count
    slowest = 0.0
    with collector_paused():
        for _ in range(commits):
            gap = 2 * chance.randrange(1, count) + 1
            began = time.thread_time()
            group.commit([(gap, gap)])
            slowest = max(slowest, time.thread_time() - began)
    held = group.coordinator.offsets.individual
    began = time.thread_time()
    other = Coordinator(GroupSettings(), Image(1, {"orders": TOPIC}))
    for data in group.logs:
        replay = BulkReplay()
        for _ in replay.scan([_Log(bytes(data))]):  # type: ignore[list-item]
            pass
        for pair in replay.latest.items():
            record = decode_record(*pair)
            assert record is not None
            other.apply(record)
    other.loaded(group.now_ms)
    took = time.thread_time() - began
    assert other.offsets.individual == held
    return {"commit": slowest * 1_000, "load": took * 1_000}


def live(scale: Scale) -> list[Result]:
    """A commit to, and the load of, a partition with 100,000 ranges above its stable offset."""
    count, commits = scale.choose((100_000, 200), (2_000, 10))
    return compare(
        "commits.live",
        what=f"one group has {count:,} ranges of offsets in one partition, committed in random order. CPU milliseconds "
        f"of the slowest of {commits} commits that join two of them, from the request's objects to the applied records "
        "and their encoded batch; and of reading both logs, uncompacted, into another coordinator",
        sides={
            "anabranch": lambda: _live(count, commits),
            "allowed": lambda: {"commit": COMMIT_MS_MAX, "load": LOAD_MS_MAX},
        },
        bars=[Bar("commit", "ms", "less", 1.0), Bar("load", "ms", "less", 1.0)],
        scale=scale,
    )


BENCHMARKS = {"bytes": written, "live": live}
