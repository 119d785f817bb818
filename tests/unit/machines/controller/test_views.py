"""What others see of a topic: never half a layout; epochs by the proposal's maps; what is waited for."""

from __future__ import annotations

from anabranch.machines.controller import views
from anabranch.machines.controller.layouts import Layout, ended_with
from anabranch.machines.controller.nodes import Phase
from anabranch.machines.controller.views import EndedEpoch, TopicView
from anabranch.machines.lineage import Lineage
from tests.unit.machines.controller.transcript import Cluster


def seen(cluster: Cluster) -> TopicView:
    view = views.topic_view(cluster.state, "t")
    assert view is not None
    return view


def counts(view: TopicView) -> tuple[int, list[int], list[bool]]:
    return (
        view.undeleted_partition_count,
        [layout.count for layout in view.layouts],
        [partition.retiring for partition in view.partitions],
    )


def test_until_a_resize_is_over_the_layout_before_it_is_shown() -> None:
    cluster = Cluster(partitions=1)
    cluster.resize(2)
    before = (1, [1], [False])
    assert counts(seen(cluster)) == before
    cluster.answer()
    assert counts(seen(cluster)) == before, "the new partition is made, but not shown"
    cluster.answer()
    assert counts(seen(cluster)) == (2, [1, 2], [False, False])
    cluster.resize(1)
    before = (2, [1, 2], [False, False])
    assert counts(seen(cluster)) == before
    cluster.answer()
    assert counts(seen(cluster)) == before
    assert seen(cluster).layouts[-1] == Layout(1, 2)
    assert cluster.state.topics["t"].newest == 1, "the epochs that are ending are not shown either"
    cluster.answer()
    assert counts(seen(cluster)) == (1, [1, 2, 1], [False, True])


def test_leader_epochs_are_those_of_the_leaders_also_during_a_resize() -> None:
    cluster = Cluster(partitions=1)
    cluster.resize(2)
    assert [partition.leader_epoch for partition in seen(cluster).partitions] == [1]


def test_the_proposals_maps_follow_from_the_layouts() -> None:
    cluster = Cluster(partitions=1)
    for count in (3, 2, 3):
        cluster.resize(count)
        cluster.run()
    topic = cluster.state.topics["t"]
    assert views.leader_epochs(topic, 0, 99) == ((), ())
    assert views.leader_epochs(topic, 1, 99) == ((EndedEpoch(1, 0, 0),), ())
    assert views.leader_epochs(topic, 2, 99) == (
        (EndedEpoch(1, 0, 0), EndedEpoch(3, 0, 2), EndedEpoch(3, 1, 1), EndedEpoch(3, 2, 1)),
        (EndedEpoch(2, 0, 1), EndedEpoch(2, 1, 0), EndedEpoch(2, 2, 0)),
    )
    assert views.leader_epochs(topic, 3, 99) == ((), ())
    assert views.leader_epochs(topic, 2, 6) is None, "more than was asked for"


def test_the_maps_of_a_removed_partition_are_still_told() -> None:
    cluster = Cluster(partitions=1)
    for count in (2, 1):
        cluster.resize(count)
        cluster.run()
    cluster.reap(p1=(0, 0))
    cluster.run()
    assert views.leader_epochs(cluster.state.topics["t"], 1, 99) == (
        (EndedEpoch(1, 0, 0),),
        (EndedEpoch(2, 0, 1),),
    ), "of partitions that exist: nobody else has a log to cut"


def test_a_reader_learns_every_cut_by_asking_for_one_partition_of_each_layout() -> None:
    cluster = Cluster(partitions=2)
    for count in (5, 3, 4, 2, 7):
        cluster.resize(count)
        cluster.run()
    view, topic = seen(cluster), cluster.state.topics["t"]
    learnt: list[dict[int, int]] = [{} for _ in view.layouts[:-1]]
    for layout in range(1, len(view.layouts)):
        told = views.leader_epochs(topic, max(view.layouts[layout - 1].count, view.layouts[layout].count) - 1, 99)
        assert told is not None
        for entry in told.creation + told.deletion:
            if entry.layout == layout:
                learnt[layout - 1][entry.partition] = entry.leader_epoch
    assert learnt == [ended_with(topic.ended, layout.number) for layout in view.layouts[:-1]]
    Lineage.of_ends(view.initial_partition_count, tuple(layout.count for layout in view.layouts), tuple(learnt))


def test_a_description_says_what_is_going_on_and_who_is_waited_for() -> None:
    cluster = Cluster(partitions=2, brokers=2)
    cluster.resize(4)
    cluster.answer()
    described = views.describe(cluster.state, "t")
    assert described is not None
    assert (described.resizing_to, described.phase, described.waiting_for) == (4, Phase.CUT, (1,))
    cluster.run()
    cluster.resize(2)
    cluster.run()
    cluster.reap(p3=(4, 4))
    described = views.describe(cluster.state, "t")
    assert described is not None
    assert (described.reaping, described.removed, described.waiting_for) == ((3,), ((3, 4, 1),), ())
    assert described.view.removed == ((3, 4),) and 3 not in [it.partition for it in described.view.partitions]
    cluster.delete()
    described = views.describe(cluster.state, "t")
    assert described is not None
    assert described.deleting
    assert described.view.partitions == ()
    cluster.run()
    assert views.describe(cluster.state, "t") is None


def test_a_resize_is_settled_when_its_layout_is_shown_and_served() -> None:
    cluster = Cluster(partitions=1)
    first = cluster.resize(2)
    assert not views.settled(cluster.state, first)  # type: ignore[arg-type]
    cluster.run()
    assert views.settled(cluster.state, first)  # type: ignore[arg-type]
    second = cluster.resize(3)
    assert views.settled(cluster.state, first)  # type: ignore[arg-type]
    assert not views.settled(cluster.state, second)  # type: ignore[arg-type]
    cluster.delete()
    assert views.settled(cluster.state, second), "it never will be, and nobody need wait"  # type: ignore[arg-type]


def test_internal_topics_are_said_to_be() -> None:
    cluster = Cluster()
    cluster.create(1, name="__consumer_offsets")
    view = views.topic_view(cluster.state, "__consumer_offsets")
    assert view is not None
    assert view.internal
