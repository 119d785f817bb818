"""Records of every kind, and their expected values after reading."""

from __future__ import annotations

import pyarrow as pa

RECORDS = [
    (b"N14228", b"2013-01-01T05:15 UA1545 +2", 1_356_998_400_000, [("carrier", b"UA"), ("cancelled", None)]),
    (None, b"", 1_356_998_400_500, []),
    (b"", None, 1_356_998_399_000, [("", b"")]),
    (b"k" * 70, b"v" * 70_000, 1_356_998_500_000, []),
    *((b"N%05d" % (n % 300), b"leg %d" % n, 1_356_998_400_000 + n * 70, []) for n in range(1000)),
]


def as_tuples(records: pa.RecordBatch) -> list[tuple]:
    return [
        (row["key"], row["value"], row["timestamp"], [(entry["key"], entry["value"]) for entry in row["headers"]])
        for row in records.to_pylist()
    ]
