"""`anabranch convert-checkpoint`: take over a streaming query of Spark's own Kafka source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from anabranch.cli.output import DEFAULT_SERVERS, AsJson, Servers, note, print_json


def convert_checkpoint(
    source: Annotated[str, typer.Argument(metavar="OLD", help="The checkpoint of a query that is stopped.")],
    target: Annotated[str, typer.Argument(metavar="NEW", help="A directory to make; OLD stays as it is.")],
    servers: Servers = DEFAULT_SERVERS,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of Spark's Kafka source one of the format anabranch: the query goes on where it was."""
    from anabranch.client.sync import Admin
    from anabranch.spark import checkpoint

    found = checkpoint.read(Path(source.removeprefix("file:")))
    with Admin(bootstrap_servers=servers) as admin:
        topics = admin.describe_topics(sorted(found.positions))
    topic_ids = {name: topic.info.topic_id.hex for name, topic in topics.items()}
    layouts = {name: topic.lineage.current + 1 for name, topic in topics.items()}
    checkpoint.write(found, Path(target.removeprefix("file:")), topic_ids, layouts)
    gone = {
        name: sorted(partitions.keys() - topics[name].info.partitions.keys())
        for name, partitions in found.positions.items()
    }
    if as_json:
        print_json(
            {
                "topics": sorted(topics),
                "micro_batches": len(found.batches),
                "unfinished": found.unfinished,
                "removed": {name: partitions for name, partitions in gone.items() if partitions},
            }
        )
        return
    for name, partitions in gone.items():
        for partition in partitions:
            note(f"{name}-{partition} does not exist any more: what the query had not read of it is lost.")
    if found.unfinished is not None:
        note(f"Micro-batch {found.unfinished} was not finished: it will be run again, with the offsets of its plan.")
    typer.echo(f"Converted {', '.join(sorted(topics))}; micro-batches: {len(found.batches)}.")
    note(f'Start the query with format("anabranch") and checkpointLocation {target}.')
