"""When Spark planned a micro-batch: what tells a replay from a micro-batch of the same number that is planned anew.

Spark shows a sink the number of a micro-batch and its rows, not its offsets. Its checkpoint has them: `offsets/N` is
written once, when micro-batch N is planned, and a replay reads it. The second line of it has the time of the plan, in
ms; `convert-checkpoint` keeps it. Micro-batches that were planned at the same time are the same micro-batch.

Only a checkpoint in a file system of this machine is read, and only if it is that of the query: where Spark takes the
same path for one of another file system, a directory of that name may be here, too. Otherwise nothing is known.
"""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import urlsplit

HEADER = 1
"""The line of a file in `offsets` that is of the micro-batch as a whole, after that of the version."""


def planned_ms(checkpoint: str | None, query: str, batch_id: int) -> int | None:
    """Return when a micro-batch of a query was planned, by its checkpoint; None where that cannot be read."""
    if checkpoint is None:
        return None
    place = urlsplit(checkpoint)
    if place.scheme not in ("", "file") or place.netloc:
        return None
    path = Path(checkpoint if not place.scheme else place.path)
    try:
        if json.loads((path / "metadata").read_text(encoding="utf-8"))["id"] != query:
            return None
        header = (path / "offsets" / str(batch_id)).read_text(encoding="utf-8").splitlines()[HEADER]
        found = json.loads(header)["batchTimestampMs"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return found if isinstance(found, int) and found > 0 else None
