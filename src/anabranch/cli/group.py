"""`anabranch group`: list, describe and delete groups, reset their offsets, validate subscription patterns."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.cli.output import DEFAULT_SERVERS, AsJson, Servers, note, print_json, print_table
from anabranch.machines.keyspace import SPACE_END, Interval

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anabranch.client import GroupDescription, MemberDescription, OffsetAndMetadata
    from anabranch.client.sync import Admin
    from anabranch.machines.key_ranges import Ranges

app = typer.Typer(
    no_args_is_help=True, help="List, describe and delete groups, reset their offsets, validate patterns."
)

EARLIEST, LATEST = -2, -1
MEMBER_COLUMNS = ("member", "client", "epoch", "subscribed", "current", "target", "pending", "revoking")
WAIT_COLUMNS = ("waiting partition", "gate", "waited", "waits on", "owner", "records left", "records/s")
OFFSET_COLUMNS = ("topic", "partition", "committed offset", "log end offset", "lag", "member")
SHARE_COLUMNS = ("topic", "partition", "keys", "next offset", "member")
GAP_COLUMNS = ("topic", "partition", "missing offsets", "offsets", "done up to", "member")
SLICE_COLUMNS = ("topic", "partition", "member", "slices", "records", "offsets")
GAPS_SHOWN = 10
"""Of one partition; the document has all."""
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
Groups = Annotated[list[str], typer.Argument(metavar="GROUP...", help="Names of groups.")]
SomeGroups = Annotated[
    list[str] | None, typer.Argument(metavar="[GROUP...]", help="Names of groups; with --type by default all.")
]


def _admin(servers: str) -> Admin:
    from anabranch.client.sync import Admin

    return Admin(bootstrap_servers=servers)


@app.command(name="list")
def list_groups(
    type_: Annotated[
        list[str] | None, typer.Option("--type", help="Only groups of these types: classic,consumer.")
    ] = None,
    state: Annotated[
        list[str] | None, typer.Option("--state", help="Only groups in these states: stable,empty, ...")
    ] = None,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """List the groups."""
    with _admin(servers) as admin:
        found = admin.list_groups(types=_split(type_), states=_split(state))
    if as_json:
        print_json([group._asdict() for group in found])
    elif found:
        print_table(("group", "type", "state", "protocol"), found)
    else:
        note("No such groups. A consumer creates one: anabranch consume TOPIC --group NAME")


def _split(given: list[str] | None) -> list[str]:
    """Read an option that may be repeated and takes names with commas."""
    return [name.strip() for text in given or () for name in text.split(",") if name.strip()]


@app.command()
def describe(
    groups: SomeGroups = None,
    type_: Annotated[
        list[str] | None, typer.Option("--type", help="Only groups of these types: classic,consumer.")
    ] = None,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Show members with their current and target assignments, committed offsets and lag, and partitions that wait."""
    types = _split(type_)
    if not groups and not types:
        raise typer.BadParameter("name at least one group, or give --type for all groups of a type")
    documents: list[dict[str, Any]] = []
    with _admin(servers) as admin:
        for name, group in admin.describe_groups(_of_types(admin, groups or [], types)).items():
            offsets = _offsets(admin, name, group)
            documents.append(_document(group, offsets))
            if not as_json:
                _print(group, offsets)
    if as_json:
        print_json(documents)


def _of_types(admin: Admin, groups: list[str], types: list[str]) -> list[str]:
    """Return the named groups, or all, of these types. Raises `AnabranchError` for a named group of another type."""
    if not types:
        return groups
    found = {group.group_id: group.type for group in admin.list_groups()}
    wanted = {name.lower() for name in types}
    for name in groups:
        if name in found and found[name] not in wanted:
            raise AnabranchError(f"group '{name}' is of type {found[name]}, not {' or '.join(types)}; leave --type out")
    return groups or [name for name, kind in found.items() if kind in wanted]


