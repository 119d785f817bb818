"""One micro-batch of one bucket: every key's new rows go to the function in order, then the timeouts that are due.

The function is called once for each key with rows to apply, with all of them, and once with no rows for each other
key whose timeout is due. As with Spark's `GroupState`, a call clears the key's timeout, and a removed key is as if it
had never been: its applied sequences are forgotten with it. A time to live does so with keys that have had no rows
and no call for so long. Everything depends on the state, the rows and the two times of the micro-batch, so that a
repeated one gives the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from anabranch.spark.keyed.errors import KeyedError
from anabranch.spark.keyed.rows import Columns, Numbers, code, order_of_new, runs
from anabranch.spark.keyed.state import NEVER, BucketState, Value, from_tuples

S = TypeVar("S", bound=tuple[Any, ...])
Returned: TypeAlias = "pa.RecordBatch | pa.Table | tuple[Any, ...] | Iterable[tuple[Any, ...]] | None"
"""What a function may return: rows of the output as Arrow, one row as a tuple, an iterable of such tuples, or none."""
Function = Callable[[Any, pa.RecordBatch, Any], Returned]


class Timeout(Enum):
    """The clock of timeouts; the values are Spark's names."""

    NONE = "NoTimeout"
    PROCESSING_TIME = "ProcessingTimeTimeout"
    EVENT_TIME = "EventTimeTimeout"


@dataclass(frozen=True, slots=True)
class Times:
    """The times of a micro-batch in ms since the epoch."""

    processing_ms: int
    watermark_ms: int | None = None
    """None: there is no watermark, or none yet."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What does not change from one micro-batch to the next."""

    columns: Columns
    rows: pa.Schema
    value: pa.StructType
    make: Callable[[Value], Any]
    """Builds the function's value from a tuple of its fields."""
    output: pa.Schema
    timeout: Timeout = Timeout.NONE
    ttl_ms: int | None = None
    event_time: str | None = None
    """The column that says whether a row is late."""

    def due_before(self, times: Times) -> int:
        """Return the time in ms up to which timeouts are due."""
        match self.timeout:
            case Timeout.PROCESSING_TIME:
                return times.processing_ms
            case Timeout.EVENT_TIME:
                return NEVER if times.watermark_ms is None else times.watermark_ms
        return NEVER


class KeyState(Generic[S]):
    """What a function sees of its key's state, for the duration of one call."""

    __slots__ = ("_settings", "removed", "timed_out", "timeout_ms", "times", "value")

    def __init__(self, value: S | None, timed_out: bool, times: Times, settings: Settings) -> None:
        self.value = value
        """The value; None for a key without one."""
        self.timed_out = timed_out
        """Whether the call is for a timeout: then there are no rows."""
        self.times = times
        """The times of the micro-batch."""
        self.removed = False
        self.timeout_ms = NEVER
        self._settings = settings

    def update(self, value: S) -> None:
        """Set the value: a tuple with the fields of the state."""
        self.value = value
        self.removed = False

    def remove(self) -> None:
        """Forget the key: its value, its timeout and what was applied of it."""
        self.value = None
        self.timeout_ms = NEVER
        self.removed = True

    def set_timeout(self, duration_ms: int) -> None:
        """Have the function called when no row of the key has come for `duration_ms` of processing time."""
        if self._settings.timeout is not Timeout.PROCESSING_TIME:
            raise KeyedError("set_timeout needs keyed(..., timeout=Timeout.PROCESSING_TIME).")
        if duration_ms <= 0:
            raise KeyedError(f"A timeout must be 1 ms or more; it is {duration_ms}.")
        self.timeout_ms = self.times.processing_ms + duration_ms

    def set_timeout_at(self, event_time_ms: int) -> None:
        """Have the function called when the watermark has passed `event_time_ms`.

        A row may be behind the watermark, as with Spark, where it is dropped one micro-batch later; a time that the
        watermark has passed is due when the watermark moves on.
        """
        if self._settings.timeout is not Timeout.EVENT_TIME:
            raise KeyedError("set_timeout_at needs keyed(..., timeout=Timeout.EVENT_TIME).")
        if event_time_ms <= 0:
            raise KeyedError(f"A timeout must be at 1 ms of the epoch or later; it is at {event_time_ms}.")
        self.timeout_ms = max(event_time_ms, self._settings.due_before(self.times) + 1)


