"""Where batches are checked, by what, and how much of one request."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller.configs import NOT_SET
from anabranch.machines.partition.appending import Refuse
from anabranch.machines.partition.checking import BatchLimits, TooLongError
from anabranch.records.batch import build
from anabranch.records.compression import Bytes, Compression
from anabranch.records.examination import Examined, examine
from anabranch.runtime import native
from anabranch.server.partitions import checks
from anabranch.server.partitions.checks import BatchChecks, Unchecked
from anabranch.server.partitions.topic_settings import topic_settings
from tests.support.batches import make_keyed_batch, make_sound_batch, recompress

NOW_MS = 1_000
LIMITS: BatchLimits = topic_settings({}, NOT_SET, "os")
BOMB = recompress(make_sound_batch(payload=bytes(60 << 20)), Compression.ZSTD, 1 << 27)


def test_a_request_with_many_bombs_has_only_so_much_of_them_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "BESIDE_RECORDS", checks.BESIDE_RECORDS // 4)
    found = native.load()
    assert found is not None, "make kernels"
    made = BatchChecks()
    made.use(found)
    sent = [Unchecked(memoryview(bytearray(BOMB)), LIMITS) for _ in range(6)]
    outcomes = asyncio.run(made.beside(sent, NOW_MS, made.copies()))
    assert [isinstance(outcome, Refuse) for outcome in outcomes] == [False, False, True, True, True, True]
    assert isinstance(outcomes[-1], Refuse)
    assert outcomes[-1].code is ErrorCode.MESSAGE_TOO_LARGE
    made.close()


def test_a_count_that_is_a_lie_takes_no_effort() -> None:
    """A batch that claims 2^31 - 1 records is refused for that, at once."""
    liar = build(b"\1", record_count=2**31 - 1, base_timestamp=NOW_MS, max_timestamp=NOW_MS)
    made = BatchChecks()
    outcome = made.now(memoryview(liar), LIMITS, NOW_MS)
    assert isinstance(outcome, Refuse)
    assert outcome.code is ErrorCode.INVALID_RECORD
    made.close()


def test_partitions_of_requests_take_turns() -> None:
    """A request that comes second waits for one partition of the first one at most."""
    order: list[str] = []
    made = BatchChecks()

    async def check(name: str, count: int) -> None:
        data = make_keyed_batch([(b"k", b"v")] * 200, timestamp=NOW_MS)
        for outcome in await made.beside(
            [Unchecked(memoryview(data), LIMITS) for _ in range(count)], NOW_MS, made.copies()
        ):
            assert not isinstance(outcome, Refuse)
        order.append(name)

    async def story() -> None:
        await asyncio.gather(check("long", 20), check("short", 1))

    asyncio.run(story())
    assert order == ["short", "long"]
    made.close()


def test_what_takes_long_is_not_begun_on_the_loop() -> None:
    made = BatchChecks()
    with pytest.raises(TooLongError):
        made.now(memoryview(bytearray(BOMB)), LIMITS, NOW_MS)
    small = memoryview(make_sound_batch())
    assert not isinstance(made.now(small, LIMITS, NOW_MS), Refuse)
    with pytest.raises(TooLongError):
        made.all_now([Unchecked(memoryview(make_sound_batch(400)), LIMITS) for _ in range(10)], NOW_MS)
    made.close()


def test_no_check_is_done_twice_and_the_loop_does_what_it_can_wait_for() -> None:
    """A request of several partitions that takes too long is examined once, most of it without a change of threads."""
    made = BatchChecks()
    threads: list[str] = []
    found: list[Any] = []

    def count(*arguments: Any) -> Any:
        """Examine the first batch, and tell the same of the others, which are like it: this machine may be slow."""
        threads.append(threading.current_thread().name)
        if not found:
            found.append(examine(*arguments))
        return found[0]

    made._examine = count
    batches = [make_keyed_batch([(b"k", b"v")] * 300, timestamp=NOW_MS) for _ in range(8)]  # 0.6 ms in plain Python.
    sent = [Unchecked(memoryview(data), LIMITS) for data in batches]
    assert len(made.all_now(sent[:1], NOW_MS)) == len(threads) == 1
    threads.clear()
    with pytest.raises(TooLongError):
        made.all_now(sent, NOW_MS)
    assert threads == []
    outcomes = asyncio.run(made.beside(sent, NOW_MS, made.copies()))
    assert not any(isinstance(outcome, Refuse) for outcome in outcomes) and len(outcomes) == 8
    on_loop = threading.current_thread().name
    assert [name == on_loop for name in threads] == [True, True, True, False, True, True, True, False]
    assert len(made.all_now(sent[:3], NOW_MS)) == 3, "as much as is allowed is checked at once"
    made.close()


def test_without_machine_code_plain_python_is_used_until_there_is_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made_before = native.build()
    elsewhere = tmp_path / "kernels-none"
    monkeypatch.setattr(native, "directories", lambda: [str(elsewhere)])
    monkeypatch.setattr(checks.sys, "executable", "/no/such/python")
    made = BatchChecks()
    assert native.load() is None
    asyncio.run(made.load())
    assert made.search is checks.search, "plain Python goes on"
    elsewhere.mkdir(exist_ok=True)
    for path in made_before:
        shutil.copy(path, elsewhere)
    asyncio.run(made.load())
    assert isinstance(made.search, native.NativeSearch)
    made.close()


def test_the_second_batch_of_a_partition_takes_effort_as_the_first_does() -> None:
    """What is told from the first headers alone is not enough."""
    made = BatchChecks()
    short, long = make_sound_batch(timestamp=NOW_MS), make_keyed_batch([(b"k", b"v")] * 5_000, timestamp=NOW_MS)
    sent = [Unchecked(memoryview(short + long), LIMITS), Unchecked(memoryview(bytearray(short)), LIMITS)]
    with pytest.raises(TooLongError):
        made.all_now(sent, NOW_MS)
    made.close()


def test_a_request_has_only_so_much_of_the_threads_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "BESIDE_S", 0.0)
    made = BatchChecks()
    records = make_keyed_batch([(b"k", b"v")] * 5_000, timestamp=NOW_MS)
    sent = [Unchecked(memoryview(bytearray(records)), LIMITS) for _ in range(2)]
    first, second = asyncio.run(made.beside(sent, NOW_MS, made.copies()))
    assert not isinstance(first, Refuse)
    assert second is checks.TOO_MUCH
    made.close()


def test_a_check_that_nobody_waits_for_ends_with_the_batch_it_looks_into() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    looked_into: list[int] = []

    def slow(records: Bytes, count: int, *others: Any) -> Examined | None:
        looked_into.append(count)
        begun.set()
        assert goes_on.wait(20)
        return examine(records, count, *others)

    async def scenario() -> None:
        made = BatchChecks()
        made._examine = slow
        records = make_keyed_batch([(b"k", b"v")] * 5_000, timestamp=NOW_MS)
        task = asyncio.create_task(made.beside([Unchecked(memoryview(records * 3), LIMITS)], NOW_MS, made.copies()))
        await asyncio.get_running_loop().run_in_executor(None, begun.wait, 20)
        task.cancel()
        await asyncio.sleep(0.01)
        assert not task.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        made.close()

    asyncio.run(scenario())
    assert looked_into == [5_000]


def test_copies_count_until_they_are_appended_and_keep_those_waiting_that_have_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = make_keyed_batch([(b"k", bytes(3_000_000))], timestamp=NOW_MS, compression=Compression.GZIP)
    configs = {"max.message.bytes": "4000000", "compression.type": "uncompressed"}
    limits = topic_settings(configs, NOT_SET, "os")
    monkeypatch.setattr(checks, "COPIED_SIZE_MAX", 3_100_000)
    made = BatchChecks()
    order: list[str] = []

    async def part(name: str, count: int, appended: asyncio.Event) -> None:
        with made.copies() as copies:
            sent = [Unchecked(memoryview(bytearray(small)), limits)]
            for _ in range(count):
                (checked,) = await made.beside(sent, NOW_MS, copies)
                assert not isinstance(checked, Refuse) and len(checked[0].data) > 3_000_000
                order.append(name)
            await appended.wait()

    async def story() -> None:
        first, second, third = (asyncio.Event() for _ in range(3))
        asked = (("first", 1, first), ("second", 3, second), ("third", 1, third))
        parts = [asyncio.create_task(part(*each)) for each in asked]
        while len(order) < 4:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        assert sorted(order) == ["first", "second", "second", "second"], "who has copies goes on, others wait"
        assert made.copied > 4 * 3_000_000
        parts[1].cancel()
        while "third" not in order:
            await asyncio.sleep(0.001)
        first.set()
        third.set()
        await asyncio.gather(*parts, return_exceptions=True)
        assert made.copied == 0
        made.close()

    asyncio.run(story())
