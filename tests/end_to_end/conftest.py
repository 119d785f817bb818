"""Brokers for the end-to-end tests: real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.applications import QUICK, Workers, own_processes
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker with default settings, `durability=os`."""
    with running(tmp_path / "data") as process:
        yield process


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[WireClient]:
    """A connection to it."""
    with WireClient(broker.port) as connection:
        yield connection


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests of a module with applications that leave it alive."""
    with running(tmp_path_factory.mktemp("data"), **QUICK) as process:
        yield process


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    """The processes of applications that live as long as the shared broker."""
    with own_processes() as made:
        yield made


@pytest.fixture
def own_workers() -> Iterator[Workers]:
    """The processes of applications of one test."""
    with own_processes() as made:
        yield made
