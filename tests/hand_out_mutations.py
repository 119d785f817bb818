"""Mutations of what is written as partitions are handed out and taken away (ADR 0033)."""

from __future__ import annotations

from tests.support.mutations import PYTEST, Edit, Mutation

LATEST = "tests/end_to_end/test_latest_groups.py"
STOCK = "tests/end_to_end/test_stock_groups.py"
STORIES = "tests/simulation/test_groups_stories.py::test_a_story_of_a_group_that_reads_in_order_ends_well"
STARTS = "tests/unit/machines/groups/test_starts.py"
GATEKEEPER = "machines/groups/gatekeeper.py"
RESETS = "machines/groups/resets.py"
WRITTEN = "machines/groups/hand_outs.py"
FETCHES = "machines/groups/offset_fetches.py"
SETTLING = "machines/groups/settling.py"
OWED = "tests/unit/machines/groups/test_positions_owed.py"


HAND_OUTS = (
    Mutation(
        "a new partition is handed out to stock consumers whatever is left before it",
        (
            Edit(
                GATEKEEPER,
                "        if at[1] in made.closed:\n            return True\n",
                "        if at[1] in made.closed:\n            return made.verdicts[at[1]].is_reopened\n",
            ),
        ),
        (
            *PYTEST,
            "tests/simulation/test_groups_stock.py::test_keys_are_in_order_at_the_edge_of_groups_of_stock_consumers",
        ),
        f"{STOCK}::test_an_earliest_group_formed_after_a_resize_reads_all_history_in_order",
    ),
    Mutation(
        "gates of a topic whose order is given up are used on",
        (
            Edit(
                GATEKEEPER,
                "        if made is None or made.topic is not topic or not topic.is_gated or at[1] in made.left:\n",
                "        if made is None or at[1] in made.left:\n",
            ),
            Edit(
                GATEKEEPER,
                "            gates.forget_gates([topic_id for topic_id in gates.evaluated "
                "if not by_id[topic_id].is_gated])\n",
                "",
            ),
        ),
        (*PYTEST, f"{STORIES}[the_order_is_given_up_while_a_partition_waits_that_was_taken_away]"),
        f"{STOCK}::test_nothing_is_taken_away_any_more_when_ordered_delivery_is_switched_off",
    ),
    Mutation(
        "a partition is taken away at its gate from whoever may not have read to there",
        (
            Edit(
                WRITTEN,
                "        return (\n            self._offsets.cur",
                "        return True or (\n            self._offsets.cur",
            ),
            Edit(
                RESETS,
                "    return bool(made.closed or made.left or made.topic.topic_id in gates.begun)\n",
                "    return bool(made.closed or made.left)\n",
            ),
        ),
        (*PYTEST, f"{STORIES}[a_partition_re_opens_that_its_owner_has_not_read]"),
        f"{STOCK}::test_what_an_owner_without_a_commit_has_not_read_is_not_skipped_when_its_partition_re_opens",
    ),
    Mutation(
        "that a partition waits is not written down, and begins when a coordinator first looks",
        (
            Edit(GATEKEEPER, "= made.gate_of(number)", "= made.topic.log_end(number)"),
            Edit(
                WRITTEN,
                "            if made is None or start is None or waited.keys() <= start.waited:\n",
                "            if made is None or start is None or waited.keys() <= start.waited or numbers:\n",
            ),
        ),
        (*PYTEST, f"{STORIES}[a_broker_fails_while_a_partition_waits]"),
        f"{STOCK}::test_what_is_written_while_a_partition_waits_is_read_after_the_broker_was_killed",
    ),
    Mutation(
        "a position that is written with a hand-out overtakes what an open transaction has committed",
        (
            Edit(
                WRITTEN,
                "        if not self._offsets.positions.unstable(group_id, topic.name, number):\n"
                "            return False\n",
                "        return bool(gates is None)\n",
            ),
        ),
        (*PYTEST, f"{STARTS}::test_what_a_transaction_commits_outlives_that_what_was_committed_before_is_deleted"),
        f"{STOCK}::test_what_a_transaction_commits_is_not_overtaken_by_the_position_of_the_next_owner",
    ),
    Mutation(
        "a position that is still to be written is told as none to who does not ask for stable offsets",
        (Edit(FETCHES, "elif self.is_owed(group_id, topic, partition) or (\n", "elif (\n"),),
        (*PYTEST, f"{OWED}::test_nor_is_one_that_does_not_ask_for_stable_offsets"),
        f"{LATEST}::test_nobody_is_told_that_a_group_has_no_position_in_a_later_partition_before_its_turn_has_come",
    ),
    Mutation(
        "what is deleted before a later partition is first read takes others with it",
        (Edit(FETCHES, "            position = position.told(known.log_start(partition))\n", "            pass\n"),),
        (*PYTEST, f"{OWED}::test_what_is_deleted_before_a_later_partition_is_read_is_not_where_it_begins"),
        f"{LATEST}::test_records_deleted_from_a_later_partition_while_the_group_is_away_take_no_others_with_them",
    ),
    Mutation(
        "where partitions that waited begin is not written when their group becomes a classic one",
        (Edit(SETTLING, "draft.write(*self._of_waited(group_id, topic, now_ms, written))", "draft.write()"),),
        ("-m", "tests.simulation.groups", "--first", "5197", "--seeds", "1", "--until-failure"),
        f"{LATEST}::test_what_is_written_while_a_partition_waits_is_read_by_the_classic_members_that_come_then",
    ),
    Mutation(
        "a commit by ranges begins where the coordinator had written, whatever is deleted",
        (
            Edit(
                "machines/groups/offsets.py",
                "return position and position.told(topic.log_start(partition) if topic.is_open(partition) else base)",
                "return position and position.told(0)",
            ),
        ),
        (*PYTEST, f"{OWED}::test_a_commit_by_ranges_begins_where_its_member_was_told_to"),
        f"{LATEST}::test_records_done_out_of_turn_in_a_later_partition_take_none_with_them_that_were_not",
    ),
    Mutation(
        "the position of a removed partition is owed for ever",
        (
            Edit(
                SETTLING,
                "if topic is None or not topic.has(number):\n            return False\n        if",
                "if topic is None:\n            return False\n        if",
            ),
        ),
        (*PYTEST, f"{OWED}::test_the_position_of_a_partition_that_is_removed_is_owed_to_nobody"),
        f"{LATEST}::test_the_offsets_of_a_group_can_be_listed_after_a_topic_that_it_reads_has_shrunk",
    ),
)
