"""The short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import Soak
from tests.support.applications import own_processes


@pytest.mark.timeout(300)
def test_groups_whose_members_come_go_and_are_killed_keep_the_order_through_resizes(tmp_path: Path) -> None:
    with own_processes() as workers:
        soak = Soak(tmp_path, workers, seconds=15, resizes=8, seed=7)
        try:
            soak.run()
        finally:
            soak.broker.kill()
    report = soak.report().splitlines()
    assert len(report) == 5 and all(" records waited at a gate " in line for line in report[1:])
    assert any(group.closed_ms for stage in soak.stages for group in stage.groups), "no gate was closed for a while"
    assert soak.resizes >= 8
    assert soak.refused > 0, "no producer was refused"
    assert soak.member_kills + soak.goings + soak.broker_kills > 0, "nothing happened"
