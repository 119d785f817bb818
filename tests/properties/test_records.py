from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pytest
from crc32c import crc32c
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.base.errors import DecodeError
from anabranch.machines.keyspace import SPACE, SPACE_END, interval, keyless_spread, spread
from anabranch.records.arrow import decode as decoding
from anabranch.records.arrow import encode as encoding
from anabranch.records.arrow.decode import COLUMN_TYPES, decode, decode_all
from anabranch.records.arrow.encode import encode_partitioned, encode_records, hash_keys
from anabranch.records.arrow.warm import warm
from anabranch.records.batch import expanded, headers
from anabranch.records.compression import Compression
from anabranch.records.hashing import murmur2, placement_hash
from anabranch.records.rows import iterate
from anabranch.records.shares import KeyShare
from tests.properties import record_model as model
from tests.properties.record_model import Batch, Row
from tests.support.fence import FencedShelf, fenced_copy

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
INT64 = st.integers(-(1 << 63), (1 << 63) - 1)
TIMES = st.integers(0, 1 << 41) | st.integers(-1, 300)
BYTES = st.none() | st.binary(max_size=20) | st.builds(bytes, st.integers(0, 700))
TEXT = st.text("aZ é\u20ac\U0001f600", max_size=20)
HEADERS = st.lists(st.tuples(TEXT, BYTES), max_size=3).map(tuple)
RECORDS = st.lists(st.tuples(BYTES, BYTES, TIMES, HEADERS | st.just(())), min_size=1, max_size=6)


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    """Kernels write to memory that ends at a fence, and read from such memory in `survives`."""
    warm()
    with pytest.MonkeyPatch.context() as patch:
        for module in (decoding, encoding):
            patch.setattr(module, "shelf", FencedShelf())
        yield


@st.composite
def logs(draw: st.DrawFn) -> list[Batch]:
    """A stretch of a log: batches with rising offsets, some left out, of any codec."""
    offset = draw(st.integers(0, 1000) | st.integers(1 << 31, 1 << 45))
    batches = []
    for _ in range(draw(st.integers(0, 5))):
        base = offset
        rows = []
        if draw(st.integers(0, 9)) == 0:
            batches.append(Batch(base, (), last_offset=base, control=True, transactional=True))
            offset += 1
            continue
        for key, value, timestamp, entries in draw(RECORDS):
            offset += draw(st.integers(0, 1)) * draw(st.integers(0, 200))
            rows.append(Row(offset, timestamp, key, value, entries))
            offset += 1
        offset += draw(st.integers(0, 3))
        batches.append(
            Batch(
                base,
                tuple(rows),
                codec=draw(st.integers(0, 4)),
                last_offset=offset - 1,
                leader_epoch=draw(st.integers(0, 1 << 20)),
                log_append_time=draw(st.none() | TIMES),
                producer_id=draw(st.integers(-1, 5)),
            )
        )
        offset += draw(st.integers(0, 5))
    return batches


def as_rows(records: pa.RecordBatch) -> list[Row]:
    records.validate(full=True)
    return [
        Row(
            row["offset"],
            row["timestamp"],
            row["key"],
            row["value"],
            tuple((entry["key"], entry["value"]) for entry in row["headers"]),
            row["timestamp_type"],
            row["leader_epoch"],
        )
        for row in records.to_pylist()
    ]


ROW_COLUMNS = ("offset", "timestamp", "key", "value", "headers", "timestamp_type", "leader_epoch")


@PATIENT
@given(batches=logs(), data=st.data())
def test_every_record_is_decoded_as_the_model_wrote_it(batches: list[Batch], data: st.DataObject) -> None:
    log = b"".join(map(model.encode, batches))
    expected = [row for batch in batches for row in model.seen(batch)]
    decoded = decode(log, columns=ROW_COLUMNS)
    assert as_rows(decoded.records) == expected
    assert decoded.next_offset == (batches[-1].last_offset + 1 if batches else 0)
    assert decoded.complete
    incomplete = data.draw(st.integers(0, len(log)))
    kept, size = [], 0
    for batch in batches:
        size += len(model.encode(batch))
        if size <= incomplete:
            kept += model.seen(batch)
    assert as_rows(decode(log[:incomplete], columns=ROW_COLUMNS).records) == kept


