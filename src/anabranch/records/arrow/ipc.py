"""Columns that lie in memory already, made an Arrow record batch in one step.

Making an array of each column, and a batch of the arrays, costs more than decoding some hundred records. Arrow's IPC
format describes the same by a message in front of the memory: the number of rows, and where in it the buffers lie.
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
        """Position in the message of the size of what follows it."""
        header = _follow(sample, _field(sample, root, _HEADER))
        self.rows_at = _field(sample, header, _ROWS)
        """Position of the number of rows."""
        self.nodes_at = _follow(sample, _field(sample, header, _NODES)) + 4
        """Position of the number of rows and of nulls of each column."""
        self.buffers_at = _follow(sample, _field(sample, header, _BUFFERS)) + 4
        """Position of where each buffer begins behind the message, and of its size."""

    def read(self, memory: pa.Buffer, start: int) -> pa.RecordBatch:
        """Make a record batch of the message in `memory` at `start`, numbers filled in, and the buffers behind it."""
        return pa.ipc.read_record_batch(memory.slice(start), self._schema)


def _follow(message: bytes, at: int) -> int:
    """Return the position that an offset of a flatbuffer leads to."""
    return int(at + _INT32.unpack_from(message, at)[0])


def _field(message: bytes, table: int, number: int) -> int:
    """Return the position of a field of a flatbuffer's table."""
    fields = table - _INT32.unpack_from(message, table)[0]
    place: int = _UINT16.unpack_from(message, fields + 4 + 2 * number)[0]
    assert place, "the field is not there"
    return table + place
