"""Stories of groups that read in order, step by step: each shows one thing that a run made of chance seldom comes to.

A story ends well or raises AssertionError, its own or that of a rule. `test_groups_stories` tells it with the code that
ships, `test_groups_done_wrong` and `tests.mutations` with code that does it wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.membership.steps import Subscription
from anabranch.machines.groups.consumer.group import ConsumerGroup
from anabranch.machines.placement import place
from anabranch.protocol.messages.consumer_group_install_assignment import ConsumerGroupInstallAssignmentRequest
from anabranch.protocol.messages.consumer_group_position import ConsumerGroupPositionRequest
from tests.simulation.groups_client import Client, Way
from tests.simulation.groups_records import Topic
from tests.simulation.groups_world import World

GROUP, TOPIC = "g0", "a"
POLL_INTERVAL_MS = 20_000
SOON_MS = 5_000
"""The time in which topics are known everywhere, and members have what they are to have."""


class OrderedWorld(World):
    """A world without incidents, with one group and one ordered topic.

    By default the group has the consumer protocol, and commits nothing.
    """

    def __init__(self, count: int = 1, **changed: Any) -> None:
        """`count`: of the topic's partitions. `changed` is of the theme."""
        calm: dict[str, Any] = {
            "groups": 1,
            "classic": 0.0,
            "static": 0.0,
            "patterns": 0.0,
            "local_assignors": 0.0,
            "slow": 0.0,
            "faults": 0.0,
            "slow_syncs": 0.0,
            "ordered": 1.0,
            "keys": 8,
            "latest": 0.0,
            "commits": ("never",),
            "poll_interval_ms": POLL_INTERVAL_MS,
        }
        super().__init__(0, **(calm | changed))
        self.heal()
        self._new_topic(TOPIC)
        while self.topic.initial != count:
            self._new_topic(TOPIC)
        self._made_again.clear()  # no group has read any of them

    @property
    def topic(self) -> Topic:
        return self.topics[TOPIC]

    def subscription(self) -> Subscription:
        return Subscription(frozenset({TOPIC}))

    def send_all(self, *, to: int | None = None) -> None:
        """Append a record of every key, or of those that one partition holds."""
        for key in range(self.topic.keys):
            if to in (None, self.topic.place_of(key)):
                self.topic.send(key)

    def resize_to(self, count: int) -> None:
        self._resize(self.image.by_name[TOPIC], count)

    def reap(self) -> None:
        """Remove the retiring partitions, which are empty."""
        self.topic.reap()
        self._put_topic(self.topic)

    def tell(self) -> None:
        """Have the coordinators learn how the topics are now."""
        for broker in self.brokers:
            self.after(0, broker.tell_topics)
        self.run_until(self.now_ms + 1)

    def owned(self, *clients: Client) -> list[set[int]]:
        """The partitions of each client."""
        return [{number for _, number in client.holds} for client in clients]

    def given(self) -> set[int]:
        """The partitions that the coordinator has given to members."""
        machine = self.broker_of(GROUP).machine
        group = None if machine is None else machine.groups.get(GROUP)
        return {number for _, number in group.holders} if isinstance(group, ConsumerGroup) else set()

    def until(self, true: Callable[[], bool], within_ms: int = SOON_MS) -> None:
        end_ms = self.now_ms + within_ms
        while not true():
            assert self.now_ms < end_ms, f"not within {within_ms} ms: {self.owned(*self.clients)}, {self.missing()}"
            self.run_until(self.now_ms + 1)


@contextmanager
def quiet(count: int = 1, **changed: Any) -> Iterator[OrderedWorld]:
    """An ordered world; it is closed at the end."""
    world = OrderedWorld(count, **changed)
    try:
        yield world
    except AssertionError:
        with suppress(AssertionError, RuntimeError):  # what a rule has found, a rule may find again
            world.end()
        world.loop.close()
        raise
    world.end()


