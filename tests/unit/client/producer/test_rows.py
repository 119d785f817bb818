from __future__ import annotations

import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from anabranch.base.errors import ErrorCode
from anabranch.client.producer.columns import columns_of
from anabranch.client.producer.driver import encode_rows
from anabranch.client.producer.records import Outgoing, Records
from anabranch.client.producer.rows import NOT_CHOSEN, ColumnNames, Columns, ColumnsPart, EncodeSettings
from anabranch.machines.clients.sending import Encoded, Placement, Refused
from anabranch.machines.placement import place
from anabranch.records.arrow.decode import decode
from anabranch.records.compression import Compression
from anabranch.records.hashing import placement_hash

SETTINGS = EncodeSettings()
ELASTIC = Placement(initial=2, count=5)


class Delivery:
    """Nobody to tell."""

    generation = 0

    def complete(self, part: ColumnsPart, topic: str, base_offset: int, append_time_ms: int) -> None: ...
    def reject(self, rows: Columns | ColumnsPart, error: Exception) -> None: ...


class Kept:
    def __init__(self, value: bytes | None) -> None:
        self.value = value
        self.results: list[Any] = []

    def set_result(self, result: Any, /) -> None:
        self.results.append(result)

    def set_exception(self, exception: BaseException, /) -> None:
        self.results.append(exception)

    def done(self) -> bool:
        return False


def chance() -> int:
    return random.Random(1).getrandbits(31)


def record(key: bytes | None, value: bytes | None, partition: int = NOT_CHOSEN, headers: Any = ()) -> Outgoing:
    return "t", key, value, 1_000, headers, partition, Kept(value)


def columns(count: int, **changes: Any) -> Columns:
    given = {
        "keys": pa.array([b"key-%d" % (row % 17) for row in range(count)]),
        "values": pa.array([b"%d" % row for row in range(count)]),
        "timestamps": np.arange(count, dtype=np.int64),
        "headers": None,
        "partition": None,
        "delivery": Delivery(),
    }
    return Columns(**{**given, **changes})


def values(batch: Encoded) -> list[bytes | None]:
    found: list[bytes | None] = decode(batch.data, columns=["value"]).records.column(0).to_pylist()
    return found


def by_partition(batches: list[Encoded]) -> dict[int, list[bytes | None]]:
    found: dict[int, list[bytes | None]] = {}
    for batch in batches:
        found.setdefault(batch.partition, []).extend(values(batch))
    return found


def test_columns_are_placed_by_linear_hashing_and_keep_their_order_in_each_partition() -> None:
    encoded, refused = encode_rows(columns(500), ELASTIC, SETTINGS, chance)
    assert refused == []
    expected: dict[int, list[bytes]] = {}
    for row in range(500):
        key_hash = placement_hash(b"key-%d" % (row % 17))
        expected.setdefault(place(key_hash, 2, 5), []).append(b"%d" % row)
    assert by_partition(encoded) == expected


def test_on_a_stock_topic_keys_are_placed_as_the_java_client_does() -> None:
    encoded, _ = encode_rows(columns(100), Placement(3, 3, elastic=False), SETTINGS, chance)
    for batch in encoded:
        assert {placement_hash(b"key-%d" % (int(value or 0) % 17)) % 3 for value in values(batch)} == {batch.partition}


def test_records_one_by_one_are_placed_and_encoded_as_columns_are() -> None:
    sent = [record(b"key-%d" % (row % 17), b"%d" % row) for row in range(500)]
    encoded, _ = encode_rows(Records(sent, 0), ELASTIC, SETTINGS, chance)
    as_columns, _ = encode_rows(columns(500), ELASTIC, SETTINGS, chance)
    assert by_partition(encoded) == by_partition(as_columns)
    for batch in encoded:
        batch.rows.delivered("t", 1_000, -1)  # type: ignore[attr-defined]
        told = {metadata.offset: promise.value for *_, promise in sent for metadata in promise.results}  # type: ignore[attr-defined]
        assert [told[1_000 + place] for place in range(len(values(batch)))] == values(batch)
        for *_, promise in sent:
            promise.results.clear()  # type: ignore[attr-defined]


def test_nothing_is_lost_of_a_record() -> None:
    headers = [("trace", b"1"), ("empty", None)]
    records = Records([record(b"k", None, 1, headers), record(None, b"", 1)], 0)
    ((batch,), _) = encode_rows(records, ELASTIC, SETTINGS, chance)
    rows = decode(batch.data).records.to_pylist()
    assert [(row["key"], row["value"], row["timestamp"]) for row in rows] == [(b"k", None, 1_000), (None, b"", 1_000)]
    assert [[tuple(header.values()) for header in row["headers"]] for row in rows] == [headers, []]


def test_records_without_a_key_stay_together_for_about_a_batch() -> None:
    hashes = iter(range(1_000))
    settings = EncodeSettings(batch_size=4_000)
    encoded, _ = encode_rows(columns(1_000, keys=None), ELASTIC, settings, lambda: next(hashes))
    assert {batch.partition for batch in encoded} == set(range(5))
    assert all(len(batch.data) < 50_000 for batch in encoded)
    nulls = pa.array([b"a", None] * 500)
    mixed, _ = encode_rows(columns(1_000, keys=nulls), ELASTIC, SETTINGS, lambda: 3)
    assert {batch.partition for batch in mixed} == {place(placement_hash(b"a"), 2, 5), place(3, 2, 5)}


