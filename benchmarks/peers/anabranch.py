"""Anabranch's own broker as a process, as a user starts it: `anabranch serve`.

with Anabranch(settings={"durability": "os"}) as broker:
    ... broker.address ...
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from anabranch import __version__
from benchmarks.peers.process import HOST, ServerProcess

SOURCE = Path(__file__).resolve().parents[2] / "src"


class Anabranch(ServerProcess):
    """One Anabranch broker."""

    def __init__(
        self,
        *,
        port: int | None = None,
        directory: Path | None = None,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("anabranch", port=port, directory=directory)
        self._settings = dict(settings or {})

    @property
    def version(self) -> str:
        return f"Anabranch {__version__}"

    @property
    def data(self) -> Path:
        """The broker's data directory."""
        return self.directory / "data"

    def command(self) -> Sequence[str]:
        settings = {
            "listeners": f"{HOST}:{self.port}",
            "log.dirs": str(self.data),
            "metrics.listener": "",
            **self._settings,
        }
        chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
        return [sys.executable, "-m", "anabranch.cli", "serve", *chosen]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH", "")]))}
