"""Hostile frames: requests of every API, whole, with odd values, or changed at random, sent to a real broker.

Each frame is made from the declaration of a request that the broker serves or refuses, with values that are ordinary,
extreme or empty, now and then with thousands of elements; half of them are then changed: bytes flipped, lengths made
huge, ends cut off. They go over some connections at a time, one behind the other. A well-behaved client produces beside
them. There is no traceback and no line of an error, no step of the loop over 10 ms of the processor, and no more memory
than the budgets and 100 MB. A step is longer than that now and then because others use the machine: the frames of a
stretch with one are sent again, and one whose steps are long each time ends the run. A seed makes the same frames
again, from any multiple of STRETCH on, so that a run can be continued:
`python -m tests.fuzz.frames --seed 7 --first 300000 --count 1000000`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import select
import selectors
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from anabranch.codec import EncodeError, schema_of
from anabranch.codec.types import Array, Bytes, Field, Fixed, Nested, String, Type, Uuid
from anabranch.protocol.frames import encode_request
from anabranch.protocol.messages.find_coordinator import FindCoordinatorRequest
from anabranch.protocol.registry import API
from tests.support.broker import BrokerProcess, running
from tests.support.steps import long_each_time
from tests.support.wire import WireClient, batch

FRIEND = "friend"
NAMES = ("t", "u", "", "g", "x" * 300, "__consumer_offsets", "a/b", "é", "1", "range", "consumer")
NUMBERS = (0, 1, 2, 3, -1, -2, 100)
BITS = {"b": 7, "h": 15, "i": 31, "q": 63, "H": 16, "I": 32}
UNSIGNED = "HI"
TOGETHER = (1,) * 15 + (4,)
CONNECTIONS = 24
PATIENCE_S = 0.1
"""Requests that park are waited for no longer."""
LENGTHS = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0")
MANY = 3_000
MIB = 1 << 20
BUDGETS: dict[str, Any] = {
    "queued_max_request_bytes": 16 * MIB,
    "queued_max_response_bytes": 16 * MIB,
    "max_incremental_fetch_session_cache_bytes": 16 * MIB,
    "group_metadata_max_bytes": 16 * MIB,
    "offsets_max_bytes": 8 * MIB,
    "transaction_metadata_max_bytes": 8 * MIB,
    "producer_state_max_bytes": 8 * MIB,
    "max_bytes_key_range_cache": 1 * MIB,
}
GROWTH_MAX = sum(BUDGETS.values()) + BUDGETS["queued_max_response_bytes"] + 100 * 10**6
"""The budgets, that of answers twice, and 100 MB."""
PARTITION_SIZE_MAX = 8_000
"""Bytes of the broker's memory for each partition, at most."""
STRETCH = 500
"""Frames that are sent again where a step was long."""
TELL_EVERY = 5_000
P99_MAX_S = 0.050
FRAMES_PER_LONG_STEP = 10_000
"""So many frames may come with one step of more than 10 ms that is not long again."""
FRIEND_PAUSE_S = 0.010


