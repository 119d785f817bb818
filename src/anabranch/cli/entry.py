"""The entry point: `serve` starts the broker at once, every other command goes through the whole command line."""

from __future__ import annotations

import logging
import os
import sys
from typing import NoReturn


def main() -> None:
    """Run `anabranch`."""
    if sys.argv[1:2] == ["serve"]:
        from anabranch.cli.broker import options_of, serve_broker

        options = options_of(sys.argv[1:])
        if options is not None:
            _end(serve_broker(options))
    from anabranch.cli.main import main as whole

    whole()


def _end(code: int) -> NoReturn:
    """End the process of a broker; at once if all is closed, as it takes seconds to free 100,000 partitions."""
    if code:
        sys.exit(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
