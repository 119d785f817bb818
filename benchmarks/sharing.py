"""Shares of a partition: the kernel that filters, and consumers of shares against those that drop others' records.

Records have a key of 10 bytes and random values, in batches of 16 KiB; nothing is compressed. What the broker costs is
its processor time; a gigabyte is useful once, however many consumers were sent it.
"""

from __future__ import annotations

import multiprocessing
import random
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Any

import numpy as np

from anabranch.client import sync
from anabranch.machines.keyspace import SPACE, cuts
from anabranch.records.arrow.encode import encode_partitioned
from anabranch.records.filtering import Cell, Scatter, Selection, Spread
from anabranch.runtime import native
from benchmarks.harness import Bar, Result, Round, Scale, compare
from benchmarks.peers.anabranch import Anabranch
from benchmarks.peers.process import free_port
from benchmarks.records import BATCH_SIZE, MIB, columns_of, gigabytes

BLOCK_SIZE = 4 * 1024 * 1024
"""What a broker filters at a time where four readers ask for 1 MiB each, as clients do, or sixteen for 256 KiB."""
COPY_BARS = {100: 0.3, 1024: 0.4}
SHARERS = 4
TOPIC, WARM_UP = "shared", "warm-up"
KEYS = 100_000
FETCH_WAIT_S = 0.7
"""More than a fetch waits at most."""
GB = 1e9


