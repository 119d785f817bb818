"""The entry point: `serve` starts the broker at once, every other command goes through the whole command line."""

from __future__ import annotations

import sys


def main() -> None:
    """Run `anabranch`."""
    if sys.argv[1:2] == ["serve"]:
        from anabranch.cli.broker import options_of, serve_broker

        options = options_of(sys.argv[1:])
        if options is not None:
            sys.exit(serve_broker(options))
    from anabranch.cli.main import main as whole

    whole()
