"""The decision about a transaction marker that reaches a partition: the one place with these rules.

    1. the partition remembers nothing of the producer                        nothing is appended
    2. the producer id is an alias, and no transaction of it is open          nothing is appended
    3. the producer, or its coordinator, has gone on to a later epoch         refused
    4. the partition is retiring, and no transaction of the producer is open  nothing is appended
    5. a client sent it, and no transaction of the producer is open           nothing is appended
    6. a client sent it, with another epoch than the producer's               refused
    7. the marker would change nothing: it was appended before                nothing is appended
    8. otherwise                                                              append

A transaction may hold a partition that its producer has written nothing into (1). A marker there would end nothing, and
fence nobody: a batch of a producer that the partition does not remember begins a transaction only if the coordinator,
asked in the same step, says that the producer has one open (`appending`, docs/adr/0014). It would make a file, and take
memory for a producer, in each partition that a request names.

An earlier append is durable only once its sync is done: the caller waits for the sync even if nothing is appended, and
decides again after a failed sync, which may have cut the marker.

A marker may come late, and more than once. A retiring partition accepts no other records, and a marker only for a
transaction that is open in it, so that its log never grows once all transactions in it have ended. A batch redirected
from a retiring partition is in a survivor under an alias of its producer: the marker for the partition addressed by
the producer goes to the survivor, too (`aliases`), and first, because the addressed partition may be removed.
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
    """Whether to append the marker; without an error and without an append, the log needs none."""

    append: bool
    error: ErrorCode = ErrorCode.NONE
    nothing_written: bool = False
    """Whether the log has nothing of the producer, and so nothing that must be durable."""


def decide_marker(
    table: ProducerTable,
    *,
    retiring: bool,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
    by_client: bool = False,
) -> MarkerVerdict:
    """Decide about the marker of a producer for a partition with this table.

    `by_client`: the marker is not the coordinator's. Such a marker begins no epoch, which would fence the producer, and
    makes no producer known, which could push others out of the table.
    """
    if producer_id < 0:
        return MarkerVerdict(append=False, error=ErrorCode.INVALID_REQUEST)
    if producer_epoch < 0:
        return MarkerVerdict(append=False, error=ErrorCode.INVALID_PRODUCER_EPOCH)
    known = table.known(producer_id)
    if known is None:
        return MarkerVerdict(append=False, nothing_written=True)
    opened = known.transaction_start is not None
    if not opened and producer_id >= 1 << PRODUCER_ID_BITS:
        return MarkerVerdict(append=False)
    error = table.check_marker(producer_id, producer_epoch, coordinator_epoch)
    if error is not ErrorCode.NONE:
        return MarkerVerdict(append=False, error=error)
    if retiring:
        return MarkerVerdict(append=opened)
    if by_client:
        if not opened:
            return MarkerVerdict(append=False)
        if producer_epoch != known.epoch:
            return MarkerVerdict(append=False, error=ErrorCode.INVALID_PRODUCER_EPOCH)
    return MarkerVerdict(append=table.needs_marker(producer_id, producer_epoch))


def aliases(
    producer_id: int, partition: int, initial_partition_count: int, ancestors: Iterable[ReplicaT]
) -> list[tuple[ReplicaT, int]]:
    """Return the ancestors with redirected batches of the producer, with its id there."""
    if partition < initial_partition_count or not 0 <= producer_id < 1 << PRODUCER_ID_BITS:
        return []
    alias = redirected(producer_id, partition)
    return [(other, alias) for other in ancestors if other.table.known(alias) is not None]
