"""Mutations of what a former life, a rewind, another transaction, or a place says of a group (ADRs 0033, 0048)."""

from __future__ import annotations

from tests.support.mutations import PYTEST, Edit, Mutation

IN_TRANSACTIONS = "tests/end_to_end/test_ranges_in_transactions.py"
MADE_AGAIN = "tests/end_to_end/test_partitions_made_again.py"
PASSED = "tests/end_to_end/test_gates_passed.py"
BEHIND = "tests/end_to_end/test_beginnings_behind_gates.py"
GROUPS = "tests/unit/machines/groups"
LIVES_OF = f"{GROUPS}/test_lives_of_partitions.py"
RANGED = f"{GROUPS}/test_ranged_commits.py"
OFFSETS = "machines/groups/offsets.py"
LEFT = "test_what_is_left_of_a_request_when_its_transaction_is_aborted_counts_nothing"
COMMITS = "machines/groups/ranged_commits.py"
SETTLING = "machines/groups/settling.py"

LIVES = (
    Mutation(
        "an offset in a transaction does not wait for ranges of another",
        (
            Edit(
                OFFSETS,
                "                    waits = self.in_transactions.of_others(group_id, at, producer_id)\n",
                "                    waits = False\n",
            ),
        ),
        (*PYTEST, f"{GROUPS}/test_ranges_in_transactions.py::test_an_offset_waits_for_ranges_of_another_transaction"),
        f"{IN_TRANSACTIONS}::test_an_offset_that_comes_beside_ranges_of_another_transaction_is_to_be_sent_again",
    ),
    Mutation(
        "a position of a former life of its partition counts",
        (
            Edit(
                OFFSETS,
                "return position.offset >= now.life(partition).begins",
                "return now.life(partition).begins >= 0",
            ),
        ),
        (*PYTEST, f"{LIVES_OF}::test_a_position_of_a_former_life_is_none"),
        f"{MADE_AGAIN}::test_a_group_that_was_away_reads_all_of_a_partition_that_was_made_again",
    ),
    Mutation(
        "a partition that existed in a former life existed",
        (
            Edit(
                "machines/groups/starts.py",
                "return partition in self.ends and self.lives.get(partition, 0) == topic.life(partition).born",
                "return partition in self.ends and topic.life(partition).born >= 0",
            ),
        ),
        (*PYTEST, f"{LIVES_OF}::test_a_partition_that_existed_in_a_former_life_appeared_later[True]"),
        f"{MADE_AGAIN}::"
        "test_a_group_that_was_away_reads_all_of_a_partition_that_was_made_again_before_its_turn_to_be_settled",
    ),
    Mutation(
        "what was emptied before its partition came back is left to the client",
        (
            Edit(
                SETTLING,
                "(was.offset >= start or any(end > start for end in cuts.ends))",
                "(was.offset >= 0 or start < 0)",
            ),
        ),
        (*PYTEST, f"{LIVES_OF}::test_a_partition_that_was_emptied_before_it_came_back_goes_on_with_what_came_since"),
        f"{MADE_AGAIN}::test_a_group_that_was_away_reads_all_of_a_partition_that_was_emptied_before_it_came_back",
    ),
    Mutation(
        "groups that only have offsets are not settled when their shard is loaded",
        (
            Edit(
                SETTLING,
                "            self._topics.update(dict.fromkeys(resized))\n            self._leave_all()\n",
                "            self._topics.update(dict.fromkeys(resized))\n"
                "            self._left.update(dict.fromkeys(it for it in self._groups))\n",
            ),
        ),
        (*PYTEST, f"{LIVES_OF}::test_groups_without_members_are_settled_when_the_shard_is_loaded"),
        f"{MADE_AGAIN}::"
        "test_groups_that_only_have_offsets_begin_at_the_start_of_a_partition_added_before_the_broker_was_killed",
    ),
    Mutation(
        "what was reported, and told, outlives a rewind",
        (
            Edit(
                "machines/groups/standing.py",
                "(-1 if committed is None else committed) < report.committed\n",
                "report.committed < -1\n",
            ),
            Edit(
                "machines/clients/fetching/sharing.py",
                "    partition.told = None\n    partition.topic.elsewhere.clear()\n",
                "    partition.topic.limits, _ = None, partition.told\n",
            ),
        ),
        (
            *PYTEST,
            f"{GROUPS}/test_positions_asked.py::test_a_report_does_not_outlive_the_commit_that_it_follows_from",
        ),
        f"{PASSED}::test_a_member_that_rewinds_both_partitions_has_the_gate_closed_again",
    ),
    Mutation(
        "who commits where the group stands has come there",
        (
            Edit(
                COMMITS,
                "    if after.offset > before.offset and not has_begun_here:\n",
                "    if after.offset >= 0 and not has_begun_here:\n",
            ),
            Edit(
                "machines/clients/fetching/sharing.py",
                "    if not by_owner or offset != partition.committed:\n",
                "    if not by_owner or offset >= 0:\n",
            ),
        ),
        (
            *PYTEST,
            f"{RANGED}::test_a_plain_commit_of_where_the_group_stands_does_not_say_that_its_member_has_come_there",
        ),
        f"{BEHIND}::test_who_commits_a_position_with_metadata_behind_a_gate_keeps_the_metadata_and_opens_no_gate",
    ),
    Mutation(
        "who begins behind a closed gate has come there",
        (
            Edit(COMMITS, "commit.metadata == BEGUN_HERE", "commit.metadata == str(BEGUN_HERE and None)"),
            Edit(COMMITS, "after.metadata == BEGUN_HERE", "after.metadata == str(BEGUN_HERE and None)"),
        ),
        (*PYTEST, f"{RANGED}::test_a_commit_of_where_a_reader_began_does_not_say_that_it_has_come_there"),
        f"{BEHIND}::test_who_seeks_behind_a_closed_gate_and_leaves_opens_it_for_no_next_owner",
    ),
    Mutation(
        "a late commit of a former life of its partition counts",
        (
            Edit(
                OFFSETS,
                "        if max(offset, 0) < topic.life(index).begins:",
                "        if topic.life(index).begins < 0:",
            ),
        ),
        (*PYTEST, f"{LIVES_OF}::test_a_late_commit_of_a_former_life_leaves_the_position_of_the_present_one"),
        f"{MADE_AGAIN}::test_a_late_commit_of_a_removed_partition_leaves_the_position_in_the_one_that_was_made_again",
    ),
    Mutation(
        "what is left of a request is committed behind the end of its transaction",
        (
            Edit(
                "server/handlers/transactions.py",
                "is not ErrorCode.NONE:\n            return _offsets_refused(part, refused)",
                "is None:\n            return _offsets_refused(part, refused)",
            ),
        ),
        (*PYTEST, f"{IN_TRANSACTIONS}::{LEFT}[False]"),
        f"{IN_TRANSACTIONS}::{LEFT}[True]",
    ),
    Mutation(
        "what the second log refuses is not decided again",
        (
            Edit(
                "server/coordinators/shard.py",
                "        if timer is not None and self.active and",
                "        if timer is None and self.active and",
            ),
        ),
        (
            *PYTEST,
            f"{IN_TRANSACTIONS}::test_what_a_transaction_has_committed_outlives_that_the_topic_of_ranges_is_deleted",
        ),
        f"{IN_TRANSACTIONS}::test_what_a_transaction_has_committed_outlives_that_the_topic_of_ranges_is_deleted",
    ),
)
"""The rules of `tests.mutations`."""
