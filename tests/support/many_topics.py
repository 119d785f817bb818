"""Metadata of very many topics, written at once: to have a broker make 50,000 topics takes minutes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from uuid import UUID

from anabranch.machines.controller import nodes
from anabranch.machines.controller.layouts import Layout
from anabranch.machines.controller.nodes import PartitionNode, PutNode, Topic
from anabranch.storage.directory import METADATA_FILE
from anabranch.storage.metadata.embedded import EmbeddedMetadataStore
from tests.support.written_metadata import write_nodes

NODE_ID = 1
"""The broker that leads all partitions: the default of `node.id`."""


def write_topics(data: Path, names: Sequence[str]) -> None:
    """Write the metadata of topics of one partition, which have no records, into a new data directory."""
    data.mkdir(parents=True, exist_ok=True)
    path = data / METADATA_FILE

    async def made() -> None:
        await (await EmbeddedMetadataStore.open(path)).close()

    asyncio.run(made())
    write_nodes(path, {node: data for number, name in enumerate(names, 1) for node, data in _nodes(number, name)})


def _nodes(number: int, name: str) -> Iterator[tuple[str, bytes]]:
    """The nodes of a topic."""
    topic = Topic(name, UUID(int=number << 64), {0: (NODE_ID,)}, 1, (Layout(0, 1),))
    led = PartitionNode(leader=NODE_ID, leader_epoch=0, isr=(NODE_ID,), controller_epoch=1)
    yield f"{nodes.topic_path(name)}/partitions", b""
    yield f"{nodes.topic_path(name)}/partitions/0", b""
    records: tuple[PutNode, ...] = (
        nodes.put_topic(topic),
        nodes.put_partition(name, 0, led),
        nodes.put_configs(name, {}),
    )
    for record in records:
        yield record.path, record.data
