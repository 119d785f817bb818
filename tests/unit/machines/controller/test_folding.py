"""Layouts without records leave the topic node, and nothing else changes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from uuid import UUID

import pytest

from anabranch.base.limits import LAYOUT_NUMBER_MAX
from anabranch.machines.controller import nodes, plan, resize
from anabranch.machines.controller.effects import Accepted, InspectLayouts, Refused
from anabranch.machines.controller.folding import HeldLayouts, decide_fold_layouts
from anabranch.machines.controller.layouts import EpochRun, Layout, ended_with
from anabranch.machines.controller.state import apply
from tests.unit.machines.controller.transcript import Cluster


def resized(*counts: int, start: int = 2) -> Cluster:
    return Cluster.resized(*counts, start=start)


def report_of(cluster: Cluster, held: Iterable[int]) -> HeldLayouts:
    topic = cluster.state.topics["t"]
    return HeldLayouts(topic.topic_id, topic.newest, frozenset(held), frozenset(topic.partitions))


def fold(cluster: Cluster, report: HeldLayouts) -> int:
    return cluster.submit(lambda state: decide_fold_layouts(state, "t", report))


def layouts(cluster: Cluster) -> list[tuple[int, int]]:
    return [(layout.number, layout.count) for layout in cluster.state.topics["t"].layouts]


def test_layouts_without_records_are_folded_wherever_they_stand_and_the_others_keep_number_count_and_epochs() -> None:
    cluster = resized(4, 6, 3, 4)
    before = cluster.state.topics["t"]
    assert fold(cluster, report_of(cluster, {1, 3})) == 2
    topic = cluster.state.topics["t"]
    assert layouts(cluster) == [(1, 4), (3, 3), (4, 4)]
    assert [ended_with(topic.ended, number) for number in (1, 3)] == [ended_with(before.ended, n) for n in (1, 3)]
    assert topic.ended[0] == (EpochRun(1, 1, 3),)
    assert cluster.text().endswith("\n  publish t")
    assert fold(cluster, report_of(cluster, {1, 3})) == 0
    assert cluster.text() == "", "nothing is written where nothing changes"
    assert nodes.read_topic("t", nodes.put_topic(topic).data) == topic


def test_the_layout_that_rules_stays_and_the_next_one_goes_on_from_its_number() -> None:
    cluster = resized(4, 3)
    assert fold(cluster, report_of(cluster, ())) == 2
    assert layouts(cluster) == [(2, 3)]
    assert cluster.state.topics["t"].ended == {}
    reply = cluster.resize(5)
    assert isinstance(reply, Accepted)
    assert reply.layout == 3
    cluster.run()
    assert layouts(cluster) == [(2, 3), (3, 5)]
    assert ended_with(cluster.state.topics["t"].ended, 2) == {0: 2, 1: 2, 2: 1, 3: 1}


def test_a_layout_that_ended_after_the_report_stays() -> None:
    cluster = resized(4)
    report = report_of(cluster, ())
    cluster.resize(3)
    cluster.run()
    assert fold(cluster, report) == 1
    assert layouts(cluster) == [(1, 4), (2, 3)]


@pytest.mark.parametrize("fault", ["resizing", "reaping", "deleting", "gone", "another topic", "a partition unseen"])
def test_nothing_is_folded_on_a_doubtful_report(fault: str) -> None:
    cluster = resized(4, 3)
    report = report_of(cluster, ())
    match fault:
        case "resizing":
            cluster.resize(4)
        case "reaping":
            cluster.reap(p3=(0, 0))
        case "deleting":
            cluster.delete()
        case "gone":
            cluster.delete()
            cluster.run()
        case "another topic":
            report = report._replace(topic_id=UUID(int=99))
        case "a partition unseen":
            report = report._replace(partitions=frozenset({0, 1, 2}))
    cluster.text()
    assert fold(cluster, report) == 0
    assert cluster.text() == ""


def test_a_topic_that_is_resized_again_and_again_is_inspected_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without records it never has many layouts, whatever the number of its resizes."""
    monkeypatch.setattr(resize, "LAYOUTS_PER_TOPIC_MAX", 10)
    monkeypatch.setattr(plan, "RESIZES_UNTIL_INSPECTION", 4)
    cluster = Cluster(partitions=1)
    for turn in range(1, 41):
        cluster.resize(1 + turn % 2)
        cluster.run()
        inspected = InspectLayouts.__name__ in cluster.text()
        assert inspected == (turn % 4 == 0)
        if inspected:
            fold(cluster, report_of(cluster, {0}))
            cluster.text()
    assert layouts(cluster) == [(0, 1), (40, 1)]
    assert len(nodes.put_topic(cluster.state.topics["t"]).data) < 600


def numbered(number: int) -> Cluster:
    """A topic with one layout left."""
    cluster = Cluster(partitions=2)
    topic = replace(cluster.state.topics["t"], layouts=(Layout(number, 2),))
    record = nodes.put_topic(topic)
    apply(cluster.state, record)
    cluster.journal.append(record)
    return cluster


def test_a_topic_resized_40_000_times_goes_on() -> None:
    cluster = numbered(40_000)
    assert isinstance(cluster.resize(3), Accepted)
    cluster.run()
    assert layouts(cluster) == [(40_000, 2), (40_001, 3)]


def test_a_topic_is_not_resized_beyond_what_the_sequence_can_tell() -> None:
    cluster = numbered(LAYOUT_NUMBER_MAX)
    reply = cluster.resize(3)
    assert isinstance(reply, Refused)
    assert f"has been resized {LAYOUT_NUMBER_MAX} times, which is the most" in reply.message
