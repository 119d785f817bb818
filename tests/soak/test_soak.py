"""The short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.run import MUST_HAPPEN, Soak
from tests.support.applications import own_processes


@pytest.mark.timeout(400)
def test_groups_whose_members_come_go_and_are_killed_keep_the_order_through_resizes(tmp_path: Path) -> None:
    """`run` itself sees that each thing happened: a minute is enough for all of them."""
    with own_processes() as workers:
        soak = Soak(tmp_path, workers, seconds=60, resizes=24, seed=7)
        try:
            soak.run()
        finally:
            soak.broker.kill()
            print(soak.report())
    report = soak.report().splitlines()
    assert len(report) == 5 and all(" records waited at a gate " in line for line in report[1:])


@pytest.mark.parametrize("name", MUST_HAPPEN)
def test_a_soak_in_which_something_never_happened_fails(name: str) -> None:
    soak = object.__new__(Soak)
    soak.resizes = soak.resizes_max = 8
    soak.refused, soak.stages = 1, []
    for each in MUST_HAPPEN:
        setattr(soak, each, int(each != name))
    with pytest.raises(AssertionError, match=MUST_HAPPEN[name]):
        soak.check_that_it_tested()
    setattr(soak, name, 1)
    soak.check_that_it_tested()
    soak.refused = 0
    with pytest.raises(AssertionError, match="no producer was refused"):
        soak.check_that_it_tested()
