"""The view of the cluster: it follows every change of the controller's state, in one step, and tells its observers."""

from __future__ import annotations

from collections.abc import Callable

from anabranch.machines.controller import configs, group_configs, terms, topics, views
from anabranch.machines.controller.configs import ConfigChange, ConfigOperation
from anabranch.machines.controller.effects import Decision
from anabranch.machines.controller.group_configs import SESSION_TIMEOUT
from anabranch.machines.controller.nodes import BrokerNode, DeleteNode, broker_path
from anabranch.machines.controller.state import ControllerState, apply
from anabranch.server.cluster.feed import everything, update_after
from anabranch.server.cluster.view import BrokerEndpoint, ClusterUpdate, ClusterView
from anabranch.server.coordinators.groups import group_configs as group_configs_of
from anabranch.server.settings import Settings
from tests.unit.machines.controller.transcript import TOPIC_ID, Cluster


class Published(Cluster):
    """A cluster whose controller publishes every change to a view; the view is checked after each."""

    def __init__(self, **given: int) -> None:
        self.view = ClusterView()
        super().__init__(**given)

    def submit(self, decide: Callable[[ControllerState], Decision[object]]) -> object:
        records = []

        def noted(state: ControllerState) -> Decision[object]:
            decision = decide(state)
            records.extend(decision.records)
            return decision

        reply = super().submit(noted)
        self.view.update(update_after(self.state, records))
        self.check()
        return reply

    def check(self) -> None:
        """The view is the state: topic by topic, and as a view that is made from nothing."""
        fresh = ClusterView()
        fresh.update(everything(self.state, 1))
        for view in (self.view, fresh):
            for name in (*self.state.topics, "t", "u"):
                found = view.topic(name)
                assert (None if found is None else found.view) == views.topic_view(self.state, name)
                assert view.configs(name) == self.state.configs.get(name, {})
                assert (view.find(name) is None) is (name not in self.state.topics)
            names = sorted(self.state.topics.keys() - self.state.deleting)
            assert [topic.name for topic in view.topics()] == names
            assert [topic.name for topic in view.topics("t")] == [name for name in names if name >= "t"]
            assert set(view.known()) == self.state.topics.keys()
            assert all(view.topic(topic.name) is topic for topic in view.topics())
            resizing = {name for name, topic in self.state.topics.items() if topic.resize is not None}
            assert (view.resizing_count, self.state.resizing) == (len(resizing), resizing)
            assert view.topic_count == len(self.state.topics)
            assert view.configured_groups() == sorted(self.state.group_configs)


def test_a_view_follows_a_topic_through_its_life() -> None:
    cluster = Published(partitions=2)
    view = cluster.view
    assert [topic.name for topic in view.topics()] == ["t"]
    assert view.name_of(TOPIC_ID) == "t"
    cluster.resize(4)
    found = view.topic("t")
    assert found is not None
    assert found.resizing
    assert view.resizing_count == 1
    assert found.undeleted_partition_count == 2, "half a layout is never shown"
    assert found.visible_partitions == [0, 1]
    cluster.run()
    assert found.undeleted_partition_count == 2, "a snapshot never changes"
    found = view.topic("t")
    assert found is not None
    assert not found.resizing
    assert [layout.count for layout in found.layouts] == [2, 4]
    cluster.resize(3)
    cluster.run()
    assert not view.has_removed("t", 3)
    cluster.reap(p3=(0, 0))
    cluster.run()
    assert view.has_removed("t", 3)
    assert not view.has_removed("t", 2)
    assert not view.has_removed("u", 3)
    cluster.delete()
    assert view.topic("t") is None
    assert view.find("t") is not None
    assert not view.has_removed("t", 3)
    assert view.name_of(TOPIC_ID) == "t"
    cluster.run()
    assert view.find("t") is None
    assert view.name_of(TOPIC_ID) is None


def test_a_snapshot_keeps_what_was_made_of_it_until_its_topic_changes() -> None:
    cluster = Published(partitions=2)
    first = cluster.view.topic("t")
    assert first is not None
    first.derived["answer"] = "made once"
    cluster.submit(lambda state: topics.decide_create_topic(state, topics.CreateTopic("u", TOPIC_ID, 1)))
    assert cluster.view.topic("t") is first
    cluster.resize(3)
    again = cluster.view.topic("t")
    assert again is not None
    assert again.derived == {}


def test_configs_of_topics_and_groups_come_and_go() -> None:
    cluster = Published(partitions=1)
    view = cluster.view
    retention = "retention.ms"

    def alter(operation: ConfigOperation, value: str | None) -> None:
        command = configs.AlterConfigs("t", [ConfigChange(retention, operation, value)])
        cluster.submit(lambda state: configs.decide_alter_configs(state, command))

    def alter_group(operation: ConfigOperation, value: str | None) -> None:
        known = group_configs_of(Settings())
        command = group_configs.AlterGroupConfigs("g/1", [ConfigChange(SESSION_TIMEOUT, operation, value)], False)
        cluster.submit(lambda state: group_configs.decide_alter_group_configs(state, command, known))

    alter(ConfigOperation.SET, "5")
    assert view.configs("t") == {retention: "5"}
    alter(ConfigOperation.DELETE, None)
    assert view.configs("t") == {}
    alter_group(ConfigOperation.SET, "50000")
    assert view.group_configs("g/1") == {SESSION_TIMEOUT: "50000"}
    alter_group(ConfigOperation.DELETE, None)
    assert view.group_configs("g/1") == {}


def test_a_broker_that_goes_leaves_its_partitions_without_a_leader() -> None:
    cluster = Published(partitions=1, brokers=1)
    node = BrokerNode(2, 1, "rack", ("PLAINTEXT://[::1]:9093",))
    cluster.submit(lambda state: terms.decide_register_broker(state, node))
    assert dict(cluster.view.brokers) == {2: BrokerEndpoint(2, "::1", 9093, "rack")}, "broker 1 has no address"
    found = cluster.view.topic("t")
    assert found is not None
    (leader,) = (partition.leader for partition in found.view.partitions)
    gone = DeleteNode(broker_path(leader))
    apply(cluster.state, gone)
    cluster.view.update(update_after(cluster.state, [gone]))
    cluster.check()
    found = cluster.view.topic("t")
    assert found is not None
    assert [partition.leader for partition in found.view.partitions] == [-1]


def test_observers_are_told_of_every_update_in_order_after_the_view_has_taken_it() -> None:
    view = ClusterView()
    seen: list[tuple[str, int, ClusterUpdate]] = []
    view.watch(lambda update: seen.append(("first", view.version, update)))
    view.watch(lambda update: seen.append(("second", view.version, update)))
    update = ClusterUpdate(configs={"t": {"retention.ms": "5"}})
    view.update(update)
    view.update(ClusterUpdate())
    assert [(name, version) for name, version, _ in seen] == [("first", 1), ("second", 1), ("first", 2), ("second", 2)]
    assert seen[0][2] is update


def test_what_an_update_does_not_name_stays() -> None:
    cluster = Published(partitions=1, brokers=1)
    before = cluster.view.topic("t"), cluster.view.brokers, cluster.view.controller_id
    cluster.view.update(ClusterUpdate(configs={"u": {"retention.ms": "5"}}))
    assert (cluster.view.topic("t"), cluster.view.brokers, cluster.view.controller_id) == before