@dataclass(frozen=True, slots=True)
class Step:
    """What a micro-batch does to a bucket."""

    state: BucketState
    output: list[pa.RecordBatch]
    wake_ms: int | None
    """When the earliest timeout is due; None without timeouts."""
    repeated: int = 0
    """The rows that were skipped, because they had been applied before or came twice."""
    late: int = 0
    """The rows that were dropped, because they were behind the watermark."""


def step(function: Function, settings: Settings, before: BucketState, rows: pa.RecordBatch, times: Times) -> Step:
    """Apply a micro-batch's rows of a bucket, in any order, and the timeouts that are due.

    Raises `KeyedError` for rows without key, topic, partition or sequence, and for results and values that do not fit.
    """
    state = _living(before, settings, times)
    coded = code(_punctual(rows, settings, state.watermark_ms), settings.columns)
    at = state.find(coded.distinct)
    applied = state.applied.of(at[coded.keys], coded.topic_names, coded.topics, coded.partitions)
    order = order_of_new(coded.keys, coded.topics, coded.partitions, coded.sequences, applied)
    keys_in_order = coded.keys[order]
    bounds = runs(keys_in_order)
    called = keys_in_order[bounds[:-1]]
    due = (state.timeouts >= 0) & (state.timeouts <= settings.due_before(times))
    due[at[called][at[called] >= 0]] = False
    late = np.flatnonzero(due)

    calls = _Calls(function, settings, times)
    ready = coded.rows.take(pa.array(order))
    calls.with_rows(coded.distinct.take(pa.array(called)), state.values_at(at[called]), ready, bounds.tolist())
    calls.timed_out(state.keys.take(pa.array(late)), state.values_at(late))

    changed = np.concatenate((at[called], late))
    after, places = _changed(state, changed, calls, settings, times)
    place_of = np.full(len(coded.distinct), -1, np.int64)
    place_of[called] = places[: len(called)]
    new_rows = place_of[keys_in_order]
    kept = new_rows >= 0
    new = order[kept]
    last = after.applied.with_last(
        new_rows[kept], coded.topic_names, coded.topics[new], coded.partitions[new], coded.sequences[new]
    )
    after = replace(after, applied=last, watermark_ms=_or_never(times.watermark_ms))
    waiting = after.timeouts[after.timeouts >= 0]
    wake_ms = int(waiting.min()) if len(waiting) else None
    punctual = coded.rows.num_rows
    return Step(after, calls.output(), wake_ms, repeated=punctual - len(order), late=rows.num_rows - punctual)


def _or_never(watermark_ms: int | None) -> int:
    return NEVER if watermark_ms is None else watermark_ms


def _punctual(rows: pa.RecordBatch, settings: Settings, watermark_ms: int) -> pa.RecordBatch:
    """Drop the rows whose event time is not after the watermark of an earlier micro-batch.

    Spark's operators drop by the watermark of the micro-batch before (`eventTimeWatermarkForLateEvents`), not by that
    of the present one, by which timeouts are due: rows that come together are not late by each other. A bucket knows
    the watermark of the last micro-batch in which it was worked on, that one or an earlier one.
    """
    if settings.event_time is None or watermark_ms == NEVER:
        return rows
    event_us = rows.column(settings.event_time).cast(pa.timestamp("us", "UTC"))
    watermark = pa.scalar(watermark_ms * 1000, pa.int64()).cast(event_us.type)
    late = pc.fill_null(pc.less_equal(event_us, watermark), False)
    return rows.filter(pc.invert(late))


def _living(state: BucketState, settings: Settings, times: Times) -> BucketState:
    """Forget the keys whose time to live is over."""
    if settings.ttl_ms is None:
        return state
    return state.keep(state.updated + settings.ttl_ms > times.processing_ms)


