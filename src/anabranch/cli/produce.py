"""`anabranch produce`: a file, or standard input, into a topic."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from anabranch.base.errors import AnabranchError
from anabranch.cli.formats import Format, format_of
from anabranch.cli.output import DEFAULT_SERVERS, AsJson, Servers, print_json, progress


def produce(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to write to.")],
    source: Annotated[str, typer.Option("--from", "-f", help="A CSV, JSON lines or Parquet file; - is stdin.")],
    key: Annotated[str | None, typer.Option("--key", "-k", help="The column or field to take as the key.")] = None,
    file_format: Annotated[
        Format | None,
        typer.Option("--format", help="The file's format; by default from its ending, JSON lines for stdin."),
    ] = None,
    compression: Annotated[str, typer.Option(help="none, gzip, snappy, lz4 or zstd.")] = "none",
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after so many rows.")] = None,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Produce every row of a file as one record: the row as a JSON object, keyed by one of its columns.

    All rows are acknowledged before the command ends. A failure reports how many were.
    """
    import pyarrow as pa

    from anabranch.cli.rows import read_rows
    from anabranch.client.sync import Producer

    chosen = format_of(source, file_format)
    size = Path(source).stat().st_size if source != "-" and Path(source).is_file() else None
    began, sent, acknowledged = time.perf_counter(), 0, 0
    try:
        with (
            Producer(bootstrap_servers=servers, compression_type=compression) as producer,
            progress(f"producing to {topic}", size) as advance,
        ):
            try:
                for rows in read_rows(source, chosen, key):
                    count = len(rows.values) if limit is None else min(len(rows.values), limit - sent)
                    columns = {"value": rows.values.slice(0, count)}
                    if rows.keys is not None:
                        columns["key"] = rows.keys.slice(0, count)
                    producer.send_arrow(topic, pa.table(columns))
                    sent += count
                    advance(rows.bytes_read, f"{sent:,} rows")
                    if sent == limit:
                        break
            finally:
                producer.flush()
                acknowledged = sent
    except AnabranchError as error:
        raise AnabranchError(f"{error}\n{acknowledged:,} rows were written before that.") from error
    took_s = time.perf_counter() - began
    if as_json:
        print_json({"topic": topic, "rows": sent, "took_s": took_s})
    else:
        typer.echo(f"Wrote {sent:,} rows to {topic} in {took_s:.1f} s ({sent / took_s:,.0f} rows/s).")
