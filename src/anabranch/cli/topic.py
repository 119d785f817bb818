"""`anabranch topic`: create, resize, describe, list, delete, and configure topics."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.cli.output import DEFAULT_SERVERS, AsJson, Servers, note, print_json, print_table, progress
from anabranch.machines.lineage import UNKNOWN_END

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anabranch.client import ResizeDescription, TopicDescription
    from anabranch.client.sync import Admin
    from anabranch.machines.controller.layouts import Layout
    from anabranch.machines.lineage import GateWait

app = typer.Typer(no_args_is_help=True, help="Create, resize, describe, list, delete and configure topics.")

LAYOUTS_SHOWN_MAX = 12
SEGMENTS_SHOWN_MAX = 4
WAITS_SHOWN_MAX = 6
"""How much of a long history people are shown of one topic or partition; a program gets more."""

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")]
Names = Annotated[list[str], typer.Argument(metavar="TOPIC...", help="Names of topics.")]
Partitions = Annotated[int, typer.Option("--partitions", "-p", min=1, help="The partition count.")]


def _admin(servers: str) -> Admin:
    from anabranch.client.sync import Admin

    return Admin(bootstrap_servers=servers)


def pairs(given: list[str] | None) -> dict[str, str]:
    """Read NAME=VALUE options."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"expected NAME=VALUE, found {text!r}")
        found[name.strip()] = value.strip()
    return found


