"""Many objects freed in a thread, one by one.

When the last reference to an object goes, the interpreter frees all that it alone holds in one go, in which no other
thread runs: 100,000 nodes of a tree keep the event loop waiting for 100 ms, whichever thread frees them. The rule: what
an object holds is taken out of it before it is let go, so that each is freed by itself, and the loop has its turns in
between. Objects that others hold, too, are left to them.
"""

from __future__ import annotations

import gc
import sys
from typing import Any

_OURS = 2
"""References to an object that is held by nobody else: the variable, and the argument of the count."""


def free_one_by_one(held: list[Any]) -> None:
    """Empty a list, and whatever it alone holds. For a thread: a million objects take half a second."""
    while held:
        each = held.pop()
        if gc.is_tracked(each) and sys.getrefcount(each) == _OURS:
            within = gc.get_referents(each)
            del each
            held += within
