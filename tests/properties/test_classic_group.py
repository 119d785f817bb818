"""Any requests in any order, beside a model of what a classic group's members may be told.

The model is the log and what it gave out: an assignment is the stored one of the group's generation, a beat that is
well answered is a member's of this generation, an id is one that was given. `GroupWorld.check` looks after each step.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.classic import ClassicSettings, ClassicState
from anabranch.protocol.messages.leave_group import MemberIdentity
from tests.support.classic_groups import Call, GroupWorld

NUMBERS = st.integers(0, 7)
INSTANCES = st.sampled_from([None, None, "i", "j"])
PROTOCOLS = st.sampled_from([{"p": b"1"}, {"p": b"2"}, {"p": b"1", "q": b"1"}, {"q": b"1", "p": b"1"}, {"q": b"2"}, {}])


class AnyRequests(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld(size_max=4, initial_rebalance_delay_ms=3_000, new_member_join_timeout_ms=20_000)
        self.ids = ["", "nobody"]
        self.joins: list[Call] = []
        self.syncs: list[tuple[str, int, Call]] = []

    def an_id(self, number: int) -> str:
        return self.ids[-1 - number % len(self.ids)]

    def learn(self) -> None:
        for call in [call for call in self.joins if not call.is_parked]:
            self.joins.remove(call)
            if call.member_id and call.member_id not in self.ids:
                self.ids.append(call.member_id)
            if call.error == ErrorCode.NONE:
                assert call.leader != "" and call.generation_id >= 1
                assert not call.members or call.protocol_name in ("p", "q")
        for member_id, generation, call in [sync for sync in self.syncs if not sync[2].is_parked]:
            self.syncs.remove((member_id, generation, call))
            if call.error == ErrorCode.NONE:
                stored = self.world.journal[-1].value
                assert stored is not None and stored.generation == generation
                assert {m.member_id: bytes(m.assignment) for m in stored.members}[member_id] == bytes(call.assignment)

    @rule(
        number=NUMBERS,
        instance=INSTANCES,
        protocols=PROTOCOLS,
        version=st.sampled_from([0, 3, 4, 5, 8, 9]),
        protocol_type=st.sampled_from(["consumer", "consumer", "consumer", "connect", ""]),
        session_timeout_ms=st.sampled_from([5_999, 6_000, 30_000]),
    )
    def join(self, number: int, **said: object) -> None:
        call = self.world.join("c", self.an_id(number), rebalance_timeout_ms=20_000, **said)  # type: ignore[arg-type]
        self.joins.append(call)
        self.learn()

    @rule(number=NUMBERS, instance=INSTANCES, late=st.sampled_from([0, 0, 0, 1, -1]))
    def sync(self, number: int, instance: str | None, late: int) -> None:
        member_id, generation = self.an_id(number), self.world.group.generation - late
        records = len(self.world.journal)
        leads = self.world.group.leader == member_id
        plan = {known: f"{generation} {known}".encode() for known in self.ids[1:]}
        call = self.world.sync(member_id, generation, plan, instance=instance, version=3)
        self.syncs.append((member_id, generation, call))
        self.learn()
        assert leads or len(self.world.journal) == records, "only the leader's has an effect"

    @rule()
    def sync_everyone(self) -> None:
        group = self.world.group
        for member_id in sorted(group.members, key=lambda member_id: member_id == group.leader):
            call = self.world.sync(member_id, version=3)
            self.syncs.append((member_id, group.generation, call))
            self.learn()

    @rule(number=NUMBERS, instance=INSTANCES, late=st.sampled_from([0, 0, 1, -1]))
    def beat(self, number: int, instance: str | None, late: int) -> None:
        member_id = self.an_id(number)
        error = self.world.heartbeat(member_id, self.world.group.generation - late, instance=instance)
        if error in (ErrorCode.NONE, ErrorCode.REBALANCE_IN_PROGRESS):
            assert not late and member_id in self.world.group.members
            assert (error != ErrorCode.NONE) is (self.world.group.state is ClassicState.PREPARING_REBALANCE)

    @rule(numbers=st.lists(NUMBERS, max_size=3), instance=INSTANCES)
    def leave(self, numbers: list[int], instance: str | None) -> None:
        leaving = [MemberIdentity(member_id=self.an_id(n), group_instance_id=instance) for n in numbers]
        left = self.world.leave(*leaving)
        assert left.error_code or len(left.members) == len(leaving)
        for asked, told in zip(leaving, left.members, strict=False):
            assert told.error_code or asked.member_id not in self.world.group.members
        self.learn()

    @rule(duration_ms=st.sampled_from([0, 1, 1_000, 2_999, 3_000, 6_000, 20_000, 60_000]))
    def advance(self, duration_ms: int) -> None:
        self.world.advance(duration_ms)
        self.learn()

    @rule()
    def kick(self) -> None:
        self.world.kick()
        self.learn()

    @rule(size_max=st.sampled_from([1, 2, 4]))
    def resize(self, size_max: int) -> None:
        self.world.settings = ClassicSettings(size_max=size_max, new_member_join_timeout_ms=20_000)

    @rule()
    def fail_over(self) -> None:
        self.world.fail_over()
        self.joins.clear()
        self.syncs.clear()

    @precondition(lambda self: self.world.group.state is not ClassicState.DEAD)
    @rule(chance=st.integers(0, 40))
    def end(self, chance: int) -> None:
        if chance == 0:
            self.world.dissolve()
        elif chance == 1:
            self.world.delete()
        self.learn()

    def teardown(self) -> None:
        """Whatever happened, silence empties the group and everyone who waited was answered."""
        self.world.advance(300_000)
        self.learn()
        assert self.world.group.state in (ClassicState.EMPTY, ClassicState.DEAD)
        assert not self.world.timers and not self.joins and not self.syncs


TestAnyRequests = AnyRequests.TestCase
TestAnyRequests.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
