"""In which order files are tested: at random, but for those that take longest, which come first.

Files are shared out among the workers as these become free (`--dist loadfile`), so one that took long and came last
would keep everybody waiting. Java is told not to compile for a long life: its processes here live for seconds. What
there is when all tests are known is set aside: each collection of all garbage would look at it for most of a second.
Examples have no time limit of their own: a low priority makes any of them slow.
"""

from __future__ import annotations

import gc
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

LONGEST = (
    "spark/test_source.py",
    "soak/test_soak.py",
    "end_to_end/test_order_at_the_edge.py",
    "crash/test_loop.py",
    "conformance/test_groups.py",
    "end_to_end/test_cli.py",
    "end_to_end/test_compacted_topics.py",
    "end_to_end/test_broker_benchmarks.py",
    "end_to_end/test_parallel_handlers.py",
    "conformance/test_group_traps.py",
    "end_to_end/test_shares_in_groups.py",
    "end_to_end/test_clients_that_hang_up.py",
    "simulation/test_controller.py",
    "simulation/test_groups.py",
    "spark/test_demo.py",
    "spark/test_sink.py",
    "end_to_end/test_gates_by_time.py",
    "conformance/test_group_failures.py",
    "end_to_end/test_order_through_resizes.py",
    "end_to_end/test_stock_groups.py",
    "end_to_end/test_gates_between_members.py",
    "simulation/test_groups_done_wrong.py",
    "end_to_end/test_shares_under_change.py",
    "conformance/test_produce_and_fetch.py",
    "end_to_end/test_groups.py",
    "end_to_end/test_transactions.py",
    "end_to_end/test_loop_steps.py",
    "end_to_end/test_hostile_batches.py",
    "end_to_end/test_shares.py",
    "end_to_end/test_cooperative_fetch.py",
    "end_to_end/test_hostile_peers.py",
    "properties/test_plan.py",
    "unit/runtime/test_collector.py",
    "conformance/test_client.py",
    "end_to_end/test_commits_by_range.py",
    "properties/test_codec_against_kio.py",
    "conformance/test_group_migration.py",
    "spark/test_keyed.py",
    "end_to_end/test_lineage.py",
    "end_to_end/test_damage.py",
    "conformance/test_admin.py",
    "end_to_end/test_bounds.py",
    "end_to_end/test_keyed_tables_by_rule.py",
    "conformance/test_group_members.py",
    "properties/test_records.py",
    "conformance/test_group_admin.py",
    "end_to_end/test_transactional_client.py",
    "end_to_end/test_broker.py",
    "end_to_end/test_sharing_benchmarks.py",
    "end_to_end/test_positions_asked.py",
    "end_to_end/test_partition_key_listeners.py",
    "end_to_end/test_claims.py",
    "end_to_end/test_broker_lifecycle.py",
    "conformance/test_transactions.py",
    "unit/runtime/test_native.py",
    "unit/server/network/test_connection.py",
    "end_to_end/test_classic_strategies.py",
    "end_to_end/test_keyed_tables.py",
    "conformance/test_limits.py",
    "unit/records/arrow/test_slabs.py",
    "end_to_end/test_odd_files.py",
    "end_to_end/test_topics_created_again.py",
    "end_to_end/test_coordinator_benchmarks.py",
    "unit/records/kernels/test_processors.py",
    "simulation/test_transactions.py",
    "end_to_end/test_resizes_held_up.py",
    "end_to_end/test_largest_requests.py",
    "properties/test_producer_order.py",
    "properties/test_gates_of_shares.py",
    "end_to_end/test_waiting_fetches.py",
)
"""Those that take over 8 seconds, longest first."""
_PLACES = {f"tests/{file}": place for place, file in enumerate(LONGEST)}


def pytest_configure() -> None:
    from tests.support.sharing_out import step_back

    step_back()
    settings.register_profile("beside others", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("beside others")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    from tests.support.sharing_out import WORKERS_MIN, BesideScheduling

    enough = config.getoption("dist") == "loadfile" and len(config.getoption("tx")) >= WORKERS_MIN
    return BesideScheduling(config, log) if enough else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(_PLACES)))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