def unread_records_were_deleted() -> None:
    """A group has committed nothing, and its parent's records are gone: the first assignment has the child, too."""
    with quiet() as world:
        world.send_all()
        world.resize_to(2)
        world.send_all()
        log = world.topic.logs[0]
        log.delete_before(log.end)
        world.run_until(world.now_ms + SOON_MS)
        world.start(GROUP)
        world.until(lambda: bool(world.given()))
        assert world.given() == {0, 1}, "the child waits for records that are gone"


def records_before_a_gate_are_deleted() -> None:
    """Nothing tells the coordinator that the records which a partition waits for were deleted: it looks itself.

    The members are stock consumers, as ours report how far they are.
    """
    serves = mock.patch.object(Way, "serves", lambda _, request: request is not ConsumerGroupPositionRequest)
    with serves, quiet() as world:
        client = world.start(GROUP)
        world.until(lambda: world.owned(client) == [{0}])
        world.send_all()
        world.resize_to(2)
        world.send_all()
        world.run_until(world.now_ms + SOON_MS)
        assert world.given() == {0}, "the child does not wait"
        log = world.topic.logs[0]
        log.delete_before(log.end)
        world.until(lambda: world.given() == {0, 1}, 2 * POLL_INTERVAL_MS)


def records_are_deleted_under_a_slow_owner() -> None:
    """It has fetched them, and hands them out one by one: those that another member waits with come after them."""
    with quiet(commits=("auto",)) as world:
        first = world.start(GROUP)
        world.until(lambda: world.owned(first) == [{0}])
        first.reader.room = 1
        for _ in range(4):
            world.send_all()
        handed = world.edges[GROUP].by_partition
        world.until(lambda: handed[world.topic.life, 0] > 4)
        world.resize_to(2)
        world.send_all()
        world.start(GROUP)
        log, before = world.topic.logs[0], handed[world.topic.life, 0]
        log.delete_before(log.end)
        world.until(lambda: handed[world.topic.life, 1] == world.topic.logs[1].end, 2 * POLL_INTERVAL_MS)
        assert handed[world.topic.life, 0] > before + 4, "nothing was handed out that was deleted"


def records_before_a_gate_are_compacted_away() -> None:
    """All that is left before a gate has newer records behind it: nothing of it can be read, and nothing is awaited.

    The members are stock consumers, which commit behind the last record that they were handed, and here have none.
    """
    with quiet(stock_groups=1.0) as world:
        topic = world.topic
        topic.is_compacted = True
        moving = [key for key in range(topic.keys) if place(topic.hash_of(key), 1, 2) == 1]
        for key in moving:
            topic.send(key)
        world.resize_to(2)
        world.send_all(to=1)
        topic.compact({0: topic.logs[0].end})
        world.run_until(world.now_ms + SOON_MS)
        member = world.start(GROUP)
        world.until(lambda: world.owned(member) == [{0, 1}])
        world.until(lambda: world.missing() is None)
        assert world.edges[GROUP].by_partition == {(topic.life, 1): len(moving)}


def records_are_compacted_away_under_a_slow_owner(*, stock: bool = False) -> None:
    """It has fetched them, and hands them out one by one: those that another member waits with come after them."""
    with quiet(commits=("auto",), stock_groups=float(stock)) as world:
        topic = world.topic
        topic.is_compacted = True
        first = world.start(GROUP)
        world.until(lambda: world.owned(first) == [{0}])
        first.reader.room = 1
        for _ in range(4):
            world.send_all()
        handed = world.edges[GROUP].by_partition
        world.until(lambda: handed[topic.life, 0] > 4)
        world.resize_to(2)
        world.send_all()
        world.start(GROUP)
        log, before = topic.logs[0], handed[topic.life, 0]
        topic.compact({0: log.end})
        assert all(log.is_compacted_away(offset) for offset in range(before, before + 4))
        world.until(lambda: world.missing() is None, 2 * POLL_INTERVAL_MS)
        assert handed[topic.life, 0] >= before + 4, "nothing was handed out that was dropped"


