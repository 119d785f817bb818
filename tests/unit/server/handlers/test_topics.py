"""CreateTopics and CreatePartitions with assignments: those of many partitions are read in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from anabranch.server.context import PARTITIONS_AT_A_TIME
from anabranch.server.handlers.topics import _made


@pytest.mark.parametrize("count", [PARTITIONS_AT_A_TIME - 1, PARTITIONS_AT_A_TIME])
def test_assignments_of_many_partitions_are_made_in_a_thread(count: int) -> None:
    maker = asyncio.run(_made(count, lambda _: threading.get_ident(), None))
    assert (maker == threading.get_ident()) is (count < PARTITIONS_AT_A_TIME)
