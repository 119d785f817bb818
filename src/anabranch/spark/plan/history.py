"""The proof of a query's whole history from its logged plans: every record once, the records of each key in order.

Each plan is proved by itself (`proof`): given where the query stood, the micro-batch holds nothing that had to wait.
What is left to prove is that the query stood there:

- a micro-batch begins where the one before it ended; a new partition begins at its log start, one that is created again
  not before where it ended. After a restart the last micro-batch may be planned again, with the same offsets;
- no partition goes with offsets unread, and no offset is passed over;
- plans agree about the layouts and their cuts. A plan that was made before the query heard of a resize is proved with
  the cuts of the resize, as the first plan that knows of it has them: it must not have read beyond them what had to
  wait. Offsets that were deleted by then have no cuts any more, and are proved with what their own plan knew.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.machines.lineage import BEYOND
from anabranch.spark.plan.proof import verify_plan
from anabranch.spark.plan.record import PLAN_VERSION


class Problem(NamedTuple):
    """A fault of a plan, or of what follows what."""

    line: int
    """Its line in the log, from 1."""
    problem: str


@dataclass(frozen=True, slots=True)
class History:
    """What was found in a log of plans."""

    plans: int
    problems: tuple[Problem, ...]
    torn: tuple[int, ...]
    """Lines that end in the middle, as a crash leaves them: no plan. What is missing shows as a gap."""


@dataclass
class _Topic:
    """How far a query was in a topic."""

    topic_id: str
    done: dict[int, int] = field(default_factory=dict)
    """Also of partitions that were removed."""
    log_end: dict[int, int] = field(default_factory=dict)
    """Of the partitions that existed, when they were last seen."""
    layout: int = 0
    """The one that ruled then."""
    layouts: dict[int, int] = field(default_factory=dict)
    """The one that ruled when a partition was last read, which `assign` may have left out since."""
    last: dict[int, tuple[int, int]] = field(default_factory=dict)
    """What the last micro-batch read."""


def verify_history(lines: Iterable[str]) -> History:
    """Check the plans of one query, in the order in which they were logged. Text before a plan is ignored.

    Raises `ValueError`, `KeyError`, `TypeError` or `AttributeError` for JSON that is no plan.
    """
    plans: list[tuple[int, dict[str, Any]]] = []
    torn: list[int] = []
    for number, line in enumerate(lines, 1):
        start = line.find("{")
        if start < 0:
            continue
        try:
            plans.append((number, json.loads(line[start:])))
        except ValueError:
            torn.append(number)
    problems: list[Problem] = []
    topics: dict[str, _Topic] = {}
    later = _resized([plan for _, plan in plans])
    for (number, plan), informed in zip(plans, later, strict=True):
        found: list[str] = []
        if plan.get("version") == PLAN_VERSION and plan["kind"] == "micro-batch":
            found += _follow(plan, topics)
            for topic, after in informed.items():
                found += _disagreements(topic, plan["topics"][topic], after)
            known = {
                topic: _informed(each, informed[topic]) if topic in informed else each
                for topic, each in plan["topics"].items()
            }
            plan = {**plan, "topics": known}
        problems += (Problem(number, each) for each in [*found, *verify_plan(plan)])
    return History(len(plans), tuple(problems), tuple(torn))


# -- what follows what -------------------------------------------------------------------------------------------------


def _follow(plan: Mapping[str, Any], topics: dict[str, _Topic]) -> list[str]:
    """Take the next micro-batch; return what is wrong with where it begins."""
    ranges: dict[str, dict[int, tuple[int, int]]] = {}
    begins, gone = bool(topics), list[str]()
    """A query begins anywhere, but reads a topic that it finds later from its log start."""
    for topic, known in plan["topics"].items():
        start, end = _numbered(known["start"]), _numbered(known["end"])
        ranges[topic] = {partition: (start[partition], end[partition]) for partition in end}
        before = topics.get(topic)
        if before is None or before.topic_id != known["id"]:
            if before is not None:
                gone += (problem for _, problem in _unread(topic, before, ()))
            begun = ({}, {}) if begins else (dict(start), _numbered(known["log_end"]))
            topics[topic] = _Topic(known["id"], *begun, layout=_newest(known))
    if all(_repeats(plan["topics"][topic], topics[topic], now) for topic, now in ranges.items()):
        return []
    problems = gone
    for topic, now in ranges.items():
        problems += _begin(topic, plan["topics"][topic], topics[topic], now)
        topics[topic].done.update({partition: end for partition, (_, end) in now.items()})
        topics[topic].layouts.update(dict.fromkeys(now, topics[topic].layout))
        topics[topic].last = now
    return problems


def _repeats(known: Mapping[str, Any], before: _Topic, now: Mapping[int, tuple[int, int]]) -> bool:
    """Whether it is the micro-batch before, planned again; what was deleted meanwhile is left out."""
    log_start = _numbered(known["log_start"])
    return bool(before.last) and all(
        partition in before.last
        and end == before.last[partition][1]
        and start in (before.last[partition][0], log_start[partition])
        for partition, (start, end) in now.items()
    )


def _begin(topic: str, known: Mapping[str, Any], before: _Topic, now: Mapping[int, tuple[int, int]]) -> Iterator[str]:
    log_start, log_end = _numbered(known["log_start"]), _numbered(known["log_end"])
    for partition, (start, _) in sorted(now.items()):
        name, done = f"{topic}-{partition}", before.done.get(partition)
        if partition in before.log_end and done is not None:
            if start < done:
                yield f"{name}: offsets {start} to {done} are read again"
            elif (
                start > done
                and start == log_start[partition]
                and start <= _folded_to(known, partition, before.layouts.get(partition, before.layout))
            ):
                continue
            elif start > done and start == log_start[partition]:
                yield f"{name}: offsets {done} to {start} were deleted before they were read"
            elif start > done:
                yield f"{name}: offsets {done} to {start} are read by no micro-batch"
        elif start != log_start[partition]:
            yield f"{name} is new, and begins at offset {start}, not at its log start {log_start[partition]}"
        elif done is not None and start < done:
            yield f"{name} was created again, and offsets {start} to {done} are read again"
    for partition, problem in _unread(topic, before, log_start):
        if _folded_to(known, partition, before.layout) < BEYOND:
            yield problem
    before.log_end, before.layout = log_end, _newest(known)


def _folded_to(known: Mapping[str, Any], partition: int, since: int) -> int:
    """Return the offset up to which what has gone since a layout ruled is in another log, or was superseded.

    That is all of it of a retiring partition of a compacted topic, and of one that takes records again, what lay before
    it retired.
    """
    cleanup, counts, first = known.get("cleanup", ()), known["counts"], known["first"]
    if "compact" not in cleanup:
        return 0
    if partition >= counts[-1]:
        return BEYOND
    retired = [layout for layout, count in enumerate(counts, first) if layout >= since and count <= partition]
    if not retired:
        return 0
    return max((end for layout, end in known["cuts"].get(str(partition), ()) if layout <= retired[-1]), default=BEYOND)


def _unread(topic: str, before: _Topic, remaining: Container[int]) -> Iterator[tuple[int, str]]:
    for partition, end in sorted(before.log_end.items()):
        if partition not in remaining and before.done.get(partition, end) < end:
            yield (
                partition,
                f"{topic}-{partition} was removed, and offsets {before.done[partition]} to {end} were never read",
            )


# -- what later plans know ---------------------------------------------------------------------------------------------


def _resized(plans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each plan the topics that a later micro-batch knows to have been resized, as the first such one has them."""
    following: dict[str, tuple[Mapping[str, Any], Mapping[str, Any] | None]] = {}
    found: list[dict[str, Any]] = []
    for plan in reversed(plans):
        informed: dict[str, Any] = {}
        if plan.get("version") == PLAN_VERSION and plan["kind"] == "micro-batch":
            for topic, known in plan["topics"].items():
                after: Mapping[str, Any] | None = None
                following_known, its_after = following.get(topic, (known, None))
                if following_known["id"] == known["id"]:
                    after = following_known if _newest(following_known) > _newest(known) else its_after
                following[topic] = known, after
                if after is not None:
                    informed[topic] = after
        found.append(informed)
    return found[::-1]