def _log(size: int, value_size: int) -> list[memoryview]:
    """A log of about `size` bytes, in the blocks of whole batches that a broker filters at a time."""
    batches = [
        bytes(each.data) for each in encode_partitioned(*columns_of(size, value_size), batch_size_max=BATCH_SIZE)
    ]
    per_block = max(1, BLOCK_SIZE // len(batches[0]))
    return [memoryview(b"".join(batches[at : at + per_block])) for at in range(0, len(batches), per_block)]


def _scatter() -> Scatter:
    if native.load() is None:
        native.build()
    found = native.load()
    assert found is not None
    return found.scatter


def _even(count: int) -> Selection:
    cells = (Cell(start, end, place) for place, (start, end) in enumerate(cuts(SPACE, count)))
    return Selection(tuple(cells), count)


def _scattered(scatter: Scatter, blocks: list[memoryview], selection: Selection) -> int:
    """Scatter all blocks; the records."""
    run = partial(scatter, record_size_max=64 * MIB, work_size_max=64 * MIB)
    return sum(sum(run(block, selection, Spread(1, SPACE)).records) for block in blocks)


def kernel(scale: Scale) -> list[Result]:
    """Scattering a log into four shares, against a plain copy of its bytes."""
    results: list[Result] = []
    scatter, seconds = _scatter(), scale.choose(0.5, 0.0)
    for value_size, bound in COPY_BARS.items():
        blocks = _log(scale.choose(256 * MIB, MIB), value_size)
        size = sum(map(len, blocks))
        source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
        sides: dict[str, Round] = {
            "anabranch": partial(gigabytes, partial(_scattered, scatter, blocks, _even(SHARERS)), size, seconds),
            "plain copy": partial(gigabytes, partial(np.copyto, target, source), size, seconds),
        }
        what = f"{size >> 20} MiB of batches with values of {value_size} bytes, scattered in blocks of 4 MiB"
        bars = [Bar("bytes", "GB/s", "more", bound)]
        results += compare(f"sharing.kernel-{value_size}", what=what, sides=sides, bars=bars, scale=scale)
    return results


def ranges(scale: Scale) -> list[Result]:
    """Scattering into sixteen ranges, against all into one."""
    return _scattering("ranges", {"16 ranges": 16, "1 range": 1}, 1.5, scale)


def sharers(scale: Scale) -> list[Result]:
    """Scattering to four sharers, against to one that is given as much."""
    return _scattering("sharers", {"4 sharers": SHARERS, "1 sharer": 1}, 1.3, scale)


def _scattering(name: str, counts: Mapping[str, int], bound: float, scale: Scale) -> list[Result]:
    """Processor time of scattering all records into as many equal ranges as each side says."""
    results: list[Result] = []
    scatter, seconds = _scatter(), scale.choose(0.5, 0.0)
    for value_size in COPY_BARS:
        blocks = _log(scale.choose(32 * MIB, MIB), value_size)
        size = sum(map(len, blocks))

        def cost(count: int, blocks: list[memoryview] = blocks, size: int = size) -> Mapping[str, float]:
            found = gigabytes(partial(_scattered, scatter, blocks, _even(count)), size, seconds)
            return {"cpu": 1 / found["bytes"]}

        sides: dict[str, Round] = {side: partial(cost, count) for side, count in counts.items()}
        what = f"{size >> 20} MiB of batches with values of {value_size} bytes in blocks of 4 MiB, all wanted"
        bars = [Bar("cpu", "s/GB", "less", bound)]
        results += compare(f"sharing.{name}-{value_size}", what=what, sides=sides, bars=bars, scale=scale)
    return results


def _fill(address: str, records: int, value_size: int) -> None:
    chance = random.Random(5)
    with sync.Producer(address, linger_ms=20, acks=1) as producer, sync.Admin(address) as admin:
        configs = {"accept.range.fetch": "true", "reserve.message.value.range.fetch": "true"}
        admin.create_topics([TOPIC, WARM_UP], partitions=1, configs=configs)
        for topic, count in ((TOPIC, records), (WARM_UP, 1_000)):
            for _ in range(count):
                producer.send(topic, chance.randbytes(value_size), key=b"key-%06d" % chance.randrange(KEYS))


def _read(address: str, share: tuple[int, int], *, shares: bool, records: int, begin: Barrier, counts: Any) -> None:
    """Read a share of the topic and count its records: the broker drops the others, or this consumer does."""
    with sync.Consumer(address, auto_offset_reset="earliest", fetch_max_bytes=8 * MIB) as consumer:
        columns = ("offset", "key", "value")
        for topic in (WARM_UP, TOPIC):  # Connect, and load the kernels; then nothing of the topic is fetched ahead.
            if topic == TOPIC:
                consumer.assign({})
                time.sleep(FETCH_WAIT_S)  # What waits for more of the other topic holds up the next fetch.
                begin.wait()  # All are connected: what that costs the broker is no part of the figure.
                begin.wait()
            consumer.assign({(topic, 0): [share]} if shares else [(topic, 0)])
            if topic == WARM_UP:
                consumer.poll_arrow(5.0, columns=columns, key_range=None if shares else share)
        count = 0
        while consumer.position(TOPIC, 0) < records:
            count += consumer.poll_arrow(5.0, columns=columns, key_range=None if shares else share).num_rows
        counts.put(count)


def _consumed(
    broker: Anabranch, metrics: str, records: int, value_size: int, wanted: Sequence[tuple[int, int]], *, shares: bool
) -> Mapping[str, float]:
    """Read the topic by as many processes as there are shares wanted."""
    context = multiprocessing.get_context("spawn")
    begin, counts = context.Barrier(len(wanted) + 1), context.Queue()
    readers = [
        context.Process(
            target=_read,
            args=(broker.address, share),
            kwargs={"shares": shares, "records": records, "begin": begin, "counts": counts},
        )
        for share in wanted
    ]
    for reader in readers:
        reader.start()
    begin.wait()
    filtering_s, cpu_s = _filtering_s(metrics), broker.usage().cpu_s  # To ask for metrics costs processor time, too.
    begin.wait()
    began = time.perf_counter()
    found = sum(counts.get(timeout=600) for _ in readers)
    took_s = time.perf_counter() - began
    useful_gb = found * (value_size + 10) / GB
    figures = {
        "records": found / took_s,
        "cpu_per_gb": (broker.usage().cpu_s - cpu_s) / useful_gb,
        "filtering": _filtering_s(metrics) - filtering_s,
    }
    for reader in readers:
        reader.join()
    if len(wanted) == SHARERS:
        assert found == records, (found, records)
    return figures


def _filtering_s(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith("anabranch_filter_cpu_seconds_total"))


def _with_broker(scale: Scale, measure: Callable[[Callable[..., Round]], list[Result]]) -> list[Result]:
    records, value_size = scale.choose(1_000_000, 2_000), 1024
    metrics = f"127.0.0.1:{free_port()}"
    with Anabranch(settings={"durability": "os", "metrics.listener": metrics}) as broker:
        _fill(broker.address, records, value_size)
        return measure(partial(partial, _consumed, broker, metrics, records, value_size))


def consumers(scale: Scale) -> list[Result]:
    """Four consumers that share a partition, against four that each fetch everything and drop what is not theirs."""

    def measure(consumed: Callable[..., Round]) -> list[Result]:
        four = cuts(SPACE, SHARERS)
        sides = {"shares": consumed(four, shares=True), "dropping": consumed(four, shares=False)}
        bars = [Bar("records", "records/s", "more", 1.5), Bar("cpu_per_gb", "s/GB", "less", 0.7)]
        what = "four processes read a partition of records with 1 KiB values into Arrow tables; the broker's CPU time"
        return compare("sharing.consumers", what=what, sides=sides, bars=bars, scale=scale)

    return _with_broker(scale, measure)


def one_pass(scale: Scale) -> list[Result]:
    """What filtering costs for four sharers, against for one of them."""

    def measure(consumed: Callable[..., Round]) -> list[Result]:
        four = cuts(SPACE, SHARERS)
        sides = {"four sharers": consumed(four, shares=True), "one sharer": consumed(four[:1], shares=True)}
        what = "processor time of the passes over a partition of records with 1 KiB values, read from its begin"
        bars = [Bar("filtering", "s", "less", 1.3)]
        return compare("sharing.one-pass", what=what, sides=sides, bars=bars, scale=scale)

    return _with_broker(scale, measure)


BENCHMARKS = {"kernel": kernel, "ranges": ranges, "sharers": sharers, "consumers": consumers, "one-pass": one_pass}
