"""The incidents in a world of groups, each with its weight in the theme of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.protocol.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from anabranch.protocol.messages.consumer_group_heartbeat import TopicPartitions as BeatPartitions
from anabranch.protocol.messages.delete_groups import DeleteGroupsRequest
from anabranch.protocol.messages.heartbeat import HeartbeatRequest
from anabranch.protocol.messages.leave_group import LeaveGroupRequest, MemberIdentity
from anabranch.protocol.messages.offset_commit import (
    KeyRangeOffset,
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from anabranch.protocol.messages.offset_delete import (
    OffsetDeleteRequest,
    OffsetDeleteRequestPartition,
    OffsetDeleteRequestTopic,
)
from tests.simulation.groups_shared_topics import SharedTopic
from tests.simulation.groups_theme import NAMES, PARTITIONS_MAX, Theme

if TYPE_CHECKING:
    from tests.simulation.groups_client import Client
    from tests.simulation.groups_world import World


def a_client(world: World) -> Client | None:
    return world.chance.choice(world.clients) if world.clients else None


def join(world: World) -> None:
    group_id = world.chance.choice(world.groups)
    there = list(world.clients_of(group_id))
    if len(there) >= world.theme.clients:
        return
    instance = None
    if world.chance.random() < world.theme.static:
        used = {client.instance for client in there}
        free = [name for name in ("i1", "i2", "i3") if name not in used]
        # Now and then two processes are given the same name.
        instance = world.chance.choice(free or ["i1"]) if world.chance.random() < 0.95 else "i1"
    world.start(group_id, instance=instance)


def leave(world: World) -> None:
    client = a_client(world)
    if client is not None:
        client.leave(stay=world.chance.choice((None, None, True, False)))


def bounce(world: World) -> None:
    """A process ends, well or badly, and another one takes its place, perhaps of the other protocol."""
    client = a_client(world)
    if client is None or client.is_leaving:
        return
    if world.chance.random() < 0.5:
        client.kill()
    else:
        client.leave()
    classic = client.is_classic
    if world.chance.random() < 0.3 and world.theme.classic:
        classic = not classic
    world.after(world.chance.randint(50, 6_000), world._bounced, client, classic)


def pause(world: World) -> None:
    client = a_client(world)
    if client is not None:
        client.pause(world.chance.choice((500, 3_000, world.theme.session_timeout_ms * 2)))


def subscribe(world: World) -> None:
    client = a_client(world)
    if client is not None:
        client.subscribe(world.subscription())


def choose_assignor(world: World) -> None:
    world.assignor_data = str(world.chance.randrange(5)).encode()


def stall(world: World) -> None:
    if world.connections:
        connection = world.chance.choice(world.connections)
        connection.stall(world.chance.choice((1_000, 3_000, 8_000)), up=world.chance.random() < 0.7)


def reset(world: World) -> None:
    if world.connections:
        world.chance.choice(world.connections).close("reset")


def isolate(world: World) -> None:
    """A client reaches no broker for a while; its requests under way are delayed."""
    client = a_client(world)
    if client is not None:
        ms = world.chance.choice((1_000, 4_000, 2 * world.theme.session_timeout_ms))
        world.say("%s is cut off for %d ms", client.name, ms)
        world._unreachable[client.name] = world.now_ms + ms
        for connection in world.connections:
            if connection.client_id == client.name:
                connection.stall(ms, up=True)
                connection.stall(ms, up=False)


def crash(world: World) -> None:
    broker = world.chance.choice(world.brokers)
    happens = world.chance.random()
    if happens < 0.6:
        broker.crash()
    elif happens < 0.8:
        broker.log.refuses = True
    else:
        broker.fails_sync = True


def compact(world: World) -> None:
    world.chance.choice(world.brokers).compact()


def change_topics(world: World) -> None:
    """Topics come, go, come again, grow and shrink."""
    chance = world.chance
    name = chance.choice(NAMES)
    topic = world.image.by_name.get(name)
    if topic is None:
        world._new_topic(name)
        return
    count = len(topic.partitions)
    least = world.topics[name].initial
    match chance.choice(("grow", "grow", "shrink", "shrink", "reap", "delete", "again", "forget")):
        case "grow" if topic.size < PARTITIONS_MAX:
            world._resize(topic, count + chance.randint(1, 3))
        case "shrink" if count > least:
            world._resize(topic, chance.randint(least, count - 1))
        case "reap" if topic.retiring:
            world._reap(topic)
        case "delete" if world.theme.makes_topics_again:
            world._delete_topic(name)
        case "again" if world.theme.makes_topics_again:
            world._new_topic(name)
        case "forget":
            world._delete_records(topic, chance.randrange(topic.size))
        case _:
            pass


def configure(world: World) -> None:
    """A group's config changes: it counts from each member's next heartbeat on."""
    chance = world.chance
    factor = chance.choice((3, 5, 8))
    configs = {"consumer.session.timeout.ms": str(factor * world.theme.heartbeat_interval_ms)}
    group_id = chance.choice(world.groups)
    world.group_configs[group_id] = configs if chance.random() < 0.7 else {}
    world.say("%s has configs %s", group_id, world.group_configs[group_id])


def expel(world: World) -> None:
    """An administrator takes a member out."""
    group_id = world.chance.choice(world.groups)
    broker = world.broker_of(group_id)
    group = None if broker.machine is None else broker.machine.groups.get(group_id)
    if group is not None and group.members:
        identity = MemberIdentity(member_id=world.chance.choice(sorted(group.members)))
        request = LeaveGroupRequest(group_id=group_id, members=[identity])
        world.say("an administrator says %s", request)
        broker.administrate(request, 5)


def forget_offsets(world: World) -> None:
    """An administrator deletes a group's committed offsets of a topic without a subscriber."""
    group_id, name = world.chance.choice(world.groups), world.chance.choice(NAMES)
    if group_id in world.latest:
        return  # a group that reads from the end skips records when it has no offsets any more
    parts = [OffsetDeleteRequestPartition(partition_index=number) for number in range(PARTITIONS_MAX)]
    request = OffsetDeleteRequest(group_id=group_id, topics=[OffsetDeleteRequestTopic(name=name, partitions=parts)])
    world.broker_of(group_id).administrate(request, 0)