def _offsets(admin: Admin, name: str, group: GroupDescription) -> list[dict[str, Any]]:
    """Describe every partition that is assigned to a member or has a committed offset, in order."""
    from anabranch.client.admin.progress import owners_of, sorted_by_keys

    committed = admin.list_group_offsets(name)
    assigned = {tp for member in group.members for tp in member.assigned}
    targets = {tp: member for member in group.members for tp in member.target}
    partitions = sorted({*committed, *assigned, *targets})
    existing = _existing(admin, partitions)
    starts = admin.list_offsets(dict.fromkeys(existing, EARLIEST)) if existing else {}
    ends = admin.list_offsets(dict.fromkeys(existing, LATEST)) if existing else {}
    slices = admin.describe_slices(name, existing)
    rows: list[dict[str, Any]] = []
    for tp in partitions:
        offset = committed[tp].offset if tp in committed else None
        end = ends[tp].offset if tp in ends else None
        start = starts[tp].offset if tp in starts else None
        lag = None if offset is None or end is None else max(0, end - offset)
        at, target = _of(committed, tp), targets.get(tp)
        sharers = sorted_by_keys(group.members, tp)
        parts = [(keys, owners_of(Interval(*keys), tp, sharers), following) for *keys, following in at.shares]
        rows.append(
            {
                "topic": tp.topic,
                "partition": tp.partition,
                "committed": offset,
                "log_start": start,
                "log_end": end,
                "lag": lag,
                "shares": [
                    {"start": first, "end": last, "offset": following, "owner": next(iter(of), None), "owners": of}
                    for (first, last), of, following in parts
                ],
                "ranges": [list(bounds) for bounds in at.ranges],
                "slices": [it._asdict() for it in slices.get(tp, ())],
                "gaps": [[gap.start, gap.end] for gap in at.gaps],
                "gap_owners": [list(gap.owners) for gap in at.gaps],
                "owner": sharers[0].member_id if sharers else None,
                "owners": [member.member_id for member in sharers],
                "target": None if target is None else target.member_id,
            }
        )
    return rows


def _of(committed: Mapping[TopicPartition, OffsetAndMetadata], tp: TopicPartition) -> OffsetAndMetadata:
    from anabranch.client import OffsetAndMetadata

    return committed[tp] if tp in committed else OffsetAndMetadata(-1)


def _existing(admin: Admin, partitions: Iterable[TopicPartition]) -> list[TopicPartition]:
    known = admin.topics()
    return [tp for tp in partitions if tp.topic in known and tp.partition in known[tp.topic].partitions]


def _document(group: GroupDescription, offsets: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "group": group.group_id,
        "type": group.type,
        "state": group.state,
        "assignor": group.assignor,
        "group_epoch": group.group_epoch,
        "assignment_epoch": group.assignment_epoch,
        "coordinator": group.coordinator,
        "members": [
            {
                "member_id": member.member_id,
                "instance_id": member.instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "type": member.type,
                "epoch": member.epoch,
                "topics": list(member.topics),
                "pattern": member.pattern,
                "current": sorted(member.assigned),
                "target": sorted(member.target),
                "pending": sorted(member.pending),
                "revoking": sorted(member.revoking),
                "key_ranges": [
                    {"topic": tp.topic, "partition": tp.partition, "start": it.start, "end": it.end}
                    for tp, ranges in sorted(member.key_ranges.items())
                    for it in ranges
                ],
            }
            for member in group.members
        ],
        "offsets": offsets,
        "waiting": [
            {
                "topic": one.partition.topic,
                "partition": one.partition.partition,
                "waits_ms": one.waits_ms,
                "opened_by_time": one.opened_by_time,
                "waits_on": [
                    {
                        "partition": wait.partition.partition,
                        "owner": wait.member_id or None,
                        "records_left": wait.records_left,
                        "records_per_second": round(wait.records_per_second, 1),
                    }
                    for wait in one.waits_on
                ],
            }
            for one in group.waiting
        ],
        "waiting_omitted": group.waiting_omitted,
    }


def _print_progress(offsets: list[dict[str, Any]], names: Mapping[str, str]) -> None:
    """Print how far each range of keys is, and what is missing below work that was finished out of turn."""
    shares = [
        (
            row["topic"],
            row["partition"],
            _percent(it["start"], it["end"]),
            it["offset"],
            _names(names, it["owners"]),
        )
        for row in offsets
        for it in row.get("shares", ())
    ]
    if shares:
        typer.echo()
        print_table(SHARE_COLUMNS, shares)
    held = [
        (
            *(row["topic"], row["partition"], names.get(it["member_id"], it["member_id"]), it["slices"], it["records"]),
            _span([it["first_offset"], it["last_offset"]]),
        )
        for row in offsets
        for it in row.get("slices", ())
    ]
    if held:
        typer.echo()
        print_table(SLICE_COLUMNS, held)
    missing = [
        (
            *(row["topic"], row["partition"], _span(gap), gap[1] - gap[0] + 1, done[1]),
            _names(names, owners) or "no member",
        )
        for row in offsets
        for gap, owners, done in list(
            zip(row.get("gaps", ()), row.get("gap_owners", ()), row.get("ranges", ()), strict=True)
        )[:GAPS_SHOWN]
    ]
    if missing:
        typer.echo()
        print_table(GAP_COLUMNS, missing)
    omitted = sum(max(0, len(row.get("gaps", ())) - GAPS_SHOWN) for row in offsets)
    if omitted:
        note(f"{omitted} more gaps; --json shows all.")


