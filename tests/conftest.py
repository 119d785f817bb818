"""In which order files are tested: at random, but for those that take longest, which come first.

Files are shared out among the workers as these become free (`--dist loadfile`), so one that took long and came last
would keep everybody waiting. Java is told not to compile for a long life: its processes here live for seconds.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadFileScheduling

os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1")

LONGEST = (
    "spark/test_source.py",
    "end_to_end/test_order_at_the_edge.py",
    "conformance/test_groups.py",
    "end_to_end/test_broker_benchmarks.py",
    "end_to_end/test_cli.py",
    "spark/test_demo.py",
    "simulation/test_groups.py",
    "soak/test_soak.py",
    "simulation/test_controller.py",
    "end_to_end/test_transactions.py",
    "conformance/test_group_traps.py",
    "conformance/test_produce_and_fetch.py",
    "properties/test_codec_against_kio.py",
    "properties/test_plan.py",
    "end_to_end/test_groups.py",
    "properties/test_records.py",
    "end_to_end/test_transactional_client.py",
    "end_to_end/test_broker.py",
    "end_to_end/test_order_through_resizes.py",
    "conformance/test_group_failures.py",
    "conformance/test_client.py",
    "conformance/test_transactions.py",
    "unit/records/arrow/test_decode.py",
    "unit/benchmarks/test_against.py",
    "unit/records/kernels/test_compiled.py",
    "unit/records/kernels/test_processors.py",
    "properties/test_lineage.py",
    "end_to_end/test_broker_lifecycle.py",
    "conformance/test_group_migration.py",
    "conformance/test_limits.py",
    "end_to_end/test_hostile_peers.py",
    "unit/storage/log/test_cleaner_transactions.py",
    "conformance/test_group_members.py",
    "conformance/test_group_admin.py",
    "simulation/test_classic_groups.py",
    "simulation/test_transactions.py",
    "simulation/test_compacted_topics.py",
    "end_to_end/test_compacted_topics.py",
    "simulation/test_cleaner.py",
    "simulation/test_partition_log.py",
    "conformance/test_admin.py",
)
"""Those that take over 8 seconds, longest first."""
_PLACES = {f"tests/{file}": place for place, file in enumerate(LONGEST)}


def pytest_configure() -> None:
    from tests.support.sharing_out import step_back

    step_back()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    from tests.support.sharing_out import WORKERS_MIN, BesideScheduling

    enough = config.getoption("dist") == "loadfile" and len(config.getoption("tx")) >= WORKERS_MIN
    return BesideScheduling(config, log) if enough else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _PLACES.get(item.nodeid.partition("::")[0], len(_PLACES)))
