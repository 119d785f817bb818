"""How much of a search is run: all of it in `make simulate`, a part where every test must be done in minutes."""

from __future__ import annotations

import os

THOROUGH = bool(os.environ.get("ANABRANCH_THOROUGH"))


def thorough(all_of_it: int, part: int) -> int:
    """How many random cases to try."""
    return all_of_it if THOROUGH else part
