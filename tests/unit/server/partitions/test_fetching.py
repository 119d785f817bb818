"""Fetches: what is read at once, what is waited for, and what ends the waiting."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import NO_TOPIC_ID
from anabranch.machines.held_memory import FetchMemory
from anabranch.machines.keyspace import SPACE
from anabranch.machines.partition.aborted import AbortedTransaction, AbortedTransactions
from anabranch.machines.partition.fetching import FetchBudget
from anabranch.machines.partition.sharing import Asked
from anabranch.records.batch import TRANSACTIONAL, end_transaction_marker, headers, parse_header
from anabranch.records.filtering import scatter
from anabranch.runtime.clock import Clock
from anabranch.runtime.disk import Disk
from anabranch.runtime.metrics import Metrics
from anabranch.server.partitions import fetching
from anabranch.server.partitions.fetch_sessions import FetchSessions, Target
from anabranch.server.partitions.fetching import EpochEnd, Fetch, Fetches, PartitionRead
from anabranch.server.partitions.filtering import FilteredSlice, Filters
from anabranch.storage.log.log import LocalLog
from tests.support.batches import make_batch
from tests.support.cold_log import ColdLog
from tests.support.replicas import NOW_MS, TOPIC, TOPIC_ID, LocalReplicas

OK = ErrorCode.NONE
SIZE = len(make_batch())
LONG_MS = 60_000


def no_filters() -> Filters:
    """Filters that are not used: nothing is asked for by key here."""
    limits = {"work_size_max": 1 << 20, "kept_size_max": 0}
    return Filters(lambda: scatter, lambda partition, offset: None, Clock(), Metrics(), **limits)


class World:
    """Two partitions, and their readers."""

    def __init__(self, path: Path, *, durability: str = "os") -> None:
        self.local = LocalReplicas(path, initial=2, durability=durability)
        self.local.resize(2)
        ids = iter(range(100))
        sessions = FetchSessions(10, lambda bound: next(ids))
        self.memory = FetchMemory(1 << 20)
        names = {TOPIC_ID: TOPIC}.get
        self.fetches = Fetches(self.local.replicas, sessions, names, no_filters(), self.memory, size_max=10 * SIZE)

    def append(self, partition: int = 0, *, producer_id: int = -1, sequence: int = -1) -> None:
        identity = {"producer_id": producer_id, "producer_epoch": 0, "base_sequence": sequence}
        attributes = TRANSACTIONAL if producer_id >= 0 else 0
        data = make_batch(attributes=attributes, **(identity if producer_id >= 0 else {}))
        self.local[partition].append(data, parse_header(data), NOW_MS)

    def abort(self, partition: int, producer_id: int) -> None:
        marker = end_transaction_marker(producer_id, 0, commit=False, coordinator_epoch=0, timestamp_ms=NOW_MS)
        self.local[partition].append(marker, parse_header(marker), NOW_MS)

    def fetch(
        self,
        *targets: Target,
        session: tuple[int, int] = (0, -1),
        size_min: int = 1,
        size_max: int = 1 << 20,
        committed: bool = False,
    ) -> Fetch:
        context = self.fetches.sessions.begin(*session, targets, (), uses_topic_ids=False, now_ms=NOW_MS)
        assert not isinstance(context, ErrorCode)
        budget = FetchBudget(size_min, size_max, self.fetches.size_max)
        fetch = Fetch(self.fetches, context, budget, committed=committed)
        fetch.read()
        return fetch

    def read(self, *targets: Target, committed: bool = False, size_max: int = 1 << 20) -> list[PartitionRead]:
        fetch = self.fetch(*targets, committed=committed, size_max=size_max)
        return answered(fetch)

    def waited(self, fetch: Fetch, *events: Callable[[], object], wait_max_ms: int = LONG_MS) -> list[PartitionRead]:
        """What the fetch answers, after these events, one in each turn of the loop."""

        async def run() -> None:
            waiting = asyncio.ensure_future(fetch.wait(wait_max_ms))
            for event in events:
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                assert not waiting.done()
                event()
            await waiting

        self.local.runner.run(run())
        return answered(fetch)

    def watched(self) -> bool:
        return any(self.local[number].watchers for number in (0, 1))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    assert not made.watched()
    assert not made.fetches.waiting
    made.local.close()


def target(partition: int = 0, offset: int = 0, *, size_max: int = 1 << 20, topic_id: UUID = NO_TOPIC_ID) -> Target:
    return Target(TOPIC if topic_id == NO_TOPIC_ID else "", topic_id, partition, offset, size_max)


def answered(fetch: Fetch) -> list[PartitionRead]:
    """The reads that the answer holds."""
    return [read for read in fetch.answer() if read is not None]


def sizes(reads: list[PartitionRead]) -> dict[int, int]:
    """Batches found of each partition."""
    return {read.target.partition: read.size // SIZE for read in reads}


def cold(world: World, path: Path, number: int, pause: Callable[[], Awaitable[None]] | None = None) -> None:
    """Give a partition a log that has nothing near."""
    partition = world.local[number]
    log = ColdLog.open(path / f"cold-{number}", partition.settings.log, disk=Disk())
    if pause is not None:
        log.pause = pause  # type: ignore[method-assign]
    partition.log = log
    log.observe(partition)


def test_what_is_not_near_is_waited_for_and_counts_as_what_is_near(world: World, tmp_path: Path) -> None:
    cold(world, tmp_path, 0)
    for _ in range(6):
        world.append(0)
        world.append(1)

    async def fetch() -> list[PartitionRead]:
        made = world.fetch(target(0, size_max=3 * SIZE), target(1))
        assert not made.complete
        await made.wait(0)
        return answered(made)

    reads = world.local.runner.run(fetch())
    assert sizes(reads) == {0: 3, 1: 6}
    assert reads[0].found is not None
    assert bytes(reads[0].found.view()) == bytes(reads[1].found.view())[: 3 * SIZE]  # type: ignore[union-attr]


def test_what_must_be_fetched_of_several_partitions_is_fetched_together(world: World, tmp_path: Path) -> None:
    together = asyncio.Barrier(2)

    async def pause() -> None:
        await together.wait()

    for number in (0, 1):
        cold(world, tmp_path, number, pause)
        world.append(number)

    async def fetch() -> list[PartitionRead]:
        made = world.fetch(target(0), target(1), size_min=2 * SIZE)
        async with asyncio.timeout(30):
            await made.wait(LONG_MS)
        return answered(made)

    assert sizes(world.local.runner.run(fetch())) == {0: 1, 1: 1}


def test_a_change_while_something_is_fetched_is_seen_when_that_is_there(world: World, tmp_path: Path) -> None:
    async def fetch() -> list[PartitionRead]:
        arriving = asyncio.Event()

        async def pause() -> None:
            await arriving.wait()

        cold(world, tmp_path, 0, pause)
        world.append(0)
        made = world.fetch(target(0), target(1), size_min=2 * SIZE)
        waiting = asyncio.ensure_future(made.wait(LONG_MS))
        await asyncio.sleep(0)
        world.append(1)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        arriving.set()
        async with asyncio.timeout(30):
            await waiting
        return answered(made)

    assert sizes(world.local.runner.run(fetch())) == {0: 1, 1: 1}


def test_what_arrives_while_a_fetch_waits_may_have_to_be_fetched_too(world: World, tmp_path: Path) -> None:
    cold(world, tmp_path, 0)

    async def fetch() -> list[PartitionRead]:
        made = world.fetch(target(0))
        waiting = asyncio.ensure_future(made.wait(LONG_MS))
        await asyncio.sleep(0)
        world.append(0)
        async with asyncio.timeout(30):
            await waiting
        return answered(made)

    assert sizes(world.local.runner.run(fetch())) == {0: 1}


def test_of_what_was_fetched_together_only_what_has_room_is_answered(world: World, tmp_path: Path) -> None:
    for number in (0, 1):
        cold(world, tmp_path, number)
        for _ in range(9):
            world.append(number)

    async def fetch() -> list[PartitionRead]:
        made = world.fetch(target(0), target(1))
        await made.wait(LONG_MS)
        return answered(made)

    assert sizes(world.local.runner.run(fetch())) == {0: 9, 1: 0}, "the broker allows ten batches"


def test_a_fetch_that_is_given_up_gives_up_what_it_waits_for(world: World, tmp_path: Path) -> None:
    async def fetch() -> bool:
        given_up = False

        async def pause() -> None:
            nonlocal given_up
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                given_up = True
                raise

        cold(world, tmp_path, 0, pause)
        world.append(0)
        waiting = asyncio.ensure_future(world.fetch(target(0)).wait(LONG_MS))
        for _ in range(3):
            await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)
        return given_up

    assert world.local.runner.run(fetch())


def test_a_read_that_fails_later_is_answered_as_one_that_fails_at_once(world: World, tmp_path: Path) -> None:
    async def pause() -> None:
        raise OSError(errno.EIO, "the store does not answer")

    cold(world, tmp_path, 0, pause)
    world.append(0)

    async def fetch() -> list[PartitionRead]:
        made = world.fetch(target(0), target(1))
        await made.wait(LONG_MS)
        return answered(made)

    reads = world.local.runner.run(fetch())
    assert [read.error for read in reads] == [ErrorCode.KAFKA_STORAGE_ERROR, OK]


def test_a_fetch_that_is_given_up_fetches_nothing_more(world: World, tmp_path: Path) -> None:
    async def fetch() -> None:
        given_up = asyncio.Event()

        async def pause() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                given_up.set()

        cold(world, tmp_path, 0, pause)
        world.append(0)
        waiting = asyncio.ensure_future(world.fetch(target(0)).wait(LONG_MS))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting.cancel()
        async with asyncio.timeout(30):
            await given_up.wait()

    world.local.runner.run(fetch())


def test_what_is_there_is_read_at_once(world: World) -> None:
    world.append(0)
    world.append(0)
    world.append(1)
    fetch = world.fetch(target(0), target(1))
    assert fetch.complete
    assert sizes(answered(fetch)) == {0: 2, 1: 1}
    assert sizes(world.read(target(0, 1))) == {0: 1}


def test_offsets_are_told_beside_the_records(world: World) -> None:
    world.append(0)
    (read,) = world.read(target(0, 1))
    assert (read.high_watermark, read.last_stable_offset, read.log_start, read.size) == (1, 1, 0, 0)


def test_the_limits_of_answer_and_partition_hold_beyond_the_first_batch(world: World) -> None:
    for _ in range(6):
        world.append(0)
        world.append(1)
    assert sizes(world.read(target(0, size_max=3 * SIZE), target(1))) == {0: 3, 1: 6}
    assert sizes(world.read(target(0), target(1), size_max=8 * SIZE)) == {0: 6, 1: 2}
    assert sizes(world.read(target(0), target(1), size_max=1)) == {0: 1, 1: 0}
    assert sizes(world.read(target(0), target(1))) == {0: 6, 1: 4}, "what the broker allows"


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        (target(7), ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        (target(0, topic_id=UUID(int=9)), ErrorCode.UNKNOWN_TOPIC_ID),
        (target(0, 5), ErrorCode.OFFSET_OUT_OF_RANGE),
        (replace(target(0), leader_epoch=0), ErrorCode.FENCED_LEADER_EPOCH),
        (replace(target(0), leader_epoch=2), ErrorCode.UNKNOWN_LEADER_EPOCH),
        (replace(target(0), undeleted_partition_count=3), ErrorCode.INVALID_PARTITION_METADATA),
    ],
)
def test_an_error_is_answered_at_once(world: World, asked: Target, error: ErrorCode) -> None:
    fetch = world.fetch(target(1), asked, size_min=1_000)
    assert fetch.complete
    assert [read.error for read in answered(fetch)] == [OK, error]


def test_a_topic_is_found_by_its_id_and_another_one_of_its_name_is_not_it(world: World) -> None:
    world.append(0)
    assert sizes(world.read(target(0, topic_id=TOPIC_ID))) == {0: 1}
    world.local[0].topic_id = UUID(int=9)
    (read,) = world.read(target(0, topic_id=TOPIC_ID))
    assert read.error is ErrorCode.INCONSISTENT_TOPIC_ID


def test_partitions_that_cannot_be_read_say_why(world: World) -> None:
    world.local[0].leadership = None
    world.local[1].take_offline("damaged")
    errors = [read.error for read in world.read(target(0), target(1))]
    assert errors == [ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.KAFKA_STORAGE_ERROR]


def test_a_reader_whose_log_diverges_is_told_where(world: World) -> None:
    world.append(0)
    world.local.resize(2)
    world.append(0)
    asked = replace(target(0, 2), last_fetched_epoch=1)
    fetch = world.fetch(asked, size_min=1_000)
    assert fetch.complete
    (read,) = answered(fetch)
    assert (read.diverging, read.size, read.error) == (EpochEnd(1, 1), 0, OK)
    (read,) = world.read(replace(target(0, 1), last_fetched_epoch=1))
    assert (read.diverging, read.size) == (None, SIZE)


def test_readers_of_committed_records_stop_at_an_open_transaction_and_hear_of_aborted_ones(world: World) -> None:
    world.append(0)
    world.append(0, producer_id=7, sequence=0)
    world.append(0)
    assert sizes(world.read(target(0))) == {0: 3}
    assert sizes(world.read(target(0), committed=True)) == {0: 1}
    world.abort(0, 7)
    (read,) = world.read(target(0), committed=True)
    assert read.aborted == [AbortedTransaction(7, 1, 3, 4)]
    (read,) = world.read(target(0, size_max=SIZE), committed=True)
    assert (read.size, read.aborted) == (SIZE, []), "none of its records is among those found"
    (read,) = world.read(target(0))
    assert read.aborted == ()


def test_a_response_tells_of_so_many_aborted_transactions_and_the_reader_asks_at_once_for_more(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.machines.partition.fetching.ABORTED_MAX", 3)
    world.fetches.size_max = 1 << 20
    world.append(0, producer_id=1, sequence=0)  # Open for long, and aborted at last.
    for sequence in range(10):
        for partition in (0, 1):
            world.append(partition, producer_id=7, sequence=sequence)
            world.abort(partition, 7)
    world.abort(0, 1)
    ends = {number: world.local[number].log.end for number in (0, 1)}
    offsets, told = {0: 0, 1: 0}, {0: set[AbortedTransaction](), 1: set[AbortedTransaction]()}
    for _ in range(20):
        fetch = world.fetch(*(target(it, offset) for it, offset in offsets.items()), size_min=1 << 19, committed=True)
        complete, reads = fetch.complete, answered(fetch)
        assert sum(len(read.aborted) for read in reads) <= 3 + 3, "and those that are open where it stops"
        for read in reads:
            number = read.target.partition
            told[number] |= set(read.aborted)
            if read.found is not None:
                records = [header for _, header in headers(read.found.view())]
                assert records[0].base_offset == offsets[number]
                offsets[number] = records[-1].next_offset
                needed = world.local[number].table.aborted.between(records[0].base_offset, offsets[number])
                assert read.aborted == needed
        assert complete or offsets == ends, "what there is more of is not waited for"
    assert offsets == ends
    assert all(told[number] == set(world.local[number].table.aborted) for number in told)


def test_slices_that_are_awaited_together_tell_of_no_more_aborted_transactions(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("anabranch.machines.partition.fetching.ABORTED_MAX", 3)
    world.fetches.size_max = 1 << 20
    for partition in (0, 1):
        cold(world, tmp_path, partition)
        for sequence in range(10):
            world.append(partition, producer_id=7, sequence=sequence)
            world.abort(partition, 7)

    async def fetch() -> list[PartitionRead]:
        made = world.fetch(target(0), target(1), committed=True)
        await made.wait(LONG_MS)
        return answered(made)

    reads = world.local.runner.run(fetch())
    assert [len(read.aborted) for read in reads] == [3 + 1, 0 + 1], "and one that is open where each stops"


def test_a_fetch_of_few_records_does_not_look_at_the_aborted_transactions_behind_them(world: World) -> None:
    """Nor at their records: a partition may have a million of them."""
    for sequence in range(300):
        world.append(0, producer_id=7, sequence=sequence)
        world.abort(0, 7)
    asked: list[tuple[int, int]] = []

    class Watched(AbortedTransactions):
        def between(self, start: int, end: int) -> list[AbortedTransaction]:
            asked.append((start, end))
            return super().between(start, end)

    world.local[0].table.aborted = Watched(world.local[0].table.aborted)
    (read,) = world.read(target(0, 2, size_max=SIZE), committed=True)
    assert [line.first_offset for line in read.aborted] == [2]
    assert asked == [(2, 3)]


@pytest.mark.parametrize("by_key", [False, True])
def test_a_read_that_a_deletion_overtakes_is_refused(world: World, tmp_path: Path, *, by_key: bool) -> None:
    """With the records the log forgets that they were aborted; what the fetch found before is not sent either."""
    world.local.close()
    world.local = LocalReplicas(tmp_path / "by key", initial=2, durability="os", accept_range_fetch="true")
    world.local.resize(2)
    world.fetches._replicas = world.local.replicas

    async def fetch() -> list[PartitionRead]:
        arriving = asyncio.Event()

        async def pause() -> None:
            await arriving.wait()

        async def find(*asked: object) -> FilteredSlice:
            if asked[2]:  # It has looked there.
                await pause()
            return FilteredSlice((memoryview(b"found"),), world.local[0].log.end)

        cold(world, tmp_path, 0, pause)
        world.fetches.filters.read = find  # type: ignore[assignment]
        asked = replace(target(0), asked=Asked((SPACE,)) if by_key else None)
        world.append(0, producer_id=7, sequence=0)
        world.abort(0, 7)
        made = world.fetch(asked, size_min=2 * len(b"found"), committed=True)
        waiting = asyncio.ensure_future(made.wait(LONG_MS))
        for _ in range(5):
            await asyncio.sleep(0)
        world.append(0)
        for _ in range(5):
            await asyncio.sleep(0)
        LocalLog.delete_before(world.local[0].log, 3)  # type: ignore[arg-type]
        world.local[0].deleted()
        arriving.set()
        async with asyncio.timeout(30):
            await waiting
        return answered(made)

    (read,) = world.local.runner.run(fetch())
    assert (read.error, read.log_start, read.found, read.aborted) == (ErrorCode.OFFSET_OUT_OF_RANGE, 3, None, ())


def test_a_fetch_waits_until_there_is_enough(world: World) -> None:
    fetch = world.fetch(target(0), target(1), size_min=3 * SIZE)
    assert not fetch.complete
    reads = world.waited(fetch, world.append, lambda: world.append(1), world.append)
    assert sizes(reads) == {0: 2, 1: 1}


def test_many_changes_of_one_turn_are_read_once(world: World) -> None:
    fetch = world.fetch(target(0), size_min=1)
    assert sizes(world.waited(fetch, lambda: [world.append() for _ in range(5)])) == {0: 5}


def test_a_change_between_a_read_and_the_waiting_is_seen(world: World) -> None:
    fetch = world.fetch(target(0), target(1))
    world.append(1)
    assert sizes(world.waited(fetch)) == {0: 0, 1: 1}


def test_a_resize_between_a_read_and_the_waiting_is_seen(world: World) -> None:
    fetch = world.fetch(replace(target(0), undeleted_partition_count=2))
    leadership = world.local[0].leadership
    assert leadership is not None
    world.local[0].leadership = replace(leadership, undeleted_partition_count=3)
    (read,) = world.waited(fetch)
    assert read.error is ErrorCode.INVALID_PARTITION_METADATA


def test_other_work_has_its_turn_while_many_partitions_are_read_and_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "READS_AT_A_TIME", 1)
    fetch = world.fetch(target(0), target(1), size_min=2 * SIZE)
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    async def run() -> None:
        counting = asyncio.ensure_future(count())
        fetch._reads.clear()
        await fetch.read_in_steps()
        assert turns >= 1 and len(fetch._reads) == 2
        waiting = asyncio.ensure_future(fetch.wait(LONG_MS))
        while not world.watched():
            await asyncio.sleep(0)
        world.append(0)
        world.append(1)
        await waiting
        counting.cancel()

    world.local.runner.run(run())
    assert sizes(answered(fetch)) == {0: 1, 1: 1}


def test_a_fetch_waits_no_longer_than_its_reader_allows(world: World) -> None:
    assert sizes(world.waited(world.fetch(target(0)), wait_max_ms=1)) == {0: 0}


def test_a_partition_that_is_lost_ends_the_waiting(world: World) -> None:
    fetch = world.fetch(target(0), target(1))
    (_, read) = world.waited(fetch, lambda: world.local[1].take_offline("damaged"))
    assert read.error is ErrorCode.KAFKA_STORAGE_ERROR


def test_a_resize_ends_the_waiting_of_those_who_said_the_old_count(world: World) -> None:
    fetch = world.fetch(replace(target(0), undeleted_partition_count=2))

    def resize() -> None:
        partition = world.local[0]
        assert partition.leadership is not None
        partition.leadership = replace(partition.leadership, undeleted_partition_count=3)
        partition.changed()

    (read,) = world.waited(fetch, resize)
    assert read.error is ErrorCode.INVALID_PARTITION_METADATA


def test_a_stop_ends_all_waiting_now_and_from_now_on(world: World) -> None:
    fetch = world.fetch(target(0))
    assert sizes(world.waited(fetch, world.fetches.stop)) == {0: 0}
    assert world.fetch(target(0)).complete


def test_a_fetch_of_nothing_does_not_wait(world: World) -> None:
    assert world.fetch().complete


def test_a_waiting_fetch_that_is_given_up_watches_nothing(world: World) -> None:
    async def run() -> None:
        waiting = asyncio.ensure_future(world.fetch(target(0)).wait(LONG_MS))
        await asyncio.sleep(0)
        assert world.watched()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    world.local.runner.run(run())


def test_where_records_are_synced_first_a_reader_waits_for_the_sync(tmp_path: Path) -> None:
    world = World(tmp_path, durability="fsync")
    fetch = world.fetch(target(0))
    reads = world.waited(fetch, world.append, lambda: world.local.replicas.commit(world.local[0]))
    assert sizes(reads) == {0: 1}
    world.local.close()


def test_a_session_answers_only_what_its_reader_was_not_sent(world: World) -> None:
    world.append(0)
    made = world.fetch(target(0), target(1), session=(0, 0))
    assert sizes(answered(made)) == {0: 1, 1: 0}
    number = made.context.session_id
    fetch = world.fetch(target(0, 1), session=(number, 1))
    assert answered(fetch) == []
    world.append(1)
    fetch = world.fetch(session=(number, 2))
    assert sizes(answered(fetch)) == {1: 1}
    assert [each.partition for each in world.fetch(session=(number, 3)).context.targets] == [0, 1], "1 is at the back"


def test_bytes_are_counted_when_they_are_answered(world: World) -> None:
    counted: list[float] = []

    class Counter:
        def add(self, amount: float = 1) -> None:
            counted.append(amount)

    world.local[0].bytes_out = Counter()
    world.append(0)
    fetch = world.fetch(target(0))
    assert counted == []
    answered(fetch)
    assert counted == [SIZE]
