"""The picture of a partition's load by key that `anabranch topic describe --load` draws, and even shares of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anabranch.machines.keyspace import Interval, cuts_by_load

if TYPE_CHECKING:
    from anabranch.base.ids import TopicPartition
    from anabranch.machines.partition.load import PartitionLoad

BARS = "▁▂▃▄▅▆▇█"


def load_lines(tp: TopicPartition, load: PartitionLoad, shares: int) -> list[str]:
    """Draw the load of a partition: a bar for each part of its keys, and `shares` ranges of keys of equal load."""
    head = f"{tp.topic} partition {tp.partition}"
    if not load.observed_ms:
        return [f"{head}: not observed yet; ask again in a few seconds", ""]
    records, sizes = sum(load.records), sum(load.bytes)
    observed = f"observed for {load.observed_ms / 1000:.0f} s"
    lines = [f"{head}: {records:,.1f} records/s, {_rate(sizes)}, {observed}"]
    lines += [f"  keys {load.held.start} to {load.held.end}, in {len(load.bytes)} parts"]
    lines += [f"  {bars(load.bytes)}"]
    if not sizes:
        return [*lines, "  nothing was appended lately", ""]
    lines += [f"  the highest bar is {_rate(max(load.bytes))}, {100 * max(load.bytes) / sizes:.1f} % of all"]
    lines += [f"  {shares} shares of equal load (anabranch consume {tp.topic} --share START-END):"]
    lines += [f"    {start}-{end}  {100 * part:.1f} %" for (start, end), part in shares_of(load, shares)]
    return [*lines, ""]


def load_as_json(tp: TopicPartition, load: PartitionLoad, shares: int) -> dict[str, Any]:
    """The same for programs."""
    return {
        "topic": tp.topic,
        "partition": tp.partition,
        "key_range": [*load.held] if load.observed_ms else None,
        "observed_ms": load.observed_ms,
        "records_per_second": [*load.records],
        "bytes_per_second": [*load.bytes],
        "shares": [{"start": start, "end": end, "load": part} for (start, end), part in shares_of(load, shares)],
    }


def shares_of(load: PartitionLoad, shares: int) -> list[tuple[Interval, float]]:
    """Shares of equal load, each with its part of the load by bytes; none before the partition was observed."""
    if not load.observed_ms:
        return []
    total = sum(load.bytes)
    size = load.held.size // len(load.bytes)
    parts = [
        Interval(load.held.start + place * size, load.held.start + (place + 1) * size - 1)
        for place in range(len(load.bytes))
    ]
    found: list[tuple[Interval, float]] = []
    for share in cuts_by_load(load.held, load.bytes, shares):
        common = ((part.overlap(share), weight) for part, weight in zip(parts, load.bytes, strict=True))
        carried = sum(weight * both.size / size for both, weight in common if both is not None)
        found.append((share, carried / total if total else 0.0))
    return found


def bars(values: tuple[float, ...]) -> str:
    """One character for each value, the largest one full height; a blank for nothing."""
    top = max(values, default=0.0)
    return "".join(BARS[min(int(value / top * len(BARS)), len(BARS) - 1)] if value else " " for value in values)


def _rate(size: float) -> str:
    for unit in ("B/s", "kB/s", "MB/s"):
        if size < 1000:
            return f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB/s"