@app.command()
def create(
    topic: Name,
    partitions: Partitions = 1,
    config: Annotated[list[str] | None, typer.Option("--config", "-c", help="A setting, as NAME=VALUE.")] = None,
    if_not_exists: Annotated[bool, typer.Option("--if-not-exists", help="Do nothing if the topic exists.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Create a topic. Its partition count is also the minimum that the topic can be resized to."""
    created = True
    with _admin(servers) as admin:
        try:
            admin.create_topics(topic, partitions=partitions, configs=pairs(config))
        except ApiError as error:
            if not if_not_exists or error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
            created = False
    if as_json:
        print_json({"topic": topic, "partitions": partitions, "created": created})
    else:
        typer.echo(f"Created {topic}, partitions: {partitions}." if created else f"{topic} exists already.")


@app.command()
def resize(
    topic: Name,
    partitions: Annotated[int | None, typer.Option("--partitions", "-p", min=1, help="The partition count.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Undo the resize that runs, if it still can be.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Change the partition count of a topic while producers and consumers use it. Every key stays in order."""
    if cancel is (partitions is not None):
        raise typer.BadParameter("give either --partitions or --cancel")
    if partitions is None:
        _cancel_resize(topic, servers, as_json=as_json)
        return
    with _admin(servers) as admin, progress(f"resizing {topic}", None):
        before = admin.topics([topic])[topic].partition_count
        began = time.perf_counter()
        admin.resize(topic, partitions)
        took_ms = (time.perf_counter() - began) * 1000
        retiring = sorted(p.partition for p in admin.topics([topic])[topic].partitions.values() if p.retiring)
    if as_json:
        print_json({"topic": topic, "from": before, "to": partitions, "took_ms": took_ms, "retiring": retiring})
        return
    typer.echo(f"Resized {topic}: {before} → {partitions} partitions in {took_ms:.0f} ms.")
    if retiring:
        listed = ", ".join(map(str, retiring))
        typer.echo(f"Retiring partitions, removed when empty: {listed}. Consumers drain them first; nothing is lost.")


def _cancel_resize(topic: str, servers: str, *, as_json: bool) -> None:
    with _admin(servers) as admin:
        admin.cancel_resize(topic)
        count = admin.topics([topic])[topic].partition_count
    if as_json:
        print_json({"topic": topic, "canceled": True, "partitions": count})
    else:
        typer.echo(f"Canceled the resize of {topic}: it has {count} partitions, as before.")


@app.command()
def describe(
    topics: Names,
    load: Annotated[
        bool, typer.Option("--load", help="Show what is appended to each part of the key space, and even shares of it.")
    ] = False,
    shares: Annotated[int, typer.Option("--shares", min=1, max=1000, help="With --load: how many even shares.")] = 4,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Show layouts, partitions, segments, leader epochs, and the offsets that a consumer waits for.

    With --load: where in the key space records are appended, of topics with accept.range.fetch=true.
    """
    if load:
        describe_load(topics, shares, servers, as_json=as_json)
        return
    with _admin(servers) as admin:
        described = admin.describe_topics(topics)
        configs = {name: admin.describe_configs("topic", name) for name in described}
    if as_json:
        print_json([_as_json(found, configs[name]) for name, found in described.items()])
        return
    for name, found in described.items():
        own = [f"{entry.name}={entry.value}" for entry in configs[name].values() if not entry.is_default]
        layouts = _counts(found.info.layouts)
        typer.echo(f"{name}  (id {found.info.topic_id})")
        typer.echo(f"  partitions {found.lineage.count}, at creation {found.lineage.initial}, layouts {layouts}")
        for line in resize_lines(found.resize):
            typer.echo(f"  {line}")
        typer.echo(f"  key order {'kept across resizes' if found.ordered else 'not kept across resizes'}")
        typer.echo(f"  settings {', '.join(own) if own else 'all at their defaults'}\n")
        rows = []
        for partition in found.partitions:
            shown = partition.segments[-SEGMENTS_SHOWN_MAX:]
            segments = [f"{s.layout}: {s.start}..{'' if s.end is None else s.end}" for s in shown]
            if partition.segment_count > len(shown):
                segments.insert(0, f"({partition.segment_count - len(shown)} before)")
            waits = ", ".join(_wait(wait) for wait in partition.waits[:WAITS_SHOWN_MAX])
            if len(partition.waits) > WAITS_SHOWN_MAX:
                waits += f" and {len(partition.waits) - WAITS_SHOWN_MAX} more"
            offline = partition.offsets.end < 0
            state = "offline" if offline else "retiring" if partition.info.retiring else "live"
            span = "" if offline else f"{partition.offsets.start}..{partition.offsets.end}"
            info = partition.info
            rows.append(
                (info.partition, state, info.leader, info.leader_epoch, span, "  ".join(segments), waits or "nothing")
            )
        columns = ("partition", "state", "leader", "epoch", "offsets", "segments (layout: offsets)")
        print_table((*columns, "a consumer at the log start waits for"), rows)
        typer.echo()


def describe_load(topics: Sequence[str], shares: int, servers: str, *, as_json: bool) -> None:
    """Print the load of topics by key."""
    from anabranch.cli.load import load_as_json, load_lines

    with _admin(servers) as admin:
        found = admin.describe_load(topics)
    if as_json:
        print_json([load_as_json(tp, load, shares) for tp, load in found.items()])
        return
    for tp, load in found.items():
        for line in load_lines(tp, load, shares):
            typer.echo(line)


def resize_lines(resize: ResizeDescription | None) -> list[str]:
    """Return what `topic describe` says of the resize that runs, and of every partition that holds it up."""
    if resize is None:
        return []
    lines = [f"being resized from {resize.from_count} to {resize.to_count} partitions, phase {resize.phase}"]
    for wait in resize.waits:
        where = f"partition {wait.partition} on broker {wait.broker_id}"
        lines.append(f"  waits for {where} since {wait.waiting_ms / 1000:.0f} s: {wait.reason}")
    if resize.wait_count > len(resize.waits):
        lines.append(f"  and for {resize.wait_count - len(resize.waits)} more partitions")
    if resize.wait_count:
        cancel = f", or cancel the resize: anabranch topic resize {resize.topic} --cancel" if resize.cancelable else ""
        lines.append(f"  bring {'it' if resize.wait_count == 1 else 'them'} back{cancel}")
    return lines


def _counts(layouts: Sequence[Layout]) -> str:
    """The counts of the newest layouts, and how many there are if that is not all."""
    shown = " → ".join(str(layout.count) for layout in layouts[-LAYOUTS_SHOWN_MAX:])
    if len(layouts) <= LAYOUTS_SHOWN_MAX:
        return shown
    return f"… → {shown} ({len(layouts)} with records, the newest is number {layouts[-1].number})"


def _wait(wait: GateWait) -> str:
    return f"{wait.partition}, which is offline" if wait.offset == UNKNOWN_END else f"{wait.partition} to {wait.offset}"


def _as_json(found: TopicDescription, configs: dict[str, Any]) -> dict[str, Any]:
    return {
        "topic": found.info.name,
        "topic_id": str(found.info.topic_id),
        "initial_partition_count": found.lineage.initial,
        "partition_count": found.lineage.count,
        "layouts": [layout.count for layout in found.info.layouts],
        "layout_numbers": [layout.number for layout in found.info.layouts],
        "ordered": found.ordered,
        "resize": None if found.resize is None else dataclasses.asdict(found.resize),
        "configs": {name: entry.value for name, entry in configs.items() if not entry.is_default},
        "partitions": [
            {
                "partition": partition.info.partition,
                "retiring": partition.info.retiring,
                "leader": partition.info.leader,
                "leader_epoch": partition.info.leader_epoch,
                "offline": partition.offsets.end < 0,
                "log_start": partition.offsets.start,
                "log_end": partition.offsets.end,
                "segments": [
                    {"layout": segment.layout, "start": segment.start, "end": segment.end}
                    for segment in partition.segments
                ],
                "segment_count": partition.segment_count,
                "waits": [wait._asdict() for wait in partition.waits],
            }
            for partition in found.partitions
        ],
    }


@app.command(name="list")
def list_topics(
    internal: Annotated[bool, typer.Option("--internal", help="Include internal topics.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """List the topics."""
    with _admin(servers) as admin:
        found = [info for info in admin.topics().values() if internal or not info.is_internal]
    rows = [
        (
            info.name,
            info.partition_count,
            sum(partition.retiring for partition in info.partitions.values()),
            info.initial_partition_count,
            len(info.layouts),
        )
        for info in sorted(found, key=lambda info: info.name)
    ]
    columns = ("topic", "partitions", "retiring", "at creation", "layouts")
    if as_json:
        print_json(
            [dict(zip(("topic", "partitions", "retiring", "initial", "layouts"), row, strict=True)) for row in rows]
        )
    elif rows:
        print_table(columns, rows)
    else:
        note("No topics. Create one: anabranch topic create NAME --partitions 2")


@app.command()
def delete(
    topics: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Delete topics with all their records."""
    if not yes and not typer.confirm(f"Delete {', '.join(topics)} with all records?", err=True):
        raise AnabranchError("Nothing was deleted.")
    with _admin(servers) as admin:
        admin.delete_topics(topics)
    if as_json:
        print_json({"deleted": topics})
    else:
        typer.echo(f"Deleted {', '.join(topics)}.")


@app.command()
def config(
    topic: Name,
    given: Annotated[list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Settings to change.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a setting, as NAME=VALUE.")] = None,
    unset: Annotated[list[str] | None, typer.Option("--unset", help="Reset a setting to its default.")] = None,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Show a topic's settings, or change them."""
    changes: dict[str, str | None] = {**pairs(given), **pairs(set_), **dict.fromkeys(unset or ())}
    with _admin(servers) as admin:
        if changes:
            admin.alter_configs("topic", topic, changes)
        entries = admin.describe_configs("topic", topic)
    if as_json:
        print_json(
            {name: {"value": entry.value, "is_default": entry.is_default} for name, entry in sorted(entries.items())}
        )
        return
    rows = [(name, entry.value, "" if entry.is_default else "set") for name, entry in sorted(entries.items())]
    print_table(("setting", "value", ""), rows)
