"""The lineage of a topic that is about to be published: found in turns, kept where all of it is known."""

from __future__ import annotations

import asyncio

import pytest

from anabranch.machines.lineage import Lineage
from anabranch.server.cluster import lineages
from anabranch.server.cluster.lineages import lineage_now, lineage_prepared, prepare
from anabranch.server.cluster.view import TopicSnapshot
from tests.unit.server.cluster.test_images import Leaders
from tests.unit.server.cluster.test_view import Published


def resized() -> TopicSnapshot:
    cluster = Published(partitions=3)
    cluster.resize(5)
    cluster.run()
    found = cluster.view.topic("t")
    assert found is not None
    return found


def test_others_have_their_turn_while_leaders_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineages, "CUTS_AT_A_TIME", 2)
    leaders, asked = Leaders(), list[int]()
    topic = resized()

    async def beside() -> None:
        preparing = asyncio.create_task(prepare(topic, leaders.cuts))
        while not preparing.done():
            asked.append(len(leaders.asked))
            await asyncio.sleep(0)

    asyncio.run(beside())
    assert asked == [0, 2, 4]
    found = lineage_prepared(topic, leaders.cuts)
    assert found == Lineage.of_ends(3, (3, 5), ({0: 5, 1: 15, 2: 25},))
    assert len(leaders.asked) == 5
    assert lineage_now(topic, leaders.cuts) == found, "as now, when there is no time to ask before"


def test_what_a_leader_does_not_know_yet_is_asked_for_again() -> None:
    leaders = Leaders()
    leaders.known = False
    topic = resized()
    asyncio.run(prepare(topic, leaders.cuts))
    assert lineage_prepared(topic, leaders.cuts).unknown == {0: 0, 1: 0, 2: 0}
    leaders.known = True
    assert lineage_prepared(topic, leaders.cuts) == Lineage.of_ends(3, (3, 5), ({0: 5, 1: 15, 2: 25},))