class Maker:
    """Makes frames from a seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.begin(0)

    def begin(self, first: int) -> None:
        """Make the frames from the number `first` on."""
        self.chance = random.Random(f"{self._seed} {first}")

    def frames(self) -> bytes:
        """One frame, or a few."""
        return b"".join(self.frame() for _ in range(self.chance.choice(TOGETHER)))

    def frame(self) -> bytes:
        """One frame, its size first."""
        while True:
            api = API[self.chance.choice([*API])]
            message = self._struct(api.request, 0)
            with contextlib.suppress(EncodeError):
                parts = encode_request(message, self.chance.choice(api.read), 7, "fuzz")
                return self._changed(b"".join(bytes(part) for part in parts))

    def _changed(self, frame: bytes) -> bytes:
        body = bytearray(frame[4:])
        for _ in range(self.chance.choice((0, 0, 1, 3))):
            place = self.chance.randrange(8, max(9, len(body)))
            match self.chance.randrange(4):
                case 0:
                    body[place : place + 1] = bytes([self.chance.randrange(256)])
                case 1:
                    body[place : place + 4] = self.chance.choice(LENGTHS)
                case 2:
                    del body[place:]
                case _:
                    body[place:place] = self.chance.randbytes(self.chance.choice((1, 5, 200)))
        return struct.pack(">i", len(body)) + body

    def _struct(self, declared: type, depth: int) -> Any:
        fields = schema_of(declared).fields
        return declared(**{name: self._value(field.type, field, depth) for name, field in fields.items()})

    def _value(self, kind: Type, field: Field | None, depth: int) -> Any:
        if field is not None and (field.default is None or field.nullable) and self.chance.random() < 0.2:
            return field.default
        match kind:
            case Fixed(code="?"):
                return self.chance.random() < 0.5
            case Fixed(code="d"):
                return self.chance.choice((0.0, -1.0, 1e308, float("nan")))
            case Fixed(code=code):
                bits = BITS[code]
                least = 0 if code in UNSIGNED else -(2**bits)
                number = self.chance.choice((*NUMBERS, least, 2**bits - 1))
                return max(least, number)
            case Uuid():
                return UUID(int=self.chance.choice((0, 1, 2**128 - 1)))
            case String():
                return self.chance.choice(NAMES)
            case Bytes():
                whole = bytes(batch([b"fuzz"]))
                return self.chance.choice((b"", b"\0" * 40, whole, whole[:-1], whole[:30] + b"\xff" * 40))
            case Array(of=of):
                count = self.chance.choice((0, 1, 1, 2, 5)) if depth < 2 else self.chance.choice((0, 1))
                values = [self._value(of, None, depth) for _ in range(count)]
                return values * MANY if depth == 0 and self.chance.random() < 0.002 else values
            case Nested(of=of):
                return self._struct(of, depth + 1)
        raise AssertionError(kind)


class Sender:
    """One connection: frames one after the other, each when the one before it is answered, or a few in one piece."""

    def __init__(self, port: int, next_frames: Callable[[], bytes]) -> None:
        self.judged = 0
        """Frames that were answered, that ended the connection, or that have no answer in time."""
        self.heard = time.monotonic()
        self._next_frames = next_frames
        self._received = bytearray()
        self._left = memoryview(b"")
        self._unanswered = 0
        self.socket = socket.create_connection(("127.0.0.1", port), 20)
        self.socket.setblocking(False)

    @property
    def events(self) -> int:
        return selectors.EVENT_READ | (selectors.EVENT_WRITE if self._left or not self._unanswered else 0)

    @property
    def busy(self) -> bool:
        """Whether a frame is not answered yet."""
        return self._unanswered > 0

    @property
    def sending(self) -> bool:
        """Whether a frame is not sent yet."""
        return bool(self._left)

    def go_on(self, *, begin: bool = True) -> bool:
        """Send and receive what is possible now; False at the end. `begin`: the next frames, if all are answered."""
        if begin and not self._left and not self._unanswered:
            frames = self._next_frames()
            self._left, self._unanswered = memoryview(frames), len(list(split(frames)))
        try:
            if self._left:
                self._left = self._left[self.socket.send(self._left) :]
            received = self.socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.heard = time.monotonic()
        self._received += received
        ends = list(split(self._received))
        self._unanswered -= len(ends)
        self.judged += len(ends)
        del self._received[: ends[-1] if ends else 0]
        return bool(received)

    def close(self) -> None:
        """Hang up: on a frame that has no answer in time, or that has ended the connection."""
        self.socket.close()
        self.judged += self._unanswered > 0


def split(data: bytes | bytearray) -> Iterator[int]:
    """Where the whole frames end."""
    at = 0
    while len(data) >= at + 4:
        (size,) = struct.unpack_from(">i", data, at)
        if len(data) < at + 4 + size:
            break
        at += 4 + size
        yield at


class Senders:
    """Many connections at a time."""

    def __init__(self, port: int, maker: Maker) -> None:
        self._port = port
        self._maker = maker
        self._selector = selectors.DefaultSelector()
        self._open: set[Sender] = set()
        self._ended = 0
        self.connections = 0

    @property
    def judged(self) -> int:
        """The frames of which the broker has made something."""
        return self._ended + sum(sender.judged for sender in self._open)

    def send(self, count: int) -> None:
        """Send frames until so many more are judged."""
        goal = self.judged + count
        while self.judged < goal:
            while len(self._open) < CONNECTIONS:
                self._begin()
            for key, _ in self._selector.select(PATIENCE_S):
                sender, before = key.data, key.data.events
                if not sender.go_on():
                    self._end(sender)
                elif sender.events != before:
                    self._selector.modify(sender.socket, sender.events, sender)
            self._end_silent()

    def settle(self) -> None:
        """Wait until all that was sent is judged."""
        while busy := [sender for sender in self._open if sender.busy]:
            sockets = {sender.socket: sender for sender in busy}
            writing = [sender.socket for sender in busy if sender.sending]
            readable, writable, _ = select.select([*sockets], writing, (), PATIENCE_S)
            for ready in {*readable, *writable}:
                if not sockets[ready].go_on(begin=False):
                    self._end(sockets[ready])
            self._end_silent()
        for sender in self._open:
            self._selector.modify(sender.socket, sender.events, sender)

    def _end_silent(self) -> None:
        """Hang up on frames that have no answer in time."""
        latest = time.monotonic() - PATIENCE_S
        for sender in [it for it in self._open if it.heard < latest]:
            self._end(sender)

    def _begin(self) -> None:
        sender = Sender(self._port, self._maker.frames)
        self.connections += 1
        self._open.add(sender)
        self._selector.register(sender.socket, sender.events, sender)

    def _end(self, sender: Sender) -> None:
        self._selector.unregister(sender.socket)
        self._open.discard(sender)
        sender.close()
        self._ended += sender.judged

    def close(self) -> None:
        """Hang up everywhere."""
        for sender in list(self._open):
            self._end(sender)
        self._selector.close()


def befriend(port: int, orders: Connection) -> None:
    """Produce until told to stop, in a process of its own; tell how long each request took, in seconds."""
    took: list[float] = []
    with WireClient(port, 60) as friend:
        while not orders.poll(FRIEND_PAUSE_S):
            began = time.monotonic()
            error = friend.produce(FRIEND, 0, batch([b"x"])).error_code
            took.append(time.monotonic() - began)
            assert error == 0, error
    orders.send(took)


@contextlib.contextmanager
def friend_of(broker: BrokerProcess) -> Iterator[list[float]]:
    """A client beside; the times of its requests are in the list at the end, in ascending order."""
    took: list[float] = []
    ours, theirs = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=befriend, args=(broker.port, theirs))
    process.start()
    try:
        yield took
        ours.send(None)
        assert ours.poll(60), "the client beside has failed"
        took += sorted(ours.recv())
        process.join(20)
    finally:
        process.kill()
        process.join()


class Figures(NamedTuple):
    """What a run has shown."""

    frames: int
    connections: int
    per_second: float
    p50_s: float
    """Of a request of the client beside."""
    p99_s: float
    grown: int
    """Resident bytes of the broker."""
    steps: Mapping[str, float]
    """Steps of more than 10 ms of processor time that were not long again, by the work that was done."""


def make_coordinators(client: WireClient) -> None:
    """Have the broker make the topics of its coordinators."""
    for kind in (0, 1):
        asked = FindCoordinatorRequest(key_type=kind, coordinator_keys=["g"])
        while client.call(asked).coordinators[0].error_code:
            time.sleep(0.05)


def check(
    data: Path, seed: int, count: int, told: Callable[[str], object] = lambda line: None, *, first_frame: int = 0
) -> Figures:
    """Send frames to a new broker, and see that only their senders are harmed."""
    began = time.monotonic()
    maker = Maker(seed)
    with running(data, **BUDGETS) as broker, contextlib.ExitStack() as stack:
        senders = stack.enter_context(contextlib.closing(Senders(broker.port, maker)))
        with WireClient(broker.port, 60) as client:
            client.create(FRIEND, retention_ms="-1")
            make_coordinators(client)
        senders.send(100)  # What is imported or made once does not count.
        senders.settle()
        before, steps = broker.resident_bytes(), Counter[str]()

        def send(first: int) -> None:
            maker.begin(first)
            senders.send(min(STRETCH, first_frame + count - first))
            senders.settle()

        with friend_of(broker) as took:
            for first in range(first_frame, first_frame + count, STRETCH):
                found, works = long_each_time(broker, partial(send, first))
                assert not works, f"seed {seed}: from frame {first} on a step is long each time: {works}"
                steps.update(found)
                assert broker.alive, (seed, first)
                assert not broker.said("error"), (seed, first, broker.said("error")[:3])
                assert not broker.said("raw"), (seed, first, broker.said("raw")[:30])
                grown = broker.resident_bytes() - before
                if grown >= GROWTH_MAX:  # Partitions have a budget of their own, a number of them.
                    told_of = broker.metrics()
                    partitions = told_of["kafka_server_replicamanager_partitioncount"]
                    assert grown < GROWTH_MAX + PARTITION_SIZE_MAX * partitions, (seed, first, grown, told_of)
                if (first + STRETCH) % TELL_EVERY == 0:
                    rate = (first - first_frame + STRETCH) / (time.monotonic() - began)
                    said = f"{first + STRETCH} frames, {rate:.0f} per second, {grown >> 20} MiB, {dict(steps)}"
                    told(f"seed {seed}: {said}")
        half, most = took[len(took) // 2], took[len(took) * 99 // 100]
        rate = count / (time.monotonic() - began)
        return Figures(count, senders.connections, rate, half, most, grown, steps)


def main() -> int:
    """Run for long, and say how it goes; the exit code is 1 if a bound was passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.frames", description=__doc__)
    parser.add_argument("--seed", type=int, default=int(time.strftime("%Y%m%d")))
    parser.add_argument("--first", type=int, default=0, help=f"a multiple of {STRETCH}")
    parser.add_argument("--count", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        told = partial(print, flush=True)
        found = check(Path(directory), given.seed, given.count, told, first_frame=given.first)
    print(f"seed {given.seed}: {found}")
    complaints = ["p99 above 50 ms"] * (found.p99_s > P99_MAX_S)
    if sum(found.steps.values()) * FRAMES_PER_LONG_STEP > given.count:
        complaints.append(f"long steps: {found.steps}")
    print(*complaints, sep="\n")
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