def delete_group(world: World) -> None:
    group_id = world.chance.choice(world.groups)
    broker = world.broker_of(group_id)
    if broker.machine is not None and group_id not in world.latest:
        group = broker.machine.groups.get(group_id)
        if world.chance.random() < 0.7 and group is not None and group.members:
            return
        world.say("an administrator deletes %s", group_id)
        broker.administrate(DeleteGroupsRequest(groups_names=[group_id]), 2)


def stranger(world: World) -> None:
    """A client that is no member, or no longer one, sends a request: the request changes nothing."""
    chance = world.chance
    group_id = chance.choice(world.groups)
    broker = world.broker_of(group_id)
    if broker.machine is None:
        return
    group = broker.machine.groups.get(group_id)
    member_id, epoch = "stranger", chance.choice((1, 5, 1 << 30))
    if group is not None and group.members and chance.random() < 0.7:
        member_id = chance.choice(sorted(group.members))
        epoch = 1 << 30
        if isinstance(group, ConsumerGroup):
            member = group.members[member_id]
            old = [one for one in range(1, member.epoch) if one != member.previous_epoch]
            epoch = chance.choice([*old, epoch])
    topics = [BeatPartitions(topic_id=topic_id, partitions=[0]) for topic_id in world.image.by_id]
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=1 << 40)
    request = chance.choice(
        (
            ConsumerGroupHeartbeatRequest(
                group_id=group_id, member_id=member_id, member_epoch=epoch, topic_partitions=topics
            ),
            ConsumerGroupHeartbeatRequest(group_id=group_id, member_id="stranger", member_epoch=-1),
            ConsumerGroupHeartbeatRequest(group_id=group_id, member_id="stranger", member_epoch=-2, instance_id="i1"),
            HeartbeatRequest(group_id=group_id, member_id=member_id, generation_id=epoch),
            OffsetCommitRequest(
                group_id=group_id,
                member_id=member_id,
                generation_id_or_member_epoch=epoch,
                topics=[OffsetCommitRequestTopic(name=name, partitions=[part]) for name in world.image.by_name],
            ),
        )
    )
    version = 9 if isinstance(request, OffsetCommitRequest) else 1
    broker.tell_topics()  # As any request does; what that writes is not the stranger's.
    end = broker.log.end
    world.say("a stranger says %s", request)

    def answered(reply: Any) -> None:
        world.say("  answer to a stranger: %s", reply)
        if isinstance(request, OffsetCommitRequest):
            assert all(part.error_code for topic in reply.topics for part in topic.partitions), (request, reply)
        else:
            assert reply.error_code, (request, reply)

    broker.handle(request, version, "stranger", 1 << 40, answered)
    assert broker.log.end <= end, request  # It is cut where a sync of what others wrote fails at this moment.


