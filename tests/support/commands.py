"""Commands of `anabranch` within this process: a process for each would take most of the time to start."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from typing import Any
from unittest import mock

from anabranch.cli.main import main


def run(address: str, *words: object, code: int = 0, stdin: bytes = b"") -> tuple[str, str]:
    """Run a command as its `main` does, against the broker at `address`; standard output and standard error."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    ended = 0
    with (
        mock.patch.object(sys, "argv", ["anabranch", *map(str, words)]),
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), "utf-8")),
        mock.patch.dict(os.environ, {"ANABRANCH_BOOTSTRAP_SERVERS": address}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            ended = int(end.code or 0)
    printed, errors = (stream.buffer.getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    assert ended == code, (ended, printed[-2000:], errors[-2000:])
    return printed, errors


def document(address: str, *words: object) -> Any:
    """Run a command with --json; the document that it prints."""
    return json.loads(run(address, *words, "--json")[0])
