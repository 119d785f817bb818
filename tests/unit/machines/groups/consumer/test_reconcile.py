"""One member, one step: every row of the table in `reconcile`'s docstring."""

from __future__ import annotations

from uuid import UUID

from anabranch.machines.groups.consumer.group import Assignment, ConsumerGroup, Member, MemberState
from anabranch.machines.groups.consumer.reconcile import is_subset, pending, reconcile
from tests.support.groups import topic_id

FOO = topic_id("foo")
STABLE, UNREVOKED, UNRELEASED = (
    MemberState.STABLE,
    MemberState.UNREVOKED_PARTITIONS,
    MemberState.UNRELEASED_PARTITIONS,
)


def foo(*partitions: int) -> Assignment:
    return ((FOO, partitions),) if partitions else ()


def world(target: Assignment, *others: Member, epoch: int = 2) -> ConsumerGroup:
    group = ConsumerGroup("g", epoch=epoch, target_epoch=epoch)
    group.targets["A"] = target
    for other in others:
        group.members[other.member_id] = other
        group.holders.update(dict.fromkeys(other.holds, other.member_id))
    return group


def nothing_waits(_: UUID, __: int) -> bool:
    return False


def test_a_member_gets_what_is_free_and_is_stable() -> None:
    member = reconcile(world(foo(0, 1)), Member("A", epoch=1), foo(), nothing_waits)
    assert (member.state, member.epoch, member.previous_epoch, member.assigned) == (STABLE, 2, 1, foo(0, 1))


def test_a_member_that_is_stable_at_the_targets_epoch_stays_the_same_object() -> None:
    member = Member("A", epoch=2, assigned=foo(0))
    assert reconcile(world(foo(0, 1)), member, None, nothing_waits) is member


def test_what_another_member_holds_is_not_given() -> None:
    group = world(foo(0, 1), Member("B", epoch=1, assigned=foo(1)))
    member = reconcile(group, Member("A", epoch=1), foo(), nothing_waits)
    assert (member.state, member.epoch, member.assigned) == (UNRELEASED, 2, foo(0))
    assert pending(group, member) == foo(1)


def test_what_another_member_is_still_revoking_is_not_given() -> None:
    group = world(foo(1), Member("B", epoch=1, state=UNREVOKED, revoking=foo(1)))
    assert reconcile(group, Member("A", epoch=1), foo(), nothing_waits).assigned == foo()


def test_a_partition_that_waits_for_records_of_others_is_pending() -> None:
    member = reconcile(world(foo(0, 1)), Member("A", epoch=1), foo(), lambda _, partition: partition == 1)
    assert (member.state, member.assigned) == (UNRELEASED, foo(0))


def test_a_member_revokes_first_and_keeps_its_epoch_until_it_says_that_it_did() -> None:
    group = world(foo(1))
    before = Member("A", epoch=1, assigned=foo(0))
    revoking = reconcile(group, before, foo(0), nothing_waits)
    assert (revoking.state, revoking.epoch, revoking.assigned, revoking.revoking) == (UNREVOKED, 1, foo(), foo(0))
    assert reconcile(group, revoking, None, nothing_waits) is revoking, "a heartbeat that says nothing proves nothing"
    assert reconcile(group, revoking, foo(0), nothing_waits) is revoking
    done = reconcile(group, revoking, foo(), nothing_waits)
    assert (done.state, done.epoch, done.assigned, done.revoking) == (STABLE, 2, foo(1), foo())


def test_a_member_that_does_not_own_what_it_loses_need_not_revoke_it() -> None:
    member = reconcile(world(foo(1)), Member("A", epoch=1, assigned=foo(0)), foo(), nothing_waits)
    assert (member.state, member.assigned) == (STABLE, foo(1))


def test_a_report_without_all_that_the_member_keeps_releases_nothing_that_it_was_not_told_to_revoke() -> None:
    group = world(foo(0, 1))
    before = Member("A", epoch=1, assigned=foo(0, 1, 2, 3))
    for report in (foo(), foo(0), foo(1)):
        told = reconcile(group, before, report, nothing_waits, may_be_taking=True)
        assert (told.state, told.epoch, told.assigned, told.revoking) == (UNREVOKED, 1, foo(0, 1), foo(2, 3))
        for late in (None, foo(0, 1, 2, 3), foo(3)):
            assert reconcile(group, told, late, nothing_waits, may_be_taking=True) is told
        for done in (foo(0, 1), foo(0), foo()):
            after = reconcile(group, told, done, nothing_waits, may_be_taking=True)
            assert (after.state, after.epoch, after.assigned, after.revoking) == (STABLE, 2, foo(0, 1), foo())


def test_a_report_of_all_that_the_member_keeps_and_no_more_releases_the_rest_at_once() -> None:
    group = world(foo(0, 1))
    before = Member("A", epoch=1, assigned=foo(0, 1, 2, 3))
    after = reconcile(group, before, foo(0, 1), nothing_waits, may_be_taking=True)
    assert (after.state, after.assigned) == (STABLE, foo(0, 1))
    after = reconcile(group, before, foo(), nothing_waits)
    assert (after.state, after.assigned) == (STABLE, foo(0, 1)), "who begins anew takes nothing of what it had"


def test_more_that_is_revoked_while_the_member_lets_go_is_told_first_as_well() -> None:
    before = Member("A", epoch=1, state=UNREVOKED, assigned=foo(0, 1), revoking=foo(2, 3))
    after = reconcile(world(foo(0)), before, foo(), nothing_waits, may_be_taking=True)
    assert (after.state, after.assigned, after.revoking) == (UNREVOKED, foo(0), foo(1))


def test_a_step_that_changes_nothing_gives_the_member_back() -> None:
    group = world(foo(0), Member("B", epoch=1, assigned=foo(0)))
    waiting = reconcile(group, Member("A", epoch=1), foo(), nothing_waits)
    assert waiting.state is UNRELEASED
    assert reconcile(group, waiting, foo(), nothing_waits) is waiting


def test_subsets_are_by_topic_and_partition() -> None:
    bar = topic_id("bar")
    assert is_subset(foo(1), foo(0, 1)) and is_subset(foo(), foo())
    assert not is_subset(foo(2), foo(0, 1)) and not is_subset(((bar, (0,)),), foo(0))
