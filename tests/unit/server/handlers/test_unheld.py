"""What a commit of records that another member holds is answered."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import STRING_SIZE_MAX
from anabranch.machines.groups.classic import ClassicGroup, ClassicState
from anabranch.machines.groups.classic.group import ClassicMember
from anabranch.machines.groups.committers import Group, request_error
from anabranch.machines.groups.consumer.group import ConsumerGroup, Member
from anabranch.protocol.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from anabranch.protocol.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from anabranch.server.coordinators.progress import Memberships
from anabranch.server.handlers.offsets import handle_offset_commit
from anabranch.server.handlers.unheld import Unheld


def holding(held: Callable[[], Any], **more: Any) -> Any:
    """A broker of which `held` says what other members hold."""

    class Books:
        def __len__(self) -> int:
            return 1

        def holders_of(self, group_id: str, partition: Any, member_id: str, ranges: Any) -> Any:
            return [held()] * len(ranges)

    return SimpleNamespace(
        slices=Books(),
        replicas=SimpleNamespace(get=lambda name, number: (name, number)),
        memberships=SimpleNamespace(commit_error=lambda request: ErrorCode.NONE),
        **more,
    )


def refuse(asked: OffsetCommitRequest, code: ErrorCode, message: str) -> OffsetCommitResponse:
    answers = [
        OffsetCommitResponsePartition(partition_index=it.partition_index, error_code=code, error_message=message)
        for it in asked.topics[0].partitions
    ]
    return OffsetCommitResponse(topics=[OffsetCommitResponseTopic(partitions=answers)])


def test_a_commit_that_waited_in_line_does_not_count_if_a_claim_before_it_got_the_records() -> None:
    """What others hold was looked at as the commit came."""
    held: list[Any] = [None]
    told: list[int] = []

    class Group:
        def offset_commit(self, request: OffsetCommitRequest, caller: Any, now_ms: int) -> OffsetCommitResponse:
            told.extend(it.partition_index for it in request.topics[0].partitions)
            return refuse(request, ErrorCode.NONE, "")

    def ask(decide: Callable[[Any, int], Any], weigh: Callable[[Any], int], look: Callable[[], None]) -> Any:
        held[0] = SimpleNamespace(start=0, end=9, member_id="other")  # A claim that was in line before it.
        look()
        return decide(Group(), 0)

    groups = SimpleNamespace(shard_of=lambda group_id: SimpleNamespace(ask=ask), takes_individual=True)
    call = SimpleNamespace(peer="host:1", client_id="c", api_version=9, connection=1)
    part = OffsetCommitRequestPartition(partition_index=0, committed_offset=10)
    request = OffsetCommitRequest(
        group_id="g", member_id="m", topics=[OffsetCommitRequestTopic(name="t", partitions=[part])]
    )
    answer = handle_offset_commit(holding(lambda: held[0], groups=groups), request, cast(Any, call))
    assert isinstance(answer, OffsetCommitResponse) and told == []
    assert answer.topics[0].partitions[0].error_code == ErrorCode.INVALID_RECORD_STATE


def test_a_commit_that_does_not_count_quotes_the_member_that_holds_the_records_in_short() -> None:
    """It chose its id: the members beside it must be able to read their answers."""
    held = SimpleNamespace(start=0, end=9, member_id="m" * STRING_SIZE_MAX)

    broker = holding(lambda: held)
    count = 100
    parts = [OffsetCommitRequestPartition(partition_index=it, committed_offset=10) for it in range(count)]
    request = OffsetCommitRequest(
        group_id="g", member_id="honest", topics=[OffsetCommitRequestTopic(name="t" * 249, partitions=parts)]
    )

    unheld = Unheld(broker, request, refuse)
    unheld.look()
    answer = unheld.whole(refuse(unheld.rest, ErrorCode.NONE, ""))
    answers = answer.topics[0].partitions
    assert [it.error_code for it in answers] == [ErrorCode.INVALID_RECORD_STATE] * count
    assert max(len(it.error_message or "") for it in answers) < 250
    assert answers[0].error_message is not None and "Offsets 0 to 9 are with member mmm" in answers[0].error_message


def classic(state: ClassicState) -> ClassicGroup:
    members = {it: ClassicMember(it, None, "c", "h", 1000, 1000, (("range", b""),)) for it in ("m", "other")}
    return ClassicGroup("g", state=state, generation=7, members=members)


def left_for_a_while() -> ConsumerGroup:
    """A group whose static member has the epoch of one that comes back."""
    members = {"m": Member("m", epoch=-2), "other": Member("other", epoch=7)}
    return ConsumerGroup("g", epoch=7, members=members, static_members={"i": "m"})


GROUPS: dict[str, Callable[[], Group]] = {
    "stable": lambda: classic(ClassicState.STABLE),
    "completing": lambda: classic(ClassicState.COMPLETING_REBALANCE),
    "consumer": left_for_a_while,
}


@pytest.mark.parametrize("epoch", [-2, -1, 6, 7])
@pytest.mark.parametrize("member_id", ["m", "", "unknown"])
@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("kind", GROUPS)
def test_a_commit_of_what_another_member_holds_is_left_to_the_coordinator_only_where_that_refuses_all_of_it(
    kind: str, transactional: bool, member_id: str, epoch: int
) -> None:
    """In a transaction, a classic group accepts commits during its rebalance, in which plain ones are refused."""
    group = GROUPS[kind]()
    request: OffsetCommitRequest | TxnOffsetCommitRequest
    if transactional:
        part = TxnOffsetCommitRequestPartition(partition_index=0, committed_offset=10, committed_metadata="")
        topic = TxnOffsetCommitRequestTopic(name="t", partitions=[part])
        request = TxnOffsetCommitRequest(
            transactional_id="x",
            group_id="g",
            producer_id=1,
            producer_epoch=0,
            generation_id=epoch,
            member_id=member_id,
            topics=[topic],
        )
    else:
        plain = OffsetCommitRequestPartition(partition_index=0, committed_offset=10)
        request = OffsetCommitRequest(
            group_id="g",
            generation_id_or_member_epoch=epoch,
            member_id=member_id,
            topics=[OffsetCommitRequestTopic(name="t", partitions=[plain])],
        )
    broker = holding(lambda: SimpleNamespace(start=0, end=9, member_id="other"))
    machine = SimpleNamespace(groups={"g": group})
    broker.memberships = Memberships(cast(Any, SimpleNamespace(shard_of=lambda _: SimpleNamespace(machine=machine))))
    unheld = Unheld(broker, cast(Any, request), lambda *given: None)
    unheld.look()
    is_accepted = request_error(group, request) is ErrorCode.NONE
    assert bool(unheld.rest.topics[0].partitions) is not is_accepted


def test_a_partition_that_is_named_again_and_again_is_asked_for_once_in_a_commit() -> None:
    asked: list[Any] = []

    class Books:
        def __len__(self) -> int:
            return 1

        def holders_of(self, group_id: str, partition: Any, member_id: str, ranges: list[tuple[int, int]]) -> Any:
            asked.append((partition, ranges))
            return [SimpleNamespace(start=5, end=9, member_id="other") if last >= 5 else None for _, last in ranges]

    broker = holding(lambda: None)
    broker.slices = Books()
    parts = [OffsetCommitRequestPartition(partition_index=it % 2, committed_offset=10 - it) for it in range(10)]
    topics = [OffsetCommitRequestTopic(name="t", partitions=parts[:5])]
    topics.append(OffsetCommitRequestTopic(name="t", partitions=parts[5:]))
    unheld = Unheld(broker, OffsetCommitRequest(group_id="g", member_id="m", topics=topics), refuse)
    unheld.look()
    assert asked == [
        (("t", 0), [(0, 1), (0, 3), (0, 5), (0, 7), (0, 9)]),
        (("t", 1), [(0, 0), (0, 2), (0, 4), (0, 6), (0, 8)]),
    ]
    left = [it.committed_offset for topic in unheld.rest.topics for it in topic.partitions]
    assert left == [5, 4, 3, 2, 1], "of which nothing is with others"
