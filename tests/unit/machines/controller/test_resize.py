"""Resizes as transcripts: what is written, in which order, and what is told to whom after it.

write t: layouts 2(0:0 1:0) 3, ...   the topic node; (0:0 1:0) are the epochs that ended with that layout
write t-0: epoch 1 at 1              a state node: leader epoch, leader
  tell 1: count 3, 0:1 2:0-          LeaderAndIsr to broker 1: partition:epoch, - for closed
"""

from __future__ import annotations

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PARTITIONS_PER_TOPIC_MAX
from anabranch.machines.controller import resize, roles, topics
from anabranch.machines.controller.effects import Accepted, Refused, SendLeaderAndIsr, Validated, WaitForResize
from anabranch.machines.controller.layouts import Layout, ended_with
from anabranch.machines.controller.nodes import Phase
from tests.unit.machines.controller.transcript import TOPIC_ID, Cluster

CUT, OPEN, CLOSE = Phase.CUT, Phase.OPEN, Phase.CLOSE


def test_expanding_cuts_every_partition_before_a_new_one_opens() -> None:
    cluster = Cluster(partitions=2)
    assert cluster.resize(3) == Accepted("t", TOPIC_ID, layout=1, count=3)
    assert cluster.text() == (
        "write t: layouts 2(0:0 1:0) 3, partitions 2, resize to 3: cut making 2\n"
        "write t-0: epoch 1 at 1\n"
        "write t-1: epoch 1 at 1\n"
        "  tell 1: count 3, 0:1 1:1"
    )
    cluster.answer()
    assert cluster.text() == (
        "write t: layouts 2(0:0 1:0) 3, partitions 3, resize to 3: open making 2\n"
        "write t-2: epoch 0 at 1\n"
        "  tell 1: count 3, 2:0"
    )
    cluster.answer()
    assert cluster.text() == "write t: layouts 2(0:0 1:0) 3, partitions 3\n  publish t"


def test_shrinking_closes_what_retires_before_it_cuts_what_stays() -> None:
    cluster = Cluster(partitions=2)
    cluster.resize(4)
    cluster.run()
    cluster.text()
    cluster.resize(3)
    assert cluster.text() == (
        "write t: layouts 2(0:0 1:0) 4(3:0) 3, partitions 4, resize to 3: close\n"
        "write t-3: epoch 1 at 1\n"
        "  tell 1: count 3, 3:1-"
    )
    cluster.answer()
    assert cluster.text() == (
        "write t: layouts 2(0:0 1:0) 4(0:1 1:1 2:0 3:0) 3, partitions 4, resize to 3: cut\n"
        "write t-0: epoch 2 at 1\n"
        "write t-1: epoch 2 at 1\n"
        "write t-2: epoch 1 at 1\n"
        "  tell 1: count 3, 0:2 1:2 2:1"
    )
    cluster.answer()
    assert cluster.text() == (
        "write t: layouts 2(0:0 1:0) 4(0:1 1:1 2:0 3:0) 3, partitions 4\n  publish t\n  InspectRetiring"
    )


def test_growing_again_opens_retiring_partitions_under_their_next_epoch_and_lets_others_retire_on() -> None:
    cluster = Cluster(partitions=1)
    for count in (4, 1):
        cluster.resize(count)
        cluster.run()
    cluster.text()
    cluster.resize(3)
    assert cluster.text() == (
        "write t: layouts 1(0:0) 4(0:1 1:0 2:0 3:0) 1(0:2 1:1 2:1 3:1) 3, partitions 4, resize to 3: cut\n"
        "write t-0: epoch 3 at 1\n"
        "  tell 1: count 3, 0:3"
    )
    cluster.answer()
    assert cluster.text() == (
        "write t: layouts 1(0:0) 4(0:1 1:0 2:0 3:0) 1(0:2 1:1 2:1 3:1) 3, partitions 4, resize to 3: open\n"
        "write t-1: epoch 2 at 1\n"
        "write t-2: epoch 2 at 1\n"
        "write t-3: epoch 2 at 1\n"
        "  tell 1: count 3, 1:2 2:2 3:2-"
    )
    cluster.answer()
    assert cluster.text().startswith("write t: layouts 1(0:0) 4(0:1 1:0 2:0 3:0) 1(0:2 1:1 2:1 3:1) 3, partitions 4\n")
    assert [cluster.roles[p].retiring for p in range(4)] == [False, False, False, True]