@PATIENT
@given(batches=logs(), data=st.data())
def test_bounds_keep_exactly_what_lies_between(batches: list[Batch], data: st.DataObject) -> None:
    log = b"".join(map(model.encode, batches))
    rows = [row for batch in batches for row in model.seen(batch)]
    around = st.sampled_from([0, *(row.offset + step for row in rows for step in (0, 1))])
    start, end = data.draw(around), data.draw(st.none() | around)
    initial, growth = data.draw(st.integers(1, 1000)), data.draw(st.integers(0, 5000))
    held = interval(data.draw(st.integers(0, initial + growth - 1)), initial + growth, initial)
    places = [
        keyless_spread(row.offset, held) if row.key is None else spread(murmur2(row.key), initial) for row in rows
    ]
    bounds = st.integers(0, SPACE_END) | st.sampled_from([0, SPACE_END, *places])
    low, high = sorted((data.draw(bounds), data.draw(bounds)))
    share = KeyShare((low, high), initial, held)
    decoded = decode(log, columns=ROW_COLUMNS, start_offset=start, end_offset=end, share=share)
    expected = [
        row
        for row, at in zip(rows, places, strict=True)
        if row.offset >= start and (end is None or row.offset < end) and low <= at <= high
    ]
    assert as_rows(decoded.records) == expected
    last = batches[-1].last_offset + 1 if batches else start
    assert decoded.next_offset == max(start, last if end is None else min(last, end))


@PATIENT
@given(batches=logs(), data=st.data())
def test_columns_come_alone_and_in_any_order(batches: list[Batch], data: st.DataObject) -> None:
    log = b"".join(map(model.encode, batches))
    everything = decode(log, columns=tuple(COLUMN_TYPES)).records
    chosen = data.draw(st.lists(st.sampled_from(list(COLUMN_TYPES)), unique=True))
    some = decode(log, columns=chosen).records
    some.validate(full=True)
    assert some.schema.names == chosen
    for name in chosen:
        assert some.column(name).equals(everything.column(name))
    keys = everything.column("key").to_pylist()
    assert everything.column("key_hash").to_pylist() == [None if key is None else placement_hash(key) for key in keys]


@PATIENT
@given(batches=logs(), limit=st.integers(0, 3000))
def test_decoding_in_pieces_is_decoding_at_once(batches: list[Batch], limit: int) -> None:
    log = b"".join(map(model.encode, batches))
    pieces = list(decode_all(log, columns=ROW_COLUMNS, decoded_size_max=limit))
    assert [piece.complete for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert [row for piece in pieces for row in as_rows(piece.records)] == as_rows(
        decode(log, columns=ROW_COLUMNS).records
    )
    assert pieces[-1].next_offset == decode(log).next_offset


@PATIENT
@given(records=RECORDS, codec=st.sampled_from(Compression))
def test_records_come_back(records: list[tuple[bytes | None, bytes | None, int, tuple]], codec: Compression) -> None:
    data = encode_records(records, compression=codec)
    ((position, header),) = headers(data)
    assert (position, header.size, header.record_count) == (0, len(data), len(records))
    assert header.max_timestamp == max(record[2] for record in records)
    expected = [Row(number, time, key, value, entries) for number, (key, value, time, entries) in enumerate(records)]
    assert as_rows(decode(data, columns=ROW_COLUMNS).records) == expected
    if codec is Compression.NONE:
        assert model.decode(bytes(data)) == [(len(data), expected)]


def shaped(draw: st.DrawFn, values: Sequence[object], kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """The same column, whole, sliced out of a longer one, or in chunks."""
    match draw(st.integers(0, 2)):
        case 0:
            return pa.array(values, kind)
        case 1:
            filler = list(values)[: draw(st.integers(0, 9))]
            return pa.array([*filler, *values, *filler], kind).slice(len(filler), len(values))
        case _:
            cut = draw(st.integers(0, len(values)))
            return pa.chunked_array([pa.array(values[:cut], kind), pa.array(values[cut:], kind)], kind)


KINDS = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.dictionary(pa.int32(), pa.binary())]
TEXT_KINDS = [pa.string(), pa.large_string(), pa.string_view()]


@st.composite
def column(draw: st.DrawFn, size: int) -> tuple[list[bytes | None], pa.Array | pa.ChunkedArray]:
    if draw(st.integers(0, 5)) == 0:
        return [None] * size, pa.nulls(size)
    if draw(st.booleans()):
        text = draw(st.lists(st.none() | TEXT, min_size=size, max_size=size))
        return [None if t is None else t.encode() for t in text], shaped(draw, text, draw(st.sampled_from(TEXT_KINDS)))
    values = draw(st.lists(BYTES, min_size=size, max_size=size))
    return values, shaped(draw, values, draw(st.sampled_from(KINDS)))


@settings(PATIENT, max_examples=300)
@given(data=st.data())
def test_columns_become_one_run_of_batches_per_partition(data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 30))
    keys, key_column = data.draw(column(size))
    values, value_column = data.draw(column(size))
    times = data.draw(TIMES | st.lists(TIMES, min_size=size, max_size=size))
    entries = data.draw(st.none() | st.lists(st.none() | HEADERS, min_size=size, max_size=size))
    partitions = data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size))
    batch_size_max = data.draw(st.integers(0, 3000))
    header_column = None
    if entries is not None:
        kind = COLUMN_TYPES["headers"]
        as_dicts = [None if e is None else [{"key": k, "value": v} for k, v in e] for e in entries]
        header_column = shaped(data.draw, as_dicts, data.draw(st.sampled_from([kind, pa.large_list(kind.value_type)])))
    encoded = encode_partitioned(
        key_column,
        value_column,
        times if isinstance(times, int) else np.array(times, np.int64),
        header_column,
        np.array(partitions, np.int32),
        batch_size_max=batch_size_max,
    )
    assert [batch.partition for batch in encoded] == sorted(batch.partition for batch in encoded)
    found: dict[int, list[tuple]] = {}
    for batch in encoded:
        ((length, rows),) = model.decode(bytes(batch.data))
        assert length == len(batch.data)
        assert len(rows) == batch.record_count
        assert length <= batch_size_max or len(rows) == 1
        mine = found.setdefault(batch.partition, [])
        assert batch.first_row == [r for r in range(size) if partitions[r] == batch.partition][len(mine)]
        mine += [(row.timestamp, row.key, row.value, row.headers) for row in rows]
    for partition in range(5):
        assert found.get(partition, []) == [
            (
                times if isinstance(times, int) else times[row],
                keys[row],
                values[row],
                () if entries is None else entries[row] or (),
            )
            for row in range(size)
            if partitions[row] == partition
        ]
    hashes = hash_keys(key_column).tolist()
    assert hashes == [-1 if key is None else placement_hash(key) for key in keys]