def _newest(known: Mapping[str, Any]) -> int:
    """The layout that ruled when a plan was made."""
    return int(known["first"]) + len(known["counts"]) - 1


def _disagreements(topic: str, known: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[str]:
    # A layout that took no record is forgotten when it ends: it has the count of the one before it then.
    told = {layout for cuts in after["cuts"].values() for layout, _ in cuts} | {_newest(after)}
    told |= {layout for _, layout in _still_there(known, after)}
    for layout in sorted(told & {*range(max(known["first"], after["first"]), _newest(known) + 1)}):
        counts = known["counts"][layout - known["first"]], after["counts"][layout - after["first"]]
        if counts[0] != counts[1]:
            yield f"{topic}: layout {layout} has {counts[0]} partitions, and {counts[1]} in a later plan"
    for partition, cuts in known["cuts"].items():
        others = dict(map(tuple, after["cuts"].get(partition, ())))
        for layout, end in cuts:
            if others.get(layout, end) != end:
                yield f"{topic}-{partition}: layout {layout} ends at {end}, and at {others[layout]} in a later plan"
    for partition, layout in _still_there(known, after):
        if layout not in dict(map(tuple, after["cuts"].get(partition, ()))):
            yield f"{topic}-{partition}: layout {layout} has records, and no end in a later plan"


def _still_there(known: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The layouts that have ended in a partition, with records that its log had, and has still in a later plan."""
    found = []
    for partition, cuts in known["cuts"].items():
        begun = known["log_start"].get(partition, 0)
        for layout, end in cuts:
            if begun < end and after["log_start"].get(partition, end) < end:
                found.append((partition, int(layout)))
            begun = max(begun, end)
    return found


def _informed(known: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Give a plan's topic the layouts and cuts that a later plan knows, as far as they concern what was read.

    Partitions of which the plan did not know had not been read then.
    """
    newest = _newest(known)
    if after["first"] > newest:
        return dict(known)
    cuts: dict[str, Any] = {}
    for partition, log_end in known["log_end"].items():
        mine = [list(cut) for cut in known["cuts"].get(partition, ())]
        begun = known["start"].get(partition, known["log_start"][partition])
        if after["log_start"].get(partition, begun + 1) <= begun:
            mine += [list(cut) for cut in after["cuts"].get(partition, ()) if cut[0] >= newest]
        else:
            mine.append([newest, log_end])
        cuts[partition] = mine
    counts = [*known["counts"], *after["counts"][newest + 1 - after["first"] :]]
    found = {p: at for p, at in after["log_start"].items() if p in after["start"] and p not in known["log_start"]}
    cuts.update({p: [cut for cut in after["cuts"].get(p, ()) if cut[0] > newest] for p in found})
    return {
        **known,
        "counts": counts,
        "cuts": cuts,
        "log_start": {**known["log_start"], **found},
        "log_end": {**known["log_end"], **{p: after["log_end"][p] for p in found}},
        "start": {**known["start"], **found},
        "end": {**known["end"], **found},
    }


def _numbered(offsets: Mapping[str, int]) -> dict[int, int]:
    return {int(partition): offset for partition, offset in offsets.items()}
