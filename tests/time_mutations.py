"""Mutations of what opens gates by time (ADR 0062)."""

from __future__ import annotations

from tests.support.mutations import PYTEST, Edit, Mutation

BY_TIME = "tests/end_to_end/test_gates_by_time.py"
OWNERS = (*PYTEST, "tests/unit/machines/groups/test_time_of_owners.py")
OPENED = (*PYTEST, "tests/unit/machines/groups/test_gates_opened_by_time.py")
IS_OPEN = "    if position >= topic.stable_end(partition):\n        return False\n"
GOES_ON = "    if made is None or partition not in made.closed:\n"

TIME = (
    Mutation(
        "the time of an owner counts while its records wait at a gate themselves",
        (
            Edit("machines/groups/gates.py", GOES_ON, "    if True:\n"),
            Edit(
                "machines/groups/gatekeeper.py",
                "        if made is not None and number in made.closed:\n",
                "        if False:\n",
            ),
        ),
        OWNERS,
        f"{BY_TIME}::test_a_partition_that_waits_at_a_gate_itself_is_waited_for",
    ),
    Mutation(
        "the time of an owner counts while a transaction is open",
        (
            Edit("machines/groups/gates.py", IS_OPEN, ""),
            Edit(
                "machines/groups/standing.py",
                "        end = min(topic.log_end(partition), topic.stable_end(partition))\n",
                "        end = topic.log_end(partition)\n",
            ),
        ),
        OWNERS,
        f"{BY_TIME}::test_a_partition_with_an_open_transaction_is_waited_for",
    ),
    Mutation(
        "what lies behind a gate counts by time with what lies before it",
        (
            Edit(
                "machines/groups/gatekeeper.py",
                "        return OPEN_END if gate is None else gate\n",
                "        return OPEN_END\n",
            ),
        ),
        OWNERS,
        f"{BY_TIME}::test_records_behind_a_gate_do_not_count_with_those_that_an_application_keeps_uncommitted",
    ),
    Mutation(
        "of gates that open by time only those are told at which the coordinator withholds a partition",
        (
            Edit(
                "machines/groups/opened_by_time.py",
                " or any(map(gates.questions.has_asked, _owners(group, at, owner)))\n",
                " or not at\n",
            ),
        ),
        OPENED,
        f"{BY_TIME}::test_a_gate_before_which_a_member_stops_is_described_and_counted_once_when_it_opens",
    ),
    Mutation(
        "records that came later count by time with those before them",
        (
            Edit(
                "machines/groups/standing.py",
                "        told = min(watch.until, watch.end)\n",
                "        told = watch.until\n",
            ),
        ),
        OWNERS,
        f"{BY_TIME}::test_a_later_gate_waits_again_for_records_that_came_later",
    ),
    Mutation(
        "the time of an owner counts when it is silent",
        (
            Edit(
                "machines/groups/standing.py",
                "        spoke_ms = self.spoken.get(watch.owner, NEVER)\n",
                "        spoke_ms = 1 << 62\n",
            ),
            Edit(
                "machines/groups/standing.py",
                "NEVER if tenure is None else self.spoken.get(tenure.owner, NEVER))",
                "NEVER if tenure is None else 1 << 62)",
            ),
        ),
        OWNERS,
        f"{BY_TIME}::test_a_partition_of_a_dead_member_is_waited_for",
    ),
    Mutation(
        "the time of a classic owner counts during a rebalance",
        (
            Edit(
                "machines/groups/gatekeeper.py",
                "            return group.state is classic.ClassicState.STABLE\n",
                "            return group is not None\n",
            ),
            Edit(
                "machines/groups/gatekeeper.py",
                "    return isinstance(group, ClassicGroup) and group.state is not classic.ClassicState.STABLE\n",
                "    return group is None\n",
            ),
        ),
        OWNERS,
        f"{BY_TIME}::test_the_time_of_a_classic_owner_begins_when_its_generation_is_handed_out",
    ),
)
