"""Mutations of shipped code: each breaks one rule, and each must die twice: `python -m tests.mutations`.

A mutation changes the text of a source file in a copy of the tree; the working tree is left alone. It must be found out
by a simulator, in a story or within some seeds, and by an end-to-end test, which sees the product from outside. The
seeds begin with one that finds it out today: where a change of the simulator moves that, some more follow. A mutation
that survives either shows a rule that nothing proves. A text that is not in its file any more is an error: the mutation
has to follow the code.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

from tests.hand_out_mutations import HAND_OUTS
from tests.life_mutations import LIVES
from tests.reliability_mutations import RELIABILITY
from tests.sharing_mutations import SHARING
from tests.slice_mutations import COOPERATIVE
from tests.spark_mutations import SPARK
from tests.support.mutations import PYTEST, Edit, Mutation
from tests.table_mutations import TABLES
from tests.time_mutations import TIME

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT_S = 900
EDGE = "tests/end_to_end/test_order_at_the_edge.py"
BETWEEN = "tests/end_to_end/test_gates_between_members.py"
COMPACTED = "tests/end_to_end/test_compacted_topics.py"
LATEST = "tests/end_to_end/test_latest_groups.py"
STOCK = "tests/end_to_end/test_stock_groups.py"
STORIES_OF_GROUPS = "tests/simulation/test_groups_stories.py"
STORIES = f"{STORIES_OF_GROUPS}::test_a_story_of_a_group_that_reads_in_order_ends_well"
SEEDS = 200
"""Lives, from the seed that finds a mutation out today on."""
SIMULATOR, END_TO_END = "simulator", "end to end"
VERDICTS = {0: "SURVIVED", 1: "died", None: "DID NOT END"}
NOT_THERE = "-"


def groups(seed: int) -> tuple[str, ...]:
    """Lives of groups from a seed on."""
    return "-m", "tests.simulation.groups", "--first", str(seed), "--seeds", str(SEEDS), "--until-failure"


def controller(seed: int) -> tuple[str, ...]:
    """Lives of a cluster from a seed on."""
    return "-m", "tests.simulation.controller", "--first", str(seed), "--seeds", str(SEEDS), "--until-failure"


def story(name: str) -> tuple[str, ...]:
    """A story of `tests.simulation.groups_stories`."""
    return *PYTEST, f"{STORIES}[{name}]"


LINEAGE = "machines/lineage.py"
APPENDING = "machines/partition/appending.py"
GATEKEEPER = "machines/groups/gatekeeper.py"
POSITIONS = "machines/clients/positions.py"
GATES = "client/consumer/gates.py"

ORDER = (
    Mutation(
        "no recursion: only the layout right before counts",
        (
            Edit(
                LINEAGE,
                "            if held is not None and self._lowest(partition, held) < ends[index]:\n",
                "            only_parents = layouts[index] == layout - 1\n"
                "            if only_parents and held is not None and self._lowest(partition, held) < ends[index]:\n",
            ),
        ),
        groups(1_000_074),
        f"{EDGE}::test_parents_without_records_hide_no_grandparents[ours]",
    ),
    Mutation(
        "any commit of a parent taken for all",
        (
            Edit(
                LINEAGE,
                "return position.lowest(keys) if isinstance(position, Frontier) else position\n",
                "return position.lowest(keys) if isinstance(position, Frontier) else BEYOND * bool(position)\n",
            ),
        ),
        groups(132),
        f"{STOCK}::test_records_deleted_behind_the_commit_are_nothing_to_read",
    ),
    Mutation(
        "the partition count is not checked",
        (
            Edit(
                APPENDING,
                "count_said != COUNT_NOT_SAID and (role.retiring or count_said != role.undeleted_partition_count)",
                "count_said != COUNT_NOT_SAID and role.retiring",
            ),
        ),
        controller(0),
        f"{EDGE}::test_groups_of_every_kind_keep_the_order_while_a_topic_grows",
    ),
    Mutation(
        "the partition count is checked before duplicates",
        (
            Edit(
                APPENDING,
                "    if repeated is not None:\n        return Duplicate(repeated, None)\n",
                "    if repeated is not None and count_said in (COUNT_NOT_SAID, role.undeleted_partition_count):\n"
                "        return Duplicate(repeated, None)\n",
            ),
        ),
        controller(0),
        "tests/end_to_end/test_broker.py::test_a_count_that_is_not_the_topics_is_refused_but_a_duplicate_is_answered",
    ),
    Mutation(
        "a shrink cuts survivors before it closes retiring partitions",
        (Edit("machines/controller/roles.py", "SHRINK: (Phase.CLOSE, Phase.CUT)", "SHRINK: (Phase.CUT, Phase.CLOSE)"),),
        controller(1),
        f"{EDGE}::test_a_retiring_partition_takes_nothing_after_its_survivor_counts_anew",
    ),
    Mutation(
        "log starts are ignored",
        (Edit("machines/progress.py", "    at = max(committed, log_start)\n", "    at = max(committed, 0)\n"),),
        story("unread_records_were_deleted"),
        f"{EDGE}::test_a_parent_whose_unread_end_was_deleted_holds_nothing_up[stock]",
    ),
    Mutation(
        "what follows a commit is waited for although nothing of it can be read",
        (Edit("machines/progress.py", "    return at if found is None else max(at, found)\n", "    return at\n"),),
        story("records_before_a_gate_are_compacted_away"),
        f"{EDGE}::test_a_parent_whose_uncommitted_end_was_compacted_away_holds_nothing_up[ours]",
    ),
    Mutation(
        "what compaction drops counts as read while its owner hands it out",
        (Edit("machines/groups/standing.py", "answer is None or given.stamp >= answer.stamp:", "True:"),),
        (*PYTEST, f"{STORIES_OF_GROUPS}::test_a_story_of_records_that_are_compacted_away_under_a_slow_owner_ends_well"),
        f"{EDGE}::test_records_compacted_away_under_a_slow_owner_come_before_those_that_another_member_waits_with[stock-False]",
    ),
    Mutation(
        "after a restart a log seems never rewritten where nothing was appended behind what was compacted",
        (Edit("storage/log/replacing.py", "        if log.segments.make_last():\n", "        if False:\n"),),
        (*PYTEST, "tests/simulation/test_cleaner.py::test_compaction_keeps_the_newest_of_each_key_whatever_happens"),
        f"{EDGE}::test_records_compacted_away_under_a_slow_owner_come_before_those_that_another_member_waits_with[ours-True]",
    ),
    Mutation(
        "deleted records count as read while their owner hands them out",
        (Edit("machines/progress.py", "return max(position, given_at) < log_start", "return False"),),
        story("records_are_deleted_under_a_slow_owner"),
        f"{EDGE}::test_records_deleted_under_a_slow_owner_come_before_those_that_another_member_waits_with[ours]",
    ),
    Mutation(
        "a gate that opened by time stays open: read for ever",
        (
            Edit(
                GATEKEEPER,
                " if isinstance(counted, Frontier) else reached\n            return Stand(",
                " if isinstance(counted, Frontier) else reached\n"
                "                self.for_ever.add((group.group_id, topic.topic_id, number))\n"
                "            if (group.group_id, topic.topic_id, number) in self.for_ever:\n"
                "                counted = 1 << 62\n"
                "            return Stand(",
            ),
            Edit(GATEKEEPER, "class Gatekeeper:\n", "class Gatekeeper:\n    for_ever: set = set()\n"),
        ),
        groups(277),
        f"{STOCK}::test_a_position_that_was_waited_for_in_vain_holds_later_gates_when_it_moves_again",
    ),
    Mutation(
        "gates are one layout too low",
        (
            Edit(
                LINEAGE,
                "        last = min(layout, other.last + 1) if other.is_older else layout\n",
                "        last = min(layout - 1, other.last + 1) if other.is_older else layout - 1\n",
            ),
        ),
        groups(62),
        f"{STOCK}::test_records_deleted_behind_the_commit_are_nothing_to_read",
    ),
    Mutation(
        "partitions are handed over before their owner has revoked them",
        (
            Edit(
                "machines/groups/consumer/reconcile.py",
                "            if holder == member.member_id and not waits(topic_id, partition):\n",
                "            if holder and not waits(topic_id, partition):\n",
            ),
        ),
        groups(0),
        f"{EDGE}::test_a_partition_is_given_away_only_when_its_owner_has_let_go",
    ),
    Mutation(
        "a report of a member that has not all that it keeps releases what it was not told to revoke",
        (
            Edit(
                "machines/groups/consumer/heartbeat.py",
                "follow(step, member_id, owned, owned_shares, may_be_taking=request.member_epoch != JOINING)\n",
                "follow(step, member_id, owned, owned_shares)\n",
            ),
        ),
        (),
        "tests/end_to_end/test_groups.py"
        "::test_a_member_that_says_to_own_nothing_yet_and_takes_all_shares_nothing_with_another_one",
    ),
    Mutation(
        "a position that was told once is not told again, whatever the fetcher has forgotten",
        (
            Edit(
                POSITIONS,
                "                known = None if self._begins else known_of(tp)\n",
                "                known = None if self._begins else self.once.get(tp)\n",
            ),
            Edit(
                POSITIONS,
                "                if position != NOTHING:\n                    told[tp] = position\n",
                "                if position not in (NOTHING, self.once.get(tp)):\n"
                "                    told[tp] = self.once[tp] = position\n",
            ),
            Edit(
                POSITIONS,
                '        self._begins = False\n        """',
                '        self.once = {}\n        self._begins = False\n        """',
            ),
        ),
        story("a_topic_is_granted_again_to_a_member_that_was_told_of_its_parent"),
        f"{EDGE}::test_a_member_that_gets_its_topic_back_is_told_again_what_others_have_read",
    ),
    Mutation(
        "a retiring partition's record is folded back after a later write of its key",
        (
            Edit(
                "server/partitions/folding.py",
                "                if folding.touches(chunk):\n",
                "                if folding.touches(Chunk([])):\n",
            ),
        ),
        (*PYTEST, "tests/simulation/test_compacted_topics.py"),
        f"{COMPACTED}::test_no_copy_of_a_folded_record_comes_after_a_later_write_of_its_key",
    ),
    Mutation(
        "a member counts a gate as opened by time for ever",
        (
            Edit(
                "machines/clients/fetching/fetcher.py",
                "before = topic.lifted.pop(tp.partition, None)\n",
                "before = topic.lifted.get(tp.partition)\n",
            ),
        ),
        (),
        f"{BETWEEN}::test_a_gate_that_opened_by_time_closes_when_the_position_before_it_moves",
    ),
    Mutation(
        "a member reports positions that are not committed",
        (
            Edit(
                POSITIONS,
                "        progress = standing.progress\n        if standing.is_shared or progress is None",
                "        progress = standing.position\n        if standing.is_shared or progress is None",
            ),
        ),
        groups(111),
        f"{BETWEEN}::test_what_another_member_has_not_committed_opens_no_gate",
    ),
    Mutation(
        "applications that commit by hand are not asked to flush before a gate",
        (Edit(GATES, "            await self.flush(due)\n", "            await self.flush(())\n"),),
        (),
        f"{BETWEEN}::test_what_a_gate_waits_for_is_flushed_and_committed_at_once[told]",
    ),
    Mutation(
        "automatic commits do not come early before a gate",
        (Edit(GATES, "self._commits.is_due() or (due and self._commits.may_begin()):", "self._commits.is_due():"),),
        (),
        f"{BETWEEN}::test_what_a_gate_waits_for_is_flushed_and_committed_at_once[auto]",
    ),
    Mutation(
        "positions are not reported again to a coordinator that has restarted",
        (Edit(POSITIONS, "        self._reported.clear()\n", ""),),
        (),
        f"{BETWEEN}::test_after_a_restart_of_the_coordinator_a_member_reports_its_position_again",
    ),
    Mutation(
        "a member sends no heartbeat when its question tells of a rebalance",
        (Edit(GATES, "                context.member.heartbeat_now()\n", ""),),
        (),
        f"{BETWEEN}::test_a_classic_member_learns_of_a_rebalance_from_its_parked_question",
    ),
    Mutation(
        "a member with more to ask waits for its parked question",
        (Edit(GATES, "OPEN_MAX = 2\n", "OPEN_MAX = 1\n"),),
        (),
        f"{BETWEEN}::test_a_member_that_has_more_to_ask_does_not_wait_for_its_parked_question",
    ),
)
MUTATIONS = ORDER + HAND_OUTS + LIVES + TIME + RELIABILITY + SHARING + COOPERATIVE + SPARK + TABLES


