"""Which offsets a batch reads and which task reads what, such that every key's records come in order.

The rule: no micro-batch holds two segments of which one must come before the other (ordering.md, section 3). A batch
starts at the query's positions and ends, in each partition, at the log end or at the first gate that is closed for a
reader that stands there, whichever comes first. So a key's records come from one partition within a batch, in offset
order, and batch after batch otherwise; a backlog over k layouts takes at most k batches more.

A batch query reads all layouts at once, so there a task reads a whole family, the partitions that any layout could move
a key between, layout after layout. Tasks are split by key range, which keeps the order of keys, or by offset.

Everything here is a function of snapshots: no clock, no socket, no Spark. `verify` checks a logged plan
against the definition of placement alone, not against the gates that made it.
"""

from anabranch.spark.plan.extent import Extent, extent, share
from anabranch.spark.plan.offsets import (
    DataLossError,
    Loss,
    Offsets,
    QueryPositions,
    TopicOffsets,
    TopicSnapshot,
    lost_between,
    offsets_from_json,
    offsets_to_json,
    query_positions,
)
from anabranch.spark.plan.proof import verify
from anabranch.spark.plan.record import PLAN_VERSION, plan_to_json
from anabranch.spark.plan.tasks import KEY_RANGE_MAX, WHOLE, KeyRange, Read, Splitting, Task, key_ranges, plan_tasks

__all__ = [
    "KEY_RANGE_MAX",
    "PLAN_VERSION",
    "WHOLE",
    "DataLossError",
    "Extent",
    "KeyRange",
    "Loss",
    "Offsets",
    "QueryPositions",
    "Read",
    "Splitting",
    "Task",
    "TopicOffsets",
    "TopicSnapshot",
    "extent",
    "key_ranges",
    "lost_between",
    "offsets_from_json",
    "offsets_to_json",
    "plan_tasks",
    "plan_to_json",
    "query_positions",
    "share",
    "verify",
]
