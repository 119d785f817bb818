"""The Python examples of a document, to be run unchanged."""

from __future__ import annotations

import re

from tests.support.broker import ROOT

_EXAMPLE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def python_examples(document: str, address: str) -> list[str]:
    """Return the Python blocks of a document, in order, for the broker at `address` (HOST:PORT)."""
    text = (ROOT / document).read_text(encoding="utf-8")
    return [block.replace("localhost:9092", address) for block in _EXAMPLE.findall(text)]
