"""The states of a classic group, what is stored of it, and how it is shown."""

from __future__ import annotations

import re
from itertools import product

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.codec import decode, encode
from anabranch.machines.groups import classic
from anabranch.machines.groups.classic import NEXT, ClassicEvent, ClassicGroup, ClassicMember, ClassicState, group
from anabranch.machines.groups.records import GroupMetadataValue, MemberMetadata
from anabranch.protocol.messages.consumer_protocol_subscription import ConsumerProtocolSubscription
from tests.support.classic_groups import GroupWorld


def test_every_state_has_an_answer_to_every_event() -> None:
    assert set(NEXT) == set(product(ClassicState, ClassicEvent))


def test_the_docstring_shows_the_table() -> None:
    lines = [line.split("  ") for line in (group.__doc__ or "").splitlines() if line.startswith("    ")]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert rows[0] == ["state", *(event.value for event in ClassicEvent)]
    shown = {}
    for name, *cells in rows[1:]:
        for event, cell in zip(ClassicEvent, cells, strict=True):
            word = re.sub(r" \(\d\)$", "", cell)
            full = [state for state in ClassicState if state.name.startswith(word)]
            shown[ClassicState[name], event] = full[0] if full else None
    assert shown == NEXT


def test_a_step_that_the_table_does_not_have_is_our_fault() -> None:
    with pytest.raises(AssertionError):
        ClassicGroup("g").move(ClassicEvent.JOINED, 0)


def test_an_empty_group_has_nothing_worth_keeping_until_a_record_tells_of_it() -> None:
    world = GroupWorld()
    assert world.group.is_vacant
    call = world.join("a")
    assert not world.group.is_vacant
    world.leave(call.member_id)
    assert world.group.is_vacant
    (member,) = world.start("a")
    world.leave(member)
    assert world.group.state is ClassicState.EMPTY and not world.group.is_vacant


def test_records_of_every_version_can_be_restored() -> None:
    member = MemberMetadata(
        member_id="m", client_id="a", client_host="/h", session_timeout=10_000, subscription=b"s", assignment=b"x"
    )
    for version in range(5):
        value = GroupMetadataValue(protocol_type="connect", generation=3, protocol="p", leader="m", members=[member])
        restored = classic.restore("g", decoded(value, version))
        assert restored.state is ClassicState.STABLE and restored.generation == 3 and restored.leader == "m"
        assert restored.members["m"] == ClassicMember("m", None, "a", "/h", 10_000, 10_000, (("p", b"s"),), b"x")


def decoded(value: GroupMetadataValue, version: int) -> GroupMetadataValue:
    return decode(GroupMetadataValue, b"".join(bytes(part) for part in encode(value, version)), version)


def test_what_members_said_is_shown_of_a_stable_group_only() -> None:
    world = GroupWorld()
    a, b = world.start("a", "b")
    shown = classic.view(world.group).described()
    assert (shown.group_state, shown.protocol_type, shown.protocol_data) == ("Stable", "consumer", "range")
    assert [(m.member_id, m.client_id, m.client_host) for m in shown.members] == [
        (a, "a", "/127.0.0.1"),
        (b, "b", "/127.0.0.1"),
    ]
    assert [(bytes(m.member_metadata), bytes(m.member_assignment)) for m in shown.members] == [
        (b"topics", a.encode()),
        (b"topics", b.encode()),
    ]
    world.join("a", a)
    shown = classic.view(world.group).described()
    assert (shown.group_state, shown.protocol_data) == ("PreparingRebalance", "")
    assert [(m.member_metadata, m.member_assignment) for m in shown.members] == [(b"", b"")] * 2
    world.dissolve()
    assert classic.view(world.group).described().group_state == "Dead"


def subscription(*topics: str, version: int = 3) -> bytes:
    parts = encode(ConsumerProtocolSubscription(topics=list(topics), rack_id="r"), version)
    return version.to_bytes(2) + b"".join(bytes(part) for part in parts)


def test_the_topics_of_consumers_are_read_from_what_they_said() -> None:
    world = GroupWorld()
    ids = world.start("a", protocols={"range": subscription("t", "u")})
    assert classic.subscribed_topics(world.group) == {"t", "u"}
    world.leave(*ids)
    assert classic.subscribed_topics(world.group) == frozenset()


def test_the_topics_of_others_and_of_nonsense_are_not_known() -> None:
    world = GroupWorld()
    world.start("a", protocols={"range": b"\0\1\xff\xff\xff"})
    assert classic.subscribed_topics(world.group) is None
    other = GroupWorld()
    call = other.join("a", protocol_type="connect", version=3)
    other.advance(3_000)
    assert call.error == ErrorCode.NONE
    assert classic.subscribed_topics(other.group) is None


def test_topics_of_a_subscription_that_is_too_long_to_be_read_in_a_step_are_not_known() -> None:
    world = GroupWorld()
    world.start("a", protocols={"range": subscription(*(f"topic-{number:06}" for number in range(9_000)))})
    assert len(classic.subscribed_topics(world.group) or ()) == 9_000
    world = GroupWorld()
    world.start("a", protocols={"range": subscription(*(f"topic-{number:06}" for number in range(10_000)))})
    assert classic.subscribed_topics(world.group) is None


def test_topics_of_many_long_subscriptions_are_not_known_and_of_many_short_ones_are() -> None:
    def known(members: int, names: int) -> int | None:
        world = GroupWorld()
        for one in range(members):
            said = {"range": subscription(f"m{one}", *(f"topic-{number:06}" for number in range(names)))}
            world.join(f"m{one}", world.join(f"m{one}", protocols=said).member_id, protocols=said)
        while world.group.state is classic.ClassicState.PREPARING_REBALANCE:
            world.advance(world.timers["classic", "g", "join"] - world.now_ms)
        found = classic.subscribed_topics(world.group)
        return None if found is None else len(found)

    assert known(200, 10) == 210
    assert known(2, 3_000) == 3_002
    assert known(5, 3_000) is None


def test_a_deleted_group_is_dead_and_only_an_empty_one_can_be_deleted() -> None:
    world = GroupWorld()
    (a,) = world.start("a")
    assert world.delete() == ErrorCode.NON_EMPTY_GROUP
    world.leave(a)
    world.join("b")
    assert world.delete() == ErrorCode.NONE
    assert world.group.state is ClassicState.DEAD
    assert world.journal[-1].value is None
    assert world.delete() == ErrorCode.GROUP_ID_NOT_FOUND
