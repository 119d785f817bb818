"""Hostile frames: requests of every API, whole, with odd values, or changed at random, sent to a real broker.

Each frame is made from the declaration of a request that the broker serves, with values that are ordinary, extreme or
empty; half of them are then changed: bytes flipped, lengths made huge, ends cut off. A well-behaved client produces
beside them. A seed makes the same frames again: `python -m tests.fuzz.frames --seed 7 --count 1000000`.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import socket
import struct
import tempfile
import time
from pathlib import Path
from typing import Any
from uuid import UUID

from anabranch.codec import EncodeError, schema_of
from anabranch.codec.types import Array, Bytes, Field, Fixed, Nested, String, Type, Uuid
from anabranch.protocol.frames import encode_request
from anabranch.protocol.registry import API
from tests.support.broker import BrokerProcess, running
from tests.support.wire import WireClient, batch

FRIEND = "friend"
NAMES = ("t", "u", "", "g", "x" * 300, "__consumer_offsets", "a/b", "é", "1", "range", "consumer")
NUMBERS = (0, 1, 2, 3, -1, -2, 100)
BITS = {"b": 7, "h": 15, "i": 31, "q": 63, "H": 16, "I": 32}
UNSIGNED = "HI"
PER_CONNECTION = 4
LENGTHS = (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0")
SERVED = [key for key, api in API.items() if api.served]
GROWTH_MAX = 200 << 20


class Maker:
    """Makes frames from a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def frame(self) -> bytes:
        """One frame, its size first."""
        while True:
            api = API[self.chance.choice(SERVED)]
            message = self._struct(api.request, 0)
            with contextlib.suppress(EncodeError):
                parts = encode_request(message, self.chance.choice(api.served), 7, "fuzz")
                return self._changed(b"".join(bytes(part) for part in parts))

    def _changed(self, frame: bytes) -> bytes:
        body = bytearray(frame[4:])
        for _ in range(self.chance.choice((0, 0, 1, 3))):
            place = self.chance.randrange(8, max(9, len(body)))
            match self.chance.randrange(4):
                case 0:
                    body[place : place + 1] = bytes([self.chance.randrange(256)])
                case 1:
                    body[place : place + 4] = self.chance.choice(
                        (b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"\x80\0\0\0")
                    )
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
                return [self._value(of, None, depth) for _ in range(count)]
            case Nested(of=of):
                return self._struct(of, depth + 1)
        raise AssertionError(kind)


class Run:
    """One run against one broker."""

    def __init__(self, broker: BrokerProcess, seed: int) -> None:
        self.broker = broker
        self.maker = Maker(seed)
        self.took: list[float] = []

    def send(self, count: int) -> None:
        """Send so many frames, with the client beside them."""
        with WireClient(self.broker.port, 60) as friend:
            for _ in range(0, count, PER_CONNECTION):
                self._one_connection()
                began = time.monotonic()
                assert friend.produce(FRIEND, 0, batch([b"x"])).error_code == 0
                self.took.append(time.monotonic() - began)

    def _one_connection(self) -> None:
        frames = b"".join(self.maker.frame() for _ in range(PER_CONNECTION))
        address = ("127.0.0.1", self.broker.port)
        with socket.create_connection(address, 20) as hostile, contextlib.suppress(OSError):
            hostile.sendall(frames)
            hostile.settimeout(0.02)
            while hostile.recv(1 << 16):
                pass


def check(data: Path, seed: int, count: int) -> dict[str, float]:
    """Send frames to a new broker, and see that only their senders are harmed; figures of the client beside."""
    with running(data) as broker:
        run = Run(broker, seed)
        with WireClient(broker.port) as friend:
            friend.create(FRIEND)
        run.send(100)
        before = broker.resident_bytes()
        run.send(count)
        assert broker.alive
        assert not broker.said("error"), (seed, broker.said("error")[:3])
        grown = broker.resident_bytes() - before
        assert grown < GROWTH_MAX, (seed, grown)
        steps = {name: took for name, took in broker.metrics().items() if "step_processor_seconds_max" in name}
        took = sorted(run.took)
        return {"p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100], "grown": grown, **steps}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, default=1_000_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        print(given.seed, check(Path(directory), given.seed, given.count))
