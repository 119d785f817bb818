"""Files as columns of keys and values: CSV, JSON lines and Parquet, batch by batch, of any size.

The value of a row is the row as one JSON object (for JSON lines: the unchanged line), its key the text of one column.
Rows are handled as columns, without Python per row. The first malformed row ends the reading with an error that names
its line; earlier batches have been yielded.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from anabranch.base.errors import AnabranchError
from anabranch.cli.formats import Format
from anabranch.records.arrow.json_rows import json_objects

ROWS_PER_BATCH = 65_536
BLOCK_SIZE = 4 << 20
LINE_SIZE_MAX = 64 << 20


class Rows(NamedTuple):
    """Some rows of a file, in its order."""

    keys: pa.Array | None
    """Text, null where the row has no key; None when no key column was asked for."""
    values: pa.Array
    """One JSON object a row, as UTF-8 text."""
    bytes_read: int
    """How far the file has been read, in bytes, to show progress by."""


def read_rows(source: str, file_format: Format, key: str | None) -> Iterator[Rows]:
    """Read a file (`-`: standard input) batch by batch; `key` names the column or field that is the key."""
    if source != "-" and not Path(source).is_file():
        raise AnabranchError(
            f"File {source!r} does not exist. Give the path of a CSV, JSON lines or Parquet file, or -."
        )
    reader = {Format.CSV: _read_csv, Format.JSON: _read_json_lines, Format.PARQUET: _read_parquet}[file_format]
    file: IO[bytes] = sys.stdin.buffer if source == "-" else open(source, "rb")  # noqa: SIM115
    try:
        yield from reader(file, source, key)
    except pa.ArrowInvalid as error:
        raise AnabranchError(f"{source}: not readable as {file_format}: {error}") from error
    finally:
        if source != "-":
            file.close()


def _read_csv(file: IO[bytes], source: str, key: str | None) -> Iterator[Rows]:
    counting = _Counting(file)
    options = pyarrow.csv.ReadOptions(block_size=BLOCK_SIZE)
    for batch in pyarrow.csv.open_csv(counting, read_options=options):
        yield from _rows_of(batch, source, key, counting.count)


def _read_parquet(file: IO[bytes], source: str, key: str | None) -> Iterator[Rows]:
    if source == "-":
        file = io.BytesIO(file.read())
    parquet = pyarrow.parquet.ParquetFile(file)
    size = max(1, parquet.metadata.num_rows)
    total = Path(source).stat().st_size if source != "-" else 0
    done = 0
    for batch in parquet.iter_batches(batch_size=ROWS_PER_BATCH):
        done += batch.num_rows
        yield from _rows_of(batch, source, key, total * done // size)


def _read_json_lines(file: IO[bytes], source: str, key: str | None) -> Iterator[Rows]:
    read = 0
    line_number = 0
    rest = b""
    while block := file.read(BLOCK_SIZE):
        read += len(block)
        lines, newline, rest = (rest + block).rpartition(b"\n")
        if not newline:
            lines, rest = b"", rest or lines
            if len(rest) > LINE_SIZE_MAX:
                raise AnabranchError(f"{source}: line {line_number + 1} is longer than {LINE_SIZE_MAX} bytes.")
            continue
        yield from _rows_of_lines(lines.split(b"\n"), source, key, line_number, read)
        line_number += lines.count(b"\n") + 1
    if rest.strip():
        yield from _rows_of_lines([rest], source, key, line_number, read)


def _rows_of_lines(lines: list[bytes], source: str, key: str | None, before: int, read: int) -> Iterator[Rows]:
    values = [line for line in lines if line.strip()]
    if not values:
        return
    text = b"\n".join(values) + b"\n"
    name = key if key is not None else ""
    options = pyarrow.json.ParseOptions(
        explicit_schema=pa.schema([(name, pa.string())]), unexpected_field_behavior="ignore"
    )
    try:
        table = pyarrow.json.read_json(
            io.BytesIO(text), read_options=pyarrow.json.ReadOptions(block_size=len(text) + 1), parse_options=options
        )
    except pa.ArrowInvalid:
        table = _key_column_one_by_one(lines, source, key, before)
    keys = None
    if key is not None:
        keys = table.column(key).combine_chunks()
        if keys.null_count == len(keys) and len(keys) and before == 0 and not any(_has(v, key) for v in values):
            raise AnabranchError(f"{source}: no row has a field {key!r} to take as the key.")
    yield Rows(keys, pa.array([value.rstrip(b"\r") for value in values], pa.binary()).cast(pa.string()), read)


def _has(line: bytes, field: str) -> bool:
    return field in json.loads(line)


def _key_column_one_by_one(lines: list[bytes], source: str, key: str | None, before: int) -> pa.Table:
    """Name the malformed line, or accept keys that are numbers or booleans, which Arrow does not cast."""
    keys: list[str | None] = []
    for number, line in enumerate(lines, before + 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise AnabranchError(f"{source}, line {number}: not a JSON object: {error}") from error
        if not isinstance(row, dict):
            raise AnabranchError(f"{source}, line {number}: expected a JSON object, found {type(row).__name__}.")
        value = None if key is None else row.get(key)
        keys.append(value if value is None or isinstance(value, str) else json.dumps(value))
    return pa.table({key or "": pa.array(keys, pa.string())})


def _rows_of(batch: pa.RecordBatch, source: str, key: str | None, read: int) -> Iterator[Rows]:
    if key is not None and key not in batch.schema.names:
        raise AnabranchError(f"{source}: no column {key!r}; the columns are {', '.join(batch.schema.names)}.")
    for start in range(0, batch.num_rows, ROWS_PER_BATCH):
        part = batch.slice(start, ROWS_PER_BATCH)
        keys = None if key is None else part.column(key).cast(pa.string())
        yield Rows(keys, json_objects(part), read)


class _Counting(io.RawIOBase):
    """A file that counts the bytes read."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.count = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.count += len(data)
        return data
