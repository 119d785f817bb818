"""The route to the coordinator of one group or transactional id: found on first use, and again after a move."""

from __future__ import annotations

import asyncio
from typing import Any

from anabranch.base.errors import AnabranchError, ApiError, ErrorCode
from anabranch.client.cluster.connection import Connection, DisconnectedError
from anabranch.client.cluster.metadata import Cluster
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest

GROUP, TRANSACTION = 0, 1
"""Key types of FindCoordinator."""
MANY_KEYS_VERSION = 4
MOVED = frozenset({ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE})


class Coordinator:
    """Sends requests to the coordinator of `key`. `purpose` names connections: long waits use their own.

    A request without a response may or may not have been carried out; this class does not repeat it.
    """

    def __init__(self, cluster: Cluster, key: str, key_type: int = GROUP) -> None:
        self._cluster = cluster
        self._key = key
        self._key_type = key_type
        self._address: tuple[str, int] | None = None
        self._finding: asyncio.Task[tuple[str, int]] | None = None

    async def connection(self, purpose: str) -> Connection:
        """Return the connection to the coordinator; find the coordinator first if necessary."""
        address = self._address
        if address is None:
            if self._finding is None:
                self._finding = asyncio.ensure_future(self._find())
                self._finding.add_done_callback(self._found)
            address = await asyncio.shield(self._finding)
        try:
            return await self._cluster.connection_to(*address, purpose)
        except (AnabranchError, OSError):
            self.forget()
            raise

    async def ask(self, request: Any, purpose: str, *, timeout_ms: int, version: int | None = None) -> Any:
        """Send a request once. Raises `DisconnectedError`, `ConnectError`, or `ApiError` if no coordinator is found."""
        connection = await self.connection(purpose)
        try:
            response = await connection.send(request, timeout_ms=timeout_ms, version=version)
        except DisconnectedError:
            self.forget()
            raise
        if ErrorCode.of(getattr(response, "error_code", 0)) in MOVED:
            self.forget()
        return response

    def forget(self) -> None:
        """Find the coordinator again before the next request: the coordinator has moved or is unreachable."""
        self._address = None

    async def _find(self) -> tuple[str, int]:
        connection = await self._cluster.any_connection()
        version = connection.version_of(FindCoordinatorRequest)
        request = FindCoordinatorRequest(key=self._key, key_type=self._key_type, coordinator_keys=[self._key])
        response = await self._cluster.ask(request)
        found = response.coordinators[0] if version >= MANY_KEYS_VERSION else response
        if found.error_code:
            what = "group" if self._key_type == GROUP else "transactional id"
            why = found.error_message or "the broker says no more"
            code = ErrorCode.of(found.error_code)
            raise ApiError(code, f"no coordinator of {what} '{self._key}' could be found: {why}")
        return found.host, found.port

    def _found(self, task: asyncio.Task[tuple[str, int]]) -> None:
        self._finding = None
        if not task.cancelled() and task.exception() is None:
            self._address = task.result()
