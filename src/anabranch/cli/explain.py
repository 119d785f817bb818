"""`anabranch explain`: where the records of a key lie."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.output import DEFAULT_SERVERS, AsJson, Servers, print_json, print_table

if TYPE_CHECKING:
    from anabranch.client import KeyHistory, Stay

STAYS_SHOWN_MAX = 40
"""Rows for people; a program gets all of them."""


def explain(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key, as text.")],
    is_hex: Annotated[bool, typer.Option("--hex", help="KEY is hexadecimal digits, two for each byte.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Show where a key lived, layout by layout, and which partition holds it now."""
    from anabranch.client.sync import Admin

    try:
        raw = bytes.fromhex(key) if is_hex else key.encode()
    except ValueError as error:
        raise typer.BadParameter(f"expected hexadecimal digits, two for each byte, found {key!r}") from error
    with Admin(bootstrap_servers=servers) as admin:
        history = admin.explain(topic, raw)
    if as_json:
        print_json(_as_json(topic, history))
        return
    held = history.interval
    typer.echo(f"{topic}, key {raw!r}: partition {history.partition}")
    typer.echo(f"  hash {history.hash}, family {history.family}, spread {history.spread}")
    typer.echo(f"  partition {history.partition} holds spreads {held.start} to {held.end}\n")
    rows = [_row(stay) for stay in history.stays]
    left_out = len(rows) - STAYS_SHOWN_MAX
    if left_out > 0:
        typer.echo(f"  {left_out} older layouts are left out; --json has them\n")
    print_table(("layout", "partitions", "partition", "offsets", "leader epochs", "state"), rows[-STAYS_SHOWN_MAX:])


def _row(stay: Stay) -> tuple[Any, ...]:
    span = "" if stay.start is None else f"{stay.start}..{stay.end}"
    epochs = f"{stay.first_epoch}" if stay.first_epoch == stay.last_epoch else f"{stay.first_epoch}..{stay.last_epoch}"
    known = stay.last_epoch is not None
    return (stay.layout, stay.partition_count, stay.partition, span, epochs if known else "", stay.state.value)


def _as_json(topic: str, history: KeyHistory) -> dict[str, Any]:
    return {
        "topic": topic,
        "key_hex": history.key.hex(),
        "hash": history.hash,
        "family": history.family,
        "spread": history.spread,
        "partition": history.partition,
        "interval": list(history.interval),
        "layouts": [stay._asdict() for stay in history.stays],
    }
