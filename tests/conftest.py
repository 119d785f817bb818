"""The order of all tests: at random, but for the parts that wait for other processes, which come first.

So the last minutes are filled by many short files, and no process is left alone with a long one.
"""

from __future__ import annotations

from pathlib import Path

import pytest

PARTS = ("spark", "conformance", "end_to_end", "simulation", "properties", "unit")
HERE = Path(__file__).parent


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PARTS.index(item.path.relative_to(HERE).parts[0]))
