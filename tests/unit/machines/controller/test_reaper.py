"""Retiring partitions that are empty are removed from the top, remembered, and made again where they ended."""

from __future__ import annotations

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import reaper, topics, views
from anabranch.machines.controller.effects import Accepted, SendStopReplica, WaitForResize
from anabranch.machines.controller.nodes import Removed
from tests.unit.machines.controller.transcript import Cluster


def shrunk(*counts: int, start: int = 1) -> Cluster:
    return Cluster.resized(*counts, start=start)


def test_an_empty_partition_is_remembered_and_hidden_before_its_replica_is_deleted() -> None:
    cluster = shrunk(2, 1)
    assert cluster.reap(p1=(7, 7)) == (1,)
    assert cluster.text() == (
        "write t: layouts 1(0:0) 2(0:1 1:0) 1, partitions 2, removed 1@7\n  publish t\n  stop 1: 1:1"
    )
    view = views.topic_view(cluster.state, "t")
    assert view is not None
    assert len(view.partitions) == 1
    cluster.answer()
    assert cluster.text() == (
        "delete /brokers/topics/t/partitions/1/state\n"
        "delete /brokers/topics/t/partitions/1\n"
        "write t: layouts 1(0:0) 2(0:1) 1, partitions 1, removed 1@7\n"
        "  publish t"
    )


def test_its_next_life_begins_where_the_last_one_ended_under_the_next_epoch() -> None:
    cluster = shrunk(2, 1)
    cluster.reap(p1=(7, 7))
    cluster.run()
    cluster.text()
    cluster.resize(2)
    cluster.run()
    text = cluster.text()
    assert "write t-1: epoch 2 at 1 from 7" in text
    assert "removed" not in text.splitlines()[-2]
    cluster.resize(1)
    cluster.run()
    cluster.reap(p1=(9, 9))
    assert cluster.state.topics["t"].removed == {1: Removed(next_offset=9, leader_epoch=3)}


def test_metadata_never_shows_a_hole() -> None:
    cluster = shrunk(4, 1)
    assert cluster.reap(p1=(3, 3), p2=(5, 5), p3=(0, 2)) == ()
    assert cluster.reap(p1=(3, 3), p2=(0, 5), p3=(2, 2)) == (3,)
    cluster.run()
    assert cluster.reap(p1=(3, 3), p2=(5, 5)) == (1, 2)
    cluster.run()
    assert sorted(cluster.state.topics["t"].partitions) == [0]


def test_live_partitions_and_unreported_ones_stay() -> None:
    cluster = shrunk(3, 2)
    assert cluster.reap(p0=(0, 0), p1=(0, 0)) == ()
    assert cluster.reap() == ()
    assert cluster.text() == ""


def test_a_report_from_before_the_partition_opened_again_removes_nothing() -> None:
    cluster = shrunk(2, 1)
    old = {1: reaper.LogRange(7, 7, leader_epoch=cluster.roles[1].leader_epoch)}
    for count in (2, 1):
        cluster.resize(count)
        cluster.run()
    assert cluster.submit(lambda state: reaper.decide_reap(state, "t", old)) == ()


def test_nothing_is_removed_while_the_topic_is_resized_or_deleted() -> None:
    cluster = shrunk(2, 1)
    cluster.resize(3)
    assert cluster.reap(p1=(7, 7)) == ()
    cluster.delete()
    assert cluster.reap(p1=(7, 7)) == ()
    assert cluster.submit(lambda state: reaper.decide_reap(state, "gone", {})) == ()


def test_a_leader_that_has_not_confirmed_its_role_is_not_believed() -> None:
    cluster = shrunk(2, 1)
    cluster.register(1, epoch=2)
    assert cluster.reap(p1=(7, 7)) == ()
    cluster.run()
    assert cluster.reap(p1=(7, 7)) == (1,)


def test_a_resize_waits_until_the_removal_is_done() -> None:
    cluster = shrunk(2, 1)
    cluster.reap(p1=(7, 7))
    reply = cluster.resize(2)
    assert isinstance(reply, WaitForResize)
    assert reply.message == "Topic 't' is still removing its empty partitions; try again."
    assert not views.idle(cluster.state, "t")
    cluster.run()
    assert views.idle(cluster.state, "t")
    assert isinstance(cluster.resize(2), Accepted)


def test_a_replica_that_cannot_be_deleted_is_tried_again() -> None:
    cluster = shrunk(2, 1)
    cluster.reap(p1=(7, 7))
    cluster.text()
    cluster.answer(ErrorCode.KAFKA_STORAGE_ERROR)
    assert cluster.text() == "timer ('retry', 't')"


def test_an_answer_about_an_earlier_life_does_not_stand_for_this_one() -> None:
    cluster = shrunk(2, 1)
    cluster.reap(p1=(7, 7))
    early = cluster.requests[0]
    assert isinstance(early, SendStopReplica)
    cluster.run()
    for count in (2, 1):
        cluster.resize(count)
        cluster.run()
    cluster.reap(p1=(9, 9))
    cluster.text()
    cluster.submit(lambda state: topics.decide_stop_replica_answered(state, early, {1: ErrorCode.NONE}, now_ms=0))
    assert cluster.text() == ""
    assert 1 in cluster.state.topics["t"].partitions
