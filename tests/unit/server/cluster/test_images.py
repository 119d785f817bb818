"""Images of topics for the group coordinators: the same object while nothing changed, complete as soon as it can be."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import cast
from uuid import NAMESPACE_DNS, UUID, uuid5

import pytest

from anabranch.machines.controller import configs
from anabranch.machines.controller.configs import AlterConfigs, ConfigChange, ConfigOperation
from anabranch.machines.controller.nodes import EVERY_BROKER, Topic
from anabranch.machines.keyspace import SPACE_END, Interval
from anabranch.machines.lineage import Cuts, Lineage
from anabranch.machines.progress import Rewritten
from anabranch.server.cluster.images import MADE_APART_MIN, Images
from anabranch.server.cluster.peers import Peers
from anabranch.server.cluster.view import ClusterUpdate
from tests.unit.server.cluster.test_view import Published


class Leaders:
    """What leaders know of their logs: the ends of all epochs, or of none yet."""

    def __init__(self) -> None:
        self.known = True
        self.asked: list[int] = []

    def cuts(self, topic: Topic, partition: int) -> Cuts | None:
        self.asked.append(partition)
        if not self.known:
            return None
        runs = topic.ended.get(partition, ())
        return Cuts.of((run.layout, 10 * partition + 5) for run in runs if run.layout < topic.newest)

    def opened(self, topic: str) -> int:
        return 1 << 20 if self.known else 0

    def is_open(self, topic: str, partition: int) -> bool:
        return self.known

    def log_start(self, topic: str, partition: int) -> int:
        return 3

    def rewritten(self, topic: str, partition: int) -> Rewritten:
        return Rewritten(2, 5)

    def log_end(self, topic: str, partition: int) -> int:
        return 7

    def stable_end(self, topic: str, partition: int) -> int:
        return 5

    def load(self, topic: str, partition: int, held: Interval) -> Sequence[float]:
        return [held.start, held.end, partition]


def images_of(cluster: Published) -> tuple[Images, Leaders]:
    leaders = Leaders()
    return Images(cluster.view, cast(Peers, leaders)), leaders


def test_a_topic_of_one_layout_needs_no_lineage() -> None:
    images, leaders = images_of(Published(partitions=2))
    topic = images.newest().by_name["t"]
    assert (topic.partitions, list(topic.retiring), topic.lineage) == (range(2), [], None)
    assert topic.log_start(1) == 3
    assert leaders.asked == []


def test_half_a_layout_is_never_shown() -> None:
    cluster = Published(partitions=1)
    images, _ = images_of(cluster)
    before = images.newest().by_name["t"]
    cluster.resize(3)
    running = images.newest().by_name["t"]
    assert (running.partitions, running.lineage) == (before.partitions, None)
    cluster.run()
    after = images.newest().by_name["t"]
    assert after.partitions == range(3)
    assert after.lineage is not None
    assert after.lineage == Lineage.of_ends(1, (1, 3), ({0: 5},))
    cluster.resize(2)
    cluster.run()
    shrunk = images.newest().by_name["t"]
    assert (list(shrunk.partitions), list(shrunk.retiring)) == ([0, 1], [2])


def test_an_image_and_its_topics_are_the_same_objects_while_nothing_changed_in_them() -> None:
    cluster = Published(partitions=1)
    images, _ = images_of(cluster)
    first = images.newest()
    assert images.newest() is first
    cluster.view.update(ClusterUpdate())
    assert images.newest() is first
    cluster.resize(2)
    cluster.run()
    second = images.newest()
    assert second is not first
    assert second.version > first.version
    cluster.delete()
    assert images.newest().by_name == {}


def test_ends_that_no_leader_knows_yet_are_asked_for_again_with_the_next_update() -> None:
    cluster = Published(partitions=1)
    images, leaders = images_of(cluster)
    leaders.known = False
    cluster.resize(2)
    cluster.run()
    waiting = images.newest().by_name["t"].lineage
    assert waiting is not None
    assert (waiting.cuts, waiting.unknown) == ({}, {0: 0})
    assert not waiting.may_deliver(1, 1, {0: 1 << 60, 1: 0})
    asked = len(leaders.asked)
    assert images.newest().by_name["t"].lineage is waiting
    assert len(leaders.asked) == asked, "nothing is asked twice without an update"
    leaders.known = True
    cluster.view.update(ClusterUpdate())
    complete = images.newest().by_name["t"].lineage
    assert complete is not None
    assert complete == Lineage.of_ends(1, (1, 2), ({0: 5},))
    asked = len(leaders.asked)
    cluster.view.update(ClusterUpdate())
    assert images.newest().by_name["t"].lineage is complete
    assert len(leaders.asked) == asked


def test_a_topic_without_ordered_delivery_has_no_lineage() -> None:
    cluster = Published(partitions=1)
    images, _ = images_of(cluster)
    cluster.resize(2)
    cluster.run()
    assert images.newest().by_name["t"].lineage is not None
    change = ConfigChange("enable.ordered.delivery", ConfigOperation.SET, "false")
    cluster.submit(lambda state: configs.decide_alter_configs(state, AlterConfigs("t", [change])))
    assert images.newest().by_name["t"].lineage is None


@pytest.mark.parametrize("why", ["its order is given up", "its old layouts are folded away"])
def test_a_resized_topic_without_a_lineage_is_looked_at_again_until_all_its_logs_are_open(why: str) -> None:
    """What is told of a log that is not open is 0: no position may be made of it."""
    cluster = Published(partitions=1)
    images, leaders = images_of(cluster)
    leaders.known = False
    if why == "its order is given up":
        change = ConfigChange("enable.ordered.delivery", ConfigOperation.SET, "false")
        cluster.submit(lambda state: configs.decide_alter_configs(state, AlterConfigs("t", [change])))
    cluster.resize(2)
    cluster.run()
    if why == "its old layouts are folded away":
        like = cluster.view.find("t")
        assert like is not None
        folded = replace(like.topic, layouts=like.topic.layouts[-1:], ended={})
        cluster.view.update(ClusterUpdate(topics={"t": replace(like, topic=folded)}))
    closed = images.newest().by_name["t"]
    assert closed.lineage is None and closed.was_resized and not closed.is_open(1)
    leaders.known = True
    cluster.view.update(ClusterUpdate())
    opened = images.newest().by_name["t"]
    assert opened is not closed and opened.is_open(1)
    cluster.view.update(ClusterUpdate())
    assert images.newest().by_name["t"] is opened


def test_only_the_topics_that_an_update_names_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Published(partitions=1)
    images, _ = images_of(cluster)
    before = images.newest()
    like = cluster.view.find("t")
    assert like is not None
    looked_at: list[str] = []
    find = cluster.view.topic
    monkeypatch.setattr(cluster.view, "topic", lambda name: looked_at.append(name) or find(name))
    for number in range(50):
        name = f"other-{number}"
        node = replace(like.topic, name=name, topic_id=UUID(int=1_000 + number))
        cluster.view.update(ClusterUpdate(topics={name: replace(like, topic=node)}))
    assert images.look(20), "thirty are left"
    assert len(looked_at) == 20
    assert set(images.newest().by_name) == {"t", *(f"other-{number}" for number in range(50))}
    assert len(looked_at) == 50 and "t" not in looked_at
    assert images.newest().by_name["t"] is before.by_name["t"]
    cluster.view.update(ClusterUpdate(topics={"other-7": None}))
    assert "other-7" not in images.newest().by_name
    assert len(looked_at) == 51


def test_the_load_is_that_of_the_interval_which_a_partition_holds_now() -> None:
    cluster = Published(partitions=1)
    images, _ = images_of(cluster)
    assert images.newest().by_name["t"].load(0) == [0, SPACE_END, 0]
    cluster.resize(2)
    cluster.run()
    topic = images.newest().by_name["t"]
    assert [topic.load(number) for number in (0, 1)] == [[0, SPACE_END // 2, 0], [SPACE_END // 2 + 1, SPACE_END, 1]]


def test_the_image_of_many_changes_is_made_in_a_thread_and_loses_none_that_come_meanwhile() -> None:
    cluster = Published(partitions=1)
    images, _ = images_of(cluster)
    like = cluster.view.find("t")
    assert like is not None

    def publish(name: str) -> None:
        node = replace(like.topic, name=name, topic_id=uuid5(NAMESPACE_DNS, name))
        cluster.view.update(ClusterUpdate(topics={name: replace(like, topic=node)}))

    async def story() -> None:
        first = images.newest()
        many = [f"many-{number}" for number in range(MADE_APART_MIN)]
        for name in many:
            publish(name)
        assert not images.look(len(many))
        assert images.newest() is first, "its image is to be made"
        making = asyncio.create_task(images.make())
        await asyncio.sleep(0)
        publish("meanwhile")
        cluster.view.update(ClusterUpdate(topics={many[0]: None}))
        assert images.newest() is first
        await making
        made = images.latest
        assert made.by_name.keys() == {"t", *many}
        last = images.newest()
        assert last.by_name.keys() == {"t", "meanwhile", *many[1:]}
        assert last.differences(made) == {"meanwhile", many[0]}
        assert last.differences(first) == {"meanwhile", *many}

    asyncio.run(story())


def test_a_default_of_all_topics_has_each_looked_at_once() -> None:
    cluster = Published(partitions=1)
    images, _ = images_of(cluster)
    before = images.newest()
    told = {EVERY_BROKER: {"log.retention.ms": "5"}}
    cluster.view.update(ClusterUpdate(broker_configs=told))
    cluster.view.update(ClusterUpdate(broker_configs=told, topics={"t": cluster.view.find("t")}))
    assert images.look(1), "it is looked at as one that an update names, and as one of all"
    assert not images.look(1)
    assert images.newest() is before
