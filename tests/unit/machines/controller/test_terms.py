"""A new controller takes up whatever its predecessor left; a broker that starts is told everything."""

from __future__ import annotations

from functools import reduce

from anabranch.base.errors import ErrorCode
from anabranch.machines.controller import nodes, terms, topics, views
from anabranch.machines.controller.layouts import ended_with
from anabranch.machines.controller.nodes import DeleteNode, MetadataRecord, PutNode
from anabranch.machines.controller.state import ControllerState, apply
from tests.unit.machines.controller.transcript import Cluster


def elected(cluster: Cluster, *, without_last: int = 0) -> str:
    """Another controller loads what was persisted, all but the last few writes of its predecessor."""
    kept: list[MetadataRecord] = cluster.journal[: len(cluster.journal) - without_last]
    cluster.journal = kept
    cluster.state = reduce(apply, kept, ControllerState())
    cluster.requests.clear()
    cluster.lines.clear()
    cluster.submit(terms.decide_elected)
    return cluster.text()


def test_a_term_begins_with_everything_said_again() -> None:
    cluster = Cluster(partitions=2)
    assert elected(cluster) == "write /controller_epoch 2\n  tell 1: count 2, 0:0 1:0\n  publish t"
    assert cluster.state.controller_epoch == 2
    assert cluster.requests[0].controller_epoch == 2


def test_state_nodes_that_a_crash_left_unwritten_are_written() -> None:
    cluster = Cluster(partitions=2)
    cluster.resize(3)
    assert elected(cluster, without_last=1) == (
        "write /controller_epoch 2\nwrite t-1: epoch 1 at 1\n  tell 1: count 3, 0:1 1:1\n  publish t"
    )
    cluster.answer()
    assert elected(cluster, without_last=1) == (
        "write /controller_epoch 3\nwrite t-2: epoch 0 at 1\n  tell 1: count 3, 0:1 1:1 2:0\n  publish t"
    )
    cluster.run()
    assert cluster.text() == "write t: layouts 2(0:0 1:0) 3, partitions 3\n  publish t"


def test_in_the_first_phase_of_a_shrink_survivors_still_serve_the_old_count() -> None:
    cluster = Cluster(partitions=1)
    cluster.resize(2)
    cluster.run()
    cluster.resize(1)
    assert elected(cluster) == (
        "write /controller_epoch 2\n  tell 1: count 2, 0:1\n  tell 1: count 1, 1:1-\n  publish t\n  InspectRetiring"
    )


def test_a_removal_goes_on() -> None:
    cluster = Cluster(partitions=1)
    for count in (2, 1):
        cluster.resize(count)
        cluster.run()
    cluster.reap(p1=(7, 7))
    assert elected(cluster) == (
        "write /controller_epoch 2\n  tell 1: count 1, 0:2\n  stop 1: 1:1\n  publish t\n  InspectRetiring"
    )
    cluster.run()
    cluster.text()
    assert elected(cluster, without_last=2).splitlines()[2] == "  stop 1: 1:1", "its state node may be gone already"


def test_a_deletion_goes_on_wherever_it_stopped() -> None:
    for lost in range(8):
        cluster = Cluster(partitions=1)
        cluster.delete()
        cluster.run()
        elected(cluster, without_last=lost)
        cluster.run()
        tree = {r.path for r in cluster.journal if isinstance(r, PutNode)}
        gone = {r.path for r in cluster.journal if isinstance(r, DeleteNode)}
        marked = nodes.deletion_path("t") in tree
        assert not marked or (cluster.state.topics == {} and not cluster.state.deleting)
        assert not marked or {nodes.topic_path("t"), nodes.config_path("t"), nodes.deletion_path("t")} <= gone


def test_what_an_earlier_term_was_answered_counts_for_nothing() -> None:
    cluster = Cluster(partitions=1)
    cluster.delete()
    early = cluster.requests[0]
    elected(cluster)
    fine = {0: ErrorCode.NONE}
    cluster.submit(lambda state: topics.decide_stop_replica_answered(state, early, fine, now_ms=0))  # type: ignore[arg-type]
    assert cluster.text() == ""


def test_a_broker_that_starts_is_told_its_own_roles() -> None:
    cluster = Cluster(partitions=3, brokers=2)
    cluster.register(2, epoch=2)
    assert cluster.text() == (
        'write /brokers/ids/2 {"version":5,"epoch":2,"rack":null,"endpoints":[]}\n  tell 2: count 3, 1:0\n  publish t'
    )
    described = views.describe(cluster.state, "t")
    assert described is not None
    assert described.waiting_for == (1,)


def test_after_an_unclean_start_open_partitions_go_on_under_a_new_epoch() -> None:
    cluster = Cluster(partitions=1)
    for count in (2, 1):
        cluster.resize(count)
        cluster.run()
    cluster.text()
    cluster.register(1, epoch=2, unclean=True)
    assert cluster.text().splitlines()[1:] == [
        "write t-0: epoch 3 at 1",
        "  tell 1: count 1, 0:3 1:1-",
        "  publish t",
        "  InspectRetiring",
    ]


def test_an_unclean_start_in_the_middle_of_a_resize_moves_no_cut() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.resize(3)
    cluster.register(1, epoch=2, unclean=True)
    cluster.run()
    assert ended_with(cluster.state.topics["t"].ended, 0) == {0: 0, 1: 0}
    assert cluster.state.partitions["t"][0].leader_epoch == 2
    assert cluster.state.topics["t"].resize is None


def test_an_epoch_that_began_while_others_were_closed_is_the_one_that_is_cut() -> None:
    cluster = Cluster(partitions=1, brokers=2)
    cluster.resize(2)
    cluster.run()
    cluster.resize(1)
    cluster.register(1, epoch=2, unclean=True)
    cluster.run()
    assert ended_with(cluster.state.topics["t"].ended, 1) == {0: 2, 1: 0}
    assert cluster.state.partitions["t"][0].leader_epoch == 3


def test_a_broker_that_left_leads_nothing_and_is_waited_for() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.submit(lambda state: terms.decide_broker_left(state, 2))
    assert cluster.text() == "delete /brokers/ids/2\n  publish t"
    view = views.topic_view(cluster.state, "t")
    assert view is not None
    assert [seen.leader for seen in view.partitions] == [1, views.NO_LEADER]
    assert view.partitions[1].offline_replicas == (2,)
    cluster.resize(3)
    cluster.run()
    assert cluster.state.topics["t"].resize is not None
    cluster.register(2, epoch=2)
    cluster.run()
    assert cluster.state.topics["t"].resize is None
    cluster.text()
    cluster.submit(lambda state: terms.decide_broker_left(state, 7))
    assert cluster.text() == ""
