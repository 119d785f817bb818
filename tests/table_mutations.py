"""Mutations of the rules of tables by key (docs/adr/0052): loads, flushes, fences."""

from __future__ import annotations

from tests.support.mutations import Edit, Mutation

TABLE = "machines/clients/table/table.py"
KEEPER = "client/table/keeper.py"
KEPT = "client/table/kept.py"
CHANGELOG = "client/table/changelog.py"
DRIVER = "client/consumer/driver.py"
CONTEXT = "client/consumer/group_context.py"

BY_RULE = "tests/end_to_end/test_keyed_tables_by_rule.py"
CRASHES = "tests/end_to_end/test_keyed_tables.py::test_each_booking_counts_once_through_crashes_and_resizes"
UNIT = "tests/unit/client/table"
WRITE = "                await self._write(producer, {tp: _upto(at) for tp, at in offsets.items()})\n"
COMMIT = "                await producer.commit_transaction()\n"
CHECK = "                check_held()\n"
OFFSETS = "                await producer.send_offsets_to_transaction(offsets, group)\n"


def _seen(name: str, test: str, *edits: Edit) -> Mutation:
    return Mutation(name, edits, (), test)


TABLES = (
    _seen(
        "changes are flushed after the commit of their offsets",
        f"{BY_RULE}::test_offsets_are_not_committed_without_the_changes_before_them",
        Edit(
            KEEPER,
            WRITE + CHECK + OFFSETS + COMMIT,
            OFFSETS + COMMIT + "                await producer.begin_transaction()\n" + WRITE + COMMIT,
        ),
    ),
    _seen(
        "a writer with an old epoch is accepted",
        f"{BY_RULE}::test_a_member_of_an_old_epoch_writes_nothing_to_the_changelog",
        Edit(KEEPER, OFFSETS, OFFSETS.replace(", group)", ", group.group_id)")),
    ),
    _seen(
        "keys that arrive are not loaded",
        f"{BY_RULE}::test_a_table_is_there_again_after_a_restart_and_what_was_not_committed_is_not",
        Edit(
            TABLE,
            "        self._loads.append(Load(tp.partition % self.initial, piece))\n",
            "        piece.ready = True\n",
        ),
    ),
    _seen(
        "what is left of a narrowing is dropped by the next one",
        f"{BY_RULE}::test_entries_outlive_two_growths_at_once",
        Edit(
            TABLE,
            "            more.update(fewer)\n            piece.behind, piece.values = more, {}\n",
            "            piece.behind, piece.values = piece.values, {}\n",
        ),
    ),
    _seen(
        "keys outside of the intervals of a member are kept",
        CRASHES,
        Edit(TABLE, "        elif kept != piece.interval:\n", "        elif not kept:\n"),
    ),
    _seen(
        "changes of keys that left with a range are kept",
        f"{BY_RULE}::test_changes_that_were_not_committed_go_with_the_range_of_their_keys",
        Edit(TABLE, "if has(ranges, place_of(key, self.initial)[1])]:", "if not has((SPACE,), place_of(key, 1)[1])]:"),
    ),
    _seen(
        "state is not told of ranges that leave",
        f"{BY_RULE}::test_changes_that_were_not_committed_go_with_the_range_of_their_keys",
        Edit(DRIVER, "            self.state.narrowed(tp, keys)\n", "            pass\n"),
    ),
    _seen(
        "offsets are committed without the changes of keys that left meanwhile",
        f"{UNIT}/test_keeper.py::test_offsets_of_keys_that_left_meanwhile_are_not_committed_without_their_changes",
        Edit(KEEPER, CHECK, ""),
    ),
    _seen(
        "keys that have left a segment are loaded for its records",
        f"{UNIT}/test_kept.py::test_keys_that_were_read_beyond_a_segment_are_not_waited_for_with_its_records",
        Edit(TABLE, "and at >= segment.end]", "and at < 0]"),
    ),
    _seen(
        "a load does not wait for open transactions",
        f"{BY_RULE}::test_a_member_waits_for_the_open_transaction_of_the_one_before",
        Edit(CHANGELOG, "offsets({tp: LATEST}))", "offsets({tp: LATEST}, read_committed=True))"),
    ),
    _seen(
        "a member begins at an offset that an open transaction may move",
        f"{BY_RULE}::test_a_member_waits_for_the_open_transaction_of_the_one_before",
        Edit(
            CONTEXT,
            "self.settings.read_committed or self.host.state is not None",
            "self.settings.read_committed and True",
        ),
    ),
    _seen(
        "a commit takes along changes of records behind its offset",
        f"{BY_RULE}::test_mistakes_are_named",
        Edit(TABLE, "sum(change.mark <= upto for change in changes.all)", "len(list(changes.all))"),
    ),
    _seen(
        "the changes of a record that failed are kept",
        f"{BY_RULE}::test_the_synchronous_table_is_used_from_the_threads_of_handlers",
        Edit(KEPT, "        if record.key is not None and record.topic", "        if not record.key and record.topic"),
    ),
)
