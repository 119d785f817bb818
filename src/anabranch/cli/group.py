"""`anabranch group`: list, describe and delete groups, move their offsets, try out subscription patterns."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.cli.output import DEFAULT_SERVERS, AsJson, Servers, note, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterable

    from anabranch.client import GroupDescription, MemberDescription
    from anabranch.client.sync import Admin

app = typer.Typer(no_args_is_help=True, help="List, describe and delete groups, and move their offsets.")

EARLIEST, LATEST = -2, -1
Group = Annotated[str, typer.Argument(metavar="GROUP", help="The group's name.")]
Groups = Annotated[list[str], typer.Argument(metavar="GROUP...", help="Names of groups.")]


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
        note("There are no such groups. A consumer makes one: anabranch consume TOPIC --group NAME")


def _split(given: list[str] | None) -> list[str]:
    """Read an option that may be repeated and takes names with commas."""
    return [name.strip() for text in given or () for name in text.split(",") if name.strip()]


@app.command()
def describe(groups: Groups, servers: Servers = DEFAULT_SERVERS, as_json: AsJson = False) -> None:
    """Show members (what they read now, beside what they are to read), offsets, and how far they are behind."""
    documents: list[dict[str, Any]] = []
    with _admin(servers) as admin:
        for name, group in admin.describe_groups(groups).items():
            offsets = _offsets(admin, name, group)
            documents.append(_document(group, offsets))
            if not as_json:
                _print(group, offsets)
    if as_json:
        print_json(documents)


def _offsets(admin: Admin, name: str, group: GroupDescription) -> list[dict[str, Any]]:
    """Every partition that the group reads or has read, in order."""
    committed = admin.list_group_offsets(name)
    owners = {tp: member for member in group.members for tp in member.assigned}
    heirs = {tp: member for member in group.members for tp in member.target}
    wanted = sorted({*committed, *owners, *heirs})
    there = _existing(admin, wanted)
    starts = admin.list_offsets(dict.fromkeys(there, EARLIEST)) if there else {}
    ends = admin.list_offsets(dict.fromkeys(there, LATEST)) if there else {}
    rows: list[dict[str, Any]] = []
    for tp in wanted:
        at = committed.get(tp)
        end = ends[tp].offset if tp in ends else None
        start = starts[tp].offset if tp in starts else None
        behind = None if at is None or end is None else max(0, end - at.offset)
        owner, heir = owners.get(tp), heirs.get(tp)
        rows.append(
            {
                "topic": tp.topic,
                "partition": tp.partition,
                "committed": None if at is None else at.offset,
                "log_start": start,
                "log_end": end,
                "lag": behind,
                "owner": None if owner is None else owner.member_id,
                "target": None if heir is None else heir.member_id,
            }
        )
    return rows


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
            }
            for member in group.members
        ],
        "offsets": offsets,
    }


def _print(group: GroupDescription, offsets: list[dict[str, Any]]) -> None:
    epochs = f", epoch {group.group_epoch}, assigned at {group.assignment_epoch}" if group.group_epoch >= 0 else ""
    typer.echo(f"{group.group_id}  ({group.type}, {group.state}, assignor {group.assignor or 'none'}{epochs})")
    typer.echo(f"  coordinator {group.coordinator}\n")
    if group.members:
        rows = [_row(member) for member in group.members]
        print_table(("member", "client", "epoch", "reads", "current", "target", "pending", "to let go"), rows)
    else:
        typer.echo("It has no members.")
    if offsets:
        typer.echo()
        names = {member.member_id: _name(member) for member in group.members}
        table = [
            (
                *(row["topic"], row["partition"], row["committed"], row["log_end"], row["lag"]),
                names.get(row["owner"], ""),
            )
            for row in offsets
        ]
        print_table(("topic", "partition", "committed", "log end", "lag", "member"), table)
    typer.echo()


def _name(member: MemberDescription) -> str:
    return member.instance_id or member.member_id


def _row(member: MemberDescription) -> tuple[object, ...]:
    epoch = "" if member.epoch < 0 else member.epoch
    reads = f"/{member.pattern}/" if member.pattern else ", ".join(member.topics)
    client = f"{member.client_id} {member.client_host}"
    sets = (member.assigned, member.target, member.pending, member.revoking)
    return (_name(member), client, epoch, reads, *(_brief(partitions) for partitions in sets))


def _brief(partitions: Iterable[TopicPartition]) -> str:
    """`flights 0-2,5`."""
    topics: dict[str, list[int]] = {}
    for tp in sorted(partitions):
        topics.setdefault(tp.topic, []).append(tp.partition)
    return "  ".join(f"{topic} {_ranges(numbers)}" for topic, numbers in topics.items())


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
        list[str] | None, typer.Option("--topic", help="TOPIC or TOPIC:0,1; by default all with an offset.")
    ] = None,
    to_earliest: Annotated[bool, typer.Option("--to-earliest", help="To the log start.")] = False,
    to_latest: Annotated[bool, typer.Option("--to-latest", help="To the log end.")] = False,
    to_offset: Annotated[int | None, typer.Option("--to-offset", min=0, help="To this offset.")] = None,
    to_datetime: Annotated[
        str | None, typer.Option("--to-datetime", help="To the first record at or after, as 2026-01-31T12:00:00Z.")
    ] = None,
    shift_by: Annotated[int | None, typer.Option("--shift-by", help="Forward, or back if negative.")] = None,
    execute: Annotated[bool, typer.Option("--execute/--dry-run", help="Do it, or only show it.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Move a group's offsets. Only shows what would be done, unless you say --execute. Stop its members first."""
    ways = [to_earliest, to_latest, to_offset is not None, to_datetime is not None, shift_by is not None]
    if sum(ways) != 1:
        raise typer.BadParameter(
            "say one of --to-earliest, --to-latest, --to-offset, --to-datetime and --shift-by, to tell where to"
        )
    with _admin(servers) as admin:
        committed = admin.list_group_offsets(group)
        wanted = _chosen(admin, topic, committed)
        if not wanted:
            raise AnabranchError(f"Group '{group}' has no offsets to move. Say which with --topic.")
        starts = {tp: at.offset for tp, at in admin.list_offsets(dict.fromkeys(wanted, EARLIEST)).items()}
        ends = {tp: at.offset for tp, at in admin.list_offsets(dict.fromkeys(wanted, LATEST)).items()}
        if to_datetime is not None:
            found = admin.list_offsets(dict.fromkeys(wanted, _timestamp(to_datetime)))
            goals = {tp: at.offset if at.offset >= 0 else ends[tp] for tp, at in found.items()}
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
    note("Done." if execute else "Nothing was changed. To do this, add --execute.")


