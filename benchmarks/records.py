"""The record kernels against a plain copy of the same bytes: how far from the speed of memory they are."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np
import pyarrow as pa

from anabranch.records.columns import decode, encode_partitioned
from benchmarks.harness import Bar, Result, Round, Scale, compare

BUFFER_SIZE = 32 << 20
PASSES = 8


def _rows(value_size: int, size: int) -> tuple[pa.Array, pa.Array]:
    count = max(1, size // (value_size + 20))
    keys = pa.array([b"key-%06d" % (number % 1_000_000) for number in range(count)], pa.binary())
    return keys, pa.array([b"x" * value_size] * count, pa.binary())


def _timed(work: Callable[[], object], size: int, passes: int) -> Round:
    def once() -> Mapping[str, float]:
        began = time.perf_counter()
        for _ in range(passes):
            work()
        return {"bytes_per_s": size * passes / (time.perf_counter() - began)}

    return once


def _measured(value_size: int, scale: Scale) -> list[Result]:
    size, passes = scale.choose((BUFFER_SIZE, PASSES), (1 << 18, 1))
    keys, values = _rows(value_size, size)
    timestamps = np.full(len(values), 1_700_000_000_000, np.int64)
    batches = b"".join(bytes(batch.data) for batch in encode_partitioned(keys, values, timestamps))
    source = np.frombuffer(batches, np.uint8)
    target = np.empty_like(source)
    name = f"{value_size}_byte_values"
    copy = _timed(lambda: np.copyto(target, source), len(batches), passes)
    columns = ("offset", "timestamp", "key", "value")
    return [
        *compare(
            f"records.decode_{name}",
            what=f"{len(batches)} bytes of batches to Arrow columns {', '.join(columns)}, CRC checked, one thread",
            sides={"anabranch": _timed(lambda: decode(batches, columns=columns), len(batches), passes), "copy": copy},
            bars=[Bar("bytes_per_s", "B/s", "more", 0.5)],
            scale=scale,
        ),
        *compare(
            f"records.encode_{name}",
            what=f"Arrow columns to {len(batches)} bytes of batches with their CRCs, one partition, one thread",
            sides={
                "anabranch": _timed(lambda: encode_partitioned(keys, values, timestamps), len(batches), passes),
                "copy": copy,
            },
            bars=[Bar("bytes_per_s", "B/s", "more", 0.25)],
            scale=scale,
        ),
    ]


def small_values(scale: Scale) -> list[Result]:
    """Batches to Arrow and back, 100-byte values."""
    return _measured(100, scale)


def large_values(scale: Scale) -> list[Result]:
    """Batches to Arrow and back, 1 KiB values."""
    return _measured(1024, scale)


BENCHMARKS = {"small_values": small_values, "large_values": large_values}
