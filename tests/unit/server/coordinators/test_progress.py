"""What leaders of slices are told of a group's progress."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest

from anabranch.machines.groups.individual import OffsetRanges
from anabranch.machines.groups.positions import Position
from anabranch.server.coordinators.groups import Groups
from anabranch.server.coordinators.progress import Committed, Memberships

TOPIC = UUID(int=1)


class Machine:
    """A loaded machine that has one position, as far as it is asked for it."""

    def __init__(self, position: Position) -> None:
        self.settings = SimpleNamespace(individual_commits=True)
        self.groups: dict[str, Any] = {}
        individual = SimpleNamespace(of=lambda *_: OffsetRanges())
        self.offsets = SimpleNamespace(current=lambda *_: position, individual=individual)


def committed(machine: Machine, log_start: int = 0, memberships: Memberships | None = None) -> Committed:
    groups = SimpleNamespace(shard_of=lambda group_id: SimpleNamespace(machine=machine))
    asked = memberships or Memberships(cast(Groups, groups))
    asked._groups = cast(Groups, groups)
    found = asked.committed("g", "t", TOPIC, 0, log_start)
    assert found is not None
    return found


@pytest.mark.parametrize(("is_begun", "stable"), [(False, 50), (True, 3)])
def test_what_the_coordinator_wrote_is_the_log_start_at_least_and_what_a_client_committed_is_not(
    is_begun: bool, stable: int
) -> None:
    found = committed(Machine(Position(3, is_begun=is_begun)), log_start=50)
    assert (found.stable, found.reaches(0)) == (stable, stable)
    assert committed(Machine(Position(70, is_begun=is_begun)), log_start=50).stable == 70


def test_a_machine_that_was_loaded_again_has_another_version_whatever_became_of_the_one_before() -> None:
    asked = Memberships(cast(Groups, None))
    versions = set()
    for _ in range(50):  # Each one may lie where the last one lay.
        machine = Machine(Position(3))
        first, second = committed(machine, memberships=asked), committed(machine, memberships=asked)
        assert first.version == second.version
        versions.add(first.version)
        del machine
    assert len(versions) == 50
