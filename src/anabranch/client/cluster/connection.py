"""One connection to a broker: requests are pipelined, responses are matched by correlation id.

Bytes are received straight into their frame: a small response is copied once out of the receive buffer, a large one is
never copied, and the `records` of a fetch are views of its frame. Every request has the highest version that both
sides support (ApiVersions is sent first).

Any fault closes the connection and fails all pending requests with `DisconnectedError`: the broker may have carried
them out or not. `ConnectError` means that no request was sent.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from anabranch.base.errors import AnabranchError, ApiError, DecodeError, ErrorCode
from anabranch.base.limits import RESPONSE_SIZE_MAX
from anabranch.protocol.frames import decode_response, encode_request, response_correlation_id
from anabranch.protocol.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from anabranch.protocol.registry import Api, api_of
from anabranch.runtime.net.transport import connect

RECEIVE_BUFFER_SIZE = 256 * 1024
UNFILLED_FROM = 256 * 1024
"""Bytes of a frame for which it is worth while that its memory is not filled with zeros."""
_LENGTH_SIZE = 4


class DisconnectedError(AnabranchError, ConnectionError):
    """The connection ended before the response arrived."""


class ConnectError(AnabranchError, ConnectionError):
    """No connection could be made; no request was sent."""


class Connect(Protocol):
    """Opens a stream to a broker for a protocol. Raises `OSError` if the address cannot be reached."""

    def __call__(self, make_protocol: Callable[[], Connection], host: str, port: int, /) -> Awaitable[Connection]: ...


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The settings of connections, by Kafka's names."""

    client_id: str = "anabranch"
    request_timeout_ms: int = 30_000
    socket_connection_setup_timeout_ms: int = 10_000
    reconnect_backoff_ms: int = 50
    reconnect_backoff_max_ms: int = 1_000
    connect: Connect = connect
    """Opens the transport: plain TCP by default."""


