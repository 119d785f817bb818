"""The common part of both member machines: identity, phase, owned partitions, and the deadline of the next poll.

The rule: between `poll_ended` and the next `poll_began` at most `max.poll.interval.ms` pass; a member whose application
polls later leaves its group (`_check_poll`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import Generic, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.machines.clients.membership.steps import MemberSettings, Owned

PhaseT = TypeVar("PhaseT", bound=Enum)


class PolledMember(ABC, Generic[PhaseT]):
    """A member of a group whose application must poll."""

    def __init__(self, settings: MemberSettings, member_id: str, phase: PhaseT) -> None:
        self._settings = settings
        self._member_id = member_id
        self._phase = phase
        self._owned: frozenset[Owned] = frozenset()
        self._poll_deadline_ms: int | None = None
        self._has_lost_slices = False
        """A membership with slices has ended, and the application has not handled the Lost event yet."""

    def poll_began(self, now_ms: int) -> bool:
        """Report that the application polls; return whether that may give the member something to do."""
        phase, deadline_ms = self._phase, self._poll_deadline_ms
        self._check_poll(now_ms)
        self._poll_deadline_ms = None
        self._advance()
        return self._phase is not phase or (deadline_ms is not None and now_ms >= deadline_ms)

    def poll_ended(self, now_ms: int) -> int:
        """Report the end of a poll; the next one is due at the time in ms that is returned (`max.poll.interval.ms`)."""
        self._poll_deadline_ms = now_ms + self._settings.max_poll_interval_ms
        return self._poll_deadline_ms

    def layout_changed(self) -> None:
        """Report that fetches have shown another layout of a topic; a coordinator that assigns has seen it itself."""

    def commit_refused(self, code: ErrorCode, epoch: int, now_ms: int) -> None:
        """Report that the coordinator has refused a commit of this epoch; heartbeats of KIP-848 tell what follows."""

    @property
    def _is_static(self) -> bool:
        """Whether the member keeps its place in the group while it is away."""
        return self._settings.group_instance_id is not None

    def _lose_slices(self) -> None:
        """Have the application drop its slices, if it has any, before the member joins again: its membership ends."""
        if self._settings.share == "any" and self.is_member:
            self._has_lost_slices = True

    @property
    @abstractmethod
    def is_member(self) -> bool:
        """Whether the coordinator accepts this member's commits, as far as known."""

    @property
    def owned(self) -> frozenset[Owned]:
        """The assigned partitions: Assign is acknowledged, Revoke or Lost is not."""
        return self._owned

    @property
    def member_id(self) -> str:
        """The member id; the classic protocol's is chosen by the coordinator, and empty before."""
        return self._member_id

    @property
    def phase(self) -> PhaseT:
        """The phase."""
        return self._phase

    @abstractmethod
    def _check_poll(self, now_ms: int) -> None:
        """Leave the group if the deadline of the next poll has passed."""

    @abstractmethod
    def _advance(self) -> None:
        """Continue once the events, or the request, of the current phase are done."""