def test_shrinking_while_others_retire_closes_only_the_new_ones() -> None:
    cluster = Cluster(partitions=1)
    for count in (4, 3):
        cluster.resize(count)
        cluster.run()
    cluster.text()
    cluster.resize(2)
    assert cluster.text() == (
        "write t: layouts 1(0:0) 4(0:1 1:0 2:0 3:0) 3(2:1 3:1) 2, partitions 4, resize to 2: close\n"
        "write t-2: epoch 2 at 1\n"
        "  tell 1: count 2, 2:2-"
    )
    cluster.answer()
    assert cluster.text().endswith("  tell 1: count 2, 0:3 1:2 3:2-")


def test_a_phase_waits_for_every_broker() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.resize(3)
    assert cluster.text().endswith("  tell 1: count 3, 0:1\n  tell 2: count 3, 1:1")
    cluster.answer()
    assert cluster.text() == ""
    cluster.answer()
    assert "resize to 3: open" in cluster.text()


def test_what_fails_is_said_again_and_nothing_else() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.resize(3)
    cluster.text()
    cluster.answer(ErrorCode.KAFKA_STORAGE_ERROR)
    cluster.answer()
    assert cluster.text() == "timer ('retry', 't')"
    cluster.submit(lambda state: resize.decide_retry(state, "t"))
    assert cluster.text() == "  tell 1: count 3, 0:1"
    cluster.run()
    assert cluster.text().endswith("partitions 3\n  publish t")
    cluster.submit(lambda state: resize.decide_retry(state, "t"))
    cluster.submit(lambda state: resize.decide_retry(state, "gone"))
    assert cluster.text() == ""


def test_an_answer_that_comes_twice_or_from_another_life_does_nothing() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.resize(3)
    first = cluster.requests[0]
    assert isinstance(first, SendLeaderAndIsr)
    cluster.text()

    def answered(effect: SendLeaderAndIsr) -> None:
        fine = {role.partition: ErrorCode.NONE for role in effect.roles}
        cluster.submit(lambda state: resize.decide_leader_and_isr_answered(state, effect, fine, now_ms=0))

    answered(first)
    answered(first)
    assert cluster.text() == ""
    cluster.register(1, epoch=2)
    cluster.text()
    cluster.requests.popleft()
    cluster.answer()
    answered(first)
    assert cluster.text() == "", "broker 1 has forgotten what it answered; only what it is told now counts"
    cluster.run()
    assert cluster.text().endswith("partitions 3\n  publish t")


def test_an_answer_that_leaves_a_partition_out_counts_as_a_failure() -> None:
    cluster = Cluster(partitions=2)
    cluster.resize(3)
    effect = cluster.requests[0]
    assert isinstance(effect, SendLeaderAndIsr)
    cluster.text()
    half = {0: ErrorCode.NONE}
    cluster.submit(lambda state: resize.decide_leader_and_isr_answered(state, effect, half, now_ms=0))
    assert cluster.text() == "timer ('retry', 't')"


def test_a_resize_that_comes_too_early_waits_and_sees_the_count_it_starts_from() -> None:
    cluster = Cluster(partitions=2)
    cluster.resize(3)
    reply = cluster.resize(5)
    assert isinstance(reply, WaitForResize)
    assert reply.code is ErrorCode.REASSIGNMENT_IN_PROGRESS
    assert reply.message == "Topic 't' is still being resized to 3; try again."
    cluster.run()
    assert isinstance(cluster.resize(5), Accepted)


@pytest.mark.parametrize(
    ("count", "sentence"),
    [
        (2, "already has 2 partitions"),
        (1, "was created with 2 partitions and cannot go below that; 1 were asked for. Ask for 2 or more."),
        (-7, "cannot go below that"),
        (PARTITIONS_PER_TOPIC_MAX + 1, f"at most {PARTITIONS_PER_TOPIC_MAX} partitions"),
    ],
)
def test_a_count_that_cannot_be_is_refused_with_a_sentence(count: int, sentence: str) -> None:
    cluster = Cluster(partitions=2)
    reply = cluster.resize(count)
    assert isinstance(reply, Refused)
    assert reply.code is ErrorCode.INVALID_PARTITIONS
    assert sentence in reply.message
    assert cluster.text() == ""


def test_a_topic_whose_lineage_is_full_is_not_resized_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resize, "LAYOUTS_PER_TOPIC_MAX", 2)
    cluster = Cluster(partitions=2)
    cluster.resize(3)
    cluster.run()
    reply = cluster.resize(4)
    assert isinstance(reply, Refused)
    assert "holds records of 2 layouts, which is the most" in reply.message