class Connection(asyncio.BufferedProtocol):
    """An open connection; made by `Connection.open`."""

    def __init__(self, name: str, client_id: str) -> None:
        self.name = name
        self.frame_memory = _memory
        """Gives at least so many writable bytes for a frame that is not received whole with others."""
        self.versions: dict[int, tuple[int, int]] = {}
        """The broker's API versions: API key to lowest and highest version."""
        self._client_id = client_id
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, tuple[Api, int, asyncio.Future[Any], asyncio.TimerHandle | None]] = {}
        self._correlation_ids = 0
        self._buffer = bytearray(RECEIVE_BUFFER_SIZE)
        self._view = memoryview(self._buffer)
        self._begin = self._end = 0
        self._frame: memoryview | None = None
        self._filled = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = asyncio.Event()
        self._reason: Exception | None = None

    @classmethod
    async def open(
        cls, host: str, port: int, *, client_id: str, timeout_ms: int, connect: Connect = connect
    ) -> Connection:
        """Connect and negotiate API versions."""
        name = f"{host}:{port}"
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                connection = await connect(lambda: cls(name, client_id), host, port)
        except TimeoutError:
            text = f"no connection to {name} within {timeout_ms} ms. Check the address, and that a broker runs there."
            raise ConnectError(text) from None
        except OSError as error:
            reason = error.strerror or str(error)
            text = f"no connection to {name}: {reason}. Check the address, and that a broker runs there."
            raise ConnectError(text) from None
        try:
            await connection._agree(timeout_ms)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _agree(self, timeout_ms: int) -> None:
        request = ApiVersionsRequest(client_software_name="anabranch", client_software_version="0.1.0")
        version = api_of(ApiVersionsRequest).versions[-1]
        try:
            response = await self.send(request, timeout_ms=timeout_ms, version=version)
            if response.error_code == ErrorCode.UNSUPPORTED_VERSION:
                response = await self.send(request, timeout_ms=timeout_ms, version=0)
        except (DisconnectedError, DecodeError) as error:
            text = f"{self.name} does not answer as a Kafka broker does ({error}). Check that the port is right."
            raise ConnectError(text) from error
        assert isinstance(response, ApiVersionsResponse)
        if response.error_code:
            raise ApiError(ErrorCode.of(response.error_code), f"{self.name} refused to name its API versions")
        self.versions = {key.api_key: (key.min_version, key.max_version) for key in response.api_keys}

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._reason is None and self._transport is not None and not self._transport.is_closing()

    def serves(self, request_class: type[Any]) -> bool:
        """Whether the broker and this client support a common version of the request."""
        return self._common(api_of(request_class)) is not None

    def version_of(self, request_class: type[Any]) -> int:
        """Return the highest version of a request that both sides support."""
        api = api_of(request_class)
        version = self._common(api)
        if version is None:
            theirs = self.versions.get(api.key)
            has = f"versions {theirs[0]} to {theirs[1]}" if theirs else "none"
            text = f"{self.name} serves {has} of {api.name}, and this client {api.versions[0]} to {api.versions[-1]}"
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"{text}. Use a broker of Kafka 2.1 or newer.")
        return version

    def _common(self, api: Api) -> int | None:
        theirs = self.versions.get(api.key)
        if theirs is None:
            return None
        highest = min(api.versions[-1], theirs[1])
        return highest if highest >= max(api.versions[0], theirs[0]) else None

    def send(self, message: Any, *, timeout_ms: int, version: int | None = None) -> asyncio.Future[Any]:
        """Send a request at once; the future completes with its response. EncodeError before anything is written."""
        self._check()
        self._correlation_ids = (self._correlation_ids + 1) & 0x7FFFFFFF
        correlation_id = self._correlation_ids
        api = api_of(type(message))
        version = self.version_of(type(message)) if version is None else version
        parts = encode_request(message, version, correlation_id, self._client_id)
        future: asyncio.Future[Any] = self._loop.create_future()
        timer = self._loop.call_later(timeout_ms / 1000, self._too_late, api.name, timeout_ms)
        self._waiting[correlation_id] = (api, version, future, timer)
        self._write(parts)
        return future

    def send_unanswered(self, message: Any, *, version: int) -> None:
        """Send a request without a response: a produce with acks=0."""
        self._check()
        self._correlation_ids = (self._correlation_ids + 1) & 0x7FFFFFFF
        self._write(encode_request(message, version, self._correlation_ids, self._client_id))

    def _write(self, parts: Sequence[Any]) -> None:
        assert self._transport is not None
        self._transport.writelines(parts)

    def _check(self) -> None:
        if not self.is_open:
            raise DisconnectedError(f"the connection to {self.name} has ended ({self._reason or 'lost'})")

    async def drain(self) -> None:
        """Wait until the socket accepts more bytes."""
        await self._writable.wait()

    def close(self, reason: Exception | None = None) -> None:
        """Close the connection; pending requests fail with `DisconnectedError`."""
        self._fail(reason or DisconnectedError(f"the connection to {self.name} was closed"))
        if self._transport is not None:
            self._transport.abort()

    async def closed(self) -> None:
        """Wait until the socket is closed."""
        await self._ended.wait()

    def _too_late(self, name: str, timeout_ms: int) -> None:
        self.close(DisconnectedError(f"{self.name} did not answer {name} within {timeout_ms} ms"))

    def _fail(self, reason: Exception) -> None:
        if self._reason is None:
            self._reason = reason
        self._writable.set()
        waiting, self._waiting = self._waiting, {}
        for _, _, future, timer in waiting.values():
            if timer is not None:
                timer.cancel()
            if not future.done():
                future.set_exception(DisconnectedError(str(reason)))

    # -- asyncio's side -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=16 * 1024 * 1024)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all pending requests."""
        reason = f": {exc}" if exc is not None else ""
        self._fail(DisconnectedError(f"{self.name} closed the connection{reason}"))
        self._ended.set()

    def pause_writing(self) -> None:
        """Make `drain` wait."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Release `drain`."""
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes: the rest of an incomplete large frame, or the receive buffer."""
        if self._frame is not None:
            return self._frame[self._filled :]
        return self._view[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        """Dispatch all complete frames."""
        try:
            if self._frame is None:
                self._end += nbytes
                self._split()
                return
            self._filled += nbytes
            if self._filled == len(self._frame):
                frame, self._frame = self._frame, None
                self._receive(frame)
        except DecodeError as error:
            self.close(DisconnectedError(f"{self.name} sent what is not a Kafka answer: {error}"))

    def _split(self) -> None:
        begin, end, buffer = self._begin, self._end, self._buffer
        while end - begin >= _LENGTH_SIZE:
            length = int.from_bytes(buffer[begin : begin + _LENGTH_SIZE], "big", signed=True)
            if not _LENGTH_SIZE <= length <= RESPONSE_SIZE_MAX:
                raise DecodeError(f"a frame of {length} bytes; at most {RESPONSE_SIZE_MAX} are read")
            begin += _LENGTH_SIZE
            if end - begin >= length:
                self._receive(memoryview(bytes(self._view[begin : begin + length])))
                begin += length
                continue
            self._frame = self.frame_memory(length)[:length]
            self._filled = end - begin
            self._frame[: self._filled] = self._view[begin:end]
            begin = end
        rest = end - begin
        buffer[:rest] = buffer[begin:end]
        self._begin, self._end = 0, rest

    def _receive(self, frame: memoryview) -> None:
        correlation_id = response_correlation_id(frame)
        waiting = self._waiting.pop(correlation_id, None)
        if waiting is None:
            raise DecodeError(f"an answer to request {correlation_id}, which was not sent")
        api, version, future, timer = waiting
        if timer is not None:
            timer.cancel()
        if future.done():
            return
        try:
            future.set_result(decode_response(frame, api.key, version)[1])
        except DecodeError as error:
            future.set_exception(error)
            self.close(DisconnectedError(f"{self.name} sent a malformed answer to {api.name}: {error}"))


class Lane:
    """The route to one broker: connects on first use, and reconnects with growing delays after failures."""

    def __init__(self, host: str, port: int, settings: ConnectionSettings) -> None:
        self.host, self.port = host, port
        self._settings = settings
        self._connection: Connection | None = None
        self._opening: asyncio.Task[Connection] | None = None
        self._failures = 0
        self._retry_at = 0.0

    @property
    def open_connection(self) -> Connection | None:
        """The connection, if open."""
        return self._connection if self._connection is not None and self._connection.is_open else None

    async def connection(self) -> Connection:
        """Return the connection; connect if necessary."""
        if (connection := self.open_connection) is not None:
            return connection
        if self._opening is None:
            self._opening = asyncio.ensure_future(self._open())
            self._opening.add_done_callback(self._opened)
        return await asyncio.shield(self._opening)

    async def _open(self) -> Connection:
        loop = asyncio.get_running_loop()
        if (wait := self._retry_at - loop.time()) > 0:
            await asyncio.sleep(wait)
        settings = self._settings
        try:
            connection = await Connection.open(
                self.host,
                self.port,
                client_id=settings.client_id,
                timeout_ms=settings.socket_connection_setup_timeout_ms,
                connect=settings.connect,
            )
        except Exception:
            backoff = min(settings.reconnect_backoff_ms << min(self._failures, 16), settings.reconnect_backoff_max_ms)
            self._failures += 1
            self._retry_at = loop.time() + backoff / 1000
            raise
        self._failures = 0
        self._connection = connection
        return connection

    def _opened(self, task: asyncio.Task[Connection]) -> None:
        self._opening = None
        if not task.cancelled():
            task.exception()

    async def close(self) -> None:
        """Close the connection."""
        if self._opening is not None:
            self._opening.cancel()
            with contextlib.suppress(asyncio.CancelledError, AnabranchError):
                await self._opening
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed()


def _memory(size: int) -> memoryview:
    """Memory for a frame; a large one is not filled with zeros first, which costs half as much as to receive it."""
    if size < UNFILLED_FROM:
        return memoryview(bytearray(size))
    import numpy as np  # Whoever reads records has it already, and a command that lists topics needs none.

    return np.empty(size, np.uint8).data