def _mutated(tree: Path, mutation: Mutation) -> str | None:
    """Change the copy; return why that cannot be done, or None."""
    for edit in mutation.edits:
        path = tree / "src" / "anabranch" / edit.file
        text = path.read_text(encoding="utf-8")
        if text.count(edit.before) != 1:
            return f"{edit.file} has {text.count(edit.before)} times {edit.before.strip()!r}"
        path.write_text(text.replace(edit.before, edit.after), encoding="utf-8")
    return None


class Row(NamedTuple):
    """The result of one mutation in one way."""

    died: bool
    verdict: str
    where: str
    why: str = ""


def _ends(tree: Path, *command: str) -> tuple[int | None, str]:
    """Run Python in the copy; return the exit code, None at the timeout, and the line that says why.

    The run has a process group, which ends with it: an interrupted test leaves no broker behind.
    """
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}", "ANABRANCH_THOROUGH": "1"}
    run = subprocess.Popen(
        [sys.executable, *command],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = run.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return None, f"not over after {TIMEOUT_S} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    lines = [line for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith(("seed ", "E  "))] or lines[-1:]
    return run.returncode, telling[0].removeprefix("E").strip() if telling else ""


def _copied(source: Path, tree: Path) -> Path:
    """Copy the sources, the tests and the benchmarks, whose peers tests run, with the compiled kernels.

    To compile those takes longer than most tests.
    """
    for part in ("src", "tests", "benchmarks"):
        shutil.copytree(source / part, tree / part)
    shutil.copy(source / "pyproject.toml", tree)
    return tree


def _judge(mutation: Mutation, base: Path, tree: Path, ways: Sequence[str]) -> dict[str, Row]:
    """Run one mutation, print its rows; return them by way."""
    reason = _mutated(_copied(base, tree), mutation)
    print(mutation.name, flush=True)
    rows: dict[str, Row] = {}
    for way, command in ((SIMULATOR, mutation.simulator), (END_TO_END, (*PYTEST, mutation.test))):
        if way not in ways or not command:
            continue
        if reason is not None:
            rows[way] = Row(False, "CANNOT BE APPLIED", "", reason)
        else:
            began = time.monotonic()
            code, why = _ends(tree, *command)
            verdict = VERDICTS.get(code, f"DID NOT RUN ({code})")
            where = command[-1].rpartition("::")[2] if command[:2] == PYTEST[:2] else " ".join(command[1:4])
            rows[way] = Row(code == 1, f"{verdict} in {time.monotonic() - began:.0f} s", where, why)
        print(f"  {way}: {rows[way].verdict}, {rows[way].where}\n    {rows[way].why[:200]}", flush=True)
    shutil.rmtree(tree)
    return rows


def _print_table(found: Mapping[str, Mapping[str, Row]], ways: Sequence[str]) -> None:
    width = max(map(len, found), default=0)
    for name, cells in [("mutation", list(ways))] + [
        (name, [rows[way].verdict if way in rows else NOT_THERE for way in ways]) for name, rows in found.items()
    ]:
        print(f"{name:{width}}  " + "  ".join(f"{cell:18}" for cell in cells).rstrip())


def _interrupted(number: int, frame: object) -> NoReturn:
    """End as at the end of the program: the copies go, and the processes that run in them."""
    sys.exit(128 + number)


def main() -> int:
    """Run the mutations; the exit code is 1 if one survives or cannot be applied."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("--only", default="", help="mutations with this text in their name")
    parser.add_argument("--way", choices=[SIMULATOR, END_TO_END], action="append", help="by default both")
    parser.add_argument("--check", action="store_true", help="only look whether every text is in its file")
    given = parser.parse_args()
    if find_spec("pytest") is None:
        parser.error("there is no pytest beside this Python: every test would fail, and every mutation seem to die")
    ways = given.way or [SIMULATOR, END_TO_END]
    chosen = [mutation for mutation in MUTATIONS if given.only in mutation.name]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupted)
    with tempfile.TemporaryDirectory() as directory:
        base = _copied(ROOT, Path(directory) / "base")  # The working tree may change meanwhile.
        if given.check:
            trees = [(mutation, _copied(base, Path(directory) / f"m{at}")) for at, mutation in enumerate(chosen)]
            reasons = [f"{mutation.name}: {why}" for mutation, tree in trees if (why := _mutated(tree, mutation))]
            print("\n".join(reasons) or f"{len(chosen)} mutations can be applied")
            return 1 if reasons else 0
        found = {each.name: _judge(each, base, Path(directory) / f"m{at}", ways) for at, each in enumerate(chosen)}
    _print_table(found, ways)
    died = [all(row.died for row in rows.values()) for rows in found.values()]
    print(f"{sum(died)} of {len(died)} mutations died wherever they had to")
    return 0 if died and all(died) else 1


if __name__ == "__main__":
    sys.exit(main())
