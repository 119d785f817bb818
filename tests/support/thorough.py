"""How much is run where every test must be done in minutes: a part of a search, the short form of a long test.

All of it: searches in `make simulate`, end-to-end tests in `make conformance`.
"""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("ANABRANCH_THOROUGH"))


def thorough(all_of_it: int, part: int) -> int:
    """How many random cases to try."""
    return all_of_it if THOROUGH else part
