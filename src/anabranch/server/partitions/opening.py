"""What becomes of a log that cannot be opened: other partitions are never kept from being opened.

The system's errors may be gone at the next attempt. All else is damage, which stays until somebody repairs it: the
partition is offline. That is so for our own defects, too, and where there is no memory for what files claim to be.
"""

from __future__ import annotations

from anabranch.base.ids import TopicPartition
from anabranch.runtime.disk import OddFileError
from anabranch.runtime.events import EventLogger
from anabranch.storage.interface import OfflineLogError

events = EventLogger("replicas")


def refusal(name: TopicPartition, error: Exception) -> OSError | OfflineLogError:
    """Turn what opening a log raised into an error to try again after, or into the reason why it is offline."""
    if isinstance(error, OddFileError):
        return OfflineLogError(f"{error}: restore the file from a copy, or delete the topic.")
    if isinstance(error, (OSError, OfflineLogError)):
        return error
    events.error("log not opened", partition=name, exception=error)
    return OfflineLogError(f"Its log could not be opened: {type(error).__name__} {error}")
