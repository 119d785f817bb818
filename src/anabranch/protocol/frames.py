"""Frames and headers, without I/O: messages become frames, and the bytes of a frame become a message.

A frame is an int32 size and that many bytes. Any bytes give a message, a `DecodeError`, or, for an unsupported request,
an `UnsupportedVersionError` with the header to answer. Streams are split into frames where they are received: by
`runtime.net.channel` in the broker, by `client.cluster.connection` in the client.
"""

from __future__ import annotations

from struct import Struct
from traceback import clear_frames
from typing import Any, NamedTuple

from anabranch.base.errors import DecodeError
from anabranch.base.limits import ARRAY_LENGTH_MAX, TAGGED_FIELDS_MAX
from anabranch.codec import Blob, EncodeError, Part, decode_prefix, encode_into, prepare, spliced
from anabranch.codec.primitives import read_tags
from anabranch.protocol.bounds import ELEMENTS_MAX, EVERY_GROUP, TOPICS_MAX
from anabranch.protocol.registry import API, Api, api_of

API_VERSIONS = 18

_SIZE = Struct(">i")
_REQUEST = Struct(">hhih")
_KIND = Struct(">hh")
_ANSWER = Struct(">ii")
_REQUEST_SENT = Struct(">ihhih")


class RequestHeader(NamedTuple):
    """The header of every request."""

    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None


class NotPreparedError(Exception):
    """The first request of an API and version in this process: to read and to answer it takes code yet to be made."""


class UnsupportedVersionError(DecodeError):
    """A well-formed header of a request that is not read here: unknown API, or unknown version of one."""

    def __init__(self, header: RequestHeader) -> None:
        super().__init__(f"API {header.api_key} version {header.api_version} is not served")
        self.header = header


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


def decode_request(
    frame: Blob, elements_max: int = ARRAY_LENGTH_MAX, *, prepare_now: bool = True
) -> tuple[RequestHeader, Any]:
    """Read a request that the broker serves, or refuses in its own form: its header and the message.

    TooManyElementsError where it has more elements than its API allows, or than `elements_max`. `prepare_now`: whether
    code is made for the first request of its API and version, and its answer, for up to 10 ms; NotPreparedError if not.

    Bytes behind the message are passed over, as Kafka's broker does: librdkafka sends three when it asks for the
    metadata of all topics.
    """
    view = frame if type(frame) is memoryview else memoryview(frame)
    size = len(view)
    if size < 10:
        raise DecodeError(f"a request of {size} bytes has no header")
    key, version, correlation_id, named = _REQUEST.unpack_from(view)
    client_id, position = None, 10
    if named >= 0:
        position += named
        if position > size:
            raise DecodeError(f"the client id has {named} bytes where {size - 10} are left")
        try:
            client_id = str(view[10:position], "utf-8")
        except UnicodeDecodeError:
            raise DecodeError("the client id is not UTF-8") from None
    # As `RequestHeader(...)`, at half the cost.
    header = tuple.__new__(RequestHeader, (key, version, correlation_id, client_id))
    served = _served.get((key, version))
    if served is None:
        if not prepare_now:
            _api_read(header)
            raise NotPreparedError
        served = _serve(header)
    declared, most, is_flexible = served
    if is_flexible:
        position = _skip_tags(view, position)
    message, _ = decode_prefix(declared, view, version, position, most if most < elements_max else elements_max)
    if elements_max > EVERY_GROUP and key in TOPICS_MAX and len(message.topics) > TOPICS_MAX[key]:
        raise DecodeError(f"{declared.__name__} names {len(message.topics)} topics, and may name {TOPICS_MAX[key]}")
    return header, message


_served: dict[tuple[int, int], tuple[type[Any], int, bool]] = {}
"""The requests that were read once: message, the most elements, whether their header has tags."""


def decode_request_into(requests: list[Any], frame: Blob) -> RequestHeader:
    """Read a large request into a list, in a thread; its header. Also where it is refused all else is freed there.

    The error would hold the message, in the frames that it has come through.
    """
    try:
        header, message = decode_request(frame)
    except Exception as error:
        clear_frames(error.__traceback__)
        if error.__context__ is not None:
            clear_frames(error.__context__.__traceback__)
        raise
    requests.append(message)
    return header


def prepare_request(frame: Blob) -> None:
    """Make the code that reads a request of this kind and writes its answer. Up to 10 ms, in a thread."""
    key, version = _KIND.unpack_from(frame)
    _serve(RequestHeader(key, version, 0, None))


def _serve(header: RequestHeader) -> tuple[type[Any], int, bool]:
    key, version, _, _ = header
    api = _api_read(header)
    prepare(api.request, api.response, version=version)
    served = _served[key, version] = api.request, ELEMENTS_MAX[key], api.flexible(version)
    return served


def _api_read(header: RequestHeader) -> Api:
    api = API.get(header.api_key)
    if api is None or header.api_version not in api.read:
        raise UnsupportedVersionError(header)
    return api


def request_key(frame: Blob) -> int:
    """The API key of a request; -1 of one that is too short to have any."""
    return int.from_bytes(frame[:2], "big", signed=True) if len(frame) >= 2 else -1


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


def _flexible_header(api: Api, version: int) -> bool:
    return version >= api.flexible_since and api.key != API_VERSIONS


def _skip_tags(view: memoryview, position: int) -> int:
    try:
        count = view[position]
        return position + 1 if count == 0 else read_tags(view, position + 1, count, TAGGED_FIELDS_MAX)[1]
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
    if splices:
        size += sum(len(part) for _, part in splices)
    if size > 0x7FFFFFFF:
        raise EncodeError(f"a frame of {size} bytes is longer than a frame can be")
    _SIZE.pack_into(out, 0, size)
    return spliced(out, splices) if splices else [out]
