"""What stock consumers tell of their resets: a partition without a committed offset is begun by a ListOffsets request.

`auto.offset.reset` is a setting of the client, and no request of a group says it. But a member that was given a
partition without a committed offset asks the partition's leader where to begin: for the latest offset, the earliest
one, or that of a time. It asks before it can read, and it reads before it can commit. So

    the owner of q asked for the latest offset, nobody that could be an owner asked for another one,
    and the group has committed in q                                        =>  the group reads from the end
    an owner asked, and never for the latest offset                         =>  the group does not

The leader cannot tell two clients of one host and one client id apart. What the other one asks makes less known, never
more: where both kinds of questions were heard nothing is known, and a partition that waited is read from its log start.
What was heard is durable, with the group's start, before the leader answers: so it holds through fail-overs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from uuid import UUID

from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.groups.gatekeeper import Gatekeeper
from anabranch.machines.groups.gates import Evaluated
from anabranch.machines.groups.group_gates import GroupGates
from anabranch.machines.groups.image import TopicImage
from anabranch.machines.groups.records import CoordinatorRecord
from anabranch.machines.groups.starts import Start, start_record
from anabranch.machines.outcome import Draft, Outcome

LATEST_MAX = 16
"""Partitions of a topic that are noted as begun at their ends: a commit in one of them is enough (`Starts`), and with
each that is noted the group's start is written again."""
LATEST = -1
"""The timestamp in ListOffsets that stands for the end of the log."""


class HeardResets:
    """The part of a coordinator that hears what consumers ask leaders."""

    keeper: Gatekeeper

    def awaiting_resets(self, topics: Iterable[UUID]) -> list[UUID]:
        """List the topics, of these, of which a group has partitions that wait, or are to be begun by its clients."""
        hearing = self.keeper.hearing
        return [topic_id for topic_id in topics if hearing.get(topic_id)] if hearing else []

    def reset_heard(
        self, topic_id: UUID, asked: Mapping[int, int], client_id: str, client_host: str
    ) -> Outcome[None, CoordinatorRecord]:
        """Take a ListOffsets request for one topic: timestamps by partition, and who asked."""
        draft: Draft[CoordinatorRecord] = Draft()
        topic = self.keeper.offsets.image.by_id.get(topic_id)
        for group_id in list(self.keeper.hearing.get(topic_id, ())) if topic is not None else ():
            group, gates = self.keeper.groups.get(group_id), self.keeper.known(group_id)
            made = None if gates is None else gates.evaluated.get(topic_id)
            if not isinstance(group, ConsumerGroup) or gates is None or made is None or not _hears(gates, made):
                self.keeper.hearing[topic_id].pop(group_id, None)
                if gates is not None:  # From now on questions are not heard: those of what was handed out before, too.
                    gates.begun.pop(topic_id, None)
                continue
            start = self.keeper.starts.get(group_id, topic_id)
            if start is not None:
                assert topic is not None
                heard = _heard(self.keeper, group, topic, start, asked, (client_id, client_host))
                if heard != start:
                    draft.write(start_record(group_id, topic_id, heard))
                    if heard.other and not heard.latest:
                        _end_tenures(self.keeper, group_id, topic_id)
        return draft.outcome(None)


def _hears(gates: GroupGates, made: Evaluated) -> bool:
    """Whether a question for a first offset of a topic may say something of a group."""
    return bool(made.closed or made.left or made.topic.topic_id in gates.begun)


def _heard(
    keeper: Gatekeeper,
    group: ConsumerGroup,
    topic: TopicImage,
    start: Start,
    asked: Mapping[int, int],
    caller: tuple[str, str],
) -> Start:
    """The start with what the request says of it: the questions for partitions that this client may have to begin."""
    latest, other = set(start.latest), start.other
    callers = {
        member_id
        for member_id, member in group.members.items()
        if (member.described.client_id, member.described.client_host) == caller
    }
    gates = keeper.known(group.group_id)
    handed_out = gates.begun.get(topic.topic_id, set()) if gates is not None else set()
    for number, timestamp in asked.items() if callers else ():
        if group.holders.get((topic.topic_id, number), "") not in callers:
            continue
        if keeper.offsets.current(group.group_id, topic.name, number) is not None:
            continue
        if timestamp != LATEST:
            other = True
        elif number in start.ends and number in handed_out and len(latest) < LATEST_MAX:
            latest.add(number)
        if other and len(latest) >= LATEST_MAX:
            break
    return start._replace(latest=frozenset(latest), other=other)


def _end_tenures(keeper: Gatekeeper, group_id: str, topic_id: UUID) -> None:
    """Take no owner for one that reads from the end, however long it commits nothing: gates that opened so close."""
    gates = keeper.of(group_id)
    ended = [at for at in gates.standing.tenures if at[0] == topic_id]
    for at in ended:
        del gates.standing.tenures[at]
    if ended:
        gates.outdate([topic_id])
