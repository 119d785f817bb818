"""One Spark session and one broker process for all Spark tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.broker import ROOT, BrokerProcess, running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from anabranch.demo.session import local_session
    from anabranch.spark import register

    session = local_session("anabranch tests")
    register(session)
    yield session
    session.stop()


@pytest.fixture(scope="module", autouse=True)
def exceptions_of_others() -> Iterator[None]:
    """PySpark has all Java exceptions of the process for Spark's: let that end with each file, for others' machines."""
    from py4j import java_gateway, protocol
    from pyspark.errors.exceptions.captured import install_exception_handler

    install_exception_handler()
    yield
    java_gateway.get_return_value = protocol.get_return_value


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Keeps records for ever: some are of a fixed, long past time, and retention would begin after five minutes."""
    with running(tmp_path_factory.mktemp("broker"), log_retention_ms=-1) as process:
        yield process


@pytest.fixture
def address(broker: BrokerProcess) -> str:
    return f"127.0.0.1:{broker.port}"


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
