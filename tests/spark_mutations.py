"""Mutations of the Spark sink (ADR 0059): what counts as a replay, what is written again, what a mark is.

Each is seen at a real broker, and by the property or unit tests of the pure rules.
"""

from __future__ import annotations

from tests.support.mutations import PYTEST, Edit, Mutation

DECISION = "spark/sink/decision.py"
RULES = (*PYTEST, "tests/unit/spark/test_sink_decision.py")
CHECKPOINTS = "tests/spark/test_sink_checkpoints.py"

SPARK = (
    Mutation(
        "a micro-batch that is planned anew passes for a replay",
        (Edit(DECISION, "        if decision.planned_ms != batch.planned_ms:\n", "        if False:\n"),),
        RULES,
        f"{CHECKPOINTS}::test_a_checkpoint_of_spark_tells_a_source_that_lost_rows_from_a_new_plan",
    ),
    Mutation(
        "other rows pass for a replay where nobody knows when they were planned",
        (Edit(DECISION, "    elif decision.digest != batch.digest:\n", "    elif False:\n"),),
        RULES,
        f"{CHECKPOINTS}::test_a_micro_batch_that_is_planned_anew_with_fewer_rows_is_refused",
    ),
    Mutation(
        "aborted tasks are written again however the rows are divided",
        (
            Edit(
                DECISION,
                "(not missing and decision.digests == batch.digests)",
                "(not missing)",
            ),
        ),
        RULES,
        f"{CHECKPOINTS}::"
        "test_a_decided_micro_batch_of_which_transactions_timed_out_is_written_again_if_it_is_divided_as_before",
    ),
    Mutation(
        "any offset of a task's group is a mark",
        (Edit(DECISION, " for tp, at in offsets.items() if tp.partition == 0)", " for at in offsets.values())"),),
        RULES,
        "tests/spark/test_sink_attempts.py::test_an_offset_that_a_resize_gave_the_group_of_a_task_is_no_mark",
    ),
)
