"""Commits of a group's offsets, one after the other: those the application requests, and automatic ones.

A commit is retried until its deadline; a member with a stale epoch waits for the next heartbeat. Automatic commits
write the positions after all records returned by earlier polls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.client.consumer.group_context import (
    AGAIN,
    EPOCH_STALE,
    OUT_OF_GROUP,
    TOPIC_GONE,
    GroupContext,
    is_final,
)
from anabranch.client.consumer.offsets import MemberIdentity, OffsetAndMetadata

TOPIC_GONE_TIMEOUT_MS = 2_000

_log = logging.getLogger("anabranch.client")


class Commits:
    """The committed offsets of one group, as read and written by this member."""

    def __init__(self, context: GroupContext) -> None:
        self._context = context
        self._settings = context.settings
        self._member = context.member
        self._in_turn = asyncio.Lock()
        self._milestone = False
        self.due_ms = 0
        """The time of the next automatic commit."""

    async def committed(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, OffsetAndMetadata | None]:
        """Return the committed offsets of the group; None for a partition without one."""
        wanted = list(partitions)
        deadline = self._context.now_ms() + self._settings.default_api_timeout_ms
        while True:
            try:
                identity = self._context.identity() if self._member.is_member else MemberIdentity()
                found = await self._context.offsets.fetch(
                    wanted, self._context.topic_ids(wanted), identity, stable=self._settings.read_committed
                )
                codes = [(tp, result) for tp, result in found.items() if isinstance(result, ErrorCode)]
                if not codes:
                    return {
                        tp: at if isinstance(at, OffsetAndMetadata) and at.offset >= 0 else None
                        for tp, at in found.items()
                    }
                tp, code = codes[0]
                raise ApiError(code, f"the committed offset of {tp} cannot be read")
            except (AnabranchError, OSError) as error:
                if is_final(error) or self._context.now_ms() > deadline:
                    raise
            await self._context.epoch_or_pause(identity)

    async def commit(
        self, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None, timeout_ms: int | None = None
    ) -> None:
        """Commit offsets, by default the positions after all returned records. Commits run one after another."""
        if offsets is None:
            offsets = {tp: OffsetAndMetadata(offset) for tp, offset in self._context.host.consumed().items()}
        deadline = self._context.now_ms() + (
            self._settings.default_api_timeout_ms if timeout_ms is None else timeout_ms
        )
        async with self._in_turn:
            await self._commit(dict(offsets), deadline)

    async def _commit(self, pending: dict[TopicPartition, OffsetAndMetadata], deadline: int) -> None:
        began = self._context.now_ms()
        while pending:
            identity = self._context.identity()
            failure: AnabranchError | OSError
            if self._context.subscription is not None and not self._member.is_member:
                raise _not_committed(ErrorCode.UNKNOWN_MEMBER_ID, self._context.group_id)
            try:
                codes = await self._context.offsets.commit(pending, self._context.topic_ids(pending), identity)
            except (AnabranchError, OSError) as error:
                if is_final(error):
                    raise
                failure = error
            else:
                failure = _unanswered(pending)
                for tp, code in codes.items():
                    if tp not in pending:
                        continue  # Not requested.
                    if code is ErrorCode.NONE:
                        self._context.note_committed(tp, pending.pop(tp).offset)
                        continue
                    if code in OUT_OF_GROUP or (code in EPOCH_STALE and self._context.subscription is None):
                        raise _not_committed(code, self._context.group_id)
                    failure = ApiError(code, f"the offset of {tp} could not be committed")
                    if not (code.retriable or code in EPOCH_STALE or code in AGAIN):
                        raise failure
                    if code in TOPIC_GONE:
                        deadline = min(deadline, began + TOPIC_GONE_TIMEOUT_MS)
            self._context.host.happened()
            if pending:
                if self._context.now_ms() > deadline:
                    raise failure
                await self._context.epoch_or_pause(identity)

    def is_due(self) -> bool:
        """Whether an automatic commit is due: its interval is over, or a position has passed the end of a layout."""
        self._milestone = self._context.fetcher.milestone() or self._milestone
        return self.may_begin() and (self._milestone or self._context.now_ms() >= self.due_ms)

    def may_begin(self) -> bool:
        """Whether an automatic commit can begin."""
        return (
            self._settings.enable_auto_commit
            and (self._context.subscription is None or self._member.is_member)
            and "commit" not in self._context.jobs
        )

    def begin(self) -> None:
        """Begin an automatic commit of the positions after all returned records."""
        self.due_ms = self._context.now_ms() + self._settings.auto_commit_interval_ms
        self._milestone = False
        processed = self._context.host.consumed()
        self._context.job("commit", lambda: self.commit_processed(processed, self._settings.auto_commit_interval_ms))

    async def commit_processed(self, positions: Mapping[TopicPartition, int], timeout_ms: int) -> None:
        """Commit the positions that changed. A failure is only logged: at worst some records come twice."""
        changed = {
            tp: OffsetAndMetadata(offset)
            for tp, offset in positions.items()
            if self._context.committed.get(tp) != offset
        }
        if not changed:
            return
        try:
            await self.commit(changed, timeout_ms)
        except (AnabranchError, OSError) as error:
            _log.warning("group '%s': positions were not committed: %s", self._context.group_id, error)


def _unanswered(partitions: Iterable[TopicPartition]) -> ApiError:
    text = f"the coordinator's response has no result for {', '.join(map(str, partitions))}"
    return ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, text)


def _not_committed(code: ErrorCode, group_id: str) -> ApiError:
    text = f"offsets were not committed: this consumer is no member of group '{group_id}' any more"
    return ApiError(code, f"{text}, and its partitions may be others'. Poll more often, or raise max.poll.interval.ms.")
