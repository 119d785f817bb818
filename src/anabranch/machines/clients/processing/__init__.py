"""What a consumer's application has of its partitions, and has finished: the records of work finished out of order.

`tracker` keeps the order of each key, the bounds, and what is done; `policy` decides about failures of a handler.
"""

from anabranch.machines.clients.processing.policy import OnError, Retry, Verdict, decide_failure
from anabranch.machines.clients.processing.values import Entry, Ranges, Room, TrackerSettings

from anabranch.machines.clients.processing.tracker import Tracker  # isort: skip

__all__ = [
    "Entry",
    "OnError",
    "Ranges",
    "Retry",
    "Room",
    "Tracker",
    "TrackerSettings",
    "Verdict",
    "decide_failure",
]
