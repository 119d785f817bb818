"""Folding: layouts of which no log holds a record any more leave the topic node (ordering.md, 6.3; ADR 0032).

The rule: a layout goes only when the leaders of all partitions that exist say that no segment of it has a record at or
behind the log start. A segment that has ended never gets a record again, so an old report still holds; a layout that
ended after the report, and a topic with a partition that the report does not know, are left as they are. The others
keep their numbers, which are part of records' `sequence`. The layout that rules always stays.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple
from uuid import UUID

from anabranch.machines.controller import nodes
from anabranch.machines.controller.effects import Decision
from anabranch.machines.controller.layouts import above, kept
from anabranch.machines.controller.plan import Plan
from anabranch.machines.controller.state import ControllerState


class HeldLayouts(NamedTuple):
    """The layouts that a topic's logs hold records of, as its leaders saw them."""

    topic_id: UUID
    newest: int
    """The layout that ruled."""
    held: frozenset[int]
    """The numbers of the ended layouts that have records."""
    partitions: frozenset[int]
    """The partitions whose leaders were asked, and answered."""


def decide_fold_layouts(state: ControllerState, name: str, report: HeldLayouts) -> Decision[int]:
    """Fold away the layouts that have no records; the reply is their count."""
    topic = state.topics.get(name)
    if (
        topic is None
        or name in state.deleting
        or topic.topic_id != report.topic_id
        or topic.resize is not None
        or topic.reaping
        or not topic.partitions.keys() <= report.partitions
    ):
        return Decision(reply=0)
    left = kept(topic.layouts, report.held, min(report.newest, topic.newest))
    folded = len(topic.layouts) - len(left)
    if not folded:
        return Decision(reply=0)
    plan = Plan(state, topic)
    plan.topic = replace(topic, layouts=left, ended=above(topic.ended, left[0].number))
    plan.draft.write(nodes.put_topic(plan.topic))
    plan.publish()
    return plan.decision(folded)
