"""Keyed state against a plain model: dictionaries, rows one at a time, in the order of their sequence."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.state import GroupState

from anabranch.machines.lineage import Lineage
from anabranch.spark.keyed.bucket import KeyState, Settings, Step, Timeout, Times, step
from anabranch.spark.keyed.errors import KeyedError
from anabranch.spark.keyed.operator import _Operator
from anabranch.spark.keyed.packing import from_messages, pack, to_message
from anabranch.spark.keyed.rows import Columns, order_of_new, runs
from anabranch.spark.keyed.schema import maker, to_arrow
from anabranch.spark.keyed.state import BucketState, decode, empty, encode

BUCKETS = 3
ROWS = pa.schema(
    {
        "key": pa.string(),
        "topic": pa.string(),
        "partition": pa.int32(),
        "sequence": pa.int64(),
        "value": pa.int64(),
        "time": pa.timestamp("us", "UTC"),
    }
)
Row = tuple[str, str, int, int, int, int]
"""Key, topic, partition, sequence, value, event time in ms."""


class Digest(NamedTuple):
    """A value that depends on every row and on their order."""

    count: int
    digest: int

    def with_row(self, topic: str, value: int) -> Digest:
        return Digest(self.count + 1, (self.digest * 31 + value + ord(topic)) % 1_000_003)


START = Digest(0, 1)


def follow(key: str, rows: pa.RecordBatch, state: KeyState[Digest]) -> Any:
    """Digest rows; some values remove the key or set a timeout, by which the function is called again."""
    assert set(rows.column("key").to_pylist()) <= {key}
    assert state.timed_out == (rows.num_rows == 0)
    digest = state.value or START
    if state.timed_out:
        digest = digest.with_row("!", 0)
        state.update(digest)
        return pa.record_batch({"digest": [digest.digest], "extra": [0], "key": [key], "count": [digest.count]})
    for topic, value in zip(rows.column("topic").to_pylist(), rows.column("value").to_pylist(), strict=True):
        digest = digest.with_row(topic, value)
    state.update(digest)
    if value % 7 == 0:
        state.remove()
    elif value % 5 == 0:
        state.set_timeout(value + 1)
    elif value % 3 == 0:
        return None
    return [(key, *digest)] if value % 2 else (key, *digest)


OUTPUT = pa.schema({"key": pa.string(), "count": pa.int64(), "digest": pa.int64()})


def settings_of(timeout: Timeout = Timeout.PROCESSING_TIME, **more: Any) -> Settings:
    value = pa.struct(list(to_arrow(Digest)))
    return Settings(Columns(), ROWS, value, maker(Digest), OUTPUT, timeout, **more)


def batch(rows: Iterable[Row]) -> pa.RecordBatch:
    columns = list(zip(*rows, strict=True)) or [()] * 6
    arrays = [pa.array(column, kind) for column, kind in zip(columns[:5], ROWS.types, strict=False)]
    return pa.RecordBatch.from_arrays([*arrays, pa.array([t * 1000 for t in columns[5]], ROWS.types[5])], schema=ROWS)


class Model:
    """What must come out."""

    def __init__(self, ttl_ms: int | None) -> None:
        self.ttl_ms = ttl_ms
        self.keys: dict[str, tuple[Digest, int, int]] = {}
        self.applied: dict[tuple[str, str, int], int] = {}

    def micro_batch(self, rows: list[Row], now_ms: int) -> list[tuple[str, int, int]]:
        for key, (_, _, updated) in list(self.keys.items()):
            if self.ttl_ms is not None and updated + self.ttl_ms <= now_ms:
                self.forget(key)
        output = []
        called = set()
        new: dict[str, list[Row]] = {}
        for row in sorted(set(rows), key=lambda row: (*row[:2], row[3], row[2])):
            if row[3] > self.applied.get(row[:3], -1):
                new.setdefault(row[0], []).append(row)
        for key, its in new.items():
            digest = self.keys[key][0] if key in self.keys else START
            for _, topic, partition, sequence, value, _ in its:
                digest = digest.with_row(topic, value)
                self.applied[key, topic, partition] = sequence
            called.add(key)
            last = its[-1][4]
            timeout = now_ms + last + 1 if last % 7 and last % 5 == 0 else -1
            self.keys[key] = digest, timeout, now_ms
            if last % 7 == 0:
                self.forget(key)
            if last % 7 == 0 or last % 5 == 0 or last % 3:
                output.append((key, *digest))
        for key, (digest, timeout, _) in list(self.keys.items()):
            if key not in called and 0 <= timeout <= now_ms:
                self.keys[key] = digest.with_row("!", 0), -1, now_ms
                output.append((key, *self.keys[key][0]))
        return output

    def forget(self, key: str) -> None:
        del self.keys[key]
        self.applied = {triple: last for triple, last in self.applied.items() if triple[0] != key}


def micro_batches(chance: Random) -> list[list[Row]]:
    """Records of keys in topics whose layouts change, cut into micro-batches that repeat what was there before.

    A key lies in up to three partitions at a time: not every producer has heard of the layout, or places keys alike.
    """
    sequences: dict[tuple[str, str, int], int] = {}
    all_rows: list[Row] = []
    cuts = []
    for number in range(chance.randint(1, 6)):
        new = []
        for _ in range(chance.randint(0, 12)):
            key, topic, partition = chance.choice("abcdef"), chance.choice("xyz"), chance.choice((0, 0, 1, 2))
            before = sequences.get((key, topic, partition), -1)
            layout = (before >> 48 if before >= 0 else 0) + (chance.random() < 0.2)
            offset = chance.randint(0, 5) if before < 0 or layout > before >> 48 else (before & (1 << 48) - 1) + 1
            sequences[key, topic, partition] = layout << 48 | offset
            new.append((key, topic, partition, layout << 48 | offset, chance.randint(0, 200), number))
        repeated = chance.sample(all_rows + new, min(len(all_rows + new), chance.randint(0, 6)))
        all_rows += new
        cuts.append(chance.sample(new + repeated, len(new + repeated)))
    return cuts


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([None, 1, 40, 150]))
def test_every_key_has_its_rows_in_order_and_once(seed: int, ttl_ms: int | None) -> None:
    chance = Random(seed)
    model, now_ms = Model(ttl_ms), 0
    given_settings = settings_of(ttl_ms=ttl_ms)
    stored = encode(empty(pa.string(), given_settings.value), BUCKETS)
    for rows in micro_batches(chance):
        now_ms += chance.randint(1, 120)
        before = decode(stored, BUCKETS, pa.string(), given_settings.value)
        done = step(follow, given_settings, before, batch(rows), Times(now_ms))
        found = [row for part in done.output for row in zip(*(c.to_pylist() for c in part.columns), strict=True)]
        assert sorted(found) == sorted(model.micro_batch(rows, now_ms))
        timeouts = [timeout for _, timeout, _ in model.keys.values() if timeout >= 0]
        assert done.wake_ms == (min(timeouts) if timeouts else None)
        assert contents(done.state) == {key: tuple(value) for key, (value, _, _) in model.keys.items()}
        stored = encode(done.state, BUCKETS)
        # The rows of keys that were not forgotten are applied: once more, they change nothing.
        known = [row for row in rows if row[0] in model.keys]
        again = step(never, given_settings, decoded(stored, given_settings), batch(known), Times(now_ms))
        assert again.output == [] and contents(again.state) == contents(done.state)


def never(key: str, rows: pa.RecordBatch, state: KeyState[Digest]) -> None:
    raise AssertionError(f"called for {key} with {rows.num_rows} rows")


def decoded(stored: Any, of: Settings) -> BucketState:
    return decode(stored, BUCKETS, pa.string(), of.value)


def contents(state: BucketState) -> dict[str, Any]:
    return dict(zip(state.keys.to_pylist(), state.values_at(np.arange(len(state))), strict=True))


GROWN = Lineage.of_cuts(1, (1, 2), {0: [(0, 1_000_000)]})


@pytest.mark.parametrize(
    ("lineage", "batches"),
    [
        # A producer that has not heard of the growth goes on in partition 0, and then hears of it.
        (GROWN, [[(0, 999_999), (0, 1_000_050)], [(1, 10), (1, 11), (1, 5_000)]]),
        # Two producers that place keys in different ways.
        (Lineage.flat(2), [[(0, 500), (0, 501)], [(1, 10), (0, 502), (1, 11)]]),
        # In one micro-batch, with offsets that are the same.
        (Lineage.flat(3), [[(2, 0), (1, 0), (0, 0), (2, 1), (1, 1), (0, 7)]]),
    ],
)
def test_a_key_in_two_partitions_has_every_row_and_each_once(
    lineage: Lineage, batches: list[list[tuple[int, int]]]
) -> None:
    of = settings_of()
    state, found = empty(pa.string(), of.value), list[int]()
    numbered = list(enumerate((place for places in batches for place in places), 1))
    rows = {place: ("a", "x", place[0], lineage.sequence(*place), value, 0) for value, place in numbered}

    def note(key: str, its: pa.RecordBatch, state: KeyState[Digest]) -> None:
        found.extend(its.column("value").to_pylist())
        state.update(START)

    for number, places in enumerate(batches):
        new = batch([rows[place] for place in places])
        for repeated in (0, len(places)):
            done = step(note, of, state, new, Times(number))
            assert done.repeated == repeated
            state = decode(encode(done.state, BUCKETS), BUCKETS, pa.string(), of.value)
    assert sorted(found) == [value for value, _ in numbered]


def test_a_state_that_knew_no_partitions_is_read_and_learns_them() -> None:
    of = settings_of()
    state = step(follow, of, empty(pa.string(), of.value), batch([("a", "x", 0, 50, 1, 0)]), Times(0)).state
    version, buckets, keys, applied = encode(state, BUCKETS)
    with pa.ipc.open_stream(applied) as stream:
        old = stream.read_next_batch().drop_columns(["partition"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, old.schema) as writer:
        writer.write_batch(old)
    assert version == 2
    state = decode((1, buckets, keys, bytes(sink.getvalue())), BUCKETS, pa.string(), of.value)
    done = step(follow, of, state, batch([("a", "x", p, s, 1, 0) for p, s in [(0, 50), (1, 49), (1, 51)]]), Times(1))
    assert done.repeated == 2 and contents(done.state)["a"][0] == 2
    done = step(follow, of, done.state, batch([("a", "x", p, s, 1, 0) for p, s in [(0, 51), (1, 51)]]), Times(2))
    assert done.repeated == 1 and contents(done.state)["a"][0] == 3


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(*(st.integers(*it) for it in [(0, 4), (0, 2), (0, 9), (0, 2), (-1, 9)])), max_size=30))
def test_the_order_of_new_rows(rows: list[tuple[int, ...]]) -> None:
    keys, topics, sequences, partitions, applied = np.array(rows, np.int64).reshape(-1, 5).T
    found = [rows[index][:4] for index in order_of_new(keys, topics, partitions, sequences, applied)]
    assert found == sorted({row[:4] for row in rows if row[2] > row[4]})


@given(st.lists(st.integers(0, 3), max_size=20))
def test_runs_cover_all_values(values: list[int]) -> None:
    bounds = runs(np.array(values, np.int64)).tolist()
    assert bounds[0] == 0 and bounds[-1] == len(values)
    for first, end in pairwise(bounds):
        assert len(set(values[first:end])) == 1
    assert all(values[bound - 1] != values[bound] for bound in bounds[1:-1])


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 400))
def test_rows_are_packed_by_bucket_and_unpacked(seed: int, size_max: int) -> None:
    chance = Random(seed)
    rows = [row for rows in micro_batches(chance) for row in rows]
    buckets = [chance.randrange(BUCKETS) for _ in rows]
    given_batches = [
        pa.record_batch([pa.array([bucket], pa.int32()), *batch([row]).columns], ["bucket", *ROWS.names])
        for bucket, row in zip(buckets, rows, strict=True)
    ]
    found: dict[int, list[Any]] = {bucket: [] for bucket in range(BUCKETS)}
    for packed in pack(given_batches, ROWS, "time", size_max):
        assert len(set(packed.column("bucket").to_pylist())) == packed.num_rows
        for bucket, message, latest in zip(*(column.to_pylist() for column in packed.columns), strict=True):
            part = from_messages([message], ROWS)
            found[bucket] += part.to_pylist()
            assert latest == max(part.column("time").to_pylist())
    for bucket, its in found.items():
        assert its == batch([row for row, of in zip(rows, buckets, strict=True) if of == bucket]).to_pylist()
    assert from_messages([], ROWS).num_rows == 0


def test_rows_are_late_by_the_watermark_of_an_earlier_micro_batch_and_timeouts_are_due_by_the_present_one() -> None:
    called: list[tuple[str, list[int], bool]] = []

    def note(key: str, rows: pa.RecordBatch, state: KeyState[Digest]) -> None:
        called.append((key, rows.column("value").to_pylist(), state.timed_out))
        state.update(START)
        if not state.timed_out:
            state.set_timeout_at(100)

    by_event = settings_of(Timeout.EVENT_TIME, event_time="time")

    def run(state: BucketState, rows: list[Row], watermark_ms: int | None) -> Step:
        called.clear()
        stored = encode(state, BUCKETS)
        return step(
            note, by_event, decode(stored, BUCKETS, pa.string(), by_event.value), batch(rows), Times(9, watermark_ms)
        )

    done = run(empty(pa.string(), by_event.value), [("a", "x", 0, 1, 10, 50)], None)
    assert called == [("a", [10], False)] and (done.wake_ms, done.late) == (100, 0)
    # The watermark of this micro-batch comes from the one before: it was not known when the rows were read.
    done = run(done.state, [("a", "x", 0, 2, 20, 50), ("b", "x", 0, 3, 30, 51)], 50)
    assert called == [("a", [20], False), ("b", [30], False)] and (done.wake_ms, done.late) == (100, 0)
    done = run(done.state, [("a", "x", 0, 4, 40, 50), ("b", "x", 0, 5, 50, 51), ("b", "x", 0, 6, 60, 50)], 99)
    assert called == [("b", [50], False)] and (done.wake_ms, done.late) == (100, 2)
    # A timeout that the watermark has passed is due when the watermark moves.
    done = run(done.state, [("b", "x", 0, 7, 70, 120)], 100)
    assert called == [("b", [70], False), ("a", [], True)] and done.wake_ms == 101
    done = run(done.state, [], 101)
    assert called == [("b", [], True)] and done.wake_ms is None
    with pytest.raises(KeyedError, match="at 1 ms of the epoch or later; it is at 0"):
        KeyState(START, False, Times(0), by_event).set_timeout_at(0)


@pytest.mark.parametrize("timeout", [Timeout.EVENT_TIME, Timeout.PROCESSING_TIME])
def test_a_bucket_without_keys_keeps_the_watermark_by_which_rows_of_an_emitted_window_are_late(
    timeout: Timeout,
) -> None:
    """The state of an operator, through Spark's own `GroupState`."""
    by_event = timeout is Timeout.EVENT_TIME

    def window(key: str, rows: pa.RecordBatch, state: KeyState[Digest]) -> Any:
        if state.timed_out:
            state.remove()
            return (key, 1, 1)
        state.update(START)
        if by_event:
            state.set_timeout_at(100)
        else:
            state.set_timeout(91)
        return None

    operator = _Operator(window, settings_of(timeout, event_time="time" if by_event else None), BUCKETS)

    def run(before: GroupState | None, rows: list[Row], now_ms: int) -> tuple[GroupState, int]:
        stored = None if before is None or not before.exists else before.get
        group = GroupState(
            stored, now_ms, now_ms, timeout.value, not rows, by_event, stored is not None, False, False, -1, b"", None
        )
        messages = [to_message(batch(rows))] if rows else []
        (frame,) = operator.stream((0,), [pd.DataFrame({"rows": messages})], group)
        return group, from_messages(frame["rows"].tolist(), OUTPUT).num_rows

    group, emitted = run(None, [("a", "x", 0, 1, 10, 50)], 9)
    assert group.exists and emitted == 0
    group, emitted = run(group, [], 100)
    assert group.exists is by_event and emitted == 1
    group, _ = run(group, [("a", "x", 0, 2, 20, 60)], 110)
    _, emitted = run(group, [], 300)
    assert emitted == (0 if by_event else 1)


