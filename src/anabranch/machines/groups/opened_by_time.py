"""Gates that have opened by time: each opening is logged and counted once, and described while records are left there.

gate of a partition that    | an opening by time concerns
nobody owns                 | the group: the partition is handed out
a member of ours owns       | its owner, which stops there: it is told so (`Told.by_time`)
a stock consumer owns       | nobody: the owner is given its records whatever the gate

Of a gate that lies ahead of its owner's commit the owner is concerned if it asks for what the gate waits on. An opening
is over when the gate closes again, or when the position that it waited for has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.gate_effects import GateOpenedByTime
from anabranch.machines.groups.gates import Evaluated, Verdict
from anabranch.machines.groups.group_gates import Group, GroupGates, OpenedByTime, has_free_keys
from anabranch.machines.groups.standing import At
from anabranch.machines.lineage import GateWait

Owner = Callable[[At], tuple[str, int]]


def note(group: Group, gates: GroupGates, made: Evaluated, number: int, owner: Owner, now_ms: int) -> None:
    """Note since when a partition waits, and whether its gate has opened by time, after its gates were decided."""
    at = made.topic.topic_id, number
    known, otherwise = gates.by_time.get(at), made.by_time.get(number)
    if known is not None and (number in made.closed or not left(gates, made, known)):
        del gates.by_time[at]
        known = None
    if otherwise is not None and _concerns(group, gates, at, otherwise, owner):
        gate = made.gate_of(number) if otherwise.is_closed else otherwise.ahead
        if known is None or known.gate != gate:
            waited_ms = max(0, now_ms - gates.closed_ms.get(at, now_ms))
            gates.by_time[at] = OpenedByTime(gate, otherwise.waits, waited_ms)
            on = otherwise.waits[0]
            records_left = on.offset - made.stands[on.partition].passed
            gates.opened.append(GateOpenedByTime(group.group_id, made.topic.name, number, on.partition, records_left))
            gates.is_due = True
    if number in made.closed:
        gates.closed_ms.setdefault(at, now_ms)
    else:
        gates.closed_ms.pop(at, None)


def left(gates: GroupGates, made: Evaluated, opened: OpenedByTime) -> list[GateWait]:
    """Of what a gate waited on that opened by time: the positions that have not moved, and have records left."""
    return [wait for wait in opened.waits if _is_left(gates, made, wait)]


def _is_left(gates: GroupGates, made: Evaluated, wait: GateWait) -> bool:
    stand = made.stands.get(wait.partition)
    is_stalled = (made.topic.topic_id, wait.partition) in gates.standing.stalls
    return is_stalled and (stand is None or stand.passed < wait.offset)


def holds_back(group: Group, gates: GroupGates, at: At, owner: Owner) -> bool:
    """Whether the closed gate in front of a partition's next record keeps it from anybody."""
    return _is_withheld(group, at) or any(map(gates.questions.has_asked, _owners(group, at, owner)))


def _concerns(group: Group, gates: GroupGates, at: At, otherwise: Verdict, owner: Owner) -> bool:
    if otherwise.is_closed:
        return holds_back(group, gates, at, owner)
    owners = set(_owners(group, at, owner))
    askers = gates.questions.askers
    return any(not owners.isdisjoint(askers.get((at[0], wait.partition), ())) for wait in otherwise.waits)


def _is_withheld(group: Group, at: At) -> bool:
    """Whether the coordinator hands out a partition, or some of its keys, when its gate opens."""
    return isinstance(group, ConsumerGroup) and (at not in group.holders or has_free_keys(group, at))


def _owners(group: Group, at: At, owner: Owner) -> Iterable[str]:
    sharers = group.sharers.get(at) if isinstance(group, ConsumerGroup) else None
    return sharers or (owner(at)[0],)
