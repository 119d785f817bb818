"""Assignors that another distribution offers: found by their entry point, imported when they are first used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import AnabranchError
from anabranch.machines.groups.assignors import Assignors
from anabranch.machines.groups.consumer.target import AssignorFailed
from anabranch.server.coordinators import assignor_plug_ins as assignor_plug_ins_module
from anabranch.server.coordinators.assignor_plug_ins import OURS, assignor_plug_ins, check_assignors, report_assignor
from anabranch.server.settings import Settings
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


@pytest.mark.usefixtures("_offered")
def test_only_installed_assignors_can_be_listed() -> None:
    check_assignors(Settings(group_consumer_assignors="last,uniform"))
    with pytest.raises(AnabranchError, match="names 'foo', 'bar', but installed are last, range, uniform"):
        check_assignors(Settings(group_consumer_assignors="uniform,foo,last,bar"))


def test_entry_points_are_not_read_for_the_brokers_own_assignors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assignor_plug_ins_module, "assignor_plug_ins", lambda: pytest.fail("entry points were read"))
    check_assignors(Settings())
    check_assignors(Settings(group_consumer_assignors="range"))


def test_the_brokers_own_assignors_are_those_of_the_registry() -> None:
    assert set(Assignors().names()) == OURS


def test_a_failure_is_logged_with_its_group_and_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    report_assignor(AssignorFailed("g", "fickle", ZeroDivisionError("a bug")))
    report_assignor(AssignorFailed("h", "gone", None))
    error, warning = caplog.records
    assert (error.levelname, error.message) == ("ERROR", "assignor failed; the group keeps its assignment")
    assert error.exc_info is not None and "a bug" in caplog.text
    assert (warning.levelname, warning.message) == (
        "WARNING",
        "assignor not offered; the group uses the broker's default",
    )


def test_without_a_distribution_that_offers_any_there_are_none() -> None:
    assert assignor_plug_ins() == {}
