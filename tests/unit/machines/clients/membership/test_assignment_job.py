"""The assignment job: prepare, compute, install, one at a time, through every refusal."""

from __future__ import annotations

from itertools import count
from uuid import UUID

import pytest

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.clients.membership.assignment_job import AssignmentJob
from anabranch.machines.clients.membership.assignors import (
    ASSIGNMENT_ERROR,
    AssignmentSpec,
    GroupAssignment,
    MemberAssignment,
    PartitionAssignor,
    TopicIdPartition,
)
from anabranch.machines.clients.membership.steps import Compute, MemberSettings, Send
from anabranch.protocol.messages.consumer_group_install_assignment import (
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
)
from anabranch.protocol.messages.consumer_group_prepare_assignment import (
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)

EVERYTHING = GroupAssignment({"m": MemberAssignment(frozenset({TopicIdPartition(UUID(int=1), 0)}))})


class Everything(PartitionAssignor):
    @property
    def name(self) -> str:
        return "everything"

    def assign(self, spec: AssignmentSpec) -> GroupAssignment:
        assert spec.group_epoch == 5
        return EVERYTHING


class World:
    def __init__(self, *assignors: PartitionAssignor) -> None:
        self.job = AssignmentJob(MemberSettings("g"), {assignor.name: assignor for assignor in assignors})
        self.tickets = count(1)
        self.now = 0

    def next(self) -> Send | Compute | None:
        return self.job.next("m", 4, self.now, lambda: next(self.tickets))

    def asked(self) -> World:
        self.job.heartbeat(wanted=True)
        return self

    def answer(self, code: ErrorCode = ErrorCode.NONE) -> bool:
        response = ConsumerGroupPrepareAssignmentResponse(
            error_code=code, group_epoch=5, assignor_name="everything", members=[], topics=[]
        )
        return self.job.take(self.job.flight, response, self.now)

    def computed(self) -> World:
        """Up to the request that installs."""
        self.asked().next()
        self.answer()
        compute = self.next()
        assert isinstance(compute, Compute)
        self.job.take(compute.ticket, compute.work(), self.now)
        return self


def test_a_member_that_is_asked_prepares_computes_and_installs() -> None:
    world = World(Everything())
    assert world.next() is None
    prepare = world.asked().next()
    assert isinstance(prepare, Send) and isinstance(prepare.request, ConsumerGroupPrepareAssignmentRequest)
    assert world.next() is None and world.job.next_ms is None, "one request at a time"
    world.answer()
    compute = world.next()
    assert isinstance(compute, Compute) and compute.work() is EVERYTHING
    world.job.take(compute.ticket, EVERYTHING, 0)
    install = world.next()
    assert isinstance(install, Send) and isinstance(install.request, ConsumerGroupInstallAssignmentRequest)
    assert (install.request.group_epoch, install.request.member_epoch) == (5, 4)
    assert world.job.take(install.ticket, ConsumerGroupInstallAssignmentResponse(), 0), "a heartbeat may bring news"
    assert world.next() is None


def test_a_member_without_assignors_computes_nothing() -> None:
    assert World().asked().next() is None


def test_a_request_without_a_response_is_sent_again_later_and_later() -> None:
    world = World(Everything()).asked()
    waits = []
    for _ in range(3):
        send = world.next()
        assert isinstance(send, Send)
        world.job.failed(send.ticket, ConnectionError(), world.now)
        assert world.job.due_ms is not None
        waits.append(world.job.due_ms - world.now)
        assert world.next() is None
        world.now = world.job.due_ms
    assert waits == [100, 200, 400]


@pytest.mark.parametrize("code", [ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.FENCED_MEMBER_EPOCH])
def test_a_stale_epoch_waits_for_the_next_heartbeat(code: ErrorCode) -> None:
    world = World(Everything()).asked()
    world.next()
    world.answer(code)
    assert world.next() is None and world.job.next_ms is None
    world.job.heartbeat(wanted=False)
    assert isinstance(world.next(), Send)


def test_a_refused_assignment_is_dropped_and_told() -> None:
    world = World(Everything()).computed()
    install = world.next()
    assert isinstance(install, Send)
    refused = ConsumerGroupInstallAssignmentResponse(error_code=ErrorCode.INVALID_REQUEST, error_message="twice")
    assert not world.job.take(install.ticket, refused, 0)
    assert isinstance(world.job.error, ApiError) and "twice" in str(world.job.error)
    assert world.next() is None


def test_an_assignor_that_raises_or_that_nobody_has_is_reported_as_an_error() -> None:
    world = World(Everything()).asked()
    world.next()
    world.answer()
    compute = world.next()
    assert isinstance(compute, Compute)
    failure = ZeroDivisionError()
    world.job.failed(compute.ticket, failure, 0)
    install = world.next()
    assert world.job.error is failure and isinstance(install, Send) and install.request.error == ASSIGNMENT_ERROR
    unknown = World(Everything()).asked()
    unknown.next()
    response = ConsumerGroupPrepareAssignmentResponse(group_epoch=5, assignor_name="other", members=[], topics=[])
    unknown.job.take(unknown.job.flight, response, 0)
    install = unknown.next()
    assert isinstance(install, Send) and install.request.error == ASSIGNMENT_ERROR


def test_a_response_to_another_request_changes_nothing() -> None:
    world = World(Everything()).asked()
    world.next()
    assert not world.job.take(0, object(), 0) and not world.job.take(99, object(), 0)
    world.job.failed(99, ConnectionError(), 0)
    assert world.job.flight == 1


def test_a_member_that_drops_out_forgets_the_job() -> None:
    world = World(Everything()).computed()
    world.job.drop()
    world.job.heartbeat(wanted=False)
    assert world.next() is None