def another_owner_has_all_its_time() -> None:
    """An owner without commits has had its time, and its partition counts as read; then another member owns it.

    The members are stock consumers that begin at the end, as ours report where they begin. What the former owner's time
    counted for is forgotten: the children of a later resize wait for the new owner's time.
    """
    serves = mock.patch.object(Way, "serves", lambda _, request: request is not ConsumerGroupPositionRequest)
    with serves, quiet(latest=1.0) as world:
        world.send_all()
        world.resize_to(2)
        clients = [world.start(GROUP), world.start(GROUP)]
        world.until(lambda: {0} in world.owned(*clients))
        assert set() in world.owned(*clients), "the child does not wait"
        world.until(lambda: set() not in world.owned(*clients), 2 * POLL_INTERVAL_MS)
        former, heir = sorted(clients, key=lambda client: 0 not in world.owned(client)[0])
        former.leave()
        world.until(lambda: world.owned(heir) == [{0, 1}])
        world.resize_to(4)
        world.send_all()
        world.run_until(world.now_ms + SOON_MS)
        assert world.owned(heir) == [{0, 1}], "the children do not wait for the new owner"
        world.until(lambda: world.owned(heir) == [{0, 1, 2, 3}], 2 * POLL_INTERVAL_MS)


def an_owner_that_comes_back_has_all_its_time() -> None:
    """A stock owner that begins at the end lets go of its partition before its time is over, and gets it back.

    The time that it had before is forgotten: the child waits for all of its time again.
    """
    serves = mock.patch.object(Way, "serves", lambda _, request: request is not ConsumerGroupPositionRequest)
    with serves, quiet(latest=1.0) as world:
        world.send_all()
        world.resize_to(2)
        world.send_all()
        client = world.start(GROUP)
        world.until(lambda: world.owned(client) == [{0}])
        world.run_until(world.now_ms + POLL_INTERVAL_MS * 3 // 4)
        world.after(0, client.subscribe, Subscription(frozenset({"another"})))
        world.until(lambda: world.owned(client) == [set()])
        world.after(0, client.subscribe, world.subscription())
        world.until(lambda: world.owned(client) == [{0}])
        world.run_until(world.now_ms + POLL_INTERVAL_MS // 2)
        assert world.owned(client) == [{0}], "the child does not wait for the owner that came back"
        world.until(lambda: world.owned(client) == [{0, 1}], 2 * POLL_INTERVAL_MS)


def a_static_member_comes_back_while_a_member_computes() -> None:
    """A static member returns under another id between Prepare and Install: the target names its former id.

    Its share is given to the new id. Otherwise that id keeps the former target, in which another member has a
    partition now: each waits for the other for good.
    """
    with quiet(4, local_assignors=1.0) as world, _slow_installs() as installs:
        world.start(GROUP)
        static = world.start(GROUP, instance="i1")
        world.until(lambda: sorted(map(len, world.owned(*world.clients))) == [2, 2])
        static.leave(stay=True)
        world.until(lambda: not static.is_alive)
        installs.clear()
        world.start(GROUP)
        world.until(lambda: bool(installs))
        heir = world.start(GROUP, instance="i1")
        world.until(lambda: heir.is_in and world.missing() is None, 3 * SOON_MS)
        assert sorted(map(len, world.owned(*world.clients))) == [1, 1, 2]


def a_group_comes_back_after_a_resize(*, classic: bool = False) -> None:
    """A group that reads from the end has committed nothing when its members leave; then the topic is resized.

    The new partition appeared after the group began: it is read from its beginning when a member comes back.
    """
    with quiet(latest=1.0) as world:
        former = world.start(GROUP, classic=classic)
        world.until(lambda: world.owned(former) == [{0}])
        former.leave()
        world.until(lambda: not former.is_alive)
        world.resize_to(2)
        world.tell()
        world.send_all()
        world.start(GROUP, classic=classic)
        world.until(lambda: world.missing() is None)
        assert world.edges[GROUP].by_partition[world.topic.life, 1] == world.topic.logs[1].end > 0


def a_classic_group_comes_back_after_a_resize() -> None:
    """The same of a group whose assignments the coordinator does not make."""
    a_group_comes_back_after_a_resize(classic=True)


def a_partition_is_removed_and_made_again_while_nobody_reads() -> None:
    """A group that reads from the end was there before a partition was removed: made again, it appeared later."""
    with quiet(2, latest=1.0) as world:
        world.resize_to(3)
        world.tell()
        former = world.start(GROUP)
        world.until(lambda: world.owned(former) == [{0, 1, 2}])
        former.leave()
        world.until(lambda: not former.is_alive)
        world.resize_to(2)
        world.reap()
        world.tell()
        world.resize_to(3)
        world.tell()
        world.send_all()
        world.start(GROUP)
        world.until(lambda: world.missing() is None)
        assert world.edges[GROUP].by_partition[world.topic.life, 2] == world.topic.logs[2].end > 0


def the_first_records_behind_a_gate_were_deleted() -> None:
    """The owner of a new partition begins behind its deleted records, and commits that: its gate stays closed.

    The members are classic, to whom the coordinator hands out partitions with closed gates.
    """
    with quiet(strategies=(("range",),), initial_delay_ms=0) as world:
        first = world.start(GROUP, classic=True)
        world.until(lambda: world.owned(first) == [{0}])
        world.send_all()
        world.resize_to(2)
        world.send_all()
        world.topic.logs[1].delete_before(1)
        world.theme = replace(world.theme, commits=("auto",))
        second = world.start(GROUP, classic=True)
        world.until(lambda: world.owned(first, second) == [{0}, {1}])
        world.run_until(world.now_ms + SOON_MS)
        positions = world.rules.positions
        assert positions.committed_offset(GROUP, world.topic.life, 1) == 1, "the log start is not committed"
        assert world.edges[GROUP].by_partition[world.topic.life, 1] == 0, "the gate is open"
        world.until(lambda: world.missing() is None, 2 * POLL_INTERVAL_MS)


def the_order_is_given_up_while_a_partition_waits_that_was_taken_away() -> None:
    """Its owner gets it back, and keeps it: the gates of before are no longer any."""
    with quiet(stock_groups=1.0) as world:
        client = world.start(GROUP)
        world.until(lambda: world.owned(client) == [{0}])
        world.resize_to(2)
        world.until(lambda: world.owned(client) == [{0, 1}])
        world.send_all()
        world.until(lambda: world.missing() is None)
        _commit(client)
        world.run_until(world.now_ms + SOON_MS)
        world.resize_to(1)
        world.send_all()
        world.resize_to(2)
        world.until(lambda: world.owned(client) == [{0}])
        world.after(0, world._give_up_order, TOPIC)
        world.until(lambda: world.owned(client) == [{0, 1}])
        end_ms = world.now_ms + POLL_INTERVAL_MS // 2
        while world.now_ms < end_ms:
            world.run_until(world.now_ms + 100)
            assert world.owned(client) == [{0, 1}], "it is taken away again"


def a_partition_re_opens_that_its_owner_has_not_read() -> None:
    """A stock owner has committed nothing for all of its time, and began at the start: it keeps the partition.

    Were it taken away, its position would be written where it re-opened, and its next owner begin there. Nobody knows
    where it began: what it asked a leader is not heard.
    """
    unheard = mock.patch.object(Client, "asks_leader", return_value=None)
    with unheard, quiet(stock_groups=1.0) as world:
        world.resize_to(2)
        world.send_all(to=1)
        world.resize_to(1)
        world.tell()
        former = world.start(GROUP)
        unread = TopicPartition(TOPIC, 1)
        world.until(lambda: unread in former.reader.fetcher.positions())
        former.reader.fetcher.pause(unread)
        assert world.edges[GROUP].by_partition[world.topic.life, 1] == 0, "it was read already"
        world.run_until(world.now_ms + 2 * POLL_INTERVAL_MS)
        world.send_all(to=0)
        world.resize_to(2)
        world.run_until(world.now_ms + SOON_MS)
        former.kill()
        heir = world.start(GROUP)
        world.until(lambda: world.owned(heir) == [{0, 1}], 2 * POLL_INTERVAL_MS)
        world.until(lambda: world.missing() is None, 2 * POLL_INTERVAL_MS)


def a_broker_fails_while_a_partition_waits() -> None:
    """What was written meanwhile is handed to a group that reads from the end, whoever has seen the wait begin."""
    with quiet(latest=1.0, stock_groups=1.0) as world:
        former = world.start(GROUP)
        world.until(lambda: world.owned(former) == [{0}])
        world.run_until(world.now_ms + SOON_MS)
        world.resize_to(2)
        world.until(lambda: world.owned(former) == [{0, 1}])
        world.send_all(to=1)
        world.run_until(world.now_ms + SOON_MS)
        former.leave()
        world.until(lambda: not former.is_alive)
        world.resize_to(1)
        heir = world.start(GROUP)
        world.until(lambda: world.owned(heir) == [{1}])
        world.send_all()
        world.broker_of(GROUP).crash()
        world.run_until(world.now_ms + SOON_MS)
        world.until(lambda: bool(heir._handed))
        world.run_until(world.now_ms + 1_000)
        assert world.owned(heir) == [{1}], "partition 0 does not wait"
        _commit(heir)
        world.until(lambda: world.owned(heir) == [{0, 1}])
        world.run_until(world.now_ms + SOON_MS)
        assert world.edges[GROUP].by_partition[world.topic.life, 0] == world.topic.logs[0].end > 0


def _commit(client: Client) -> None:
    """Have an application commit what it was handed."""
    client._process.create_task(client.commit_handed(frozenset(client._handed)))


@contextmanager
def _slow_installs() -> Iterator[list[ConsumerGroupInstallAssignmentRequest]]:
    """Targets that members compute arrive late; yields those that were sent."""
    send, sent = Way.send, []

    def late(way: Way, message: Any, **given: Any) -> Any:
        if isinstance(message, ConsumerGroupInstallAssignmentRequest):
            sent.append(message)
            assert way.connection is not None
            way.connection.stall(500, up=True)
        return send(way, message, **given)

    with mock.patch.object(Way, "send", late):
        yield sent


def a_topic_is_granted_again_to_a_member_that_was_told_of_its_parent() -> None:
    """The owner of a child learns that the parent is read; a rebalance takes the child away, and gives it back.

    Every rebalance of an eager group takes all partitions of the topic away, and with them what the member has been
    told. The child had no records yet, so its gate opens only once the member is told again; and the parent gets no
    record any more, of which the coordinator would tell.
    """
    with quiet(classic=1.0, strategies=(("range",),), commits=("each",), initial_delay_ms=0) as world:
        world.send_all()
        clients = [world.start(GROUP), world.start(GROUP)]
        world.until(lambda: sorted(world.owned(*clients)) == [set(), {0}])
        world.resize_to(2)
        world.until(lambda: sorted(world.owned(*clients)) == [{0}, {1}])
        world.run_until(world.now_ms + SOON_MS)
        owned, generation = world.owned(*clients), clients[0].machine.epoch
        passing = world.start(GROUP)
        world.until(lambda: passing.is_in)
        passing.leave()
        world.until(lambda: not passing.is_alive and world.owned(*clients) == owned)
        assert clients[0].machine.epoch > generation, "nothing was taken away"
        world.run_until(world.now_ms + SOON_MS)
        world.send_all(to=1)
        world.until(lambda: world.edges[GROUP].unread(world.topic) is None)
