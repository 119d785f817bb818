"""The distribution of test files to workers when there are three or more: the last one works beside the others.

Tests of brokers spend half of their time waiting, and some measure time. Two at once leave a third of two cores idle,
and three disturb each other. So the last worker takes tests that only compute, at the lowest priority: this uses the
idle time and delays no other worker. Workers without files of their own take from the last one's.
"""

from __future__ import annotations

import os

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

COMPUTING = ("tests/unit/", "tests/properties/", "tests/simulation/")
"""Where the tests are that start no servers, or as good as none."""
WORKERS_MIN = 3


def step_back() -> None:
    """In the last of enough workers, let all others go first."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count >= WORKERS_MIN and os.environ["PYTEST_XDIST_WORKER"] == _name(count - 1):
        os.nice(19)


def _name(number: int) -> str:
    return f"gw{number}"


class BesideScheduling(LoadFileScheduling):
    """As `--dist loadfile`, but the last worker takes files of `COMPUTING` alone, and the others these last."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        scope = self._next(node)
        if scope is None:
            node.shutdown()
        else:
            self.workqueue.move_to_end(scope, last=False)
            super()._assign_work_unit(node)

    def _next(self, node: WorkerController) -> str | None:
        """Return the next file for a worker, if any."""
        computing = (scope for scope in self.workqueue if scope.startswith(COMPUTING))
        if node.gateway.id == _name(self.numnodes - 1):
            return next(computing, None)
        others = (scope for scope in self.workqueue if not scope.startswith(COMPUTING))
        return next(others, None) or next(computing, None)
