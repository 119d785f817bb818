"""What all connections of a listener share: the broker, APIs with their metrics, threads, memory with its budgets."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from anabranch.base.limits import QUEUED_DECODED_SIZE_MAX, QUEUED_RESPONSE_SIZE_MAX
from anabranch.machines.held_memory import DecodedMemory, GatheredMemory
from anabranch.protocol.registry import API
from anabranch.runtime.events import EventLimit
from anabranch.runtime.loop_steps import LoopSteps
from anabranch.runtime.metrics import Counter, Histogram, Metrics
from anabranch.runtime.net.hang_ups import HangUps
from anabranch.runtime.net.pool import BufferPool, Landing
from anabranch.server.context import BrokerContext
from anabranch.server.handlers import Endpoint
from anabranch.server.network.admission import AnswerMemory

SAID_INTERVAL_S, SAID_MAX = 10.0, 100
"""Lines of the log about bad connections: at most so many in the interval, the next one with the number left out."""
CODEC_THREADS = 2
"""Two, so that one long answer does not hold up all others. More do no more work, as one has the interpreter at a time,
but each keeps the loop waiting for it: an honest client beside 300 that ask for much waits 10 ms with 6, 2 ms with 2.
They are not those of other work: a change of topics does not wait behind thousands of answers.
"""


class ApiMetrics:
    """The counters of each API."""

    def __init__(self, metrics: Metrics, name: str) -> None:
        self.name = name
        self.requests: Counter = metrics.counter(
            "kafka_network_requestmetrics_requests_total", "Requests received.", request=name
        )
        self.time: Histogram = metrics.histogram(
            "kafka_network_requestmetrics_totaltime_seconds", "From a request's last byte to its answer.", request=name
        )


@dataclass(slots=True)
class Service:
    """The objects shared by all connections of a listener."""

    broker: BrokerContext
    loop: asyncio.AbstractEventLoop
    endpoints: Mapping[int, Endpoint]
    metrics: Metrics
    pool: BufferPool
    frame_size_max: int
    answers: AnswerMemory = field(default_factory=lambda: AnswerMemory(QUEUED_RESPONSE_SIZE_MAX))
    decoded: DecodedMemory = field(default_factory=lambda: DecodedMemory(QUEUED_DECODED_SIZE_MAX))
    gathered: GatheredMemory = field(default_factory=lambda: GatheredMemory(QUEUED_RESPONSE_SIZE_MAX))
    steps: LoopSteps = field(default_factory=LoopSteps)
    landing: Landing = field(default_factory=Landing)
    said: EventLimit = field(default_factory=lambda: EventLimit(SAID_INTERVAL_S, SAID_MAX))
    codec: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(CODEC_THREADS, "codec"))
    """Decodes large requests, and encodes large answers."""
    closing: bool = False
    """Whether no further request is begun."""
    api_metrics: dict[int, ApiMetrics] = field(default_factory=dict)
    hang_ups: HangUps = field(init=False)

    def __post_init__(self) -> None:
        self.hang_ups = HangUps(self.loop)

    def metrics_of(self, api_key: int) -> ApiMetrics:
        """The metrics of one API."""
        found = self.api_metrics.get(api_key)
        if found is None:
            found = self.api_metrics[api_key] = ApiMetrics(self.metrics, API[api_key].name)
        return found