def _names(names: Mapping[str, str], members: Iterable[str]) -> str:
    """Name members, those by their id that have left the group since it was described."""
    return ", ".join(names.get(member, member) for member in members)


def _percent(start: int, end: int) -> str:
    """A range of keys as a part of the key space."""
    size = (SPACE_END + 1) / 100
    return f"{start / size:.1f}-{(end + 1) / size:.1f} %"


def _span(bounds: list[int]) -> str:
    first, last = bounds
    return str(first) if first == last else f"{first}-{last}"


def _print(group: GroupDescription, offsets: list[dict[str, Any]]) -> None:
    epochs = f", epoch {group.group_epoch}, assigned at {group.assignment_epoch}" if group.group_epoch >= 0 else ""
    typer.echo(f"{group.group_id}  ({group.type}, {group.state}, assignor {group.assignor or 'none'}{epochs})")
    typer.echo(f"  coordinator {group.coordinator}\n")
    if group.members:
        rows = [_row(member) for member in group.members]
        print_table(MEMBER_COLUMNS, rows)
    else:
        typer.echo("No members.")
    if offsets:
        typer.echo()
        names = {member.member_id: _name(member) for member in group.members}
        table = [
            (
                *(row["topic"], row["partition"], row["committed"], row["log_end"], row["lag"]),
                ", ".join(names.get(owner, "") for owner in row.get("owners", [row["owner"]])),
            )
            for row in offsets
        ]
        print_table(OFFSET_COLUMNS, table)
        _print_progress(offsets, names)
    if group.waiting:
        typer.echo()
        print_table(WAIT_COLUMNS, _waits(group))
    if group.waiting_omitted:
        note(f"{group.waiting_omitted} more partitions wait.")
    typer.echo()


def _waits(group: GroupDescription) -> list[tuple[object, ...]]:
    """One row for each partition that is waited on."""
    names = {member.member_id: _name(member) for member in group.members}
    return [
        (
            str(one.partition) if place == 0 else "",
            ("open by time" if one.opened_by_time else "closed") if place == 0 else "",
            f"{one.waits_ms / 1000:.1f} s" if place == 0 else "",
            str(wait.partition),
            names.get(wait.member_id, "nobody"),
            "log offline" if wait.records_left is None else wait.records_left,
            f"{wait.records_per_second:.1f}",
        )
        for one in group.waiting
        for place, wait in enumerate(one.waits_on)
    ]


def _name(member: MemberDescription) -> str:
    return member.instance_id or member.member_id


def _row(member: MemberDescription) -> tuple[object, ...]:
    epoch = "" if member.epoch < 0 else member.epoch
    subscribed = f"/{member.pattern}/" if member.pattern else ", ".join(member.topics)
    client = f"{member.client_id} {member.client_host}"
    assignments: tuple[tuple[Iterable[TopicPartition], Mapping[TopicPartition, Ranges]], ...] = (
        (member.assigned, member.key_ranges),
        (member.target, member.target_key_ranges),
        (member.pending, {}),
        (member.revoking, {}),
    )
    return (_name(member), client, epoch, subscribed, *(_brief(*assignment) for assignment in assignments))


def _brief(partitions: Iterable[TopicPartition], keys: Mapping[TopicPartition, Ranges]) -> str:
    """Write partitions as `flights 0-2,5`, and those that are shared as `flights 6 (0.0-50.0 %)`."""
    topics: dict[str, list[int]] = {}
    for tp in sorted(set(partitions) - keys.keys()):
        topics.setdefault(tp.topic, []).append(tp.partition)
    parts = (
        f"{tp.topic} {tp.partition} ({', '.join(_percent(it.start, it.end) for it in ranges)})"
        for tp, ranges in sorted(keys.items())
    )
    return "  ".join((*(f"{topic} {_ranges(numbers)}" for topic, numbers in topics.items()), *parts))