class _Calls:
    """Calls the function for key after key, and collects what it returns and leaves."""

    def __init__(self, function: Function, settings: Settings, times: Times) -> None:
        self._function = function
        self._settings = settings
        self._times = times
        self._tuples: list[tuple[Any, ...]] = []
        self._batches: list[pa.RecordBatch] = []
        self.keys: list[pa.Array] = []
        self.states: list[KeyState[Any]] = []

    def with_rows(
        self, keys: pa.Array, values: Sequence[Value | None], rows: pa.RecordBatch, bounds: Sequence[int]
    ) -> None:
        """Call the function for each key with its rows, which begin at its bound."""
        self.keys.append(keys)
        for number, (key, value) in enumerate(zip(keys.to_pylist(), values, strict=True)):
            first = bounds[number]
            self._call(key, value, rows.slice(first, bounds[number + 1] - first), timed_out=False)

    def timed_out(self, keys: pa.Array, values: Sequence[Value | None]) -> None:
        """Call the function for each key whose timeout is due."""
        self.keys.append(keys)
        none = pa.RecordBatch.from_pylist([], self._settings.rows)
        for key, value in zip(keys.to_pylist(), values, strict=True):
            self._call(key, value, none, timed_out=True)

    def _call(self, key: Any, value: Value | None, rows: pa.RecordBatch, *, timed_out: bool) -> None:
        settings = self._settings
        made = None if value is None else settings.make(value)
        state: KeyState[Any] = KeyState(made, timed_out, self._times, settings)
        returned = self._function(key, rows, state)
        self.states.append(state)
        if returned is None:
            return
        if isinstance(returned, tuple):
            self._tuples.append(returned)
        elif isinstance(returned, pa.RecordBatch):
            self._batches.append(self._fitting(returned, key))
        elif isinstance(returned, pa.Table):
            self._batches += [self._fitting(batch, key) for batch in returned.to_batches()]
        elif isinstance(returned, Mapping | str | bytes) or not isinstance(returned, Iterable):
            raise KeyedError(f"The function returned {returned!r} for key {key!r}; it must be tuples, Arrow or None.")
        else:
            self._tuples += returned

    def _fitting(self, batch: pa.RecordBatch, key: Any) -> pa.RecordBatch:
        """Return a batch with the columns of the output, by name."""
        wanted = self._settings.output
        missing = [name for name in wanted.names if name not in batch.schema.names]
        if missing:
            raise KeyedError(
                f"The function's rows for key {key!r} have no column {missing[0]}; the output declares it."
            )
        try:
            return pa.RecordBatch.from_arrays([batch.column(f.name).cast(f.type) for f in wanted], schema=wanted)
        except pa.ArrowException as error:
            raise KeyedError(f"The function's rows for key {key!r} do not fit the declared output: {error}") from error

    def output(self) -> list[pa.RecordBatch]:
        """Return all rows that the function returned."""
        if not self._tuples:
            return self._batches
        wanted = self._settings.output
        rows = from_tuples(self._tuples, pa.struct(list(wanted)), "A row that the function returned")
        return [*self._batches, pa.RecordBatch.from_arrays(rows.flatten(), schema=wanted)]


def _changed(
    state: BucketState, called: Numbers, calls: _Calls, settings: Settings, times: Times
) -> tuple[BucketState, Numbers]:
    """Return the state with what the calls left, and the row in it of each call's key, -1 for a removed key.

    `called` has the row in `state` of each call's key, or -1.
    """
    untouched = np.ones(len(state), np.bool_)
    untouched[called[called >= 0]] = False
    stays = np.asarray([not each.removed for each in calls.states], np.bool_)
    count = int(untouched.sum())
    places = np.where(stays, np.cumsum(stays) - 1 + count, -1)
    moved_to = np.where(untouched, np.cumsum(untouched) - 1, -1)
    known = called >= 0
    moved_to[called[known]] = places[known]
    left = [each for each in calls.states if not each.removed]
    values = [each.value for each in left]
    keys = pa.concat_arrays(calls.keys) if calls.keys else state.keys.slice(0, 0)
    rest = pa.array(untouched)
    return BucketState(
        pa.concat_arrays([state.keys.filter(rest), keys.filter(pa.array(stays))]),
        pa.concat_arrays([state.values.filter(rest), from_tuples(values, settings.value, "The state's value")]),
        np.concatenate((state.timeouts[untouched], np.asarray([each.timeout_ms for each in left], np.int64))),
        np.concatenate((state.updated[untouched], np.full(len(left), times.processing_ms, np.int64))),
        state.applied.moved(moved_to),
    ), places
