"""The proposal's case studies (KIP-848, Case Studies), step by step: each shows the group after what is said of it."""

from __future__ import annotations

from textwrap import dedent

from anabranch.base.errors import ErrorCode
from tests.support.groups import GroupWorld, topics


def shows(world: GroupWorld, expected: str) -> None:
    world.check()
    assert world.show() == dedent(expected).strip("\n")


def test_basic() -> None:
    world = GroupWorld(topics(foo=3))

    # A joins. Its target is all there is, and it has nothing to revoke.
    answer = world.join("A")
    assert (answer.member_epoch, world.told(answer)) == (1, "foo-0 foo-1 foo-2")
    shows(
        world,
        """
        Group (epoch=1) A
        Target (epoch=1)
          A [foo-0 foo-1 foo-2]
        Members
          A epoch=1 [foo-0 foo-1 foo-2]
        """,
    )

    # B joins. It is at epoch 2 at once, but foo-2 is A's until A has revoked it.
    answer = world.join("B")
    assert (answer.member_epoch, world.told(answer)) == (2, "")
    shows(
        world,
        """
        Group (epoch=2) A B
        Target (epoch=2)
          A [foo-0 foo-1]
          B [foo-2]
        Members
          A epoch=1 [foo-0 foo-1 foo-2]
          B epoch=2 [] pending [foo-2]
        """,
    )

    # A heartbeats and is told to revoke foo-2. Until it says that it did, B gets nothing.
    answer = world.beat("A", 1)
    assert (answer.member_epoch, world.told(answer)) == (1, "foo-0 foo-1")
    assert world.told(world.beat("B", 2)) is None

    # A acknowledges, and is at epoch 2; foo-2 is free.
    answer = world.beat("A", 1, "foo-0 foo-1")
    assert answer.member_epoch == 2
    shows(
        world,
        """
        Group (epoch=2) A B
        Target (epoch=2)
          A [foo-0 foo-1]
          B [foo-2]
        Members
          A epoch=2 [foo-0 foo-1]
          B epoch=2 [] pending [foo-2]
        """,
    )

    # B heartbeats and gets it.
    answer = world.beat("B", 2)
    assert (answer.member_epoch, world.told(answer)) == (2, "foo-2")
    assert world.group.state().value == "Stable"

    # C joins; B has nothing to revoke and goes on to epoch 3 before A does.
    assert world.join("C").member_epoch == 3
    assert world.beat("B", 2).member_epoch == 3
    shows(
        world,
        """
        Group (epoch=3) A B C
        Target (epoch=3)
          A [foo-0]
          B [foo-2]
          C [foo-1]
        Members
          A epoch=2 [foo-0 foo-1]
          B epoch=3 [foo-2]
          C epoch=3 [] pending [foo-1]
        """,
    )
    assert world.told(world.beat("A", 2)) == "foo-0"
    assert world.beat("A", 2, "foo-0").member_epoch == 3
    assert world.told(world.beat("C", 3)) == "foo-1"
    shows(
        world,
        """
        Group (epoch=3) A B C
        Target (epoch=3)
          A [foo-0]
          B [foo-2]
          C [foo-1]
        Members
          A epoch=3 [foo-0]
          B epoch=3 [foo-2]
          C epoch=3 [foo-1]
        """,
    )


def two_and_a_third() -> GroupWorld:
    """A and B have six partitions, C joins: the proposal's second example, up to where all have converged."""
    world = GroupWorld(topics(foo=6))
    world.join("A")
    world.join("B")
    world.beat("A", 1)
    world.beat("A", 1, "foo-0 foo-1 foo-2")
    world.beat("B", 2)
    assert world.told(world.beat("B", 2, "foo-3 foo-4 foo-5")) is None
    world.join("C")
    return world


def test_a_member_gets_what_is_free_while_it_waits_for_the_rest() -> None:
    world = two_and_a_third()
    assert world.told(world.beat("A", 2)) == "foo-0 foo-1"
    assert world.told(world.beat("B", 2)) == "foo-3 foo-4"
    assert world.told(world.beat("C", 3)) is None
    assert world.beat("A", 2, "foo-0 foo-1").member_epoch == 3
    shows(
        world,
        """
        Group (epoch=3) A B C
        Target (epoch=3)
          A [foo-0 foo-1]
          B [foo-3 foo-4]
          C [foo-2 foo-5]
        Members
          A epoch=3 [foo-0 foo-1]
          B epoch=2 [foo-3 foo-4 foo-5]
          C epoch=3 [] pending [foo-2 foo-5]
        """,
    )
    assert world.told(world.beat("C", 3)) == "foo-2"
    assert world.beat("B", 2, "foo-3 foo-4").member_epoch == 3
    assert world.told(world.beat("C", 3, "foo-2")) == "foo-2 foo-5"
    assert world.group.state().value == "Stable"


def converged() -> GroupWorld:
    world = two_and_a_third()
    world.beat("A", 2)
    world.beat("B", 2)
    world.beat("A", 2, "foo-0 foo-1")
    world.beat("B", 2, "foo-3 foo-4")
    world.beat("C", 3)
    world.beat("C", 3, "foo-2 foo-5")
    return world


def test_member_failure() -> None:
    world = converged()
    # A is silent until its session is over; the others go on.
    for _ in range(9):
        world.advance(4_999)
        world.beat("B", 3)
        world.beat("C", 3)
    world.advance(5_000)
    assert sorted(world.group.members) == ["B", "C"]
    shows(
        world,
        """
        Group (epoch=4) B C
        Target (epoch=4)
          B [foo-0 foo-3 foo-4]
          C [foo-1 foo-2 foo-5]
        Members
          B epoch=3 [foo-3 foo-4] pending [foo-0]
          C epoch=3 [foo-2 foo-5] pending [foo-1]
        """,
    )
    assert world.told(world.beat("B", 3)) == "foo-0 foo-3 foo-4"
    assert world.told(world.beat("C", 3)) == "foo-1 foo-2 foo-5"
    # A is back. It is nobody now, and joins as a new member.
    assert world.beat("A", 3).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert world.join("A").member_epoch == 5


def test_partition_added() -> None:
    world = converged()
    world.set_topics(topics(2, foo=8))
    shows(
        world,
        """
        Group (epoch=4) A B C
        Target (epoch=4)
          A [foo-0 foo-1 foo-6]
          B [foo-3 foo-4 foo-7]
          C [foo-2 foo-5]
        Members
          A epoch=3 [foo-0 foo-1] pending [foo-6]
          B epoch=3 [foo-3 foo-4] pending [foo-7]
          C epoch=3 [foo-2 foo-5]
        """,
    )
    assert world.told(world.beat("A", 3)) == "foo-0 foo-1 foo-6"
    assert world.told(world.beat("B", 3)) == "foo-3 foo-4 foo-7"
    assert world.beat("C", 3).member_epoch == 4
    assert world.group.state().value == "Stable"