def test_a_partition_that_is_said_is_taken_if_it_takes_records() -> None:
    records = Records([record(b"k", b"1", 4), record(b"k", b"2", 5), record(b"k", b"3", 4)], 0)
    encoded, refused = encode_rows(records, ELASTIC, SETTINGS, chance)
    assert by_partition(encoded) == {4: [b"1", b"3"]}
    (refusal,) = refused
    assert refusal.error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert "partition 5 takes no records: the topic has 5 that do, 0 to 4" in str(refusal.error)
    assert refusal.rows.record_count == 1
    _, refused = encode_rows(
        Records([record(b"k", b"1", -1), record(b"k", b"2", 1 << 40)], 0), ELASTIC, SETTINGS, chance
    )
    assert ["partition -1 takes" in str(refused[0].error), f"partition {1 << 40} takes" in str(refused[1].error)] == [
        True
    ] * 2
    whole, refused = encode_rows(columns(10, partition=9), ELASTIC, SETTINGS, chance)
    assert whole == [] and refused[0].rows.record_count == 10


@pytest.mark.parametrize("compression", list(Compression))
def test_batches_are_compressed_as_the_settings_say(compression: Compression) -> None:
    encoded, _ = encode_rows(columns(500), ELASTIC, EncodeSettings(compression=compression), chance)
    assert sum(len(values(batch)) for batch in encoded) == 500


def test_a_record_larger_than_a_request_may_be_is_refused_alone() -> None:
    records = Records([record(b"a", b"1"), record(b"a", b"x" * 3_000), record(b"a", b"2")], 0)
    settings = EncodeSettings(max_request_size=2_000)
    encoded, refused = encode_rows(records, ELASTIC, settings, chance)
    assert [value for batch in encoded for value in values(batch)] == [b"1", b"2"]
    (refusal,) = refused
    assert refusal.error.code is ErrorCode.MESSAGE_TOO_LARGE and refusal.rows.record_count == 1
    assert "max.request.size is 2000" in str(refusal.error)


def test_rows_taken_out_and_placed_again_are_the_same_rows_in_order() -> None:
    """A resize in between: every old batch is placed anew by itself, in the order of the batches."""
    settings = EncodeSettings(max_request_size=1_000)
    before, _ = encode_rows(columns(700), ELASTIC, settings, chance)
    moved = Placement(2, 3)
    after: list[Encoded] = []
    refused: list[Refused] = []
    for batch in before:
        again, failed = encode_rows(batch.rows, moved, settings, chance)
        after += again
        refused += failed
    assert refused == []
    seen = by_partition(after)
    assert sorted(int(value or 0) for part in seen.values() for value in part) == list(range(700))
    for partition, part in seen.items():
        last: dict[int, int] = {}
        for number in (int(value or 0) for value in part):
            assert place(placement_hash(b"key-%d" % (number % 17)), 2, 3) == partition
            assert number > last.get(number % 17, -1)
            last[number % 17] = number
    assert sum(batch.rows.record_count for batch in after) == 700


def sliced(table: pa.Table, names: ColumnNames, size_max: int = 1_000_000) -> list[Columns]:
    parts = columns_of(table, names, partition=None, delivery=Delivery(), now_ms=77, size_max=size_max)
    return [part for part, _ in parts]


def test_a_table_becomes_slices_of_columns_in_order() -> None:
    table = pa.table({"key": [str(row) for row in range(100)], "value": [b"x" * 50] * 100})
    parts = sliced(table, ColumnNames(), size_max=1_000)
    assert len(parts) > 5
    assert [key for part in parts for key in part.keys.to_pylist()] == [b"%d" % row for row in range(100)]
    assert {part.timestamps for part in parts} == {77}


def test_columns_are_taken_by_their_names_and_types() -> None:
    table = pa.table(
        {
            "id": pa.array(["a", "b"]).dictionary_encode(),
            "body": pa.array(["x", None], pa.large_string()),
            "at": pa.array([1_500, 2_500], pa.timestamp("us")),
            "meta": [[{"key": "h", "value": b"1"}], []],
        }
    )
    (part,) = sliced(table, ColumnNames("id", "body", "meta", "at"))
    assert part.keys.to_pylist() == [b"a", b"b"] and part.values.to_pylist() == [b"x", None]
    assert list(part.timestamps) == [1, 2]  # type: ignore[arg-type]
    assert part.headers.to_pylist() == [[{"key": "h", "value": b"1"}], []]


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (ColumnNames("id", "n"), TypeError, "column 'n' is int64; a value is binary or text"),
        (ColumnNames("nope", "id"), ValueError, "no column 'nope' to take the key from; the table has id, n"),
        (ColumnNames("id", "id", "n"), TypeError, "headers are lists of structs"),
        (ColumnNames("id", "id", None, "id"), TypeError, "a timestamp is an Arrow timestamp or int64 ms"),
    ],
)
def test_a_column_of_another_type_is_refused_with_what_to_do(
    names: ColumnNames, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        sliced(pa.table({"id": ["a"], "n": [1]}), names)


def test_a_table_without_a_key_column_has_null_keys() -> None:
    (part,) = sliced(pa.table({"value": ["a"]}), ColumnNames())
    assert part.keys is None
