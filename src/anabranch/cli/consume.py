"""`anabranch consume`: a topic's records to standard output, every key in order."""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.base.ids import is_whole
from anabranch.cli.output import DEFAULT_SERVERS, Servers, note

if TYPE_CHECKING:
    import pyarrow as pa

    from anabranch.client import RecordFilter
    from anabranch.client.sync import Consumer

COLUMNS = ("partition", "offset", "timestamp", "key", "value")
VALUE_WIDTH = 100
SHARES_MAX = 1_000
ANY, KEYS = "any", "keys"
ANY_AT_A_TIME = 100
"""Records of a slice: printed, and committed, together."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Form(StrEnum):
    """The output format."""

    TABLE = "table"
    JSON = "json"
    VALUE = "value"
    ARROW = "arrow"


class Start(StrEnum):
    """The offset to begin at."""

    EARLIEST = "earliest"
    LATEST = "latest"


class Protocol(StrEnum):
    """The rebalance protocol of a group."""

    CONSUMER = "consumer"
    CLASSIC = "classic"


class Ordering(StrEnum):
    """The order that is kept."""

    KEY = "key"
    NONE = "none"


def consume(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")],
    form: Annotated[
        Form, typer.Option("--format", help="Aligned lines, JSON lines, bare values, or an Arrow IPC stream.")
    ] = Form.TABLE,
    start: Annotated[Start, typer.Option("--from", help="Begin with the first record, or with the next to come.")] = (
        Start.EARLIEST
    ),
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="Stop after so many records.")] = None,
    until_end: Annotated[bool, typer.Option("--until-end", help="Stop at the end of the topic.")] = False,
    partition: Annotated[list[int] | None, typer.Option("--partition", "-p", help="Only these partitions.")] = None,
    group: Annotated[str | None, typer.Option("--group", "-g", help="Consume as a member of this group.")] = None,
    protocol: Annotated[
        Protocol, typer.Option("--group-protocol", help="The rebalance protocol of the group.")
    ] = Protocol.CONSUMER,
    ordering: Annotated[
        Ordering, typer.Option(help="key: in order across resizes; none: as they arrive.")
    ] = Ordering.KEY,
    share: Annotated[
        str | None,
        typer.Option(
            "--share",
            metavar="K/N|START-END|keys|any",
            help="Only a share of the keys: the K-th of N even ones, or a range of the key space; with --group what is "
            "printed is committed for these keys. For members of a group, keys: partitions are shared with other such "
            "members by ranges of keys; any: what no other member has, in no order.",
        ),
    ] = None,
    key: Annotated[
        list[str] | None, typer.Option("--key", "-k", help="Only records with this key; may be repeated.")
    ] = None,
    refuse_key: Annotated[
        list[str] | None, typer.Option("--refuse-key", help="No records with this key; may be repeated.")
    ] = None,
    min_size: Annotated[
        int | None, typer.Option("--min-size", min=0, help="Only records with so many bytes of key and value, or more.")
    ] = None,
    max_size: Annotated[
        int | None, typer.Option("--max-size", min=0, help="Only records with so many bytes, or fewer.")
    ] = None,
    servers: Servers = DEFAULT_SERVERS,
) -> None:
    """Print the records of a topic, every key in order, until Ctrl-C or SIGTERM.

    A group continues at its committed offsets; --from applies to partitions without one. Brokers send only the records
    of a share, or with the keys and sizes wanted, of topics with accept.range.fetch=true.
    """
    from anabranch.client.sync import Consumer

    if group is not None and partition is not None:
        raise typer.BadParameter("use --group or --partition, not both: a group assigns partitions to its members")
    _check_share(group, share, protocol)
    wanted_records = filter_of(key, refuse_key, min_size, max_size)
    if wanted_records is not None and share == ANY:
        raise typer.BadParameter("--share any takes every record that is next: leave out --key and the like")
    if group is not None and share == ANY:
        _consume_any(topic, form, start, limit, group, protocol, servers, until_end=until_end)
        return
    keys = [] if share is None or share == KEYS else [share_of(share)]

    with (
        _Interruption() as interruption,
        Consumer(
            bootstrap_servers=servers,
            group_id=group,
            group_protocol=protocol.value,
            auto_offset_reset=start.value,
            ordering=ordering.value,
            allow_key_share=share == KEYS,
        ) as consumer,
    ):
        if group is not None and not keys:
            consumer.subscribe(topic)
        else:
            names: list[Any] = [topic] if partition is None else [(topic, number) for number in partition]
            consumer.assign(dict.fromkeys(names, keys) if keys else names)
        printed = _print_tables(
            consumer, topic, _PRINTERS[form](), interruption, limit, wanted_records, until_end=until_end
        )
    note(f"{printed:,} records")


def _print_tables(
    consumer: Consumer,
    topic: str,
    printer: _Lines | _Arrow,
    interruption: _Interruption,
    limit: int | None,
    wanted_records: RecordFilter | None,
    *,
    until_end: bool,
) -> int:
    """Print records until the limit, the end, or an interruption. Return how many were printed."""
    printed = 0
    wait_s = 0.1 if until_end else 0.5
    try:
        while not interruption.told and (limit is None or printed < limit):
            table = consumer.poll_arrow(timeout_s=wait_s, max_bytes=8 << 20, columns=COLUMNS, filter=wanted_records)
            if table.num_rows:
                wanted = table.num_rows if limit is None else min(table.num_rows, limit - printed)
                given = 0
                try:
                    printer.print(table.slice(0, wanted))
                    given = wanted
                finally:
                    _seek_back(consumer, topic, table.slice(given))
                printed += wanted
            if until_end and consumer.assignment() and all(lag == 0 for lag in consumer.lag().values()):
                break
    except KeyboardInterrupt:
        pass
    finally:
        printer.close()
    return printed


def _check_share(group: str | None, share: str | None, protocol: Protocol) -> None:
    if share in (ANY, KEYS) and group is None:
        raise typer.BadParameter(f"--share {share} is for members of a group: give --group, too")
    if share == KEYS and protocol is Protocol.CLASSIC:
        raise typer.BadParameter("--share keys needs --group-protocol consumer: others assign whole partitions")


def _consume_any(
    topic: str,
    form: Form,
    start: Start,
    limit: int | None,
    group: str,
    protocol: Protocol,
    servers: str,
    *,
    until_end: bool,
) -> None:
    """Print records that no other member of the group has, in no order; what is printed is committed."""
    if form is Form.ARROW:
        raise typer.BadParameter("--share any prints records as they come, not as an Arrow stream")
    import pyarrow as pa

    from anabranch.client.consumer.tables import TYPES
    from anabranch.client.sync import Consumer

    printer = _PRINTERS[form]()
    schema = pa.schema([(name, TYPES[name]) for name in COLUMNS])
    printed = 0
    with (
        _Interruption() as interruption,
        Consumer(
            bootstrap_servers=servers,
            group_id=group,
            group_protocol=protocol.value,
            auto_offset_reset=start.value,
            share=ANY,
            acknowledgement_mode="explicit",
            max_poll_records=ANY_AT_A_TIME,
        ) as consumer,
    ):
        consumer.subscribe(topic)
        try:
            while not interruption.told and (limit is None or printed < limit):
                records = consumer.poll(0.5, None if limit is None else min(ANY_AT_A_TIME, limit - printed))
                if records:
                    columns = [[getattr(record, name) for record in records] for name in COLUMNS]
                    printer.print(pa.table(columns, schema=schema))
                    printed += len(records)
                    for record in records:
                        consumer.done(record)
                elif until_end and consumer.assignment():
                    consumer.commit()
                    if not any(consumer.lag().values()):
                        break
        except KeyboardInterrupt:
            pass
        finally:
            printer.close()
    note(f"{printed:,} records")


def filter_of(
    keys: list[str] | None, keys_refused: list[str] | None, size_min: int | None, size_max: int | None
) -> RecordFilter | None:
    """Make a filter of the options; None if none is given, so that topics need not allow it."""
    from anabranch.client import RecordFilter

    if not keys and not keys_refused and size_min is None and size_max is None:
        return None
    if keys and keys_refused:
        raise typer.BadParameter("use --key or --refuse-key, not both")
    if size_min is not None and size_max is not None and size_min > size_max:
        raise typer.BadParameter(f"no record has at least {size_min} and at most {size_max} bytes")
    made = RecordFilter(tuple(map(os.fsencode, keys or ())), tuple(map(os.fsencode, keys_refused or ())))
    if size_min is not None:
        made = replace(made, size_min=size_min)
    return made if size_max is None else replace(made, size_max=size_max)


def share_of(text: str) -> tuple[int, int]:
    """Read `K/N`, the K-th of N even shares of the key space, or `START-END`, both inclusive."""
    from anabranch.machines.keyspace import SPACE, SPACE_END, cuts

    wanted = f"'{text}' is no share: use 2/3 for the second of three, or START-END in 0 to {SPACE_END}"
    first, sign, second = text.partition("/" if "/" in text else "-")
    if not (sign and all(is_whole(number) and len(number) <= 19 for number in (first, second))):
        raise typer.BadParameter(wanted)
    start, end = int(first), int(second)
    if sign == "/":
        if not 1 <= start <= end <= SHARES_MAX:
            raise typer.BadParameter(wanted)
        return cuts(SPACE, end)[start - 1]
    if not start <= end <= SPACE_END:
        raise typer.BadParameter(wanted)
    return start, end


class _Interruption:
    """Has SIGTERM end a block as Ctrl-C does: the consumer commits, and leaves its group at once.

    The exception ends a wait. It is lost where it is raised within a destructor or a callback of the collector: so what
    was told is kept, too.
    """

    def __init__(self) -> None:
        self.told = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        self.told = True
        raise KeyboardInterrupt


def _seek_back(consumer: Consumer, topic: str, table: pa.Table) -> None:
    """Seek to the first records that were not printed, so that their offsets are not committed."""
    first: dict[int, int] = {}
    for row in table.select(["partition", "offset"]).to_pylist():
        first.setdefault(row["partition"], row["offset"])
    for partition, offset in first.items():
        if (topic, partition) in consumer.assignment():
            consumer.seek(topic, partition, offset)


class _Lines:
    def print(self, table: pa.Table) -> None:
        out = sys.stdout
        # As numbers: to make times of them, pyarrow would import pandas.
        numbers = table.column("timestamp").cast("int64")
        for row in table.set_column(table.schema.get_field_index("timestamp"), "timestamp", numbers).to_pylist():
            out.write(self.line(row))
        out.flush()

    def line(self, row: dict[str, Any]) -> str:
        raise AssertionError

    def close(self) -> None:
        pass


class _Table(_Lines):
    """Aligned columns, with long values cut."""

    def __init__(self) -> None:
        self._headed = False

    def line(self, row: dict[str, Any]) -> str:
        time = _time(row["timestamp"])
        when = "" if time is None else time.strftime("%Y-%m-%d %H:%M:%S")
        value = _text(row["value"]).replace("\n", " ")
        value = value if len(value) <= VALUE_WIDTH else value[: VALUE_WIDTH - 1] + "…"
        line = f"{row['partition']:>9}  {row['offset']:>10}  {when:19}  {_text(row['key']):<16}  {value}\n"
        if not self._headed:
            self._headed = True
            return f"{'partition':>9}  {'offset':>10}  {'time':19}  {'key':<16}  value\n{line}"
        return line


class _Json(_Lines):
    """One JSON object a line; binary keys and values are `{"base64": ...}`, times outside the calendar stay ms."""

    def line(self, row: dict[str, Any]) -> str:
        time = _time(row["timestamp"])
        if time is not None:
            row["timestamp"] = time.isoformat(timespec="milliseconds")
        row["key"], row["value"] = _json_of(row["key"]), _json_of(row["value"])
        return json.dumps(row, ensure_ascii=False) + "\n"


class _Value(_Lines):
    """The value and a newline."""

    def print(self, table: pa.Table) -> None:
        out = sys.stdout.buffer
        for value in table.column("value").to_pylist():
            out.write((value or b"") + b"\n")
        out.flush()


class _Arrow:
    """An Arrow IPC stream."""

    def __init__(self) -> None:
        self._writer: Any = None

    def print(self, table: pa.Table) -> None:
        import pyarrow as pa

        if self._writer is None:
            self._writer = pa.ipc.new_stream(sys.stdout.buffer, table.schema)
        self._writer.write_table(table)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            sys.stdout.buffer.flush()


_PRINTERS: dict[Form, type[_Lines] | type[_Arrow]] = {
    Form.TABLE: _Table,
    Form.JSON: _Json,
    Form.VALUE: _Value,
    Form.ARROW: _Arrow,
}


def _time(timestamp_ms: int) -> datetime | None:
    """Convert to UTC; None for a producer's timestamp outside the calendar."""
    try:
        return _EPOCH + timedelta(milliseconds=timestamp_ms)
    except OverflowError:
        return None


def _text(data: bytes | None) -> str:
    return "" if data is None else data.decode("utf-8", "backslashreplace")


def _json_of(data: bytes | None) -> object:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
