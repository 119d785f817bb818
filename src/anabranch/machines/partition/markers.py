"""What becomes of a transaction marker that reaches a partition: the one place where its rules are written.

    1. the producer id is an alias, and no transaction of it is open          nothing is appended
    2. the producer, or its coordinator, has gone on to a later epoch         refused
    3. the partition is retiring, and no transaction of the producer is open  nothing is appended
    4. the marker would change nothing: it was appended before                nothing is appended
    5. otherwise                                                              append

What was appended before is durable only once its sync is done: the caller waits for that where nothing is appended,
too, and decides again after a failed sync, which may have cut the marker.

A marker may come late, and again. It is the one thing that a retiring partition still takes, and only to end a
transaction that is open in it, so that its log never grows once all transactions in it have ended. A batch that was
redirected from a retiring partition lies in a survivor under an alias of its producer: the marker for the partition
that the producer named goes there, too (`aliases`), first, because the named partition may be removed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from anabranch.base.errors import ErrorCode
from anabranch.base.limits import PRODUCER_ID_BITS
from anabranch.machines.partition.appending import Replica
from anabranch.machines.partition.producers import ProducerTable, redirected

ReplicaT = TypeVar("ReplicaT", bound=Replica)


class MarkerVerdict(NamedTuple):
    """Whether the marker is to be appended; without an error and without an append, the log needs none."""

    append: bool
    error: ErrorCode = ErrorCode.NONE


def decide_marker(
    table: ProducerTable, *, retiring: bool, producer_id: int, producer_epoch: int, coordinator_epoch: int
) -> MarkerVerdict:
    """Decide about the marker of a producer for a partition that has this table."""
    opened = table.open_transaction(producer_id) is not None
    if not opened and producer_id >= 1 << PRODUCER_ID_BITS:
        return MarkerVerdict(append=False)
    error = table.check_marker(producer_id, producer_epoch, coordinator_epoch)
    if error is not ErrorCode.NONE:
        return MarkerVerdict(append=False, error=error)
    if retiring:
        return MarkerVerdict(append=opened)
    return MarkerVerdict(append=table.needs_marker(producer_id, producer_epoch))


def aliases(
    producer_id: int, partition: int, initial_partition_count: int, ancestors: Iterable[ReplicaT]
) -> list[tuple[ReplicaT, int]]:
    """The ancestors that know the producer from redirected batches, with its id there."""
    if partition < initial_partition_count or producer_id >= 1 << PRODUCER_ID_BITS:
        return []
    alias = redirected(producer_id, partition)
    return [(other, alias) for other in ancestors if other.table.known(alias) is not None]
