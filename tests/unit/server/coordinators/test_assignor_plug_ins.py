"""Assignors that another distribution offers: found by their entry point, imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.machines.groups.assignors import Assignors
from anabranch.server.coordinators.assignor_plug_ins import assignor_plug_ins
from tests.support.assigned_group import AssignedGroup, topic

MODULE = "last_wins_assignor"


@pytest.fixture
def _offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that offers the assignor `last`, and would like to be `uniform` too."""
    information = tmp_path / "last_wins-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: last-wins\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        f"[anabranch.group_assignors]\nlast = {MODULE}:assign\nuniform = {MODULE}:assign\n"
    )
    (tmp_path / f"{MODULE}.py").write_text(
        "import numpy as np\n\ndef assign(spec):\n    return np.full(len(spec.owner), spec.members - 1, np.int32)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop(MODULE, None)


@pytest.mark.usefixtures("_offered")
def test_an_offered_assignor_is_imported_when_it_is_used_and_assigns() -> None:
    assignors = Assignors(assignor_plug_ins())
    assert assignors.names() == ("uniform", "range", "last")
    assert MODULE not in sys.modules
    group = AssignedGroup("last", assignors=assignors)
    group.put(topic("a", 3))
    group.join("m1", ["a"])
    group.join("m2", ["a"])
    group.plan()
    assert len(group.owned("m2")) == 3


@pytest.mark.usefixtures("_offered")
def test_an_offered_assignor_does_not_replace_ours() -> None:
    assert Assignors(assignor_plug_ins()).get("uniform").__module__.startswith("anabranch.")


def test_without_a_distribution_that_offers_any_there_are_none() -> None:
    assert assignor_plug_ins() == {}
