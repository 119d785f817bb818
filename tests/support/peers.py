"""The tests' dependencies outside of Python packages: `python -m tests.support.peers` fetches all of them.

Tests fetch a missing dependency on demand; this command fetches them ahead of checks without a network.
"""

from __future__ import annotations

from benchmarks.peers.artifacts import KAFKA_LOCK, fetch
from tests.support import javascript
from tests.support.kcat import kcat

if __name__ == "__main__":
    javascript.install()
    kcat()
    fetch(KAFKA_LOCK)
