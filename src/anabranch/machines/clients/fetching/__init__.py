"""The consumer's decisions, without clock or socket: what is fetched from which broker, and what may be handed out.

Every assigned partition has a position, the next offset to hand out, and holds the batches fetched beyond it. Positions
move as records are handed out. The gates of `machines.lineage` are evaluated with the positions of all partitions that
are read: at a closed gate a partition stops at exactly the first record that must wait, and keeps its batches.

The rule: no record is handed out whose layout is not known. A fetch carries leader epoch and count; a leader that
accepts both serves by our last layout, so batches of its response up to that epoch are taken, and no later ones (a
resize may have come first). A refusal, and a later epoch, make the topic stale: its metadata is refreshed, and
positions stay. Partitions that appear start at their log start; removed ones leave.
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
    "TopicView",
]
