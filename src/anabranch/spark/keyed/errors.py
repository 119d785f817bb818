"""What can be wrong about a keyed operator: its arguments, its rows, its function's results, its state."""

from __future__ import annotations

from anabranch.base.errors import AnabranchError


class KeyedError(AnabranchError, ValueError):
    """A keyed operator cannot go on; the message names the argument, column or key, and says what would be right."""
