"""The errors of a partition log."""

from __future__ import annotations

from anabranch.base.errors import AnabranchError


class OffsetOutOfRangeError(AnabranchError):
    """An offset that the log does not have: below its start, or above its end."""


class OfflineLogError(AnabranchError):
    """A log that is damaged where it was known to be sound. It is left as it is; the other partitions serve."""