def _ranges(numbers: list[int]) -> str:
    spans: list[tuple[int, int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1] = (spans[-1][0], number)
        else:
            spans.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


@app.command(name="reset-offsets")
def reset_offsets(
    group: Group,
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", help="TOPIC or TOPIC:0,1; by default every partition with a committed offset."),
    ] = None,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the log start.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the log end.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_datetime: Annotated[
        str | None,
        typer.Option("--to-datetime", help="To the first record of this time or later, as 2026-01-31T12:00:00Z."),
    ] = None,
    shift_by: Annotated[int | None, typer.Option("--shift-by", help="By so many records, back if negative.")] = None,
    execute: Annotated[
        bool, typer.Option("--execute/--dry-run", help="Reset the offsets, or only print the new ones.")
    ] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Reset the committed offsets of a group without members. Without --execute the new offsets are only printed."""
    ways = [to_earliest, to_latest, to_offset is not None, to_datetime is not None, shift_by is not None]
    if sum(ways) != 1:
        raise typer.BadParameter(
            "give exactly one of --to-earliest, --to-latest, --to-offset, --to-datetime and --shift-by"
        )
    with _admin(servers) as admin:
        committed = admin.list_group_offsets(group)
        wanted = _chosen(admin, topic, committed)
        if not wanted:
            raise AnabranchError(f"Group '{group}' has no committed offsets. Name the topics with --topic.")
        starts = {tp: found.offset for tp, found in admin.list_offsets(dict.fromkeys(wanted, EARLIEST)).items()}
        ends = {tp: found.offset for tp, found in admin.list_offsets(dict.fromkeys(wanted, LATEST)).items()}
        if to_datetime is not None:
            by_time = admin.list_offsets(dict.fromkeys(wanted, _timestamp(to_datetime)))
            goals = {tp: found.offset if found.offset >= 0 else ends[tp] for tp, found in by_time.items()}
        elif shift_by is not None:
            goals = {tp: (committed[tp].offset if tp in committed else starts[tp]) + shift_by for tp in wanted}
        elif to_offset is not None:
            goals = dict.fromkeys(wanted, to_offset)
        else:
            goals = starts if to_earliest else ends
        goals = {tp: min(max(goals[tp], starts[tp]), ends[tp]) for tp in wanted}
        if execute:
            admin.alter_group_offsets(group, goals)
    rows = [
        (tp.topic, tp.partition, committed[tp].offset if tp in committed else None, goal, ends[tp] - goal)
        for tp, goal in goals.items()
    ]
    if as_json:
        names = ("topic", "partition", "from", "to", "lag")
        print_json({"executed": execute, "offsets": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    print_table(("topic", "partition", "from", "to", "lag"), rows)
    note("Offsets reset." if execute else "Nothing was changed. Add --execute to reset the offsets.")


def _chosen(admin: Admin, named: list[str] | None, committed: Iterable[TopicPartition]) -> list[TopicPartition]:
    if not named:
        return _existing(admin, sorted(committed))
    wanted: list[TopicPartition] = []
    for text in named:
        name, colon, listed = text.partition(":")
        existing = admin.topics([name])[name].partitions
        try:
            numbers = [int(number) for number in listed.split(",")] if colon else list(existing)
        except ValueError:
            raise typer.BadParameter(f"expected TOPIC or TOPIC:0,1,..., found {text!r}") from None
        if absent := sorted(set(numbers) - set(existing)):
            raise AnabranchError(
                f"Topic {name} has no partition {', '.join(map(str, absent))}; it has {len(existing)}."
            )
        wanted += [TopicPartition(name, number) for number in numbers]
    return wanted


def _timestamp(text: str) -> int:
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"expected a date and time as 2026-01-31T12:00:00Z, found {text!r}") from None
    return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp() * 1000)


@app.command()
def delete(
    groups: Groups,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Delete groups without members, and their committed offsets."""
    if not yes and not typer.confirm(f"Delete {', '.join(groups)} with all committed offsets?", err=True):
        raise AnabranchError("Nothing was deleted.")
    with _admin(servers) as admin:
        admin.delete_groups(groups)
    if as_json:
        print_json({"deleted": groups})
    else:
        typer.echo(f"Deleted {', '.join(groups)}.")


@app.command(name="validate-regex")
def validate_regex(
    pattern: Annotated[str, typer.Argument(metavar="PATTERN", help="An RE2 regular expression.")],
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Validate a subscription pattern, and list the existing topics whose whole name matches."""
    from anabranch.base.patterns import compile_pattern

    matches = compile_pattern(pattern)
    with _admin(servers) as admin:
        matched = [name for name in admin.list_topics() if matches(name)]
    if as_json:
        print_json({"pattern": pattern, "valid": True, "topics": matched})
    elif matched:
        typer.echo("\n".join(matched))
    else:
        note("The pattern is valid. No existing topic matches.")
