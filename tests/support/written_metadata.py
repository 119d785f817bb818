"""Nodes that are set in a file of metadata that no broker uses."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from anabranch.storage.metadata.table import Row, read_tree, write_tree


def write_nodes(path: Path, nodes: Mapping[str, bytes]) -> None:
    """Set nodes, or make them, in a file of metadata."""
    found = read_tree(path)
    assert found is not None and not found.damaged
    rows = found.sound | {
        name: Row(name, found.sound[name].version if name in found.sound else 0, 0, None, data)
        for name, data in nodes.items()
    }
    made = path.with_name(f"{path.name}.made")
    write_tree(made, [rows[name] for name in sorted(rows)])
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    made.replace(path)
