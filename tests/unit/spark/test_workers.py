"""Sessions whose Python workers cannot import the data source."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from anabranch.spark.workers import check_workers


def session(python: str) -> Any:
    return SimpleNamespace(_sc=SimpleNamespace(pythonExec=python, environment={}))


@pytest.fixture
def bare(tmp_path: Path) -> str:
    """A Python without any package."""
    path = tmp_path / "bare-python"
    path.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_a_python_without_the_package_is_named_with_the_option_and_what_would_be_right(bare: str) -> None:
    with pytest.raises(PySparkException) as refused:
        check_workers(session(bare))
    assert str(refused.value) == (
        f"PYSPARK_PYTHON: the Python workers of this session run {bare}, which cannot import anabranch.spark.reader: "
        "ModuleNotFoundError: No module named 'anabranch'. Set PYSPARK_PYTHON to a Python that has this package, "
        f"such as {sys.executable}, before the session is started."
    )


def test_a_python_that_is_not_there_is_named() -> None:
    with pytest.raises(PySparkException, match=r"run /no/such/python, .* there is no such program"):
        check_workers(session("/no/such/python"))


def test_the_driver_s_own_python_another_one_with_the_package_and_a_remote_session_pass(tmp_path: Path) -> None:
    check_workers(session(sys.executable))
    other = tmp_path / "python"
    other.symlink_to(sys.executable)
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    check_workers(session(str(wrapper)))
    check_workers(SimpleNamespace())  # type: ignore[arg-type]
