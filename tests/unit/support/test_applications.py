"""Applications as a test sees them, without their processes."""

from __future__ import annotations

from typing import Any, cast

from tests.support.applications import Member, Worker


class Told:
    """Keeps what a process is told."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def tell(self, name: str, do: str, **more: Any) -> None:
        self.commands.append(do)


def test_a_member_that_was_told_to_leave_is_told_nothing_more() -> None:
    """Its process has forgotten it: one more command ended the process, and all members in it."""
    told = Told()
    member = Member("g.0", "ours", cast(Worker, told), cast(Any, None))
    member.stand(1)
    member.leave()
    member.leave()
    member.stand(1)
    assert told.commands == ["stand", "leave"]
