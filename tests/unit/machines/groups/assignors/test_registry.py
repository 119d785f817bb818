"""Assignors by name: ours, plug-ins, and none."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from anabranch.base.errors import ErrorCode
from anabranch.machines.groups.assignors import DEFAULT_ASSIGNOR, Assignors, UnknownAssignorError
from anabranch.machines.groups.assignors.spec import Assignor, Ints, Spec
from tests.support.assigned_group import AssignedGroup, topic


def _last(spec: Spec) -> Ints:
    return np.full(len(spec.owner), spec.members - 1, np.int32)


def _load_last() -> Assignor:
    return _last


PLUGGED = Assignors({"last": _load_last, "uniform": _load_last})


def test_ours_are_there_and_uniform_is_the_default() -> None:
    ours = Assignors()
    assert ours.names() == ("uniform", "range")
    assert ours.names()[0] == DEFAULT_ASSIGNOR
    assert all(callable(ours.get(name)) for name in ours.names())


def test_one_that_is_not_there_is_refused_with_the_names_of_those_that_are() -> None:
    text = r"no assignor 'sticky'; supported are uniform, range, last"
    with pytest.raises(UnknownAssignorError, match=text) as refused:
        PLUGGED.get("sticky")
    assert refused.value.code == ErrorCode.UNSUPPORTED_ASSIGNOR


def test_a_plug_in_is_used() -> None:
    assert PLUGGED.names() == ("uniform", "range", "last")
    group = AssignedGroup("last", assignors=PLUGGED)
    group.put(topic("a", 3))
    group.join("m1", ["a"])
    group.join("m2", ["a"])
    group.plan()
    assert len(group.owned("m2")) == 3


def test_ours_cannot_be_replaced() -> None:
    assert PLUGGED.get("uniform").__module__.startswith("anabranch.")


def test_names_are_known_without_numpy() -> None:
    program = (
        "import sys; from anabranch.machines.groups.assignors import Assignors; Assignors().names(); "
        "assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, env={"PYTHONPATH": "src"})
