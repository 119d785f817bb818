"""The codec against kio, whose reader is native code and whose writer is Python: microseconds a message.

The messages are those of the hot path: a Produce request (v9) and its response for one partition, a Fetch request and
response (v12) for 100 partitions. Decoding is from a memoryview, as frames come; ours leaves records where they are,
kio copies them. Encoding is to the parts that a socket sends, kio's to one buffer.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any

from kio.schema.fetch.v12.request import FetchRequest as KioFetchRequest
from kio.schema.fetch.v12.response import FetchResponse as KioFetchResponse
from kio.schema.produce.v9.request import ProduceRequest as KioProduceRequest
from kio.schema.produce.v9.response import ProduceResponse as KioProduceResponse
from kio.serial import entity_reader, entity_writer

from anabranch.codec import decode, encode
from anabranch.protocol.messages.fetch import (
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    FetchTopic,
    PartitionData,
)
from anabranch.protocol.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from benchmarks.harness import Bar, Result, Scale, compare

RECORDS = bytes(range(256)) * 16
PARTITIONS = range(100)


def produce_request() -> ProduceRequest:
    partition = PartitionProduceData(index=1, records=RECORDS)
    topic = TopicProduceData(name="flights", partition_data=[partition])
    return ProduceRequest(acks=-1, timeout_ms=30_000, topic_data=[topic])


def produce_response() -> ProduceResponse:
    partition = PartitionProduceResponse(index=1, base_offset=123_456, log_start_offset=0)
    return ProduceResponse(responses=[TopicProduceResponse(name="flights", partition_responses=[partition])])


def fetch_request() -> FetchRequest:
    partitions = [FetchPartition(partition=p, fetch_offset=p * 1000, partition_max_bytes=1 << 20) for p in PARTITIONS]
    return FetchRequest(max_wait_ms=500, min_bytes=1, topics=[FetchTopic(topic="flights", partitions=partitions)])


def fetch_response() -> FetchResponse:
    partitions = [
        PartitionData(partition_index=p, high_watermark=10_000, last_stable_offset=10_000, records=RECORDS)
        for p in PARTITIONS
    ]
    return FetchResponse(responses=[FetchableTopicResponse(topic="flights", partitions=partitions)])


def microseconds(act: Callable[[], object], times: int) -> Mapping[str, float]:
    start = perf_counter()
    for _ in range(times):
        act()
    return {"microseconds": (perf_counter() - start) / times * 1e6}


def measured(name: str, ours: Any, kio: type[Any], times: int, scale: Scale) -> list[Result]:
    """Compare the decoding and the encoding of one message, which is the same bytes on both sides."""
    declared, version = type(ours), kio.__version__
    read, write = entity_reader(kio), entity_writer(kio)
    encoded = b"".join(bytes(part) for part in encode(ours, version))
    view = memoryview(encoded)
    theirs, _ = read(encoded, 0)
    out = io.BytesIO()
    write(out, theirs)
    assert encoded == out.getvalue()
    assert decode(declared, view, version) == ours
    rounds = scale.choose(times, 5)
    what = f"{declared.__name__} v{version} of {len(encoded)} bytes"
    return [
        *compare(
            f"codec.{name}.decode",
            what=f"{what} from memory; kio reads in native code and copies records",
            sides={
                "anabranch": lambda: microseconds(lambda: decode(declared, view, version), rounds),
                "kio": lambda: microseconds(lambda: read(encoded, 0), rounds),
            },
            bars=[Bar("microseconds", "us", "less")],
            scale=scale,
        ),
        *compare(
            f"codec.{name}.encode",
            what=f"{what} to the parts that are sent; kio to one buffer",
            sides={
                "anabranch": lambda: microseconds(lambda: encode(ours, version), rounds),
                "kio": lambda: microseconds(lambda: write(io.BytesIO(), theirs), rounds),
            },
            bars=[Bar("microseconds", "us", "less", 0.5)],
            scale=scale,
        ),
    ]


def produce(scale: Scale) -> list[Result]:
    """Produce, one partition: request and response, both ways."""
    return [
        *measured("produce_request", produce_request(), KioProduceRequest, 20_000, scale),
        *measured("produce_response", produce_response(), KioProduceResponse, 20_000, scale),
    ]


def fetch(scale: Scale) -> list[Result]:
    """Fetch, 100 partitions: request and response, both ways."""
    return [
        *measured("fetch_request", fetch_request(), KioFetchRequest, 500, scale),
        *measured("fetch_response", fetch_response(), KioFetchResponse, 500, scale),
    ]


BENCHMARKS = {"produce": produce, "fetch": fetch}
