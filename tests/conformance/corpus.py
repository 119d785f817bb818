"""Records that bring out what clients and brokers get wrong: absent, empty and binary parts, headers, odd times."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

from tests.conformance.clients import Client, Record

TIME = 1_700_000_000_123
EVERY_BYTE = bytes(range(256))


def corpus(client: Client) -> Sequence[Record]:
    """Return the records that the client can express."""
    blob = random.Random(20130101).randbytes(2_000)
    records = [
        Record(b"key", b"value", TIME),
        Record(None, b"no key", TIME + 1),
        Record(b"tombstone", None, TIME + 2),
        Record(b"Z\xc3\xbcrich \xf0\x9f\x9a\x86", "grüezi 🚆".encode(), TIME - 5_000),
        Record(b"long", b"compressible " * 3_000, TIME),
        Record(b"headers", b"x", TIME, (("trace-id", b"abc"), ("naïve", b"d"))),
        Record(b"headers", b"y", TIME, (("same", b"1"), ("same", b"2"), ("other", b"3"))),
        Record(b"1970", b"the epoch", 1),
        Record(b"repeated", b"first", TIME),
        Record(b"repeated", b"second", TIME),
    ]
    if client.sends_binary:
        records += [
            Record(EVERY_BYTE, EVERY_BYTE, TIME),
            Record(b"blob", blob, TIME + 60_000),
            Record(b"headers", b"z", TIME, (("binary", EVERY_BYTE), ("empty", b""))),
        ]
    if client.sends_empty_bytes:
        records += [Record(b"", b"", TIME), Record(b"", None, TIME), Record(None, b"", TIME)]
    if client.sends_null_headers:
        records.append(Record(b"headers", b"n", TIME, (("nothing", None), ("something", b"s"))))
    return [replace(record, timestamp=_timestamp(client, record)) for record in records]


def _timestamp(client: Client, record: Record) -> int | None:
    if not client.chooses_timestamps or record.timestamp is None:
        return None
    return record.timestamp if client.sends_falling_timestamps else max(record.timestamp, TIME)