def _chosen(admin: Admin, named: list[str] | None, committed: Iterable[TopicPartition]) -> list[TopicPartition]:
    if not named:
        return _existing(admin, sorted(committed))
    wanted: list[TopicPartition] = []
    for text in named:
        name, colon, listed = text.partition(":")
        there = admin.topics([name])[name].partitions
        try:
            numbers = [int(number) for number in listed.split(",")] if colon else list(there)
        except ValueError:
            raise typer.BadParameter(f"expected TOPIC or TOPIC:0,1,..., found {text!r}") from None
        if absent := sorted(set(numbers) - set(there)):
            raise AnabranchError(f"Topic {name} has no partition {', '.join(map(str, absent))}; it has {len(there)}.")
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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Delete groups that have no members, with their offsets."""
    if not yes and not typer.confirm(f"Delete {', '.join(groups)} with all offsets?", err=True):
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
    """Say whether a pattern can be subscribed to, and which topics it matches as a whole."""
    from anabranch.base.patterns import compile_pattern

    matches = compile_pattern(pattern)
    with _admin(servers) as admin:
        matched = [name for name in admin.list_topics() if matches(name)]
    if as_json:
        print_json({"pattern": pattern, "valid": True, "topics": matched})
    elif matched:
        typer.echo("\n".join(matched))
    else:
        note("The pattern is valid, and matches no topic that there is now.")
