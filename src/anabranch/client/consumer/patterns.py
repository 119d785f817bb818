"""RE2 patterns of topic names, matched as a whole."""

from __future__ import annotations

from anabranch.base.patterns import compile_pattern as compiled

__all__ = ["compiled"]
