"""The consumer's decisions, without clock or socket: the fetches to send, and the records that may be returned.

Every assigned partition has a position, the next offset to return, and holds the batches fetched beyond it. Positions
move as records are returned. The gates of `machines.lineage` are evaluated with the positions of all assigned
partitions: at a closed gate a partition stops at exactly the first record that must wait, and keeps its batches.

The rule: no record is returned before its layout is known. A fetch carries leader epoch and partition count; a leader
that accepts both serves by our last layout, so batches of its response up to that epoch are kept, and later ones
dropped (a resize may have come first). A refusal or a later epoch makes the topic stale: its metadata is refreshed, and
positions stay. New partitions start at their log start; removed ones are dropped.
"""

from anabranch.machines.clients.fetching.fetcher import Fetcher
from anabranch.machines.clients.fetching.values import (
    EARLIEST,
    LATEST,
    ConsumerWork,
    Deliverable,
    Fetch,
    Fetched,
    FetcherSettings,
    FetchFrom,
    FetchResult,
    Lookup,
    RecordFilter,
    TopicView,
)

__all__ = [
    "EARLIEST",
    "LATEST",
    "ConsumerWork",
    "Deliverable",
    "Fetch",
    "FetchFrom",
    "FetchResult",
    "Fetched",
    "Fetcher",
    "FetcherSettings",
    "Lookup",
    "RecordFilter",
    "TopicView",
]
