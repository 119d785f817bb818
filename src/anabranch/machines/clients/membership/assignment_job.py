"""The group's assignment, when the coordinator asks this member to compute it (KIP-848, Client Side Assignors).

    IDLE ── asked ──► PREPARE ──► COMPUTE ──► INSTALL ──► IDLE

Prepare and install are requests; the driver runs the computation in a thread. A request refused for an old member epoch
waits for the next heartbeat; one without a response is sent again after a while.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.machines.clients.membership.assignors import (
    ASSIGNMENT_ERROR,
    GroupAssignment,
    PartitionAssignor,
    install_request,
    spec_of,
)
from anabranch.machines.clients.membership.steps import UNRELATED_TO_MEMBER, Compute, MemberSettings, Send, backoff_ms
from anabranch.protocol.messages.consumer_group_prepare_assignment import ConsumerGroupPrepareAssignmentRequest


@dataclass(slots=True)
class AssignmentJob:
    """The remaining steps of the computation: prepare, compute, install; one request or computation at a time."""

    settings: MemberSettings
    assignors: dict[str, PartitionAssignor]
    wanted: bool = False
    flight: int = 0
    group_epoch: int = 0
    computation: Callable[[], GroupAssignment] | None = None
    computed: GroupAssignment | None = None
    due_ms: int | None = None
    failures: int = 0
    error: Exception | None = None

    def drop(self) -> None:
        """Abandon the job."""
        self.wanted = False
        self.flight = 0
        self.computation = self.computed = self.due_ms = None
        self.failures = 0

    @property
    def next_ms(self) -> int | None:
        """Return the time of the next step; None while a step is in flight or without a job."""
        return None if self.flight else self.due_ms

    def heartbeat(self, *, wanted: bool) -> None:
        """Handle a heartbeat response: start a job if wanted; resume a request that waited for a new epoch."""
        if self.flight or not self.assignors:
            return
        if self.computed is None and self.computation is None:
            self.wanted = self.wanted or wanted
        if self.due_ms is None and (self.wanted or self.computed is not None):
            self.due_ms = 0

    def next(self, member_id: str, epoch: int, now_ms: int, new_ticket: Callable[[], int]) -> Send | Compute | None:
        """Return the next request or computation."""
        if self.flight or self.due_ms is None or now_ms < self.due_ms:
            return None
        if self.computation is not None:
            self.flight = new_ticket()
            return Compute(self.flight, self.computation)
        group_id = self.settings.group_id
        if self.computed is not None:
            self.flight = new_ticket()
            return Send(self.flight, install_request(group_id, member_id, epoch, self.group_epoch, self.computed))
        assert self.wanted
        self.flight = new_ticket()
        request = ConsumerGroupPrepareAssignmentRequest(group_id=group_id, member_id=member_id, member_epoch=epoch)
        return Send(self.flight, request)

    def take(self, ticket: int, response: Any, now_ms: int) -> bool:
        """Handle a response or a result; True once the assignment is installed, so that a heartbeat should follow."""
        if not ticket or ticket != self.flight:
            return False
        self.flight = 0
        if isinstance(response, GroupAssignment):
            self.computation, self.computed = None, response
            return False
        code = ErrorCode.of(response.error_code)
        if code is ErrorCode.NONE:
            self.failures = 0
            if self.computed is not None:
                self.drop()
                return True
            assignor = self.assignors.get(response.assignor_name)
            self.group_epoch = response.group_epoch
            self.wanted = False
            if assignor is None:
                self.computed = GroupAssignment(error=ASSIGNMENT_ERROR)
            else:
                self.error = None
                self.computation = partial(assignor.assign, spec_of(response))
        elif code in UNRELATED_TO_MEMBER:
            self._later(now_ms)
        elif code in (ErrorCode.STALE_MEMBER_EPOCH, ErrorCode.FENCED_MEMBER_EPOCH):
            self.due_ms = None  # until the next heartbeat has brought the epoch
        else:
            if self.computed is not None and not self.computed.error:
                self.error = ApiError(code, response.error_message or "the assignment was refused")
            self.drop()
        return False

    def failed(self, ticket: int, error: Exception, now_ms: int) -> None:
        """Handle a request without a response, or an exception of the assignor."""
        if not ticket or ticket != self.flight:
            return
        self.flight = 0
        if self.computation is not None:
            self.computation, self.computed = None, GroupAssignment(error=ASSIGNMENT_ERROR)
            self.error = error
        else:
            self._later(now_ms)

    def _later(self, now_ms: int) -> None:
        self.failures += 1
        self.due_ms = now_ms + backoff_ms(self.settings, self.failures)
