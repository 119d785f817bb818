"""Client-side assignors (KIP-848): chosen, asked, told, checked, and replaced by another when they are late."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.caller import Caller
from anabranch.machines.groups.image import Image, TopicImage
from anabranch.protocol.messages.consumer_group_heartbeat import Assignor
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
    Member,
    TopicPartition,
)
from anabranch.protocol.messages.consumer_group_prepare_assignment import ConsumerGroupPrepareAssignmentRequest
from tests.support.groups import GROUP, GroupWorld, partitions, topic_id, topics
from tests.unit.machines.groups.consumer.test_heartbeat import offer
from tests.unit.machines.groups.test_migration import stable_classic


def prepare(world: GroupWorld, member: str, epoch: int, group: str = GROUP) -> Any:
    request = ConsumerGroupPrepareAssignmentRequest(group_id=group, member_id=member, member_epoch=epoch)
    return world.submit(lambda machine: machine.prepare_assignment(request, Caller(), world.now_ms))


def install(
    world: GroupWorld, member: str, epoch: int, group_epoch: int, error: int = 0, data: bytes = b"", **shares: str
) -> Any:
    request = ConsumerGroupInstallAssignmentRequest(
        group_id=GROUP,
        member_id=member,
        member_epoch=epoch,
        group_epoch=group_epoch,
        error=error,
        members=[
            Member(
                member_id=name,
                partitions=[
                    TopicPartition(topic_id=entry.topic_id, partitions=entry.partitions)
                    for entry in partitions(share) or ()
                ],
                metadata_version=1,
                metadata_bytes=data,
            )
            for name, share in shares.items()
        ],
    )
    return world.submit(lambda machine: machine.install_assignment(request, Caller(), world.now_ms))


def assigning(*members: str, offers: list[Assignor] | None = None) -> GroupWorld:
    world = GroupWorld(topics(foo=3))
    for member in members:
        world.join(member, client_assignors=[offer(data=member.encode())] if offers is None else offers)
    return world


def test_one_member_computes_what_all_get() -> None:
    world = assigning("A", "B")
    first = world.beat("A", 0)
    assert first.error_code == ErrorCode.NONE
    assert first.should_compute_assignment
    assert not world.beat("B", 0, None).should_compute_assignment
    told = prepare(world, "A", 0)
    assert (told.error_code, told.group_epoch, told.assignor_name) == (0, 2, "mine")
    assert [(member.member_id, bytes(member.assignor.metadata_bytes)) for member in told.members] == [
        ("A", b"A"),
        ("B", b"B"),
    ]
    assert [(topic.topic_name, topic.num_partitions) for topic in told.topics] == [("foo", 3)]
    assert install(world, "A", 0, 2, data=b"tell", A="foo-2", B="foo-0 foo-1").error_code == ErrorCode.NONE
    answer = world.beat("A", 0)
    assert (answer.member_epoch, world.told(answer)) == (2, "foo-2")
    assert not answer.should_compute_assignment
    assert bytes(answer.assignment.metadata_bytes) == b"tell" if answer.assignment else False
    assert world.told(world.beat("B", 0)) == "foo-0 foo-1"
    world.check()
    world.reload(compact=True)
    assert bytes(world.group.told["B"].metadata) == b"tell"


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({"A": "foo-0 foo-1"}, "partition 2 of topic .* is assigned to nobody"),
        ({"A": "foo-0 foo-1", "B": "foo-1 foo-2"}, "partition 1 of topic .* is assigned twice"),
        ({"A": "foo-0 foo-1 foo-2 foo-3"}, "partition 3 of topic .* does not exist"),
        ({"A": "foo-0 foo-1 foo-2", "Z": ""}, "member Z, whom the group has not"),
        ({"A": "foo-0 foo-1 foo-2 bar-0"}, "to which nobody subscribes"),
        ({"A": "foo-0", "B": "foo-1", "C": "foo-2"}, "it names 3 members, and the group has 2"),
    ],
)
def test_an_assignment_that_is_wrong_is_refused_and_may_be_handed_in_again(shares: dict[str, str], words: str) -> None:
    import re

    world = assigning("A", "B")
    world.beat("A", 0)
    prepare(world, "A", 0)
    answer = install(world, "A", 0, 2, **shares)
    assert answer.error_code == ErrorCode.INVALID_ASSIGNMENT
    assert re.search(words, answer.error_message)
    assert world.group.target_epoch == 0
    assert install(world, "A", 0, 2, A="foo-0 foo-1", B="foo-2").error_code == ErrorCode.NONE


def test_partitions_are_refused_for_a_member_that_does_not_subscribe_to_their_topic() -> None:
    world = GroupWorld(topics(foo=1, bar=1))
    world.join("A", client_assignors=[offer()])
    world.join("B", client_assignors=[offer()], topics=["foo", "bar"])
    world.beat("A", 0)
    prepare(world, "A", 0)
    answer = install(world, "A", 0, 2, A="foo-0 bar-0")
    assert answer.error_code == ErrorCode.INVALID_ASSIGNMENT
    assert "member A does not subscribe to topic" in answer.error_message
    assert world.group.target_epoch == 0
    assert install(world, "A", 0, 2, A="foo-0", B="bar-0").error_code == ErrorCode.NONE


def test_the_assignor_learns_which_partitions_are_retiring() -> None:
    image = Image(1, {"foo": TopicImage(topic_id("foo"), "foo", (0, 1), (2, 3))})
    world = GroupWorld(image)
    world.join("A", client_assignors=[offer()])
    (topic,) = prepare(world, "A", 0).topics
    assert (topic.num_partitions, topic.retiring_partitions) == (4, [2, 3])


def test_a_group_is_described_with_the_assignor_that_its_members_run() -> None:
    world = assigning("A", "B")
    assert world.coordinator.describe_consumer_group(GROUP).assignor_name == offer().name
    world.join("C")
    assert world.coordinator.describe_consumer_group(GROUP).assignor_name == "uniform"


def test_only_who_was_chosen_may_prepare_and_install() -> None:
    world = assigning("A", "B")
    assert prepare(world, "A", 0, group="other").error_code == ErrorCode.GROUP_ID_NOT_FOUND
    assert prepare(world, "Z", 0).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert prepare(world, "A", 3).error_code == ErrorCode.STALE_MEMBER_EPOCH
    answer = prepare(world, "B", 0)
    assert answer.error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert "was not asked" in answer.error_message
    assert install(world, "A", 0, 2, A="foo-0 foo-1 foo-2").error_code == ErrorCode.INVALID_ASSIGNMENT
    assert prepare(world, "", 0).error_code == ErrorCode.INVALID_REQUEST


def test_who_is_late_is_replaced_and_not_fenced() -> None:
    world = assigning("A", "B")
    assert world.beat("A", 0).should_compute_assignment
    for _ in range(2):
        world.advance(30_000)
        world.beat("A", 0)
        world.beat("B", 0)
    world.advance(1)
    assert "A" in world.group.members
    assert not world.beat("A", 0).should_compute_assignment
    assert world.beat("B", 0).should_compute_assignment
    assert install(world, "A", 0, 2, A="foo-0 foo-1 foo-2").error_code == ErrorCode.UNKNOWN_MEMBER_ID
    prepare(world, "B", 0)
    assert install(world, "B", 0, 2, B="foo-0 foo-1 foo-2").error_code == ErrorCode.NONE


def test_who_asks_before_it_was_told_to_compute_may_not_take_for_ever_either() -> None:
    world = assigning("A", "B")
    assert prepare(world, "A", 0).error_code == ErrorCode.NONE  # it comes late: A was told before it began anew
    for _ in range(2):
        world.advance(30_000)
        world.beat("A", 0)
        world.beat("B", 0)
    world.advance(1)
    assert world.beat("B", 0).should_compute_assignment


def test_a_group_that_went_on_gets_the_assignment_first_and_the_next_one_after_it() -> None:
    world = assigning("A", "B")
    world.beat("A", 0)
    prepare(world, "A", 0)
    world.join("C", client_assignors=[offer()])
    world.leave("B")
    assert world.group.epoch == 4
    assert install(world, "A", 0, 2, A="foo-0", B="foo-1 foo-2").error_code == ErrorCode.NONE
    assert (world.group.target_epoch, "B" in world.group.targets) == (2, False)
    answer = world.beat("A", 0)
    assert (answer.member_epoch, world.told(answer)) == (2, "foo-0")
    assert answer.should_compute_assignment
    assert prepare(world, "A", 2).group_epoch == 4
    assert install(world, "A", 2, 4, A="foo-0", C="foo-1 foo-2").error_code == ErrorCode.NONE
    assert world.told(world.beat("C", 0)) == "foo-1 foo-2"
    world.check()


def test_the_share_of_a_static_member_that_was_replaced_meanwhile_goes_to_its_new_id() -> None:
    """The new id has kept the former target: without its share the target would give a partition to two members."""
    world = GroupWorld(topics(foo=3))
    world.join("A", client_assignors=[offer()])
    world.join("S", client_assignors=[offer()], instance_id="i")
    prepare(world, "A", 0)
    assert install(world, "A", 0, 2, A="foo-0", S="foo-1 foo-2").error_code == ErrorCode.NONE
    for member in "AS":
        world.beat(member, 0)
    assert world.beat("S", -2, instance_id="i").error_code == ErrorCode.NONE
    world.join("B", client_assignors=[offer()])
    assert prepare(world, "A", 2).group_epoch == 3
    world.join("T", client_assignors=[offer()], instance_id="i")
    assert install(world, "A", 2, 3, A="foo-0", S="foo-1", B="foo-2").error_code == ErrorCode.NONE
    targets = {member: world.named(world.group.target(member)) for member in world.group.members}
    assert targets == {"A": "foo-0", "T": "foo-1", "B": "foo-2"}
    world.check()


def test_an_assignors_error_is_told_to_all_and_the_assignment_stays() -> None:
    world = assigning("A")
    world.beat("A", 0)
    prepare(world, "A", 0)
    assert install(world, "A", 0, 1, error=7).error_code == ErrorCode.NONE
    answer = world.beat("A", 0)
    assert answer.member_epoch == 1
    assert answer.assignment is not None
    assert answer.assignment.error == 7


def test_without_an_assignor_that_all_offer_the_server_assigns() -> None:
    world = assigning("A")
    assert world.beat("A", 0).should_compute_assignment
    assert world.told(world.join("B")) in ("foo-0", "foo-1", "foo-2", "foo-0 foo-1", "foo-1 foo-2", "foo-0 foo-2")
    assert not world.beat("A", 0).should_compute_assignment
    assert world.group.target_epoch == world.group.epoch


def test_versions_that_the_others_do_not_understand_are_refused() -> None:
    world = assigning("A")
    answer = world.beat(
        "B",
        0,
        "",
        topics=["foo"],
        rebalance_timeout_ms=1,
        client_assignors=[offer(lowest=2, highest=3, version=3)],
    )
    assert answer.error_code == ErrorCode.UNSUPPORTED_ASSIGNOR
    assert "do not understand versions 2 to 3" in (answer.error_message or "")


def test_new_metadata_calls_for_a_new_assignment() -> None:
    world = assigning("A")
    world.beat("A", 0)
    prepare(world, "A", 0)
    install(world, "A", 0, 1, A="foo-0 foo-1 foo-2")
    world.beat("A", 0)
    answer = world.beat("A", 1, client_assignors=[offer(data=b"new")])
    assert answer.should_compute_assignment
    assert world.group.epoch == 2


def test_classic_metadata_has_version_minus_one_during_migration() -> None:
    world = GroupWorld(topics(foo=2))
    members = stable_classic(world, 1, "mine", A="foo-0 foo-1")
    world.join("N", client_assignors=[offer(lowest=-1)])
    assert world.beat("N", 1).should_compute_assignment
    told = prepare(world, "N", 1)
    versions = {member.member_id: member.assignor.metadata_version for member in told.members}
    assert versions == {"N": 1, members["A"].name: -1}


def test_a_partition_that_went_while_the_assignment_was_computed_is_given_to_nobody() -> None:
    world = assigning("A")
    prepare(world, "A", 0)
    world.set_topics(topics(2, foo=2))
    assert install(world, "A", 0, 1, A="foo-0 foo-1 foo-2").error_code == ErrorCode.NONE
    answer = world.join("A", client_assignors=[offer(data=b"A")])
    assert world.told(answer) == "foo-0 foo-1"
    assert answer.should_compute_assignment
    world.check()
