"""Histories of a classic group, one per seed: members that crash and come back, answers that get lost, fail-overs.

After every step `GroupWorld.check` holds, and whoever was told of an assignment was told the one that the leader of
that generation handed in. After quiet time everyone is in one STABLE generation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicSettings, ClassicState
from anabranch.protocol.messages.leave_group import MemberIdentity
from tests.support.classic_groups import Call, GroupWorld
from tests.support.thorough import thorough

HISTORIES = thorough(100, 60)
STEPS = 250
VERSIONS = {3: 2, 5: 3, 8: 4, 9: 5}
"""Of JoinGroup, and of SyncGroup at the time."""


class Member:
    """A client that follows the protocol, as far as the network lets it."""

    def __init__(self, history: History, name: str, instance: str | None) -> None:
        self.history = history
        self.world = history.world
        self.name = name
        self.instance = instance
        self.version = history.chance.choice(list(VERSIONS) if instance is None else [5, 8, 9])
        self.protocols: Mapping[str, bytes] = history.protocols()
        self.session_timeout_ms = history.chance.choice((6_000, 10_000, 30_000))
        self.forget()
        self.fenced = False

    def forget(self) -> None:
        self.member_id, self.generation, self.assignment = "", -1, b""
        self.joining: Call | None = None
        self.syncing: Call | None = None

    @property
    def is_settled(self) -> bool:
        return self.generation >= 0 and self.joining is None and self.syncing is None

    def step(self) -> None:
        """Read a response that arrived, or send the request that is due."""
        for call in (self.joining, self.syncing):
            if call is not None and call.is_parked:
                if call in self.world.parked.values() and not self.history.loses():
                    return
                self.rejoin()
                return
        if self.history.loses():  # the answer, or the next request
            self.joining = self.syncing = None
            self.generation = -1 if self.generation < 0 or not self.assignment else self.generation
        elif self.joining is not None:
            self.on_joined(self.joining)
        elif self.syncing is not None:
            self.on_synced(self.syncing)
        elif self.generation < 0:
            self.joining = self.world.join(
                self.name,
                self.member_id,
                instance=self.instance,
                protocols=self.protocols,
                session_timeout_ms=self.session_timeout_ms,
                rebalance_timeout_ms=20_000,
                version=self.version,
            )
        else:
            self.on_beat(self.world.heartbeat(self.member_id, self.generation, instance=self.instance))

    def rejoin(self) -> None:
        self.joining = self.syncing = None
        self.generation, self.assignment = -1, b""

    def on_joined(self, call: Call) -> None:
        self.joining = None
        if call.error == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = call.member_id
            return
        if self.failed(call.error):
            return
        self.member_id, self.generation = call.member_id, call.generation_id
        leads = call.leader == self.member_id and not call.skip_assignment
        plan = self.history.plan([m.member_id for m in call.members]) if leads else {}
        records = len(self.world.journal)
        self.syncing = self.world.sync(
            self.member_id,
            self.generation,
            plan,
            instance=self.instance,
            protocol_type=call.protocol_type,
            protocol_name=call.protocol_name,
            version=VERSIONS[self.version],
        )
        if len(self.world.journal) > records:
            stored = self.world.journal[-1].value
            assert stored is not None and leads and stored.generation == self.generation
            assert {m.member_id: bytes(m.assignment) for m in stored.members} == {
                member_id: plan.get(member_id, b"") for member_id in self.world.group.members
            }

    def on_synced(self, call: Call) -> None:
        self.syncing = None
        if not self.failed(call.error):
            self.assignment = bytes(call.assignment)
            stored = self.history.stored(self.generation)
            assert any(assigned.get(self.member_id) == self.assignment for assigned in stored)

    def on_beat(self, error: ErrorCode) -> None:
        if not self.failed(error) and self.world.group.state is ClassicState.STABLE:
            assert self.world.group.members[self.member_id].assignment == self.assignment

    def failed(self, error: ErrorCode) -> bool:
        match error:
            case ErrorCode.NONE:
                return False
            case ErrorCode.UNKNOWN_MEMBER_ID:
                self.forget()
            case ErrorCode.REBALANCE_IN_PROGRESS | ErrorCode.ILLEGAL_GENERATION:
                self.rejoin()
            case ErrorCode.FENCED_INSTANCE_ID:
                self.fenced = True
            case ErrorCode.INCONSISTENT_GROUP_PROTOCOL:
                assert self.history.fail_overs, "until then all are known to support range"
                self.forget()
                self.protocols = dict.fromkeys(("sticky", "cooperative", "range"), b"")
            case ErrorCode.GROUP_MAX_SIZE_REACHED | ErrorCode.COORDINATOR_NOT_AVAILABLE:
                self.forget()
            case _:
                raise AssertionError(error)
        return True


class History:
    """One random life of a group."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.world = GroupWorld(
            initial_rebalance_delay_ms=self.chance.choice((0, 3_000)),
            new_member_join_timeout_ms=self.chance.choice((15_000, 300_000)),
            size_max=self.chance.choice((3, 100, 100)),
        )
        self.loss = self.chance.choice((0.0, 0.02, 0.1))
        self.members: list[Member] = []
        self.names = 0
        self.fail_overs = 0
        self.left_out: set[str] = set()
        """Members that a leader assigned nothing once."""

    def loses(self) -> bool:
        return self.chance.random() < self.loss

    def protocols(self) -> dict[str, bytes]:
        """All know `range`, so that all can be in one group."""
        others = self.chance.sample(["sticky", "cooperative"], self.chance.randrange(3))
        names = [*others, "range"] if self.chance.random() < 0.7 else ["range", *others]
        return {name: self.chance.randbytes(2) for name in names}

    def plan(self, members: list[str]) -> dict[str, bytes]:
        """An assignment that no other is equal to; sometimes it leaves a member out."""
        given = {member_id: self.chance.randbytes(6) for member_id in members}
        if self.loss and given and self.chance.random() < 0.1:
            self.left_out.add(name_of(given.popitem()[0]))
        return given

    def stored(self, generation: int) -> list[dict[str, bytes]]:
        values = [record.value for record in self.world.journal]
        return [
            {m.member_id: bytes(m.assignment) for m in value.members}
            for value in values
            if value is not None and value.generation == generation
        ]

    def run(self) -> None:
        for _ in range(STEPS):
            happenings = {
                self.beat: 60,
                self.wait: 60,
                self.come: 6,
                self.leave: 3,
                self.crash: 3,
                self.restart: 3,
                self.change: 3,
                self.ask_nonsense: 5,
                self.kick: 1,
                self.fail_over: 2,
                self.resize: 1,
            }
            self.chance.choices(list(happenings), list(happenings.values()))[0]()
        self.settle()

    def beat(self) -> None:
        for member in self.chance.sample(self.members, len(self.members)):
            member.step()
        self.members = [member for member in self.members if not member.fenced]

    def wait(self) -> None:
        self.world.advance(self.chance.choice((0, 100, 1_000, 2_500, 4_000)))

    def come(self) -> None:
        if len(self.members) < 8:
            self.names += 1
            instance = f"i{self.chance.randrange(4)}" if self.chance.random() < 0.4 else None
            self.members.append(Member(self, f"c{self.names}", instance))

    def leave(self) -> None:
        if self.members:
            gone = self.members.pop(self.chance.randrange(len(self.members)))
            identity = MemberIdentity(member_id=gone.member_id, group_instance_id=gone.instance)
            self.world.leave(identity, version=3)

    def crash(self) -> None:
        if self.members:
            self.members.pop(self.chance.randrange(len(self.members)))

    def restart(self) -> None:
        if self.members:
            self.chance.choice(self.members).forget()

    def change(self) -> None:
        if self.members:
            member = self.chance.choice(self.members)
            member.protocols = self.protocols()
            if self.chance.random() < 0.5:
                member.rejoin()

    def ask_nonsense(self) -> None:
        ids = ["", "nobody", *self.world.group.members, *self.world.group.pending]
        instances = [None, "nothing", *self.world.group.static]
        member_id, instance = self.chance.choice(ids), self.chance.choice(instances)
        generation = self.world.group.generation + self.chance.randint(-1, 1)
        before = dict(self.world.group.members)
        match self.chance.randrange(3):
            case 0:
                self.world.heartbeat(member_id, generation, instance=instance)
            case 1 if member_id not in self.world.group.members:
                self.world.sync(member_id, generation, {"": b"x"}, instance=instance)
            case _:
                assert self.world.join("x", "nobody", instance=instance).error
        assert self.world.group.members == before

    def kick(self) -> None:
        self.world.kick()

    def fail_over(self) -> None:
        self.fail_overs += 1
        self.world.fail_over()

    def resize(self) -> None:
        self.world.settings = ClassicSettings(size_max=self.chance.choice((2, 4, 100)))

    def settle(self) -> None:
        """Without faults and with room everyone is in one generation after a while."""
        self.world.settings = ClassicSettings()
        self.loss = 0.0
        instances = {member.instance: member for member in self.members if member.instance is not None}
        self.members = [m for m in self.members if m.instance is None or instances[m.instance] is m]
        for _ in range(200):
            self.beat()
            self.world.advance(1_000)
        alive = {member.member_id for member in self.members}
        assert set(self.world.group.members) == alive
        assert self.world.group.state is (ClassicState.STABLE if alive else ClassicState.EMPTY)
        for member in self.members:
            assert member.is_settled and member.generation == self.world.group.generation
            assert member.assignment == self.world.group.members[member.member_id].assignment
            assert member.assignment or name_of(member.member_id) in self.left_out
        for member in self.members:
            self.world.leave(member.member_id)
        self.world.advance(600_000)
        assert self.world.group.state is ClassicState.EMPTY
        assert not self.world.timers and not self.world.parked


def name_of(member_id: str) -> str:
    """The client, or the static instance that keeps the assignment of its former life."""
    return member_id.rpartition("-")[0]


@pytest.mark.parametrize("seed", range(HISTORIES))
def test_a_group_assigns_exactly_what_its_leader_says_and_converges(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # As a large group is answered.
        monkeypatch.setattr("anabranch.machines.groups.classic.sync.ANSWERED_AT_A_TIME", 1)
    History(seed).run()


def test_a_seed_reproduces() -> None:
    first, second = History(7), History(7)
    first.run()
    second.run()
    assert first.world.journal == second.world.journal