def test_validating_changes_nothing() -> None:
    cluster = Cluster(partitions=2)
    assert cluster.resize(3, validate_only=True) == Validated()
    assert isinstance(cluster.resize(1, validate_only=True), Refused)
    assert cluster.text() == ""


def test_an_unknown_or_vanishing_topic_is_unknown() -> None:
    cluster = Cluster(partitions=2)
    cluster.delete()
    assert cluster.resize(3) == topics.unknown_topic("t")
    missing = cluster.submit(lambda state: resize.decide_resize_topic(state, resize.ResizeTopic("x", 3)))
    assert missing == Refused(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "There is no topic 'x'.")


def test_internal_topics_keep_their_count() -> None:
    cluster = Cluster()
    cluster.create(2, name="__consumer_offsets")
    command = resize.ResizeTopic("__consumer_offsets", 4)
    reply = cluster.submit(lambda state: resize.decide_resize_topic(state, command))
    assert isinstance(reply, Refused)
    assert "is internal" in reply.message


def test_new_partitions_go_where_fewest_are_led_or_where_the_caller_says() -> None:
    cluster = Cluster(partitions=3, brokers=2)
    cluster.resize(5)
    cluster.run()
    assert cluster.state.topics["t"].partitions == {0: (1,), 1: (2,), 2: (1,), 3: (2,), 4: (1,)}
    cluster.resize(7, assignments=[[1], [1]])
    cluster.run()
    assert cluster.state.topics["t"].partitions[5] == cluster.state.topics["t"].partitions[6] == (1,)


@pytest.mark.parametrize(
    ("assignments", "code", "sentence"),
    [
        ([[1]], ErrorCode.INVALID_REPLICA_ASSIGNMENT, "adds 2 partitions, but 1 assignments"),
        ([[1], []], ErrorCode.INVALID_REPLICA_ASSIGNMENT, "needs brokers, each once"),
        ([[1], [9]], ErrorCode.INVALID_REPLICA_ASSIGNMENT, "not there: [9]"),
        ([[1], [1, 2]], ErrorCode.INVALID_REPLICATION_FACTOR, "each partition has 1 replica"),
    ],
)
def test_an_assignment_that_cannot_be_is_refused(assignments: list[list[int]], code: ErrorCode, sentence: str) -> None:
    cluster = Cluster(partitions=2, brokers=2)
    reply = cluster.resize(4, assignments=assignments)
    assert isinstance(reply, Refused)
    assert reply.code is code
    assert sentence in reply.message


def test_a_partition_that_opens_again_stays_where_it_is() -> None:
    cluster = Cluster(partitions=1, brokers=2)
    for count in (2, 1):
        cluster.resize(count)
        cluster.run()
    reply = cluster.resize(3, assignments=[[1], [2]])
    assert isinstance(reply, Refused)
    assert "opens again where it is, on [2], not on [1]" in reply.message
    assert isinstance(cluster.resize(3, assignments=[[2], [2]]), Accepted)


def test_the_table_of_phases_gives_each_partition_one_role_change() -> None:
    """ordering.md 4 for 3 partitions that become 5 or 2 of 6 that exist."""
    assert [roles.phase_of(p, 3, 5) for p in range(6)] == [CUT, CUT, CUT, OPEN, OPEN, OPEN]
    assert [roles.phase_of(p, 3, 2) for p in range(6)] == [CUT, CUT, CLOSE, CUT, CUT, CUT]
    assert roles.phases(3, 5) == (CUT, OPEN)
    assert roles.phases(3, 2) == (CLOSE, CUT)
    for old in range(1, 5):
        for new in {1, 2, 3, 4} - {old}:
            assert {roles.phase_of(p, old, new) for p in range(6)} == set(roles.phases(old, new))


def test_the_layouts_of_a_long_history_are_kept_whole() -> None:
    cluster = Cluster(partitions=1)
    for count in (3, 2, 4, 1):
        cluster.resize(count)
        cluster.run()
    topic = cluster.state.topics["t"]
    assert topic.layouts == tuple(Layout(number, count) for number, count in enumerate((1, 3, 2, 4, 1)))
    assert [ended_with(topic.ended, number) for number in range(5)] == [
        {0: 0},
        {0: 1, 1: 0, 2: 0},
        {0: 2, 1: 1, 2: 1},
        {0: 3, 1: 2, 2: 2, 3: 0},
        {},
    ]
