"""Rules of members that share partitions by ranges of keys (ADRs 0050, 0051), broken one by one (`tests.mutations`).

Each must be found out by lives with sharers (`tests.simulation.groups_sharers`), and by a test from outside. Keys of
the simulator never lie at the bound of a range, so that rule is left to real keys alone.
"""

from __future__ import annotations

from tests.support.mutations import PYTEST, Edit, Mutation

SEEDS = 60
"""Lives, from the seed that finds a mutation out today on."""
IN_GROUPS = "tests/end_to_end/test_shares_in_groups.py"
STORIES = "tests/simulation/test_groups_sharers.py"
BY_RANGE = "tests/end_to_end/test_commits_by_range.py"
BY_HAND = f"{IN_GROUPS}::test_a_share_that_is_assigned_by_hand_goes_on_where_its_keys_were_committed"
FOUR = f"{IN_GROUPS}::test_four_members_share_one_partition"


def lives(seed: int) -> tuple[str, ...]:
    """Lives with sharers from a seed on."""
    return "-m", "tests.simulation.groups", "--first", str(seed), "--seeds", str(SEEDS), "--until-failure"


SHARED_COMMITS = "machines/groups/shared_commits.py"
FETCHING = "machines/clients/fetching"

SHARING = (
    Mutation(
        "keys are handed over before their holder has acknowledged",
        (
            Edit(
                "machines/groups/consumer/reconcile.py",
                "            given = without(more, self._held_by_others(at))\n",
                "            given = more\n",
            ),
        ),
        lives(2_000_000),
        FOUR,
    ),
    Mutation(
        "a commit of foreign keys is accepted",
        (
            Edit(
                SHARED_COMMITS,
                "    member = group.members.get(member_id)\n    holds = NONE if member is None else member.held(at)\n"
                '    if holds == WHOLE:\n        return ""\n',
                "    return str()\n",
            ),
        ),
        lives(2_000_000),
        f"{IN_GROUPS}::test_a_member_cannot_commit_the_keys_of_another",
    ),
    Mutation(
        "the filter of a range leaves out its last place",
        (
            Edit(
                "machines/partition/sharing.py",
                "cells = [Cell(start, end, target)",
                "cells = [Cell(start, max(start, end - 1), target)",
            ),
        ),
        (),
        f"{IN_GROUPS}::test_a_range_has_the_keys_at_its_bounds_and_none_beyond",
    ),
    Mutation(
        "a fetch goes on by one record without keys that are to be asked for there",
        (
            Edit(
                f"{FETCHING}/receiving.py",
                "next_offset = min(next_offset, partition.asked_until)",
                "next_offset = min(next_offset, partition.asked_until + 1)",
            ),
        ),
        lives(2_000_000),
        BY_HAND,
    ),
    Mutation(
        "keys that are behind are read from where the others are",
        (Edit(f"{FETCHING}/state.py", "in steps if at <= self.fetch_offset)", "in steps if at < self.fetch_offset)"),),
        lives(2_000_012),
        BY_HAND,
    ),
    Mutation(
        "a gap below a range of offsets is forgotten",
        (
            Edit(
                "machines/groups/ranged_commits.py",
                "            at = bisect_right(starts, offset) - 1\n",
                "            at = len(starts) - 1\n",
            ),
        ),
        lives(2_000_000),
        f"{BY_RANGE}::test_what_was_committed_is_there_after_a_kill",
    ),
    Mutation(
        "a member begins without looking at what was committed of each key",
        (
            Edit(
                f"{FETCHING}/sharing.py",
                "    partition.floor = partition.done = frontier_of(steps) if steps else None\n",
                "    partition.floor = partition.done = None\n",
            ),
        ),
        lives(2_000_004),
        BY_HAND,
    ),
    Mutation(
        "keys that go are not committed first",
        (
            Edit(
                "client/consumer/group.py",
                "            await self._commit_processed(names)\n"
                '            await self._call_listener("on_partitions_revoked", units)',
                '            await (self._call_listener("on_partitions_revoked", units))',
            ),
        ),
        (*PYTEST, f"{STORIES}::test_keys_that_move_are_committed_before_they_go_so_that_no_record_comes_twice"),
        FOUR,
    ),
    Mutation(
        "keys that wait at a gate go through it with what others have finished there",
        (
            Edit(
                "machines/groups/positions.py",
                "return self.offset if self.passed is None else shares.stable(self.passed)",
                "return int(self.offset)",
            ),
            Edit(
                f"{FETCHING}/gating.py",
                "passed = partition.committed if partition.passed is None else lowest(partition.passed, (SPACE,))",
                "passed = partition.committed or 0",
            ),
            Edit(
                f"{FETCHING}/gating.py",
                "known = partition.passed or partition.committed_by_key or NOWHERE",
                "known = partition.committed_by_key or NOWHERE",
            ),
        ),
        lives(2_001_441),
        f"{BY_RANGE}::test_what_others_have_finished_at_a_gate_does_not_open_it_for_keys_that_wait_there",
    ),
    Mutation(
        "a member does not stop at the gate itself where others have finished what follows",
        (
            Edit(
                f"{FETCHING}/gating.py",
                "    if limit is None or view is None or position is None or position >= limit:\n",
                "    if limit is None or view is None or position is None or partition.share or position >= limit:\n",
            ),
        ),
        lives(2_001_441),
        f"{IN_GROUPS}::test_what_a_sharer_has_finished_behind_a_gate_opens_it_for_no_other_keys",
    ),
    Mutation(
        "a member says that it has come to where others have finished",
        (Edit(f"{FETCHING}/sharing.py", "return _come_to(partition.gone, found)", "return list(found)"),),
        (
            *PYTEST,
            "tests/unit/machines/clients/fetching/test_shares.py"
            "::test_a_member_says_nothing_of_keys_that_others_have_moved_on",
        ),
        f"{BY_RANGE}::test_what_others_have_finished_at_a_gate_does_not_open_it_for_keys_that_wait_there[False]",
    ),
    Mutation(
        "keys that are ahead are read again where a topic may not be read by key any more",
        (Edit(f"{FETCHING}/delivering.py", "    if not partition.is_sifted or", "    if partition.is_sifted or"),),
        (
            *PYTEST,
            "tests/unit/machines/clients/fetching/test_shares.py"
            "::test_where_a_broker_gives_no_keys_all_is_asked_for_and_said_what_is_to_be_left_out",
        ),
        f"{BY_RANGE}::test_keys_that_are_ahead_are_not_read_again_where_the_topic_may_not_be_read_by_key_any_more",
    ),
)
