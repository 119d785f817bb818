"""Brokers for the end-to-end tests: real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
