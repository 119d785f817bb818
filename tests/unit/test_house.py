"""The map of the code (docs/house.md) names what exists."""

from __future__ import annotations

import importlib
import re

import pytest

from tests.support.broker import ROOT

SOURCES = ROOT / "src" / "anabranch"
LAYERS = sorted(path.name for path in SOURCES.iterdir() if (path / "__init__.py").exists())
_NAME = re.compile(rf"`((?:{'|'.join(LAYERS)})(?:\.\w+)*)`")
NAMES = sorted(set(_NAME.findall((ROOT / "docs" / "house.md").read_text(encoding="utf-8"))))


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_map_exists(name: str) -> None:
    parts = name.split(".")
    found = importlib.import_module("anabranch")
    for place, part in enumerate(parts, 1):
        if not hasattr(found, part):
            importlib.import_module(".".join(["anabranch", *parts[:place]]))
        found = getattr(found, part)


def test_every_layer_is_on_the_map() -> None:
    assert set(LAYERS) <= set(NAMES)
    assert len(NAMES) > 50
