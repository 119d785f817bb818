"""The progress of a streaming query, partition by partition, for listeners.

from anabranch.spark.progress import partitions_of

class Lag(StreamingQueryListener):
    def onQueryProgress(self, event):
        for each in partitions_of(event.progress):
            gauge.labels(each.topic, each.partition).set(each.lag)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import StreamingQueryProgress


@dataclass(frozen=True, slots=True)
class PartitionProgress:
    """How far a query is in a partition at the end of a micro-batch, and what it waits for."""

    topic: str
    partition: int
    end: int
    """Where reading could end."""
    lag: int
    """Offsets from the end of the micro-batch to there."""
    gate: int | None
    """The offset that the query does not pass before other partitions are read; None without one."""
    waits: Mapping[int, int]
    """For the gate: partitions that must be read first, and up to which offset."""
    undecided: int
    """Offsets beyond `end`, from the first open transaction on; 0 for queries that read uncommitted records."""


def partitions_of(progress: StreamingQueryProgress) -> list[PartitionProgress]:
    """Return the partitions of all sources `anabranch` of a progress report, in the order of topics and numbers."""
    found: list[PartitionProgress] = []
    for source in progress.sources:
        for topic, known in sorted(_reported(source.latestOffset).items()):
            for partition, end in sorted((int(number), end) for number, end in known["offsets"].items()):
                gate = known["gates"].get(str(partition))
                waits = {} if gate is None else {int(number): offset for number, offset in gate["waits"].items()}
                lag, undecided = (known[name].get(str(partition), 0) for name in ("lag", "transactions"))
                at = None if gate is None else gate["at"]
                found.append(PartitionProgress(topic, partition, end, lag, at, waits, undecided))
    return found


def _reported(text: str | None) -> dict[str, Any]:
    """Parse what `spark.plan.report` wrote; nothing for another source."""
    try:
        reported = json.loads(text or "{}")
    except ValueError:
        return {}
    wanted = {"offsets", "lag", "gates", "transactions"}
    ours = isinstance(reported, dict) and all(
        isinstance(known, dict) and wanted <= known.keys() for known in reported.values()
    )
    return reported if ours else {}
