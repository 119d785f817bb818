"""The controller's term and the live brokers: interrupted changes are resumed here.

A controller's term begins with the whole tree folded. It writes the records that a crash left unwritten, then repeats
every order: its predecessor's effects may have been performed, or not, or performed and their answers lost. A broker
has no role after its start until the controller sends it.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.machines.controller import nodes
from anabranch.machines.controller.effects import Decision, Effect, InspectRetiring, PublishMetadata, decision
from anabranch.machines.controller.nodes import BrokerNode, DeleteNode, MetadataRecord
from anabranch.machines.controller.plan import Plan
from anabranch.machines.controller.roles import role_of
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.topics import deleted_nodes
from anabranch.machines.outcome import Draft


def decide_elected(state: ControllerState) -> Decision[int]:
    """Begin a term: the first decision after loading the tree. The reply is the controller epoch."""
    epoch = state.controller_epoch + 1
    draft: Draft[MetadataRecord] = Draft()
    draft.write(nodes.put_controller_epoch(epoch))
    term = replace(state, controller_epoch=epoch)
    for name in sorted(state.deleting - state.topics.keys()):
        draft.write(*deleted_nodes(state, name))
    for name in sorted(state.topics):
        plan = Plan(term, state.topics[name])
        if name not in state.deleting:
            plan.write_due()
        plan.send_all()
        draft.add(plan.draft)
    draft.perform(*_look_over(state))
    return decision(draft, epoch)


def decide_register_broker(state: ControllerState, broker: BrokerNode, *, unclean: bool = False) -> Decision[None]:
    """Register a started broker, whose epoch is above that of its last start, and send it all of its roles.

    `unclean`: it may have lost records that readers saw (it was killed under `durability=os`). Its open partitions
    then go on under a new leader epoch, so that readers notice (KIP-320).
    """
    before = state.brokers.get(broker.broker_id)
    assert before is None or broker.epoch >= before.epoch, "a broker's epoch grows with each start"
    draft: Draft[MetadataRecord] = Draft()
    draft.write(nodes.put_broker(broker))
    there = replace(state, brokers={**state.brokers, broker.broker_id: broker})
    for name in sorted(state.topics):
        plan = Plan(there, state.topics[name])
        if unclean and name not in state.deleting:
            _restart_epochs(plan, broker.broker_id)
        plan.send_all(broker.broker_id)
        draft.add(plan.draft)
    draft.perform(*_look_over(state))
    return decision(draft, None)


def decide_broker_left(state: ControllerState, broker_id: int) -> Decision[None]:
    """A broker is gone: its partitions have no leader until it is back. Nothing that waits for it is given up."""
    if broker_id not in state.brokers:
        return Decision(reply=None)
    names = tuple(
        name for name in sorted(state.topics) if any(n.leader == broker_id for n in state.partitions[name].values())
    )
    return Decision(reply=None, records=(DeleteNode(nodes.broker_path(broker_id)),), effects=(PublishMetadata(names),))


def _look_over(state: ControllerState) -> list[Effect]:
    """Every topic is shown anew, and looked at for retiring partitions that are empty by now."""
    retiring = (
        name
        for name, topic in sorted(state.topics.items())
        if name not in state.deleting and len(topic.partitions) > topic.undeleted_partition_count
    )
    effects: list[Effect] = [PublishMetadata(tuple(sorted(state.topics)))]
    names = tuple(retiring)
    return [*effects, InspectRetiring(names)] if names else effects


def _restart_epochs(plan: Plan, broker_id: int) -> None:
    reaping = frozenset(plan.topic.reaping)
    for partition in sorted(plan.topic.partitions.keys() - reaping):
        node = plan.node(partition)
        if node is None or node.leader != broker_id or role_of(plan.topic, partition, node).retiring:
            continue
        plan.write_node(
            partition,
            replace(node, leader_epoch=node.leader_epoch + 1, controller_epoch=plan.state.controller_epoch),
        )
