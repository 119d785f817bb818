"""Frames and headers, without I/O: bytes in pieces of any size become frames, frames become messages, and back.

A frame is an int32 size and that many bytes. Any bytes give a message, a `DecodeError`, or, for an unsupported request,
an `UnsupportedVersionError` with the header to answer. A size is checked before a byte is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from struct import Struct
from typing import Any, NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.limits import REQUEST_SIZE_MAX
from anabranch.codec import Blob, EncodeError, Part, decode_prefix, encode_into, spliced
from anabranch.codec.primitives import read_tags
from anabranch.protocol.registry import API, Api, api_of

API_VERSIONS = 18

_SIZE = Struct(">i")
_REQUEST = Struct(">hhih")
_ANSWER = Struct(">ii")
_REQUEST_SENT = Struct(">ihhih")


class RequestHeader(NamedTuple):
    """The header of every request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


class UnsupportedVersionError(DecodeError):
    """A well-formed header of a request that is not served here: unknown API, or unknown version of one."""

    def __init__(self, header: RequestHeader) -> None:
        super().__init__(f"API {header.api_key} version {header.api_version} is not served")
        self.header = header


class FrameSplitter:
    """Cuts a stream of bytes into frames.

    A frame that arrived in one piece is a view of that piece, so the piece must not be reused while the frame lives;
    one that arrived in several is put together in a buffer of its own.
    """

    def __init__(self, size_max: int = REQUEST_SIZE_MAX) -> None:
        self._size_max = size_max
        self._piece = memoryview(b"")
        self._head = bytearray()
        self._body: bytearray | None = None
        self._expected = 0

    @property
    def pending(self) -> int:
        """Bytes that were fed and belong to no frame that was taken."""
        started = 0 if self._body is None else 4 + len(self._body)
        return len(self._head) + started + len(self._piece)

    def feed(self, data: Blob) -> Iterator[memoryview]:
        """Take more bytes; iterate over the frames that they complete, which must be done before more are fed."""
        assert not self._piece, "frames of the last piece were not taken"
        self._piece = memoryview(data)
        return self.frames()

    def frames(self) -> Iterator[memoryview]:
        """The frames that are complete and not yet taken."""
        while (frame := self._next()) is not None:
            yield frame

    def _next(self) -> memoryview | None:
        piece = self._piece
        if self._body is None:
            if not self._head and len(piece) >= 4:
                size = self._checked(_SIZE.unpack_from(piece)[0])
                if len(piece) >= 4 + size:
                    self._piece = piece[4 + size :]
                    return piece[4 : 4 + size]
                piece = piece[4:]
            else:
                missing = 4 - len(self._head)
                self._head += piece[:missing]
                piece = self._piece = piece[missing:]
                if len(self._head) < 4:
                    return None
                size = self._checked(_SIZE.unpack(self._head)[0])
                self._head.clear()
            self._expected = size
            self._body = bytearray()
        body = self._body
        taken = piece[: self._expected - len(body)]
        body += taken
        self._piece = piece[len(taken) :]
        if len(body) < self._expected:
            return None
        self._body = None
        return memoryview(body)

    def _checked(self, size: int) -> int:
        if not 0 <= size <= self._size_max:
            raise DecodeError(f"a frame of {size} bytes; at most {self._size_max} are read")
        return size


def encode_request(message: object, version: int, correlation_id: int, client_id: str | None) -> list[Part]:
    """Write a request frame, its size first."""
    api = api_of(type(message))
    name = b"" if client_id is None else client_id.encode()
    named = -1 if client_id is None else len(name)
    out = bytearray(_REQUEST_SENT.pack(0, api.key, version, correlation_id, named))
    out += name
    if api.flexible(version):
        out.append(0)
    return _framed(out, message, version)


def decode_request(frame: Blob) -> tuple[RequestHeader, Any]:
    """Read a request that the broker serves: its header and the message.

    Bytes behind the message are passed over, as Kafka's broker does: librdkafka sends three when it asks for the
    metadata of all topics.
    """
    view = frame if type(frame) is memoryview else memoryview(frame)
    header, position = _request_header(view)
    api = API.get(header.api_key)
    if api is None or header.api_version not in api.served:
        raise UnsupportedVersionError(header)
    if api.flexible(header.api_version):
        position = _skip_tags(view, position)
    message, _ = decode_prefix(api.request, view, header.api_version, position)
    return header, message


def encode_response(message: object, api_key: int, version: int, correlation_id: int) -> list[Part]:
    """Write a response frame, its size first. The header of ApiVersions is never flexible (KIP-511)."""
    out = bytearray(_ANSWER.pack(0, correlation_id))
    if _flexible_header(API[api_key], version):
        out.append(0)
    return _framed(out, message, version)


def decode_response(frame: Blob, api_key: int, version: int) -> tuple[int, Any]:
    """Read the response to a request of that API and version: its correlation id and the message."""
    view = frame if type(frame) is memoryview else memoryview(frame)
    correlation_id = response_correlation_id(view)
    api = API[api_key]
    position = _skip_tags(view, 4) if _flexible_header(api, version) else 4
    return correlation_id, _whole(api.response, view, version, position)


def response_correlation_id(frame: Blob) -> int:
    """Read which request a response frame answers."""
    if len(frame) < 4:
        raise DecodeError(f"a response of {len(frame)} bytes has no correlation id")
    correlation_id: int = _SIZE.unpack_from(frame)[0]
    return correlation_id


def _request_header(view: memoryview) -> tuple[RequestHeader, int]:
    if len(view) < 10:
        raise DecodeError(f"a request of {len(view)} bytes has no header")
    api_key, version, correlation_id, named = _REQUEST.unpack_from(view)
    if named < 0:
        return RequestHeader(api_key, version, correlation_id, None), 10
    position = 10 + named
    if position > len(view):
        raise DecodeError(f"the client id has {named} bytes where {len(view) - 10} are left")
    try:
        client_id = str(view[10:position], "utf-8")
    except UnicodeDecodeError:
        raise DecodeError("the client id is not UTF-8") from None
    return RequestHeader(api_key, version, correlation_id, client_id), position


def _flexible_header(api: Api, version: int) -> bool:
    return api.key != API_VERSIONS and api.flexible(version)


def _skip_tags(view: memoryview, position: int) -> int:
    try:
        count = view[position]
        return position + 1 if count == 0 else read_tags(view, position + 1, count)[1]
    except IndexError:
        raise DecodeError("the header ends too early") from None


def _whole(declared: type[Any], view: memoryview, version: int, position: int) -> Any:
    message, end = decode_prefix(declared, view, version, position)
    if end != len(view):
        raise DecodeError(f"{declared.__name__} version {version}: {len(view) - end} bytes left over")
    return message


def _framed(out: bytearray, message: object, version: int) -> list[Part]:
    splices: list[tuple[int, Any]] = []
    encode_into(message, version, out, splices)
    size = len(out) - 4
    for _, part in splices:
        size += len(part)
    if size > 0x7FFFFFFF:
        raise EncodeError(f"a frame of {size} bytes is longer than a frame can be")
    _SIZE.pack_into(out, 0, size)
    return spliced(out, splices)
