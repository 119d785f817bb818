"""The proof of a logged plan, from the definition of placement alone, independent of the gates that made the plan."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, pairwise, permutations
from typing import Any, NamedTuple

from anabranch.machines.placement import level_size, place
from anabranch.spark.plan.record import PLAN_VERSION
from anabranch.spark.plan.tasks import WHOLE, KeyRange


class _Piece(NamedTuple):
    """The part of a segment that one task of the plan reads; layouts count from the oldest one in the plan."""

    task: int
    turn: int
    partition: int
    layout: int
    keys: KeyRange
    start: int
    end: int


def verify(line: str) -> list[str]:
    """Check a plan written by `plan_to_json`; return its faults, one sentence each, empty if the plan is correct.

    The check is by brute force over the classes of keys that every layout places alike: for each class, find the
    segments that can hold its records, and check whether a task, or this batch, reads them out of order.
    """
    return verify_plan(json.loads(line))


def verify_plan(plan: Mapping[str, Any]) -> list[str]:
    """Check a plan as `verify` does, parsed from its JSON."""
    if plan.get("version") != PLAN_VERSION:
        return [f"this is not a plan of version {PLAN_VERSION}"]
    tasks = [(KeyRange(*task["keys"]), [tuple(read) for read in task["reads"]]) for task in plan["tasks"]]
    problems: list[str] = []
    for topic, known in plan["topics"].items():
        problems += _verify_topic(topic, known, tasks, whole=plan["kind"] == "batch", by_key=plan["split"] == "key")
    return problems


def _verify_topic(
    topic: str, known: Mapping[str, Any], tasks: Sequence[tuple[KeyRange, list[Any]]], *, whole: bool, by_key: bool
) -> list[str]:
    log_start, log_end, start, end = (
        {int(p): offset for p, offset in known[name].items()} for name in ("log_start", "log_end", "start", "end")
    )
    problems = [
        f"{topic}-{p}: offsets {start.get(p)} to {offset} are not within the log, {log_start[p]} to {log_end[p]}"
        for p, offset in end.items()
        if not log_start[p] <= start.get(p, -1) <= offset <= log_end[p]
    ]
    segments = _segments(known, log_start, log_end)
    pieces = [
        _Piece(number, turn, partition, layout, keys, max(low, begin), min(high, finish))
        for number, (keys, reads) in enumerate(tasks)
        for turn, (name, partition, low, high) in enumerate(reads)
        if name == topic
        for layout, (begin, finish) in enumerate(segments.get(partition, ()))
        if max(low, begin) < min(high, finish)
    ]
    problems += _verify_cover(topic, pieces, start, end)
    if not known["ordered"]:
        return problems
    initial, counts = known["initial"], known["counts"]
    wrong: dict[str, None] = {}
    placed: defaultdict[tuple[int, int], list[_Piece]] = defaultdict(list)
    for piece in pieces:
        placed[piece.layout, piece.partition].append(piece)
    for key_class in range(2 * level_size(max(counts), initial)):
        path = [place(key_class, initial, count) for count in counts]
        mine = list(chain.from_iterable(placed.get(where, ()) for where in enumerate(path)))
        if not whole:
            wrong.update(dict.fromkeys(_verify_batch(topic, path, mine, segments, start)))
        if by_key:
            wrong.update(dict.fromkeys(_verify_tasks(topic, mine)))
    return problems + list(wrong)


def _segments(
    known: Mapping[str, Any], log_start: Mapping[int, int], log_end: Mapping[int, int]
) -> dict[int, list[tuple[int, int]]]:
    """Return the segments of every existing partition, one for each layout in `counts`, as offsets."""
    segments: dict[int, list[tuple[int, int]]] = {}
    for partition, low in log_start.items():
        ends = {layout - known["first"]: end for layout, end in known["cuts"].get(str(partition), ())}
        bounds = [low]
        for layout in range(len(known["counts"]) - 1):
            bounds.append(max(bounds[-1], ends.get(layout, 0)))
        bounds.append(max(bounds[-1], log_end[partition]))
        segments[partition] = list(pairwise(bounds))
    return segments


def _verify_cover(
    topic: str, pieces: Sequence[_Piece], start: Mapping[int, int], end: Mapping[int, int]
) -> Iterator[str]:
    """Check that every (offset, key range) between start and end is read exactly once."""
    for partition in sorted({piece.partition for piece in pieces} | end.keys()):
        mine = [piece for piece in pieces if piece.partition == partition]
        bounds = sorted({offset for piece in mine for offset in (piece.start, piece.end)})
        low, high = start.get(partition, 0), end.get(partition, 0)
        if low < high and (not bounds or bounds[0] > low or bounds[-1] < high):
            yield f"{topic}-{partition}: not all of offsets {low} to {high} are read by a task"
        if bounds and (bounds[0] < low or bounds[-1] > high):
            yield f"{topic}-{partition}: a task reads beyond offsets {low} to {high}"
        for first, last in pairwise(bounds):
            ranges = sorted(piece.keys for piece in mine if piece.start <= first and last <= piece.end)
            follow = [keys.end + 1 for keys in ranges]
            if [keys.start for keys in ranges] != [0, *follow[:-1]] or follow[-1:] != [WHOLE.end + 1]:
                yield f"{topic}-{partition}: offsets {first} to {last} are not read once, by one task for each key"


def _verify_batch(
    topic: str,
    path: Sequence[int],
    mine: Sequence[_Piece],
    segments: Mapping[int, list[tuple[int, int]]],
    start: Mapping[int, int],
) -> Iterator[str]:
    """Check that in a micro-batch a class of keys waits on no other partition."""
    for piece in mine:
        for layout in range(piece.layout):
            earlier = path[layout]
            if earlier == piece.partition or earlier not in segments:
                continue
            low, high = segments[earlier][layout]
            if low < high and earlier in start and start[earlier] < high:
                yield (
                    f"{topic}-{piece.partition}: offset {piece.start}, of layout {piece.layout}, is read before "
                    f"{topic}-{earlier} was read up to offset {high}, the end of layout {layout}"
                )


def _verify_tasks(topic: str, mine: Sequence[_Piece]) -> Iterator[str]:
    """Check that one task reads all records of a key in these pieces, and reads them in layout order."""
    for one, other in permutations(mine, 2):
        both = f"{topic}-{one.partition} and {topic}-{other.partition}"
        if one.task < other.task and one.keys.start <= other.keys.end and other.keys.start <= one.keys.end:
            yield f"tasks {one.task} and {other.task} both read some keys of {both}"
        earlier = (one.layout, one.start) < (other.layout, other.start)
        if one.task == other.task and earlier and (one.turn, one.start) > (other.turn, other.start):
            yield f"task {one.task} reads {both} in layouts {other.layout}, {one.layout}: the wrong way round"
