"""Columns that lie in memory already, made an Arrow record batch in one step.

To make an array of each column, and a batch of the arrays, costs more than to decode some hundred records. Arrow's IPC
format says the same with a message in front of the memory: how many rows there are, and where in it the buffers lie.
The message of a schema is written once, by Arrow itself; only its numbers are filled in for each batch, by the kernel
that fills the memory.
"""

from __future__ import annotations

from struct import Struct

import pyarrow as pa

_PREFIX_SIZE = 8
_UINT16, _INT32 = Struct("<H"), Struct("<i")
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
        self.message = sample[: self.size]
        """Without its numbers."""
        root = _follow(sample, _PREFIX_SIZE)
        self.body_size_at = _field(sample, root, _BODY_SIZE)
        """Where in the message is how many bytes follow it."""
        header = _follow(sample, _field(sample, root, _HEADER))
        self.rows_at = _field(sample, header, _ROWS)
        """Where it says how many rows there are."""
        self.nodes_at = _follow(sample, _field(sample, header, _NODES)) + 4
        """Where for each column its rows and its nulls come."""
        self.buffers_at = _follow(sample, _field(sample, header, _BUFFERS)) + 4
        """Where for each buffer of the columns comes where it begins behind the message, and how many bytes it has."""

    def read(self, memory: pa.Buffer, start: int) -> pa.RecordBatch:
        """Take the message in `memory` at `start`, with its numbers filled in, and what is behind it for a batch."""
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