@PATIENT
@given(times=st.lists(INT64, min_size=1, max_size=5))
def test_any_timestamps_come_back(times: list[int]) -> None:
    data = encode_records([(b"k", b"v", time, ()) for time in times])
    assert decode(data, columns=["timestamp"]).records.column(0).to_pylist() == times


def alike(choice: random.Random) -> Batch:
    """A batch of many records that are mostly of one shape, as producers send them, with others in between."""
    value_size = choice.choice([0, 20, 58, 61, 64, 100, 128, 2048, 8185, 8192])
    key_size = choice.choice([None, 0, 6, 32, 60, 64])
    time_step = choice.choice([0, 1, 37, 3_000, -5])
    odd = choice.choice([0, 0, 0.02, 0.3])
    offset, timestamp = choice.randrange(1 << 40), 1_700_000_000_000
    base = offset
    rows = []
    for _ in range(choice.choice([3, 30, 256, 257, 700]) if value_size < 2000 else 40):
        key = None if key_size is None else choice.randbytes(key_size)
        value: bytes | None = choice.randbytes(max(0, value_size + choice.randrange(3) - 1))
        headers: tuple[tuple[str, bytes | None], ...] = ()
        if choice.random() < odd:
            key = choice.choice([None, key, b"", b"x" * 63, b"y" * 64])
            value = choice.choice([None, value, b"", choice.randbytes(9_000)])
            headers = choice.choice([(), (("h", None),), (("", b"v"), ("\u00e9", b""))])
            offset += choice.randrange(300)
            timestamp += choice.randrange(-(1 << 33), 1 << 33)
        rows.append(Row(offset, timestamp, key, value, headers))
        offset += 1
        timestamp += time_step
    return Batch(base, tuple(rows), last_offset=offset, log_append_time=choice.choice([None, None, 5]))


