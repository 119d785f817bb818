"""Assignors by name: ours, those of other distributions, and none."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.assignors import DEFAULT_ASSIGNOR, UnknownAssignorError, assignor, names, registry
from tests.support.assigned_group import AssignedGroup, topic


@pytest.fixture
def offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that offers the assignor `last`, and would like to be `uniform` too."""
    information = tmp_path / "last_wins-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: last-wins\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(
        "[anabranch.group_assignors]\nlast = last_wins_assignor:assign\nuniform = last_wins_assignor:assign\n"
    )
    (tmp_path / "last_wins_assignor.py").write_text(
        "import numpy as np\n\ndef assign(spec):\n    return np.full(len(spec.owner), spec.members - 1, np.int32)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    registry._offered.cache_clear()
    assignor.cache_clear()
    yield
    registry._offered.cache_clear()
    assignor.cache_clear()
    sys.modules.pop("last_wins_assignor", None)


def test_ours_are_there_and_uniform_is_the_default() -> None:
    assert names()[:2] == ("uniform", "range")
    assert names()[0] == DEFAULT_ASSIGNOR
    assert all(callable(assignor(name)) for name in names())


def test_one_that_is_not_there_is_refused_with_the_names_of_those_that_are() -> None:
    with pytest.raises(UnknownAssignorError, match=r"no assignor 'sticky'; supported are uniform, range") as refused:
        assignor("sticky")
    assert refused.value.code == ErrorCode.UNSUPPORTED_ASSIGNOR


@pytest.mark.usefixtures("offered")
def test_one_that_another_distribution_offers_is_used() -> None:
    assert names() == ("uniform", "range", "last")
    group = AssignedGroup("last")
    group.put(topic("a", 3))
    group.join("m1", ["a"])
    group.join("m2", ["a"])
    group.plan()
    assert len(group.owned("m2")) == 3


@pytest.mark.usefixtures("offered")
def test_ours_cannot_be_replaced() -> None:
    assert assignor("uniform").__module__.startswith("anabranch.")


def test_names_are_known_without_numpy() -> None:
    program = (
        "import sys; from anabranch.machines.groups.assignors import names; names(); assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={"PYTHONPATH": "src"})
