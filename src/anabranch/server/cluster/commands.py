"""The changes that requests can make through the controller: one method for each command, with the broker's additions.

Every method raises ApiError: the refusal, REQUEST_TIMED_OUT for a change that is accepted and takes longer than
`timeout_ms`, KAFKA_STORAGE_ERROR when the metadata store refuses (then nothing has changed).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from anabranch.base.errors import ApiError, ErrorCode
from anabranch.base.ids import INTERNAL_TOPICS
from anabranch.machines.controller.broker_configs import AlterBrokerConfigs, decide_alter_broker_configs
from anabranch.machines.controller.configs import (
    AlterConfigs,
    ReplaceConfigs,
    decide_alter_configs,
    decide_replace_configs,
)
from anabranch.machines.controller.effects import Accepted, CommandReply, Decision, Refused, Validated
from anabranch.machines.controller.group_configs import AlterGroupConfigs, GroupConfig, decide_alter_group_configs
from anabranch.machines.controller.resize import ResizeTopic, decide_cancel_resize, decide_resize_topic
from anabranch.machines.controller.state import ControllerState
from anabranch.machines.controller.topics import (
    CreateTopic,
    DeleteTopic,
    decide_create_topic,
    decide_delete_topic,
    unknown_topic,
)
from anabranch.machines.controller.views import reached
from anabranch.server.cluster.controller import Controller
from anabranch.server.cluster.resize_waits import RunningResize
from anabranch.server.cluster.view import ClusterView

CANCEL_TIMEOUT_MS = 5_000


class Commands:
    """The commands of the controller in this process."""

    def __init__(
        self,
        controller: Controller,
        view: ClusterView,
        *,
        default_partition_count: int,
        deletes_topics: bool,
        broker_settings: Mapping[str, str],
        group_configs: Mapping[str, GroupConfig],
        per_broker_max: int | None = None,
    ) -> None:
        """`broker_settings`: all that the broker was started with; `group_configs`: the allowed configs of groups."""
        self._controller = controller
        self._view = view
        self._deletes_topics = deletes_topics
        self._default_partition_count = default_partition_count
        self._broker_settings = broker_settings
        self._group_configs = group_configs
        self._per_broker_max = per_broker_max

    @property
    def controller_epoch(self) -> int:
        """The number of the controller's term."""
        return self._controller.state.controller_epoch

    async def create_topic(self, command: CreateTopic, timeout_ms: int) -> Accepted | Validated:
        """Make a topic for a client; without a count of its own it gets the broker's."""
        if command.name in INTERNAL_TOPICS:
            raise ApiError(
                ErrorCode.INVALID_TOPIC_EXCEPTION,
                "The broker makes this topic itself, when a client looks for a coordinator.",
            )
        return await self._create(command, timeout_ms, self._per_broker_max)

    async def create_internal_topic(self, command: CreateTopic, timeout_ms: int) -> Accepted | Validated:
        """Make a topic for the broker itself."""
        return await self._create(command, timeout_ms, None)

    async def _create(self, command: CreateTopic, timeout_ms: int, per_broker_max: int | None) -> Accepted | Validated:
        default_count, settings = self._default_partition_count, self._view.broker_settings
        count = max(command.partition_count, default_count, len(command.assignments))
        return await self._carry_out(
            lambda state: decide_create_topic(state, command, default_count, settings, per_broker_max),
            timeout_ms,
            partitions=count,
        )

    async def delete_topic(self, command: DeleteTopic, timeout_ms: int) -> Accepted | Validated:
        """Delete a topic, unless the broker deletes none."""
        if not self._deletes_topics:
            raise ApiError(
                ErrorCode.TOPIC_DELETION_DISABLED,
                "This broker does not delete topics: delete.topic.enable is false.",
            )
        return await self._carry_out(lambda state: decide_delete_topic(state, command), timeout_ms)

    async def resize_topic(self, command: ResizeTopic, timeout_ms: int) -> Accepted | Validated:
        """Give a topic more partitions, or fewer."""
        if self._view.topic(command.name) is None:  # Of which one request may name 100,000.
            refusal = unknown_topic(command.name)
            raise ApiError(refusal.code, refusal.message)
        return await self._carry_out(
            lambda state: decide_resize_topic(state, command, self._per_broker_max),
            timeout_ms,
            partitions=command.count,
        )

    async def cancel_resize(self, topic: str) -> None:
        """Cancel the resize of a topic that runs, if it can be undone.

        When this returns, leaders that can be reached take records by the old count, or have had 5 s to begin so.
        """
        try:
            reply = await self._controller.submit(lambda state: decide_cancel_resize(state, topic), asked=True)
        except OSError as error:
            raise _storage_error(error) from error
        if isinstance(reply, Refused):
            raise ApiError(reply.code, reply.message)
        await self._controller.wait_at_most(lambda state: reached(state, topic), CANCEL_TIMEOUT_MS)

    def resizes(self, topics: Iterable[str] | None) -> Iterator[RunningResize]:
        """The resizes that run, in any order: of these topics, or of all; bears changes meanwhile."""
        return self._controller.resizes(topics)

    async def alter_configs(self, command: AlterConfigs, timeout_ms: int) -> Accepted | Validated:
        """Change some config overrides of a topic; they apply to its logs at once."""
        settings = self._view.broker_settings
        return await self._carry_out(lambda state: decide_alter_configs(state, command, settings), timeout_ms)

    async def replace_configs(self, command: ReplaceConfigs, timeout_ms: int) -> Accepted | Validated:
        """Replace all config overrides of a topic."""
        settings = self._view.broker_settings
        return await self._carry_out(lambda state: decide_replace_configs(state, command, settings), timeout_ms)

    async def alter_group_configs(self, command: AlterGroupConfigs) -> None:
        """Change some configs of a group."""
        known = self._group_configs
        await self._do(lambda state: decide_alter_group_configs(state, command, known))

    async def alter_broker_configs(self, command: AlterBrokerConfigs) -> None:
        """Change some dynamic settings of brokers; they apply to all logs at once."""
        settings = self._broker_settings
        await self._do(lambda state: decide_alter_broker_configs(state, command, settings))

    def inspect_retiring(self, topic: str) -> None:
        """Remove the retiring partitions of a topic that are empty now, soon."""
        self._controller.inspect_soon(topic)

    async def _do(self, decide: Callable[[ControllerState], Decision[Refused | None]]) -> None:
        try:
            refused = await self._controller.submit(decide, asked=True)
        except OSError as error:
            raise _storage_error(error) from error
        if refused is not None:
            raise ApiError(refused.code, refused.message)

    async def _carry_out(
        self, decide: Callable[[ControllerState], Decision[CommandReply]], timeout_ms: int, *, partitions: int = 0
    ) -> Accepted | Validated:
        try:
            return await self._controller.command(decide, timeout_ms, partitions=partitions)
        except OSError as error:
            raise _storage_error(error) from error


def _storage_error(error: OSError) -> ApiError:
    return ApiError(ErrorCode.KAFKA_STORAGE_ERROR, str(error))
