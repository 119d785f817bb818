"""Columns that lie in memory already, made an Arrow record batch in one step.

To make an array of each column, and a batch of the arrays, costs more than to decode some hundred records. Arrow's IPC
format says the same with a message in front of the memory: how many rows there are, and where in it the buffers lie.
The message of a schema is written once, by Arrow itself; only its numbers are filled in for each batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from typing import Any

import pyarrow as pa

_PREFIX_SIZE = 8
_UINT16, _INT32, _INT64 = Struct("<H"), Struct("<i"), Struct("<q")
# Where the tables of Arrow's Message.fbs have their fields.
_HEADER, _BODY_SIZE = 2, 3
_ROWS, _NODES, _BUFFERS = 0, 1, 2


class Envelope:
    """The message in front of the columns of `schema`; they may be of fixed width, or binary."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        # One row, because numbers that are 0 would not be written.
        sample = pa.record_batch([pa.nulls(1, kind) for kind in schema.types], schema.names).serialize().to_pybytes()
        self.size = _PREFIX_SIZE + _INT32.unpack_from(sample, 4)[0]
        """Of the message; the columns' memory begins right behind it."""
        self._message = sample[: self.size]
        root = _follow(sample, _PREFIX_SIZE)
        self._body_size_at = _field(sample, root, _BODY_SIZE)
        header = _follow(sample, _field(sample, root, _HEADER))
        self._rows_at = _field(sample, header, _ROWS)
        self._nodes_at, self._nodes = _vector(sample, _field(sample, header, _NODES))
        self._buffers_at, self._buffers = _vector(sample, _field(sample, header, _BUFFERS))

    def fill(
        self,
        slab: memoryview,
        memory: pa.Buffer,
        start: int,
        body_size: int,
        rows: int,
        nodes: Sequence[int],
        buffers: Sequence[int],
    ) -> pa.RecordBatch:
        """Write the message into `slab` at `start`; answer the batch that it and the bytes behind it are.

        `memory` is the slab as Arrow sees it.
        `nodes` has for each column its rows and its nulls, `buffers` for each of its buffers where it begins behind the
        message and how many bytes it has.
        """
        slab[start : start + self.size] = self._message
        _INT64.pack_into(slab, start + self._body_size_at, body_size)
        _INT64.pack_into(slab, start + self._rows_at, rows)
        self._nodes.pack_into(slab, start + self._nodes_at, *nodes)
        self._buffers.pack_into(slab, start + self._buffers_at, *buffers)
        return pa.ipc.read_record_batch(memory.slice(start), self._schema)


def _follow(message: bytes, at: int) -> int:
    """Where an offset of a flatbuffer leads."""
    return int(at + _INT32.unpack_from(message, at)[0])


def _field(message: bytes, table: int, number: int) -> int:
    """Where a field of a flatbuffer's table is."""
    fields = table - _INT32.unpack_from(message, table)[0]
    place: int = _UINT16.unpack_from(message, fields + 4 + 2 * number)[0]
    assert place, "the field is not there"
    return table + place


def _vector(message: bytes, at: int) -> tuple[int, Any]:
    """Where a vector of pairs of numbers begins, and how to write it."""
    vector = _follow(message, at)
    return vector + 4, Struct(f"<{2 * _INT32.unpack_from(message, vector)[0]}q")
