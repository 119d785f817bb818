"""Checkpoints of Spark's own Kafka source, made into checkpoints of this one: the query goes on where it was.

Spark keeps one file for each micro-batch in `offsets`: a version, a line of metadata, and for each source a line with
the offset that the micro-batch reached, `-` for a source that had none. The Kafka source writes the next offset of each
partition, `{"flights":{"0":23,"1":40}}`, this one also which topic it was (`plan.offsets_to_json`). State, commits and
the rest are the same for both. Nothing is changed in place: a new directory is made, complete or not at all.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabranch.base.errors import AnabranchError
from anabranch.spark.plan import TopicOffsets, offsets_to_json

VERSION = "v1"
HEADER_LINES = 2
NO_OFFSET = "-"
KafkaOffsets = Mapping[str, Mapping[int, int]]
"""Topic to partition to the next offset."""


class CheckpointError(AnabranchError):
    """A checkpoint that cannot be converted; the message says why."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint with sources of the Kafka format."""

    path: Path
    batches: Mapping[int, Sequence[str]]
    """The lines of `offsets` by micro-batch."""
    sources: tuple[int, ...]
    """The numbers of the sources that are Spark's Kafka source."""
    unfinished: int | None
    """The micro-batch that was planned and not committed, if there is one: it is run again with the same offsets."""

    @property
    def positions(self) -> KafkaOffsets:
        """Where the query stands in each topic, by all sources together: the offsets of the newest micro-batch."""
        found: dict[str, dict[int, int]] = {}
        for source in self.sources:
            offsets = kafka_offsets(self.batches[max(self.batches)][HEADER_LINES + source]) or {}
            for topic, partitions in offsets.items():
                found.setdefault(topic, {}).update(partitions)
        return found


def kafka_offsets(line: str) -> KafkaOffsets | None:
    """Parse an offset of Spark's Kafka source; None for one of another source."""
    try:
        return kafka_offsets_of(json.loads(line))
    except ValueError:
        return None


def kafka_offsets_of(value: Any) -> KafkaOffsets | None:
    """Return the offsets in the JSON of Spark's Kafka source; None for that of another source."""
    if not isinstance(value, dict) or not value:
        return None
    for partitions in value.values():
        if not isinstance(partitions, dict):
            return None
        if not all(name.isdecimal() and type(offset) is int for name, offset in partitions.items()):
            return None
    return {topic: {int(name): offset for name, offset in value[topic].items()} for topic in value}


def read(path: Path) -> Checkpoint:
    """Read a checkpoint. Raises `CheckpointError` if it is none of Spark's Kafka source."""
    if not (path / "offsets").is_dir():
        raise CheckpointError(
            f"{path} is not the checkpoint of a streaming query: it has no directory offsets. "
            "Copy the checkpoint to this machine if it is in another file system."
        )
    batches = {
        int(file.name): file.read_text(encoding="utf-8").split("\n")
        for file in sorted((path / "offsets").iterdir())
        if file.name.isdecimal()
    }
    commits = path / "commits"
    committed = [int(file.name) for file in commits.iterdir() if file.name.isdecimal()] if commits.is_dir() else []
    if not batches or not committed:
        raise CheckpointError(
            f"No micro-batch of {path} was finished: start the query anew with format anabranch, or once more with its "
            "own format until one is."
        )
    for batch, lines in batches.items():
        if lines[0] != VERSION:
            raise CheckpointError(f"{path}/offsets/{batch} has version {lines[0]!r}; {VERSION} can be converted.")
    newest = batches[max(batches)][HEADER_LINES:]
    sources = tuple(number for number, line in enumerate(newest) if kafka_offsets(line) is not None)
    if not sources:
        raise CheckpointError(f"No source of {path} is Spark's Kafka source: nothing needs to be converted.")
    last = max(batches)
    return Checkpoint(path, batches, sources, None if max(committed) >= last else last)


def converted(
    lines: Sequence[str], sources: Sequence[int], topic_ids: Mapping[str, str], layouts: Mapping[str, int]
) -> list[str]:
    """Convert a micro-batch's lines: the offsets of some sources. `topic_ids` in hexadecimal digits."""
    made = list(lines)
    for source in sources:
        place = HEADER_LINES + source
        offsets = kafka_offsets(made[place]) if place < len(made) else None
        if offsets is not None:
            known = {
                topic: TopicOffsets(partitions, topic_ids.get(topic, ""), layouts.get(topic, 0))
                for topic, partitions in offsets.items()
            }
            made[place] = json.dumps(offsets_to_json(known))
    return made


def write(checkpoint: Checkpoint, target: Path, topic_ids: Mapping[str, str], layouts: Mapping[str, int]) -> None:
    """Write the converted checkpoint to a directory that does not exist yet. Raises `CheckpointError`, `OSError`."""
    if target.exists():
        raise CheckpointError(f"{target} exists already; name a new directory.")
    scratch = target.with_name(f".{target.name}.unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(checkpoint.path, scratch)
    for batch, lines in checkpoint.batches.items():
        text = "\n".join(converted(lines, checkpoint.sources, topic_ids, layouts))
        (scratch / "offsets" / str(batch)).write_text(text, encoding="utf-8")
        # Hadoop's checksum of what was there before.
        (scratch / "offsets" / f".{batch}.crc").unlink(missing_ok=True)
    scratch.rename(target)
