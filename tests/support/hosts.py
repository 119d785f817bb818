"""The part of a consumer that its group sees, of a consumer whose records are finished in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.state import KeptState
from anabranch.machines.clients.fetching.assigning import NO_RANGES
from anabranch.machines.clients.key_ranges import KeyRanges
from anabranch.machines.clients.processing import Ranges


class InOrder:
    """Nothing is finished out of order, and nothing is skipped."""

    fresh = 0
    state: KeptState | None = None

    def narrowed(self, tp: TopicPartition, keys: KeyRanges) -> None:
        """Nothing runs."""

    def stands(self, tp: TopicPartition) -> None:
        """Nothing is tracked."""

    async def settle(
        self, partitions: Sequence[TopicPartition], shares: Mapping[TopicPartition, KeyRanges] = NO_RANGES
    ) -> None:
        """Nothing runs."""

    def take_fresh(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Ranges]:
        return {}

    def give_back(self, ranges: Mapping[TopicPartition, Ranges]) -> None:
        """Nothing was taken."""

    def skip(self, tp: TopicPartition, ranges: Ranges) -> None:
        """Nothing is skipped."""

    def forget_skips(self, tp: TopicPartition, stable: int) -> None:
        """Nothing is skipped."""
