"""What the tests need of others and Python's packages do not bring: `python -m tests.support.peers` fetches all of it.

Whoever needs a thing fetches it where it is missing; here it is done before, beside checks that need no network.
"""

from __future__ import annotations

from benchmarks.peers.artifacts import KAFKA_LOCK, fetch
from tests.support import javascript
from tests.support.kcat import kcat

if __name__ == "__main__":
    javascript.install()
    kcat()
    fetch(KAFKA_LOCK)