@settings(PATIENT, max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_batches_of_records_that_are_alike_are_decoded_too(seed: int) -> None:
    choice = random.Random(seed)
    batches = [alike(choice) for _ in range(choice.randrange(1, 4))]
    batches = sorted(batches, key=lambda batch: batch.base_offset)
    log = b"".join(map(model.encode, batches))
    rows = [row for batch in batches for row in model.seen(batch)]
    assert as_rows(decode(log, columns=ROW_COLUMNS).records) == rows
    start, end = sorted(choice.choice(rows).offset for _ in range(2))
    middle, initial = choice.randrange(1, 1 << 63), choice.randint(1, 9)
    found = [
        decode(log, columns=ROW_COLUMNS, start_offset=start, end_offset=end, share=share, decoded_size_max=1 << 30)
        for share in (KeyShare((0, middle - 1), initial, SPACE), KeyShare((middle, SPACE_END), initial, SPACE))
    ]
    assert sorted((row for part in found for row in as_rows(part.records)), key=lambda row: row.offset) == [
        row for row in rows if start <= row.offset < end
    ]


@settings(PATIENT, max_examples=150)
@given(seed=st.integers(0, 1 << 32))
def test_changed_bytes_among_records_that_are_alike_harm_nobody(seed: int) -> None:
    choice = random.Random(seed)
    log = bytearray(model.encode(alike(choice)))
    for _ in range(choice.randrange(1, 20)):
        log[choice.randrange(61, len(log))] = choice.choice([choice.randrange(256), 0x80, 0xFF, 0, 1])
    survives(with_crc(log))
    cut = choice.randrange(61, len(log) + 1)
    struct.pack_into(">i", log, 8, cut - 12)
    survives(with_crc(log[:cut]))


NUMBERS = [
    0,
    1,
    62,
    63,
    64,
    8191,
    8192,
    (1 << 20) - 1,
    1 << 20,
    (1 << 27) - 1,
    1 << 27,
    1 << 34,
    1 << 48,
    1 << 55,
    1 << 62,
]


@settings(PATIENT, max_examples=300)
@given(
    deltas=st.lists(st.tuples(st.sampled_from(NUMBERS), st.booleans(), st.sampled_from(NUMBERS[:9])), max_size=12),
    sizes=st.lists(st.none() | st.sampled_from([0, 1, 31, 32, 33, 63, 64, 65, 127, 128, 129, 2047, 2049]), min_size=2),
    attributes=st.sampled_from([0, 0, 0, 1, 0x7F, 0x80, 0xFF]),
)
def test_numbers_of_any_width_are_read(
    deltas: list[tuple[int, bool, int]], sizes: list[int | None], attributes: int
) -> None:
    rows, offset, records = [], 0, b""
    for place, (timestamp, later, step) in enumerate(deltas):
        offset += step + 1
        key, value = (
            None if size is None else bytes([place + 1]) * size
            for size in (sizes[place % len(sizes)], sizes[~place % len(sizes)])
        )
        rows.append(Row(offset, timestamp if later else -timestamp, key, value))
        body = bytes([attributes]) + model.varint(rows[-1].timestamp) + model.varint(offset)
        for content in (key, value):
            body += model.varint(-1) if content is None else model.varint(len(content)) + content
        body += model.varint(0)
        records += model.varint(len(body)) + body
    data = model.frame(Batch(0, (), last_offset=offset), records, len(rows), 0, 0)
    assert as_rows(decode(fenced_copy(data).data, columns=ROW_COLUMNS).records) == rows


@settings(PATIENT, max_examples=100)
@given(
    contents=st.lists(st.none() | st.builds(bytes, st.sampled_from([0, 1, 31, 32, 33, 64, 100, 300, 2048, 2049]))),
    partitions=st.integers(1, 3),
    batch_size=st.sampled_from([200, 5_000, 1 << 20]),
)
def test_no_more_of_a_column_is_read_than_there_is(
    contents: list[bytes | None], partitions: int, batch_size: int
) -> None:
    made = pa.array(contents, pa.binary())
    bitmap, ends, data = made.buffers()
    exact = [None if buffer is None else pa.py_buffer(fenced_copy(buffer)) for buffer in (bitmap, ends)]
    size = sum(map(len, filter(None, contents)))
    exact.append(pa.py_buffer(fenced_copy(memoryview(data)[:size] if data is not None else b"")))
    column = pa.Array.from_buffers(pa.binary(), len(contents), exact)
    to = np.arange(len(contents), dtype=np.int32) % partitions
    batches = encode_partitioned(column, column, 0, None, to, batch_size_max=batch_size)
    for partition in range(partitions):
        found = [decode(batch.data, columns=("value",)).records for batch in batches if batch.partition == partition]
        assert [value for part in found for value in part.column(0).to_pylist()] == contents[partition::partitions]


def with_crc(data: bytearray) -> bytearray:
    """Make the first batch's checksum right again, so that the kernels see what is wrong behind it."""
    size = struct.unpack_from(">i", data, 8)[0] + 12
    if 61 <= size <= len(data):
        struct.pack_into(">I", data, 17, crc32c(memoryview(data)[21:size]))
    return data


def survives(data: bytes | bytearray) -> None:
    """Decode from memory that ends exactly where the bytes end, to memory that ends where it may be written to."""
    exact = fenced_copy(data)
    found = []
    # Those with a hash are looked at one by one, those without a run at a time: they agree, or refuse the same.
    for wanted in (ROW_COLUMNS, tuple(COLUMN_TYPES)):
        try:
            records = decode(exact.data, columns=wanted, size_max=1 << 20).records
        except DecodeError as error:
            found.append(str(error))
        else:
            records.validate(full=True)
            found.append(records.select(ROW_COLUMNS))
    one, other = found
    assert one == other
    if isinstance(one, pa.RecordBatch):
        whole = [one.column(name).to_pylist() for name in ("offset", "timestamp", "key", "value")]
        assert one_by_one(bytes(data)) == list(zip(*whole, strict=True))


def one_by_one(data: bytes) -> list[tuple[int, int, bytes | None, bytes | None]]:
    """Offset, timestamp, key and value of all records, as plain Python reads them."""
    found = []
    for position, header in headers(data):
        if header.is_control:
            continue
        records = bytes(expanded(memoryview(data)[position:], header))
        for span in iterate(records, header.record_count, header.base_offset):
            timestamp = header.base_timestamp + span.timestamp_delta
            found.append(
                (
                    header.base_offset + span.offset_delta,
                    header.max_timestamp if header.log_append_time else (timestamp + (1 << 63)) % (1 << 64) - (1 << 63),
                    None if span.key_end < 0 else records[span.key_start : span.key_end],
                    None if span.value_end < 0 else records[span.value_start : span.value_end],
                )
            )
    return found


@settings(PATIENT, max_examples=400)
@given(batches=logs(), data=st.data())
def test_changed_bytes_give_records_or_a_decode_error(batches: list[Batch], data: st.DataObject) -> None:
    log = bytearray(b"".join(map(model.encode, batches)))
    if not log:
        return
    for _ in range(data.draw(st.integers(1, 5))):
        position = data.draw(st.integers(0, len(log) - 1))
        log[position] = data.draw(st.integers(0, 255))
    survives(with_crc(log))
    survives(with_crc(log[: data.draw(st.integers(61, max(61, len(log))))]))


HOSTILE = [-2, -1, 0, 1, 63, 64, 1 << 14, (1 << 31) - 1, 1 << 31, (1 << 63) - 1, -(1 << 63)]


@settings(PATIENT, max_examples=400)
@given(data=st.data())
def test_hostile_numbers_give_records_or_a_decode_error(data: st.DataObject) -> None:
    number = st.sampled_from(HOSTILE).map(model.varint) | st.binary(min_size=10, max_size=11)
    body = b"\0"
    for _ in range(data.draw(st.integers(0, 8))):
        body += data.draw(number | st.binary(max_size=8))
    record = data.draw(st.just(model.varint(len(body))) | number) + body
    count = data.draw(st.integers(0, 4))
    batch = Batch(5, (), codec=data.draw(st.integers(0, 4)), last_offset=20)
    survives(model.frame(batch, record * data.draw(st.integers(1, 4)), count, 0, 0))


@PATIENT
@given(st.binary(max_size=300))
def test_noise_gives_records_or_a_decode_error(noise: bytes) -> None:
    survives(noise)
    survives(model.frame(Batch(0, (), last_offset=7), noise, 3, 0, 0))


def test_what_aborted_transactions_wrote_is_passed_over() -> None:
    choice = random.Random(7)
    for _ in range(300):
        log, expected, aborted = b"", [], []
        begun: dict[int, tuple[int, list[int]]] = {}
        offset = 0
        for _ in range(choice.randrange(40)):
            producer = choice.randrange(4)
            if producer in begun and choice.random() < 0.4:
                first, offsets = begun.pop(producer)
                abort = choice.random() < 0.5
                marker = Batch(offset, (), last_offset=offset, producer_id=producer, control=True, transactional=True)
                log += model.encode(Batch(**{**marker.__dict__, "abort": abort}))
                if abort:
                    aborted.append((producer, first))
                else:
                    expected += offsets
                offset += 1
                continue
            rows = tuple(Row(offset + n, 0, b"k", b"v") for n in range(choice.randrange(1, 4)))
            transactional = producer > 0
            log += model.encode(Batch(offset, rows, producer_id=producer, transactional=transactional))
            if transactional:
                begun.setdefault(producer, (offset, []))[1].extend(row.offset for row in rows)
            else:
                expected += [row.offset for row in rows]
            offset += len(rows)
        # What is still open lies beyond the last stable offset and would not have been fetched; count it as read.
        expected += [number for _, offsets in begun.values() for number in offsets]
        found = [
            number
            for piece in decode_all(log, columns=["offset"], aborted=aborted, decoded_size_max=200)
            for number in piece.records.column(0).to_pylist()
        ]
        assert found == sorted(expected)