def switch(world: World) -> None:
    """A topic is to be shared no longer, or again."""
    topic = world.chance.choice(sorted(world.topics.values(), key=lambda topic: topic.name)) if world.topics else None
    if isinstance(topic, SharedTopic):
        topic.accept(world.now_ms)
        world.say("%s %s fetches by ranges", topic.name, "accepts" if topic.accepts_ranges else "refuses")
        world._put_topic(topic)


def late_commit(world: World) -> None:
    """A member's commit of before arrives when its keys are others': of theirs it moves nothing.

    It names keys of another member, and is refused; or none, and counts for the keys that its sender has, which have
    come as far already.
    """
    chance = world.chance
    group_id = chance.choice(world.groups)
    broker = world.broker_of(group_id)
    group = None if broker.machine is None else broker.machine.groups.get(group_id)
    if broker.machine is None or not isinstance(group, ConsumerGroup) or not group.sharers:
        return
    topic_id, number = at = chance.choice(sorted(group.sharers))
    name = broker.machine.image.name_of(topic_id)
    position = broker.machine.offsets.current(group_id, name, number)
    if not name or position is None:
        return
    sharers = group.sharers[at]
    sender, other = chance.choice(sorted(group.members)), chance.choice(sorted(sharers))
    part = OffsetCommitRequestPartition(partition_index=number, committed_offset=position.offset)
    is_refused = sender not in sharers or chance.random() < 0.5
    if is_refused:
        if sender == other:
            return
        highest = max(position.stands.offsets)
        part.key_range_offsets = [KeyRangeOffset(start=it.start, end=it.end, offset=highest) for it in sharers[other]]
    else:
        part.committed_offset = min(position.stands.lowest(it) for it in sharers[sender])
    request = OffsetCommitRequest(
        group_id=group_id,
        member_id=sender,
        generation_id_or_member_epoch=group.members[sender].epoch,
        topics=[OffsetCommitRequestTopic(name=name, topic_id=topic_id, partitions=[part])],
    )
    world.say("late: %s", request)

    def answered(reply: Any) -> None:
        world.say("  answer to what was late: %s", reply)
        codes = [part.error_code for topic in reply.topics for part in topic.partitions]
        assert not is_refused or ErrorCode.NONE not in codes, f"{request} was accepted"

    broker.handle(request, 10, "late", 1 << 40, answered)


def give_up_order(world: World) -> None:
    """A topic's order is no longer kept."""
    names = sorted(name for name, topic in world.topics.items() if topic.ordered and len(topic.counts) > 1)
    if names:
        world._give_up_order(world.chance.choice(names))


def clean(world: World) -> None:
    """A compacted topic is cleaned, each partition up to somewhere."""
    names = sorted(name for name, topic in world.topics.items() if topic.is_compacted)
    if names:
        world._clean(world.chance.choice(names))


INCIDENTS: tuple[tuple[Callable[[Theme], float], Callable[[World], object]], ...] = (
    (lambda theme: 10, join),
    (lambda theme: 4, leave),
    (lambda theme: 8, bounce),
    (lambda theme: 3, pause),
    (lambda theme: 4, subscribe),
    (lambda theme: 2 * theme.local_assignors, choose_assignor),
    (lambda theme: 12 * theme.faults, stall),
    (lambda theme: 6 * theme.faults, reset),
    (lambda theme: 3 * theme.faults, isolate),
    (lambda theme: theme.crashes, crash),
    (lambda theme: 4, compact),
    (lambda theme: theme.topics, change_topics),
    (lambda theme: 1, delete_group),
    (lambda theme: 1, configure),
    (lambda theme: 1, expel),
    (lambda theme: 1, forget_offsets),
    (lambda theme: 3, stranger),
    (lambda theme: 3 * (theme.sharing > 0), switch),
    (lambda theme: 6 * (theme.sharing > 0), late_commit),
    (lambda theme: theme.disorder, give_up_order),
    (lambda theme: 6 * (theme.compacted > 0), clean),
)
