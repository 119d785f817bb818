"""How far a consumer without a group has processed its shares: offsets by key range of a group without members.

A consumer begins where its keys stand. It cannot begin at two offsets of one partition: where its share was cut anew,
and its keys do not stand at one offset, it says so. It begins there also where it has processed more of the same
partition by another share: what was not committed of that is dropped, with its changes.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.cluster.coordinator import Coordinator
from anabranch.client.consumer.consumer import Consumer
from anabranch.client.consumer.offsets import OffsetAndMetadata, Offsets
from anabranch.machines.keyspace import SPACE, Interval

Shares = dict[TopicPartition, tuple[Interval, ...]]


class Assigned(NamedTuple):
    """One assignment of a partition."""

    share: tuple[Interval, ...]
    arrivals: int
    """`Fetcher.arrivals`: another one of the same share begins as `auto_offset_reset` says, not where keys stand."""


class Progress:
    """The progress of one consumer."""

    def __init__(self, consumer: Consumer, name: str) -> None:
        self.name = name
        self._driver = consumer.driver
        self._offsets = Offsets(Coordinator(consumer.driver.cluster, name), name, consumer.settings.request_timeout_ms)
        self._known: dict[TopicPartition, Assigned] = {}
        """Where the consumer stands where its keys do, by the assignment of which that is known."""
        self._committed: dict[TopicPartition, int] = {}
        self._asking = False

    def is_known(
        self,
        run: Callable[[Coroutine[Any, Any, None]], None],
        take_over: Callable[[], Awaitable[None]],
        release: Callable[[Iterable[TopicPartition]], None],
    ) -> bool:
        """Whether the consumer stands where its keys do; if not, begin to find out, after `take_over`.

        `release` is called with partitions that are assigned no more, or with another share.
        """
        wanted = {tp: self._assigned(tp) for tp in self._driver.fetcher.assignment}
        gone = [tp for tp in self._known if not self._is_known(tp)]
        if gone:
            for tp in gone:
                del self._known[tp]
                self._committed.pop(tp, None)
            release(gone)
        missing = {tp: assigned for tp, assigned in wanted.items() if tp not in self._known}
        if missing and not self._asking:
            self._asking = True
            run(self._find(missing, take_over))
        return not missing

    def _assigned(self, tp: TopicPartition) -> Assigned:
        return Assigned(tuple(self._driver.fetcher.share_of(tp)), self._driver.fetcher.arrivals(tp))

    def _is_known(self, tp: TopicPartition) -> bool:
        """Whether the consumer stands where its keys do, by the assignment of now."""
        return tp in self._known and self._known[tp] == self._assigned(tp)

    async def _find(self, missing: Mapping[TopicPartition, Assigned], take_over: Callable[[], Awaitable[None]]) -> None:
        try:
            await take_over()
            found = await self._offsets.fetch(missing, {}, stable=True)
        except (AnabranchError, OSError) as error:
            if isinstance(error, ApiError) and not error.retriable:
                raise
            return
        finally:
            self._asking = False
        for tp, assigned in missing.items():
            at = found[tp]
            if isinstance(at, ErrorCode):
                if not at.retriable:
                    raise ApiError(at, f"the progress of {tp} in '{self.name}' cannot be read")
                continue
            if self._assigned(tp) != assigned:
                continue
            if at.offset >= 0:
                offset = self._start(tp, at, assigned.share or (SPACE,))
                self._seek(tp, offset)
                self._committed[tp] = offset
            elif self._driver.fetcher.position(tp) is not None:
                self._seek(tp, self._driver.fetcher.first_position(tp))
            self._known[tp] = assigned

    def _seek(self, tp: TopicPartition, offset: int) -> None:
        self._driver.moved_by_hand(tp)
        self._driver.fetcher.seek(tp, offset)

    def check_held(self, positions: Iterable[TopicPartition]) -> None:
        """Raise if some partitions are assigned no more, or with another share: their changes are gone."""
        gone = [tp for tp in positions if not self._is_known(tp)]
        if gone:
            text = f"offsets of {', '.join(map(str, gone))} were not committed: they were assigned anew meanwhile"
            raise ApiError(ErrorCode.INVALID_REQUEST, text)

    def _start(self, tp: TopicPartition, at: OffsetAndMetadata, share: Sequence[Interval]) -> int:
        steps = at.shares or [(*SPACE, at.offset)]
        stands = {offset for start, end, offset in steps if any(one.overlap(Interval(start, end)) for one in share)}
        if len(stands) != 1:
            text = f"keys of this share of {tp} stand at offsets {', '.join(map(str, sorted(stands)))} in '{self.name}'"
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"{text}: a share can be cut anew where its keys have been processed up to the same offset",
            )
        return stands.pop()

    def changed(
        self, positions: Mapping[TopicPartition, int], unflushed: set[TopicPartition]
    ) -> dict[TopicPartition, int]:
        """Return the positions that are to be committed."""
        return {
            tp: offset
            for tp, offset in positions.items()
            if self._is_known(tp) and (self._committed.get(tp) != offset or tp in unflushed)
        }

    def commit_of(self, positions: Mapping[TopicPartition, int]) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return a commit of positions, for the keys of the shares alone."""
        return {
            tp: OffsetAndMetadata(-1, shares=[(start, end, offset) for start, end in self._known[tp].share])
            if self._known[tp].share
            else OffsetAndMetadata(offset)
            for tp, offset in positions.items()
        }

    def committed(self, positions: Mapping[TopicPartition, int]) -> None:
        """Note that positions were committed."""
        self._committed.update(positions)