def test_a_state_of_another_shape_is_refused_and_a_field_may_be_added() -> None:
    kind = settings_of().value
    done = step(follow, settings_of(), empty(pa.string(), kind), batch([("a", "x", 0, 1, 1, 0)]), Times(0))
    stored = encode(done.state, BUCKETS)
    wider = pa.struct([*kind, pa.field("more", pa.string())])
    assert contents(decode(stored, BUCKETS, pa.string(), wider)) == {"a": (1, 152, None)}
    for arguments, says in [
        ((BUCKETS + 1, pa.string(), kind), f"made with buckets={BUCKETS}"),
        ((BUCKETS, pa.binary(), kind), "keys of type string; the rows have binary"),
        ((BUCKETS, pa.string(), pa.struct(list(kind)[:1])), "has a field digest"),
        ((BUCKETS, pa.string(), pa.struct({"count": pa.string(), "digest": pa.int64()})), "field count .* is int64"),
    ]:
        with pytest.raises(KeyedError, match=says):
            decode(stored, *arguments)
    with pytest.raises(KeyedError, match="version 9"):
        decode((9, *stored[1:]), BUCKETS, pa.string(), kind)


@pytest.mark.parametrize(
    ("row", "returns", "says"),
    [
        ((None, "x", 0, 1, 1, 0), None, "column key of a row is null"),
        (("a", None, 0, 1, 1, 0), None, "column topic of a row is null"),
        (("a", "x", None, 1, 1, 0), None, "column partition of a row is null"),
        (("a", "x", 0, None, 1, 0), None, "column sequence of a row is null"),
        (("a", "x", 0, 1, 1, 0), ("a", 1), r"has 2 fields, \('a', 1\); there are 3: key, count, digest"),
        (("a", "x", 0, 1, 1, 0), ("a", "one", 1), "field count must be int64"),
        (("a", "x", 0, 1, 1, 0), {"key": "a"}, "returned {'key': 'a'} for key 'a'; it must be tuples, Arrow or None"),
        (("a", "x", 0, 1, 1, 0), ["abc"], "returned is 'abc'; it must be a tuple with the fields key, count, digest"),
        (("a", "x", 0, 1, 1, 0), 3, "returned 3 for key 'a'"),
        (("a", "x", 0, 1, 1, 0), pa.record_batch({"key": ["a"]}), "key 'a' have no column count"),
    ],
)
def test_what_does_not_fit_is_a_sentence(row: Any, returns: Any, says: str) -> None:
    of = settings_of()
    with pytest.raises(KeyedError, match=says):
        step(lambda *_: returns, of, empty(pa.string(), of.value), batch([row]), Times(0))
