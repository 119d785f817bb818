"""The plan of a batch: its end offsets and its tasks, such that the records of every key come in order.

The rule: no micro-batch holds two segments of which one must come before the other (ordering.md, section 3). A batch
starts at the query's positions. In each partition, the batch ends at the log end or at the first closed gate,
whichever comes first. Thus within a batch all records of a key come from one partition, in offset order; across
batches, in layout order. A backlog over k layouts takes at most k additional batches.

A batch query reads all layouts at once. There a task reads a whole family, the partitions that any layout could move
a key between, layout after layout. Tasks are split by key range, which keeps the order of keys, or by offset.

Everything here is a function of snapshots: no clock, no socket, no Spark. `verify` checks a logged plan
against the definition of placement alone, not against the gates that made it.
"""

from anabranch.spark.plan.extent import Extent, extent, share
from anabranch.spark.plan.history import History, Problem, verify_history
from anabranch.spark.plan.offsets import (
    DataLossError,
    Loss,
    Offsets,
    QueryPositions,
    TopicOffsets,
    TopicSnapshot,
    begun_of,
    is_folded_back,
    lost_between,
    missing_of,
    offsets_from_json,
    offsets_to_json,
    query_positions,
    with_begun,
)
from anabranch.spark.plan.proof import verify
from anabranch.spark.plan.record import PLAN_VERSION, plan_to_json
from anabranch.spark.plan.report import report
from anabranch.spark.plan.tasks import WHOLE, KeyRange, Read, Splitting, Task, key_ranges, keys_within, plan_tasks

__all__ = [
    "PLAN_VERSION",
    "WHOLE",
    "DataLossError",
    "Extent",
    "History",
    "KeyRange",
    "Loss",
    "Offsets",
    "Problem",
    "QueryPositions",
    "Read",
    "Splitting",
    "Task",
    "TopicOffsets",
    "TopicSnapshot",
    "begun_of",
    "extent",
    "is_folded_back",
    "key_ranges",
    "keys_within",
    "lost_between",
    "missing_of",
    "offsets_from_json",
    "offsets_to_json",
    "plan_tasks",
    "plan_to_json",
    "query_positions",
    "report",
    "share",
    "verify",
    "verify_history",
    "with_begun",
]
