"""The distribution of test files to workers when there are five or more: all but the first four work beside these.

Tests of brokers spend most of their time waiting: four at once leave two thirds of two cores idle. What measures time
measures the processor's. The other workers take tests that only compute, at a low priority: this uses the idle time
and delays the first four little. Not at the lowest: where these leave no time, that is a hundredth of a processor, and
whatever waits for a process in such a test waits in vain. Workers without files of their own take from the others'.

Spark, and the clients of all libraries, take long to start, and live as long as the worker: each is started by one.
"""

from __future__ import annotations

import os

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

COMPUTING = ("tests/unit/", "tests/properties/", "tests/simulation/")
"""Where the tests are that start no servers, or as good as none."""
FIRST = {
    "gw0": "tests/spark/",
    "gw1": "tests/conformance/",
    **dict.fromkeys(("gw2", "gw3"), "tests/end_to_end/"),
}
"""The workers that take tests with servers, and where those are that each begins with."""
WORKERS_MIN = len(FIRST) + 1
NICENESS = 10
"""A tenth of the others' share of a processor that all want."""


def step_back() -> None:
    """In all but the first of enough workers, let these go first."""
    count = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if count >= WORKERS_MIN and os.environ["PYTEST_XDIST_WORKER"] not in FIRST:
        os.nice(NICENESS)


class BesideScheduling(LoadFileScheduling):
    """As `--dist loadfile`, but all workers behind `FIRST` take files of `COMPUTING` alone, and those these last."""

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
        if node.gateway.id not in FIRST:
            return next(computing, None)
        own = (scope for scope in self.workqueue if scope.startswith(FIRST[node.gateway.id]))
        common = (scope for scope in self.workqueue if not scope.startswith((*COMPUTING, *FIRST.values())))
        others = (scope for scope in self.workqueue if not scope.startswith(COMPUTING))
        return next((scope for kind in (own, common, others, computing) for scope in kind), None)
