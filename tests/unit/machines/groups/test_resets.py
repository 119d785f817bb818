"""What consumers ask leaders when their resets make them begin, and what the coordinator concludes from it."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from anabranch.machines.groups.classic import ClassicGroup
from anabranch.machines.groups.settings import GroupSettings
from anabranch.protocol.messages.join_group import JoinGroupResponse
from anabranch.protocol.messages.sync_group import SyncGroupRequestAssignment
from tests.support.groups import GROUP, assignment, subscription
from tests.unit.machines.groups.test_positions_asked import Asking, settle
from tests.unit.machines.groups.test_starts import FOO, TIMEOUT_MS, Topic, assigned, committed

LATEST, EARLIEST, HOUR_AGO = -1, -2, 1_700_000_000_000


def grown() -> Topic:
    """Five records in partition 0, of which another came after it grew, and seven in partition 1."""
    topic = Topic()
    topic.ends[0] = 5
    topic.resize(2)
    topic.ends = {0: 6, 1: 7}
    return topic


def heard(world: Asking, asked: Mapping[int, int], *, client: str = "client", host: str = "/host") -> None:
    world.submit(lambda machine: machine.reset_heard(FOO, asked, client, host))


def begun(topic: Topic) -> tuple[Asking, int]:
    """A group formed after the resize, whose member has partition 0; five records arrive in partition 1."""
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    assert assigned(world) == "foo-0"
    topic.ends[1] = 12
    return world, epoch


def test_an_owner_that_asked_for_the_latest_offset_and_commits_reads_from_the_end() -> None:
    """Fault 7: the commit opened the gate, and the partition behind it was read from its log start."""
    topic = grown()
    world, epoch = begun(topic)
    heard(world, {0: LATEST})
    topic.ends[0] = 9
    world.commit("A", epoch, 0, 8)
    settle(world, "A", epoch)
    assert committed(world) == {0: 8, 1: 7}, "the log end when the group began"
    world.check()


def test_what_was_heard_outlives_the_coordinator() -> None:
    world, epoch = begun(grown())
    heard(world, {0: LATEST})
    world.reload(compact=True)
    settle(world, "A", epoch)
    world.commit("A", epoch, 0, 8)
    settle(world, "A", epoch)
    assert committed(world) == {0: 8, 1: 7}


@pytest.mark.parametrize(("asked", "begins"), [([LATEST], 7), ([EARLIEST], 0), ([LATEST, EARLIEST], 0), ([], 0)])
def test_a_commit_right_after_a_fail_over_does_not_hide_that_a_partition_waited(asked: list[int], begins: int) -> None:
    """The gate was open when the new coordinator first looked: the reset passed over what had come meanwhile."""
    topic = grown()
    world, epoch = begun(topic)
    for each in asked:
        heard(world, {0: each})
    topic.ends[0] = 9
    world.set_topics(topic.image())
    world.reload(compact=True)
    world.commit("A", epoch, 0, 8)
    settle(world, "A", epoch)
    assert committed(world) == {0: 8, 1: begins}


@pytest.mark.parametrize(
    "asked",
    [
        pytest.param([{0: EARLIEST}], id="earliest"),
        pytest.param([{0: LATEST}, {0: EARLIEST}], id="a client of the same name asked first"),
        pytest.param([{0: EARLIEST}, {0: LATEST}], id="a client of the same name asked later"),
        pytest.param([{0: HOUR_AGO}], id="by time"),
        pytest.param([{1: LATEST}], id="of a partition that it does not have"),
        pytest.param([], id="nothing"),
    ],
)
def test_a_group_that_may_have_read_history_reads_that_of_partitions_that_waited(asked: list[dict[int, int]]) -> None:
    world, epoch = begun(grown())
    for each in asked:
        heard(world, each)
    world.commit("A", epoch, 0, 8)
    settle(world, "A", epoch)
    assert committed(world) == {0: 8, 1: 0}


@pytest.mark.parametrize(("client", "host"), [("another", "/host"), ("client", "/another")])
def test_what_others_ask_says_nothing(client: str, host: str) -> None:
    world, epoch = begun(grown())
    heard(world, {0: LATEST}, client=client, host=host)
    world.commit("A", epoch, 0, 8)
    settle(world, "A", epoch)
    assert committed(world) == {0: 8, 1: 0}


def test_a_question_alone_says_nothing_before_its_partition_is_committed() -> None:
    """A client of the same name may have asked, and the owner not yet: gates may open for other reasons meanwhile."""
    topic = grown()
    world, _ = begun(topic)
    heard(world, {0: LATEST})
    second = settle(world, "B", world.join("B").member_epoch)
    topic.starts[0] = 5
    world.set_topics(topic.image())
    world.leave("A")
    settle(world, "B", second)
    assert assigned(world, "B") == "foo-0 foo-1" and committed(world) == {1: 0}


def test_a_question_after_the_commit_says_nothing() -> None:
    world, epoch = begun(grown())
    world.commit("A", epoch, 0, 3)
    heard(world, {0: LATEST})
    world.commit("A", epoch, 0, 8)
    settle(world, "A", epoch)
    assert committed(world) == {0: 8, 1: 0}


def test_an_owner_that_asked_for_the_earliest_offset_is_never_taken_for_one_that_reads_from_the_end() -> None:
    """Without a commit for its rebalance timeout it was, and the history of the partition behind the gate was lost."""
    topic = grown()
    world, epoch = begun(topic)
    heard(world, {0: EARLIEST})
    for _ in range(TIMEOUT_MS // 20_000 + 2):
        world.advance(20_000)
        world.beat("A", epoch)
    assert assigned(world) == "foo-0 foo-1" and committed(world) == {1: 0}
    assert world.coordinator.starts.reads_from_beginning(GROUP, FOO)


def test_a_gate_that_opened_because_an_owner_seemed_to_read_from_the_end_closes_when_it_asks() -> None:
    """Its time was over, and its question came before the heartbeat that would have given it the partition behind."""
    topic = Topic(2)
    topic.ends = {0: 5, 1: 5}
    topic.resize(4)
    topic.ends = {0: 6, 1: 6, 2: 7, 3: 7}
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    for _ in range(2):
        world.advance(20_000)
        world.beat("A", epoch)
    world.advance(10_000)
    world.commit("A", epoch, 1, 3)
    world.beat("A", epoch)
    assert assigned(world) == "foo-0 foo-1"
    world.advance(TIMEOUT_MS // 3)
    assert world.told(world.beat("A", epoch)) is None
    world.advance(500)
    stand = world.coordinator.keeper.of(GROUP).evaluated[FOO].stands[0]
    assert stand.position == 6, "the owner does not seem to read from the end"
    heard(world, {0: EARLIEST})
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1"


def test_what_is_begun_while_nothing_waits_is_heard_until_it_is_committed() -> None:
    """A resize may follow, after which it matters what the owners had read."""
    topic = grown()
    topic.starts[0] = 5
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    assert assigned(world) == "foo-0 foo-1"
    before = len(world.log)
    heard(world, {0: LATEST, 1: LATEST})
    assert len(world.log) == before + 1
    heard(world, {0: LATEST, 1: LATEST})
    assert len(world.log) == before + 1, "nothing new"
    heard(world, {0: EARLIEST})
    start = world.coordinator.starts.get(GROUP, FOO)
    assert start is not None and start.other, "an application may ask for the end first, and for its lag"
    world.commit("A", epoch, 0, 6)
    world.commit("A", epoch, 1, 7)
    heard(world, {0: LATEST, 1: LATEST})
    assert not world.coordinator.awaiting_resets([FOO])
    world.check()


def test_nothing_is_heard_of_a_group_that_has_committed() -> None:
    topic = Topic()
    topic.ends[0] = 5
    world = Asking(topic.image())
    epoch = settle(world, "A", world.join("A").member_epoch)
    world.commit("A", epoch, 0, 5)
    world.set_topics(topic.resize(2))
    settle(world, "A", epoch)
    assert assigned(world) == "foo-0 foo-1" and not world.coordinator.awaiting_resets([FOO])


def test_a_question_that_says_nothing_new_is_not_written() -> None:
    world, _ = begun(grown())
    heard(world, {0: LATEST})
    before = len(world.log)
    heard(world, {0: LATEST})
    assert len(world.log) == before


def test_a_group_that_is_gone_is_not_told() -> None:
    world, _ = begun(grown())
    world.leave("A")
    world.advance(1_000)
    assert not world.coordinator.awaiting_resets([FOO])
    heard(world, {0: LATEST})


def test_time_counts_from_when_the_owner_has_learned_of_its_partition() -> None:
    """The answer that gave the partition was lost, and the poll interval is shorter than the session."""
    topic = grown()
    world = Asking(topic.image())
    world.join("A", rebalance_timeout_ms=10_000)
    world.join("B", rebalance_timeout_ms=10_000)
    epoch = settle(world, "B", 1)
    assert assigned(world) == "foo-0" and assigned(world, "B") == "", "B is to have the partition that waits"
    world.advance(30_000)
    epoch = settle(world, "B", epoch)
    assert assigned(world, "B") == "", "nobody has read partition 0: A has not been heard since it was given it"
    learned = settle(world, "A", 1)
    world.advance(9_000)
    settle(world, "A", learned)
    epoch = settle(world, "B", epoch)
    assert assigned(world, "B") == ""
    world.advance(2_000)
    settle(world, "A", learned)
    world.advance(1_000)
    settle(world, "B", epoch)
    assert assigned(world, "B") == "foo-1"


def test_a_question_for_the_end_by_an_owner_that_was_not_heard_all_the_time_says_nothing() -> None:
    """An earliest question right after a fail-over is not heard, so that `endOffsets` later counted alone."""
    world, epoch = begun(grown())
    world.reload()
    assert not world.coordinator.awaiting_resets([FOO]), "whoever asks now is not heard"
    epoch = settle(world, "A", epoch)
    world.advance(500)
    heard(world, {0: LATEST})
    world.commit("A", epoch, 0, 5)
    world.advance(500)
    settle(world, "A", epoch)
    assert committed(world) == {0: 5, 1: 0}


def test_what_owners_ask_while_a_group_is_a_classic_one_is_not_taken_for_heard() -> None:
    """A question of before, that nobody asked, was still waited for: `endOffsets` afterwards made the group a late one.

    Partition 1 waits for 0. Of 0 nobody has committed anything: B was handed it, and is gone; A begins at its start.
    """
    topic = Topic()
    topic.ends = {0: 50}
    topic.resize(2)
    topic.ends = {0: 60, 1: 30}
    world = Asking(topic.image(), GroupSettings(consumer_migration_policy="bidirectional"))
    joining = world.join_classic("", {"range": subscription("foo")}, version=3, fresh="A")
    world.advance(3_001)
    a = (joining if isinstance(joining, JoinGroupResponse) else world.answers[joining]).member_id

    def again(owned: str) -> int:
        """Have A join again, with what it has; its generation."""
        joining = world.join_classic(a, {"range": subscription("foo", owned=owned)}, version=3)
        joined = joining if isinstance(joining, JoinGroupResponse) else world.answers[joining]
        handed = [SyncGroupRequestAssignment(member_id=a, assignment=assignment(owned))]
        world.sync_classic(a, joined.generation_id, handed)
        return joined.generation_id

    def pass_by(member: str, epoch: int, generation: int) -> int:
        for _ in range(4):
            world.advance(1_000)
            world.beat_classic(a, generation)
            epoch = settle(world, member, epoch)
        return epoch

    again("")
    b = world.join("B").member_epoch
    pass_by("B", b, again(""))
    assert assigned(world, "B") == "foo-0"
    world.leave("B")
    assert isinstance(world.coordinator.groups[GROUP], ClassicGroup)
    again("foo-0")
    if world.coordinator.awaiting_resets([FOO]):
        world.submit(lambda machine: machine.reset_heard(FOO, {0: EARLIEST}, "classic", "/host"))
    c = world.join("C").member_epoch
    generation = again("foo-0")
    c = pass_by("C", c, generation)
    said = world.group.members[a].described
    world.submit(lambda machine: machine.reset_heard(FOO, {0: LATEST}, said.client_id, said.client_host))
    world.commit(a, world.group.members[a].epoch, 0, 60)
    pass_by("C", c, generation)
    assert assigned(world, "C") == "foo-1"
    assert committed(world).get(1, 0) == 0, "its records are not skipped"
