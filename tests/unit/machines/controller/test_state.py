"""The fold of the metadata tree: order of nodes, deletion, and what a term forgets."""

from __future__ import annotations

import copy
import dataclasses
import random
from functools import reduce
from itertools import permutations
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import nodes
from anabranch.machines.controller.layouts import Layout
from anabranch.machines.controller.nodes import (
    BrokerNode,
    Confirmed,
    DeleteNode,
    MetadataRecord,
    PartitionNode,
    PutNode,
    Stopped,
    Topic,
    Unconfirmed,
)
from anabranch.machines.controller.state import ControllerState, applied, apply

TOPIC_ID = UUID(int=7)


def topic(count: int = 2) -> Topic:
    return Topic("t", TOPIC_ID, dict.fromkeys(range(count), (1,)), 1, (Layout(0, count),))


TREE = [
    nodes.put_topic(topic()),
    nodes.put_partition("t", 0, PartitionNode(leader=1, leader_epoch=3, isr=(1,), controller_epoch=1)),
    nodes.put_broker(BrokerNode(1, 1)),
    PutNode(f"{nodes.DELETIONS}/t", b""),
]


@pytest.mark.parametrize("order", list(permutations(range(len(TREE)))))
def test_the_order_in_which_a_tree_is_loaded_does_not_matter(order: tuple[int, ...]) -> None:
    state = ControllerState()
    for place in order:
        apply(state, TREE[place])
    assert state.topics["t"].topic_id == TOPIC_ID and state.names == {TOPIC_ID: "t"}
    assert state.partitions["t"][0].leader_epoch == 3
    assert state.deleting == {"t"} and 1 in state.brokers


def loaded() -> ControllerState:
    state = ControllerState()
    for record in TREE:
        apply(state, record)
    return state


def test_a_deleted_topic_leaves_nothing_of_itself() -> None:
    state = loaded()
    apply(state, Confirmed("t", TOPIC_ID, {0: (0, 3)}))
    apply(state, Stopped("t", TOPIC_ID, frozenset({(0, 1)})))
    for path in (
        f"{nodes.TOPICS}/t/partitions/0/state",
        f"{nodes.TOPICS}/t",
        f"{nodes.DELETIONS}/t",
    ):
        apply(state, DeleteNode(path))
    assert not (state.topics or state.partitions or state.names or state.deleting or state.confirmed or state.stopped)
    apply(state, DeleteNode(f"{nodes.TOPICS}/t"))


def test_confirmations_of_another_life_of_the_topic_or_of_an_older_epoch_change_nothing() -> None:
    state = loaded()
    apply(state, Confirmed("t", UUID(int=8), {0: (0, 9)}))
    assert state.confirmed.get("t", {}) == {}
    apply(state, Confirmed("t", TOPIC_ID, {0: (1, 4)}))
    apply(state, Confirmed("t", TOPIC_ID, {0: (0, 3)}))
    assert state.confirmed["t"] == {0: (1, 4)}


def test_a_broker_that_starts_again_has_confirmed_nothing() -> None:
    state = loaded()
    apply(state, Confirmed("t", TOPIC_ID, {0: (0, 3)}))
    apply(state, nodes.put_broker(BrokerNode(1, 1)))
    assert state.confirmed["t"] == {0: (0, 3)}
    apply(state, nodes.put_broker(BrokerNode(1, 2)))
    assert state.confirmed["t"] == {}


def test_a_partition_that_is_gone_is_neither_confirmed_nor_stopped_any_more() -> None:
    state = loaded()
    apply(state, Confirmed("t", TOPIC_ID, {0: (0, 3), 1: (0, 3)}))
    apply(state, Stopped("t", TOPIC_ID, frozenset({(1, 1)})))
    apply(state, nodes.put_topic(topic(1)))
    assert state.confirmed["t"] == {0: (0, 3)} and state.stopped["t"] == set()


# -- states of their own ---------------------------------------------------------------------------------------------


def _whole(state: ControllerState) -> dict[str, object]:
    """Every field, also those that are not compared."""
    return {each.name: copy.deepcopy(getattr(state, each.name)) for each in dataclasses.fields(state)}


def test_a_state_of_its_own_is_what_applying_makes_and_leaves_the_other_as_it_was() -> None:
    chance = random.Random(1)
    state = ControllerState()
    for step in range(400):
        records = [_some_record(chance, step) for _ in range(chance.randrange(1, 4))]
        before = _whole(state)
        other = applied(state, records)
        assert _whole(state) == before
        reduce(apply, records, state)
        assert _whole(other) == _whole(state)


def _some_record(chance: random.Random, step: int) -> MetadataRecord:
    name, partition, broker = chance.choice("ab"), chance.randrange(3), chance.randrange(2)
    topic_id = UUID(int=ord(name))
    topic = Topic(name, topic_id, dict.fromkeys(range(chance.randrange(1, 4)), (broker,)), 1, (Layout(0, 1),))
    paths = [nodes.topic_path(name), nodes.partition_path(name, partition), nodes.broker_path(broker)]
    paths += [nodes.config_path(name), nodes.deletion_path(name), nodes.group_config_path(name)]
    makers: list[MetadataRecord] = [
        nodes.put_topic(topic),
        nodes.put_topic(topic),
        nodes.put_partition(name, partition, PartitionNode(broker, step, (broker,), 1)),
        nodes.put_broker(BrokerNode(broker, step)),
        nodes.put_configs(name, {"x": str(step)}),
        nodes.put_group_configs(name, {"x": str(step)}),
        nodes.put_deletion(topic),
        nodes.put_controller_epoch(step),
        Confirmed(name, topic_id, {partition: (0, step)}),
        Unconfirmed(name, topic_id, {partition: ErrorCode.KAFKA_STORAGE_ERROR}),
        Stopped(name, topic_id, frozenset({(partition, broker)})),
    ]
    return DeleteNode(chance.choice(paths)) if chance.random() < 0.2 else chance.choice(makers)
