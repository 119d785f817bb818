"""Mutations of cooperative fetch (ADR 0053): who holds what, what a repeat gets, what counts.

Each is seen at a real broker, and those of the machine by its model (`tests/properties/test_slices.py`), too.
"""

from __future__ import annotations

from tests.support.mutations import PYTEST, Edit, Mutation

SLICES = "machines/partition/slices.py"
CLAIMS = "server/handlers/claims.py"
PROGRESS = "server/coordinators/progress.py"

WIRE = "tests/end_to_end/test_claims.py"
APPLICATIONS = "tests/end_to_end/test_cooperative_fetch.py"
MODEL = (*PYTEST, "tests/properties/test_slices.py")
GONE = f"{WIRE}::test_what_a_member_had_is_offered_again_when_it_is_gone_and_its_commit_counts_no_more"
REPEATS = f"{WIRE}::test_a_repeated_claim_gets_the_same_slice_and_an_old_one_moves_nothing"

COOPERATIVE = (
    Mutation(
        "slices of a dead member are never offered again",
        (
            Edit(
                SLICES,
                "for member_id in [member_id for member_id in self._sessions if not is_live(member_id)]:",
                "for member_id in ():",
            ),
        ),
        MODEL,
        GONE,
    ),
    Mutation(
        "a repeated claim gets the next slice",
        (Edit(SLICES, "if by.sequence == session.sequence:", "if False:"),),
        MODEL,
        REPEATS,
    ),
    Mutation(
        "what another member holds can be committed",
        (Edit(SLICES, "return not found.session.is_over and", "return False and"),),
        MODEL,
        f"{WIRE}::test_after_a_fail_over_an_old_claim_counts_until_others_have_the_records",
    ),
    Mutation(
        "a transaction commits what another member holds",
        (
            Edit(
                "server/handlers/transactions.py",
                "            look=unheld.look,\n",
                "",
            ),
        ),
        (),
        GONE,
    ),
    Mutation(
        "what a transaction has committed is handed to others before it has ended",
        (
            Edit(
                PROGRESS,
                "return offset if self._taken is None else self._taken.reaches(offset)",
                "return self.reaches(offset)",
            ),
        ),
        (*PYTEST, "tests/unit/server/coordinators/test_progress.py"),
        f"{WIRE}::test_what_a_member_that_has_left_has_in_a_transaction_is_handed_out_when_that_is_aborted",
    ),
    Mutation(
        "a zombie commits",
        (
            Edit(
                "machines/groups/committers.py",
                "    if member is None:\n        return ErrorCode.UNKNOWN_MEMBER_ID\n    if epoch == member.epoch:",
                "    if member is None:\n        return ErrorCode.NONE\n    if epoch == member.epoch:",
            ),
        ),
        (),
        GONE,
    ),
    Mutation(
        "an old epoch claims",
        (
            Edit(
                CLAIMS,
                "broker.memberships.check_member(group_id, member_id, request.generation_id_or_member_epoch)",
                "repr(member_id)",
            ),
            Edit(SLICES, "if known is not None and by.epoch < known.epoch:", "if False:"),
        ),
        MODEL,
        REPEATS,
    ),
    Mutation(
        "slices reach beyond the last stable offset",
        (
            Edit(
                CLAIMS,
                "return partition.last_stable_offset if self._committed else partition.log.high_watermark",
                "return partition.log.high_watermark",
            ),
        ),
        (),
        f"{APPLICATIONS}::test_a_transaction_that_is_open_is_not_handed_out_and_an_aborted_one_is_done_by_itself",
    ),
    Mutation(
        "a slice is longer than what was read",
        (
            Edit(
                CLAIMS,
                "                end = max(found.start, min(end, reached if size else end))",
                "                pass",
            ),
        ),
        (),
        f"{WIRE}::test_a_slice_ends_where_its_records_were_found",
    ),
    Mutation(
        "each member decides where a group begins",
        (Edit(PROGRESS, "if machine.offsets.current(group_id, at.topic, at.partition) is not None:", "if False:"),),
        (),
        f"{WIRE}::test_where_a_group_begins_is_decided_once",
    ),
    Mutation(
        "a slice that is offered again to its member comes in beside itself",
        (Edit("machines/clients/slices.py", "(start, end)], self._in_hand(tp, start, end))", "(start, end)], [])"),),
        (*PYTEST, "tests/unit/machines/clients/test_slices.py"),
        f"{APPLICATIONS}::test_a_record_that_takes_longer_than_the_hold_time_is_handed_out_once_and_committed",
    ),
    Mutation(
        "markers between the records that an application names of a slice are not committed with them",
        (Edit("machines/clients/slices.py", "return start, end", "return first, last"),),
        (*PYTEST, "tests/unit/machines/clients/test_slices.py"),
        f"{APPLICATIONS}::test_of_a_topic_of_transactions_all_is_committed_by_two_members_in_transactions",
    ),
    Mutation(
        "a member without partitions keeps its slices when its membership ends",
        (
            Edit(
                "machines/clients/membership/polled.py",
                'if self._settings.share == "any" and self.is_member:',
                "if False:",
            ),
        ),
        (*PYTEST, "tests/unit/machines/clients/membership"),
        f"{APPLICATIONS}::test_a_member_that_stalls_drops_what_it_had_though_no_partition_is_assigned_to_it",
    ),
    Mutation(
        "a commit of slices that had to wait names the topic that has their name by then",
        (
            Edit(
                "client/consumer/cooperative.py",
                "        began_ms = context.now_ms()\n",
                "        ids, began_ms = self.fetches.topic_ids, context.now_ms()\n",
            ),
        ),
        (
            *PYTEST,
            "tests/unit/client/consumer/test_slice_commits.py"
            "::test_what_is_done_of_slices_counts_in_their_topic_alone_where_its_commit_had_to_wait",
        ),
        "tests/end_to_end/test_what_consumers_leave.py"
        "::test_what_is_done_of_slices_is_not_done_in_the_new_topic_where_its_commit_had_to_wait",
    ),
)
