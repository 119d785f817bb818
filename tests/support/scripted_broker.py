"""A broker whose responses a test writes down, behind false transports: client drivers run on it without a socket.

A handler returns the response to one request, or how the broker fails to respond: `Late`, `SILENT`, `HANG_UP`. Without
a handler of its own a request of ApiVersions, Metadata, InitProducerId or FindCoordinator gets the usual response.
Frames are encoded and decoded as on a real connection, and take `DELAY_S` each way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, TypeVar, cast
from uuid import UUID

from anabranch.base.errors import ErrorCode
from anabranch.client.cluster.connection import Connect, Connection, ConnectionSettings
from anabranch.client.cluster.metadata import Cluster
from anabranch.protocol.frames import RequestHeader, decode_request, encode_response
from anabranch.protocol.messages.api_versions import ApiVersion, ApiVersionsRequest, ApiVersionsResponse
from anabranch.protocol.messages.find_coordinator import Coordinator, FindCoordinatorRequest, FindCoordinatorResponse
from anabranch.protocol.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from anabranch.protocol.messages.metadata import (
    MetadataRequest,
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
from anabranch.protocol.registry import API

NODE, HOST, PORT = 1, "broker", 9092
DELAY_S = 0.001
CONNECT_S = 0.002

R = TypeVar("R")


class Failure(Enum):
    """How a broker leaves a request without a response."""

    SILENT = auto()
    """The connection stays open."""
    HANG_UP = auto()
    """The connection ends."""


SILENT, HANG_UP = Failure.SILENT, Failure.HANG_UP


@dataclass(frozen=True, slots=True)
class Late:
    """A response that takes a while, whatever becomes of the connection."""

    seconds: float
    response: Any


@dataclass(frozen=True, slots=True)
class Asked:
    """A request as it arrived."""

    at_s: float
    request: Any
    version: int
    link: int
    """The number of its connection."""


Handler = Callable[[Any], Any]


class ScriptedBroker:
    """A cluster of one broker, and what it was asked."""

    def __init__(self, topics: Mapping[str, int] | None = None, *, without: Iterable[int] = ()) -> None:
        """`topics` maps names to partition counts; `without` lists the keys of APIs that are not served."""
        self.topics = dict(topics or {})
        self.initial: dict[str, int] = {}
        """The partition count at creation of each elastic topic."""
        self.retiring: dict[str, int] = {}
        """How many of a topic's partitions, the highest ones, are retiring."""
        self.reachable = True
        self.nodes = [MetadataResponseBroker(node_id=NODE, host=HOST, port=PORT)]
        """The brokers that it names."""
        self.asked: list[Asked] = []
        self.links: list[Link] = []
        self._without = frozenset(without)
        self._versions: dict[int, int] = {}
        self._handlers: dict[type[Any], Handler] = {
            ApiVersionsRequest: self._api_versions,
            MetadataRequest: self._metadata,
            InitProducerIdRequest: lambda request: InitProducerIdResponse(producer_id=7, producer_epoch=0),
            FindCoordinatorRequest: self._coordinator,
        }

    def on(self, request_class: type[R], handler: Callable[[R], Any]) -> None:
        """Let `handler` respond to requests of a class."""
        self._handlers[request_class] = handler

    def script(self, request_class: type[Any], *answers: Any) -> None:
        """Give these answers to requests of a class, one after the other, and the last one for ever."""
        left = list(answers)

        def answer(request: Any) -> Any:
            following = left.pop(0) if len(left) > 1 else left[0]
            return following(request) if callable(following) else following

        self._handlers[request_class] = answer

    def limit(self, api_key: int, version: int) -> None:
        """Serve an API up to this version."""
        self._versions[api_key] = version

    def requests(self, request_class: type[R]) -> list[R]:
        """The requests of a class, in the order of their arrival."""
        return [asked.request for asked in self.asked if isinstance(asked.request, request_class)]

    def times(self, request_class: type[Any]) -> list[float]:
        """When the requests of a class arrived, in seconds."""
        return [round(asked.at_s, 3) for asked in self.asked if isinstance(asked.request, request_class)]

    def cluster(self, **settings: Any) -> Cluster:
        """A client's cluster that connects to this broker only."""
        return Cluster(f"{HOST}:{PORT}", ConnectionSettings(connect=self.connect, **settings))

    async def connect(self, make_protocol: Callable[[], Connection], host: str, port: int) -> Connection:
        """As `runtime.net.transport.connect`."""
        assert (host, port) == (HOST, PORT)
        await asyncio.sleep(CONNECT_S)
        if not self.reachable:
            raise ConnectionRefusedError(111, "Connection refused")
        connection = make_protocol()
        link = Link(self, connection, len(self.links))
        self.links.append(link)
        connection.connection_made(link)
        return connection

    def hang_up(self) -> None:
        """End every connection."""
        for link in self.links:
            link.end()

    def answer(self, request: Any) -> Any:
        """The answer of the handler."""
        return self._handlers[type(request)](request)

    def _api_versions(self, request: ApiVersionsRequest) -> ApiVersionsResponse:
        keys = [
            ApiVersion(
                api_key=key, min_version=api.served[0], max_version=min(api.served[-1], self._versions.get(key, 99))
            )
            for key, api in API.items()
            if api.served and key not in self._without
        ]
        return ApiVersionsResponse(api_keys=keys)

    def _metadata(self, request: MetadataRequest) -> MetadataResponse:
        if request.topics is None:
            names: list[str] = sorted(self.topics)
        else:
            by_id = {topic_id(name): name for name in self.topics}
            names = [topic.name or by_id.get(topic.topic_id, "") for topic in request.topics]
        return MetadataResponse(
            brokers=self.nodes,
            cluster_id="scripted",
            controller_id=NODE,
            topics=[self._topic(name) for name in names],
        )

    def _topic(self, name: str) -> MetadataResponseTopic:
        count = self.topics.get(name)
        if count is None:
            return MetadataResponseTopic(name=name, error_code=ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        live = count - self.retiring.get(name, 0)
        return MetadataResponseTopic(
            name=name,
            topic_id=topic_id(name),
            is_internal=name.startswith("__"),
            initial_partition_count=self.initial.get(name, -1),
            undeleted_partition_count=live if name in self.initial else -1,
            partitions=[
                MetadataResponsePartition(
                    partition_index=number, leader_id=NODE, leader_epoch=0, retiring=number >= live
                )
                for number in range(count)
            ],
        )

    def _coordinator(self, request: FindCoordinatorRequest) -> FindCoordinatorResponse:
        found = [Coordinator(key=key, node_id=NODE, host=HOST, port=PORT) for key in request.coordinator_keys]
        return FindCoordinatorResponse(coordinators=found)


def together(*brokers: ScriptedBroker) -> Connect:
    """Have brokers name each other, as `broker1` and so on; return how a client connects to them."""
    hosts = {f"{HOST}{number}": broker for number, broker in enumerate(brokers, 1)}
    nodes = [MetadataResponseBroker(node_id=number, host=host, port=PORT) for number, host in enumerate(hosts, 1)]
    for broker in brokers:
        broker.nodes = nodes

    async def connect(make_protocol: Callable[[], Connection], host: str, port: int, /) -> Connection:
        return await hosts[host].connect(make_protocol, HOST, port)

    return connect


def topic_id(name: str) -> UUID:
    """The id of a topic."""
    return UUID(int=int.from_bytes(name.encode()[:15].rjust(15, b"\1"), "big"))


class Link(asyncio.Transport):
    """The transport of one connection, and the broker's end of it."""

    def __init__(self, broker: ScriptedBroker, connection: Connection, number: int) -> None:
        super().__init__()
        self.number = number
        self._broker = broker
        self._connection = connection
        self._loop = asyncio.get_running_loop()
        self._received = bytearray()
        self._ended = False

    # -- the client's end ----------------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        self.writelines([data])

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        data = b"".join(bytes(part) for part in list_of_data)
        if not self._ended:
            self._loop.call_later(DELAY_S, self._arrive, data)

    def is_closing(self) -> bool:
        return self._ended

    def abort(self) -> None:
        self.end()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Nothing is ever full here."""

    # -- the broker's end ----------------------------------------------------------------------------------------------

    def end(self) -> None:
        """End the connection, in both directions."""
        if not self._ended:
            self._ended = True
            self._loop.call_soon(self._connection.connection_lost, None)

    def _arrive(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 4:
            size = int.from_bytes(self._received[:4], "big")
            if len(self._received) < 4 + size:
                return
            frame = bytes(self._received[4 : 4 + size])
            del self._received[: 4 + size]
            if not self._ended:
                self._serve(frame)

    def _serve(self, frame: bytes) -> None:
        header, request = decode_request(frame)
        self._broker.asked.append(Asked(self._loop.time(), request, header.api_version, self.number))
        answer = self._broker.answer(request)
        delay_s = DELAY_S
        if isinstance(answer, Late):
            delay_s, answer = answer.seconds, answer.response
        if answer is HANG_UP:
            self.end()
        elif answer is not SILENT and answer is not None:
            self._loop.call_later(delay_s, self._respond, header, answer)

    def _respond(self, header: RequestHeader, response: Any) -> None:
        parts = encode_response(response, header.api_key, header.api_version, header.correlation_id)
        data = b"".join(bytes(cast(Any, part)) for part in parts)
        while data and not self._ended:
            room = self._connection.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            self._connection.buffer_updated(size)
            data = data[size:]
