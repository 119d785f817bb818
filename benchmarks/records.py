"""The record kernels against a plain copy of the same bytes, `np.copyto`: gigabytes a second of processor time.

Records have a key of 10 bytes and a value of 100 or 1,024 random bytes, in batches of 16 KiB, one after another as a
fetch brings them: 8 MiB (a fetch of the Spark source), 1 MiB (`max.partition.fetch.bytes`, a copy that stays in the
second-level cache) or 32 MiB (a copy around the caches). Decoding checks the CRC and gives the columns offset,
timestamp, key and value; encoding starts from Arrow columns and ends with checksums. Nothing is compressed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from functools import partial
from time import thread_time

import numpy as np
import pyarrow as pa

from anabranch.records.arrow.decode import decode_all
from anabranch.records.arrow.encode import encode_partitioned, encode_records, hash_keys
from anabranch.records.batch import stamp
from benchmarks.harness import Bar, Result, Scale, compare

BATCH_SIZE = 16 * 1024
COLUMNS = ("offset", "timestamp", "key", "value")
VALUE_SIZES = (100, 1024)
KEY_SIZE = 10
MIB = 1 << 20
SIZES = (8 * MIB, MIB, 32 * MIB)
START_MS = 1_356_998_400_000
DECODE_BAR, ENCODE_BAR = 0.5, 0.25


def columns_of(size: int, value_size: int) -> tuple[pa.Array, pa.Array, np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Return keys, values and timestamps of about `size` bytes in all."""
    count = max(1, size // (value_size + KEY_SIZE + 10))
    chance = random.Random(7)
    keys = pa.array([b"key-%06d" % (number * 7919 % 100_000) for number in range(count)])
    values = pa.array([chance.randbytes(value_size) for _ in range(count)])
    return keys, values, START_MS + np.arange(count, dtype=np.int64)


def gigabytes(act: Callable[[], object], size: int, seconds_min: float) -> Mapping[str, float]:
    """Repeat for a while and take the median of processor time, in which other work on the machine shows least."""
    times: list[float] = []
    while not times or sum(times) < seconds_min:
        start = thread_time()
        act()
        times.append(thread_time() - start)
    return {"bytes": size / float(np.median(times)) / 1e9}


def drained(log: bytes) -> int:
    """Decode all of it, a piece at a time; answers how many records there are."""
    return sum(piece.records.num_rows for piece in decode_all(log, columns=COLUMNS))


def compared(name: str, what: str, size: int, act: Callable[[], object], bound: float, scale: Scale) -> list[Result]:
    """Compare with a copy of as many bytes."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    seconds_min = scale.choose(0.3, 0.0)
    return compare(
        name,
        what=what,
        sides={
            "anabranch": lambda: gigabytes(act, size, seconds_min),
            "copy": lambda: gigabytes(partial(np.copyto, target, source), size, seconds_min),
        },
        bars=[Bar("bytes", "GB/s", "more", bound)],
        scale=scale,
    )


def decoding(scale: Scale) -> list[Result]:
    """Batches to Arrow columns against a copy."""
    results = []
    for size in scale.choose(SIZES, (16 * 1024,)):
        for value_size in VALUE_SIZES:
            log = bytearray()
            offset = 0
            for batch in encode_partitioned(*columns_of(size, value_size), batch_size_max=BATCH_SIZE):
                stamp(batch.data, 0, offset, 0)
                offset += batch.record_count
                log += batch.data
            name = f"records.decode.{value_size}_bytes.{max(1, size // MIB)}_mib"
            what = f"{offset} records of {value_size}-byte values in {len(log)} bytes, CRC checked, columns {COLUMNS}"
            act = partial(drained, bytes(log))
            assert act() == offset
            results += compared(name, what, len(log), act, DECODE_BAR, scale)
    return results


def encoding(scale: Scale) -> list[Result]:
    """Arrow columns to batches with checksums against a copy."""
    results = []
    for size in scale.choose(SIZES, (16 * 1024,)):
        for value_size in VALUE_SIZES:
            columns = columns_of(size, value_size)
            act = partial(encode_partitioned, *columns, batch_size_max=BATCH_SIZE)
            encoded = sum(len(batch.data) for batch in act())
            name = f"records.encode.{value_size}_bytes.{max(1, size // MIB)}_mib"
            what = (
                f"{len(columns[0])} records of {value_size}-byte values, batches of {BATCH_SIZE} bytes, one partition"
            )
            results += compared(name, what, encoded, act, ENCODE_BAR, scale)
    return results


def counted(name: str, what: str, count: int, act: Callable[[], object], scale: Scale) -> list[Result]:
    """Measure records a second, against nothing."""

    def measure() -> Mapping[str, float]:
        figures = gigabytes(act, count, scale.choose(0.3, 0.0))
        return {"records": figures["bytes"] * 1e3}

    bars = [Bar("records", "million/s", "more")]
    return compare(name, what=what, sides={"anabranch": measure}, bars=bars, scale=scale)


def rows(scale: Scale) -> list[Result]:
    """Records a second of Python tuples encoded, of keys hashed, and of columns spread over partitions."""
    keys, values, timestamps = columns_of(scale.choose(MIB, 16 * 1024), 100)
    count = len(keys)
    empty: tuple[()] = ()
    records = [
        (key, value, timestamp, empty)
        for key, value, timestamp in zip(keys.to_pylist(), values.to_pylist(), timestamps.tolist(), strict=True)
    ]
    partitions = (hash_keys(keys) % 8).astype(np.int32)
    spread = partial(encode_partitioned, keys, values, timestamps, None, partitions, batch_size_max=BATCH_SIZE)
    tuples = partial(encode_records, records)
    return [
        *counted("records.encode_records", f"{count} tuples with 100-byte values, one batch", count, tuples, scale),
        *counted("records.hash_keys", f"{count} keys of {KEY_SIZE} bytes", count, partial(hash_keys, keys), scale),
        *counted("records.encode_spread", f"{count} rows with 100-byte values, 8 partitions", count, spread, scale),
    ]


BENCHMARKS = {"decode": decoding, "encode": encoding, "rows": rows}
