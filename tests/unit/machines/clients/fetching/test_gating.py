"""Gates of a member: committed progress counts, time opens a gate no further than it needs, openings are announced."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from anabranch.base.errors import ErrorCode
from anabranch.base.ids import TopicPartition
from anabranch.machines.clients.fetching import Fetcher, FetcherSettings, FetchResult, TopicView
from anabranch.machines.clients.fetching.values import Fetched
from anabranch.machines.keyspace import SPACE_END
from anabranch.machines.lineage import Lineage

P0, P1 = TopicPartition("t", 0), TopicPartition("t", 1)
GREW = Lineage.of_ends(1, (1, 2), ({0: 10},))
"""Partition 1 waits for the ten records of partition 0."""
SHRANK = Lineage.of_ends(1, (1, 2, 1), ({0: 10}, {0: 20, 1: 5}))
"""Partition 0 holds 10 + 10 records, and then waits for the five of partition 1."""


def view(lineage: Lineage, *, ordered: bool = True) -> TopicView:
    return TopicView("t", UUID(int=1), lineage, {0: 1, 1: 1}, {0: 0, 1: 0}, True, ordered)


def member(lineage: Lineage, *, ordered: bool = True, announcing: bool = False, **begins: int) -> Fetcher:
    """A member that owns partitions from these offsets on, with batches of five records up to offset 30."""
    fetcher = Fetcher(FetcherSettings())
    fetcher.announce(enabled=announcing)
    fetcher.grant((TopicPartition("t", int(name[1:])), None) for name in begins)
    fetcher.topic_known(view(lineage, ordered=ordered), 0)
    for name, offset in begins.items():
        tp = TopicPartition("t", int(name[1:]))
        fetcher.begin(tp, offset=offset)
        partition = fetcher._state.partition(tp)
        partition.held.extend(Fetched(memoryview(b"x"), end) for end in range(5, 35, 5) if end > offset)
        partition.held_size = len(partition.held)
    return fetcher


def spans(fetcher: Fetcher) -> dict[int, tuple[int, int]]:
    found: dict[int, tuple[int, int]] = {}
    for part in fetcher.deliverable():
        found[part.partition] = (found.get(part.partition, (part.start, 0))[0], part.end)
    return found


def hand_out(fetcher: Fetcher, tp: TopicPartition, offset: int, records_end: int | None = None) -> None:
    while fetcher.position(tp) != offset:
        part = next(part for part in fetcher.deliverable() if part.partition == tp.partition)
        fetcher.handed_out(part, min(part.end, offset), records_end)


def test_within_one_member_what_was_handed_out_counts_when_it_is_committed() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    hand_out(fetcher, P0, 10)
    assert 1 not in spans(fetcher) and fetcher.needs() == {P0: 10}
    fetcher.committed(P0, 9)
    assert 1 not in spans(fetcher) and fetcher.needs() == {P0: 10}
    fetcher.committed(P0, 10)
    assert spans(fetcher)[1] == (0, 30) and fetcher.needs() == {}


def test_what_follows_the_commit_without_a_record_counts_as_read() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    hand_out(fetcher, P0, 5)
    hand_out(fetcher, P0, 10, records_end=8)  # offsets 8 and 9 hold markers
    fetcher.committed(P0, 7)
    assert fetcher.needs() == {P0: 10}
    fetcher.committed(P0, 8)
    assert fetcher.needs() == {}


def test_records_that_a_seek_skipped_are_not_read() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    fetcher.committed(P0, 0)
    fetcher.seek(P0, 10)
    assert fetcher.needs() == {P0: 10}
    fetcher = member(GREW, p0=0, p1=0)
    hand_out(fetcher, P0, 5)
    fetcher.committed(P0, 5)
    fetcher.seek(P0, 10)
    assert fetcher.needs() == {P0: 10}


def test_a_place_behind_a_closed_gate_that_was_sought_is_no_progress() -> None:
    fetcher = member(SHRANK, p0=0, p1=0)
    hand_out(fetcher, P0, 20)
    fetcher.committed(P0, 15)
    assert not fetcher.is_sought_past_gate(P0)
    fetcher.seek(P0, 20)
    assert not fetcher.is_sought_past_gate(P0), "it stops there anyhow"
    fetcher.seek(P0, 25)
    assert fetcher.is_sought_past_gate(P0) and 0 not in spans(fetcher)
    fetcher.committed(P1, 5)
    assert not fetcher.is_sought_past_gate(P0), "the gate is open"
    fetcher = member(SHRANK, p0=0, p1=0)
    fetcher.seek(P0, 25)
    assert not fetcher.is_sought_past_gate(P0), "the group begins there"
    fetcher.committed(P0, 25)
    assert 0 not in spans(fetcher)


def test_where_a_reset_made_the_group_begin_behind_a_closed_gate_is_told_to_the_next_owner() -> None:
    fetcher = member(SHRANK, p0=0, p1=0)
    fetcher.seek(P0, 25)
    assert fetcher.begins_behind_gate(P0, 25) and not fetcher.begins_behind_gate(P0, 24)
    fetcher.committed(P0, 25)
    assert fetcher.begins_behind_gate(P0, 25)
    fetcher.committed(P1, 5)
    assert not fetcher.begins_behind_gate(P0, 25), "the gate is open"
    owner = member(SHRANK, p0=25, p1=0)
    owner.committed(P0, 25)
    assert 0 in spans(owner), "as if it had been open"
    owner.begun(P0, 25)
    assert 0 not in spans(owner) and owner.begins_behind_gate(P0, 25)
    owner.committed(P1, 5)
    assert 0 in spans(owner)


def test_where_nothing_is_committed_the_start_counts_until_records_are_handed_out() -> None:
    fetcher = member(GREW, p0=10, p1=0)
    assert fetcher.needs() == {}
    fetcher = member(GREW, p0=4, p1=0)
    hand_out(fetcher, P0, 10)
    assert fetcher.needs() == {P0: 10}
    standing = fetcher.standing(P0)
    assert standing is not None
    assert (standing.position, standing.progress, standing.flushed, tuple(standing.ends)) == (10, 4, 4, (10,))


def test_a_flush_during_which_the_application_went_back_is_none_of_what_it_will_be_given_again() -> None:
    fetcher = member(GREW, p0=4, p1=0)
    hand_out(fetcher, P0, 10)
    fetcher.seek(P0, 6)
    fetcher.flushed(P0, 10)
    standing = fetcher.standing(P0)
    assert standing is not None and standing.flushed == 6


def test_the_log_start_counts_as_read_where_the_rest_was_deleted() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    fetcher.committed(P0, 0)
    partition = fetcher._state.partition(P0)
    partition.log_start = 10
    partition.held.clear()
    fetcher.told(P1, 0)
    assert fetcher.needs() == {}


def test_records_that_were_fetched_before_they_were_deleted_are_not_read() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    fetcher.committed(P0, 0)
    fetcher._state.partition(P0).log_start = 20
    fetcher.told(P1, 0)
    assert spans(fetcher) == {0: (0, 30)} and fetcher.needs() == {P0: 10}
    hand_out(fetcher, P0, 5)
    assert fetcher.needs() == {P0: 10}
    hand_out(fetcher, P0, 10)
    assert fetcher.needs() == {} and spans(fetcher)[1] == (0, 30)


def test_fetched_records_of_layouts_that_are_folded_away_are_dropped() -> None:
    folded = view(Lineage.of_ends(1, (2,), (), first=1))
    fetcher = member(GREW, p0=0, p1=0)
    fetcher.topic_known(folded, 0)
    assert spans(fetcher) == {1: (0, 30)} and fetcher._state.partition(P0).fetch_offset == 0
    fetcher = member(GREW, p0=10, p1=0)
    fetcher.topic_known(folded, 0)
    assert spans(fetcher) == {0: (10, 30), 1: (0, 30)}


def test_the_coordinators_word_opens_a_gate_on_an_own_partition_too() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    fetcher.committed(P0, 0)
    hand_out(fetcher, P0, 10)
    fetcher.told(P0, 10)
    assert fetcher.needs() == {} and spans(fetcher)[1] == (0, 30)


def test_a_rewind_takes_the_coordinators_word_back() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    hand_out(fetcher, P0, 10)
    fetcher.committed(P0, 9)
    fetcher.told(P0, 10)
    assert fetcher.needs() == {} and spans(fetcher)[1] == (0, 30)
    fetcher.seek(P0, 0)
    fetcher.committed(P0, 0)
    assert fetcher.needs() == {P0: 10} and 1 not in spans(fetcher) and fetcher.known(P0) is None


def test_a_rewind_by_key_takes_the_coordinators_word_back() -> None:
    fetcher = member(GREW, p0=0, p1=0)
    fetcher.committed_by_key(P0, [], 9)
    fetcher.told(P0, 10)
    assert fetcher.needs() == {}
    fetcher.committed_by_key(P0, [], 0)
    assert fetcher.needs() == {P0: 10} and fetcher.known(P0) is None


def test_a_rewind_asks_anew_how_far_others_are() -> None:
    """They may have gone back, too, while the gate was open and nobody asked."""
    fetcher = member(GREW, p1=0)
    fetcher.told(P0, 10)
    fetcher.committed(P1, 20)
    assert fetcher.needs() == {}
    fetcher.committed(P1, 0)
    assert fetcher.needs() == {P0: 10} and fetcher.known(P0) is None and spans(fetcher) == {}


def test_a_commit_of_where_the_group_stands_does_not_say_that_its_member_has_come_there() -> None:
    fetcher = member(GREW, p1=3)
    fetcher.committed(P1, 3)
    fetcher.passed(P1, ((0, SPACE_END, 0),))
    assert fetcher.needs() == {P0: 10}
    fetcher.committed(P1, 3)
    assert fetcher.needs() == {P0: 10}, "metadata was committed with it"
    fetcher.committed(P1, 4)
    assert fetcher.needs() == {}


def test_time_opens_a_gate_no_further_than_it_was_asked_for() -> None:
    fetcher = member(GREW, p1=0)
    fetcher.lift(P0, 10)
    assert fetcher.needs() == {P0: 10} and spans(fetcher) == {1: (0, 30)}
    later = Lineage.of_ends(1, (1, 2, 1, 2), ({0: 10}, {0: 12, 1: 20}, {0: 15, 1: 20}))
    fetcher.topic_known(view(later), 0)
    assert fetcher.needs()[P0] == 15 and spans(fetcher) == {1: (0, 20)}
    fetcher.lift(P0, None)
    assert fetcher.needs()[P0] == 10 and spans(fetcher) == {}


def test_what_a_gate_that_opened_by_time_waits_on_is_needed_until_it_is_read_or_the_gate_has_begun() -> None:
    fetcher = member(GREW, p1=0)
    fetcher.lift(P0, 10)
    fetcher.told(P0, 7)
    assert fetcher.needs() == {P0: 10}
    fetcher.lift(P0, None)
    assert fetcher.needs() == {P0: 10} and spans(fetcher) == {}
    fetcher.lift(P0, 10)
    fetcher.told(P0, 10)
    assert fetcher.needs() == {} and spans(fetcher) == {1: (0, 30)}
    fetcher.told(P0, 7)
    assert fetcher.needs() == {P0: 10} and spans(fetcher) == {}, "nothing is remembered"
    assert fetcher.known(P0) == 7
    fetcher.lift(P0, 10)
    fetcher.committed(P1, 3)
    assert fetcher.needs() == {} and spans(fetcher) == {1: (0, 30)}
    assert fetcher.known(P0) is None, "the coordinator would not say again that the gate opens by time"
    fetcher.told(P0, 7)
    assert fetcher.known(P0) == 7


def test_a_gate_with_committed_records_behind_it_is_not_closed_again() -> None:
    fetcher = member(GREW, p0=4, p1=3)
    fetcher.committed(P0, 4)
    fetcher.committed(P1, 3)
    assert spans(fetcher)[1] == (3, 30)
    fetcher = member(GREW, p0=4, p1=0)
    fetcher.committed(P1, 0)
    assert 1 not in spans(fetcher)


def test_a_gate_behind_which_the_reset_put_the_member_stays_closed_though_it_commits_that() -> None:
    """A group that reads from the end got what followed before what was left to read in a partition made later."""
    fetcher = Fetcher(FetcherSettings())
    fetcher.grant([(P0, None), (P1, None)])
    fetcher.topic_known(view(GREW), 0)
    fetcher.begin(P0, offset=4)
    fetcher.begin(P1)
    (lookup,) = fetcher.drain(0).lookups
    fetcher.found(lookup.request_id, {P1: (ErrorCode.NONE, 20)}, 0)
    fetcher._state.partition(P1).held.append(Fetched(memoryview(b"x"), 30))
    fetcher.committed(P1, 20)
    assert 1 not in spans(fetcher) and fetcher.needs() == {P0: 10}
    fetcher.committed(P1, 21)
    assert spans(fetcher)[1] == (20, 30), "a record behind the gate was read"


def test_a_gate_behind_which_only_deleted_records_are_committed_stays_closed() -> None:
    """A member that finds the first records deleted begins behind them, and commits that."""
    fetcher = member(GREW, p0=4, p1=3)
    fetcher.committed(P1, 3)
    assert spans(fetcher)[1] == (3, 30), "the log start is not known yet"
    (fetch,) = fetcher.drain(0).fetches
    empty = FetchResult(ErrorCode.NONE, memoryview(b""), 30, 30, 3)
    fetcher.answered(fetch.request_id, ErrorCode.NONE, 1, {P1: empty}, 0)
    assert 1 not in spans(fetcher) and fetcher.needs() == {P0: 10}
    hand_out(fetcher, P0, 10)
    fetcher.committed(P0, 10)
    assert spans(fetcher)[1] == (3, 30)


def test_a_member_pauses_at_the_cut_of_a_shrink_and_keeps_what_it_fetched_beyond() -> None:
    fetcher = member(SHRANK, p0=0)
    fetcher.told(P1, 2)
    hand_out(fetcher, P0, 20)
    fetcher.committed(P0, 20)
    assert spans(fetcher) == {} and fetcher.needs() == {P1: 5}
    fetcher.told(P1, 5)
    assert spans(fetcher) == {0: (20, 30)}


def test_without_order_nothing_waits_and_nothing_is_asked() -> None:
    fetcher = member(GREW, ordered=False, announcing=True, p0=0, p1=0)
    assert spans(fetcher) == {0: (0, 30), 1: (0, 30)}
    assert not fetcher.is_layered and fetcher.needs() == {} and fetcher.openings() == ()
    assert fetcher.standing(P0) is None


def test_a_revoked_partitions_committed_progress_still_counts_and_other_progress_does_not() -> None:
    fetcher = member(GREW, p0=10, p1=0)
    fetcher.committed(P0, 10)
    fetcher.withdraw([P0])
    assert fetcher.needs() == {}
    fetcher = member(GREW, p0=10, p1=0)
    fetcher.withdraw([P0])
    assert fetcher.needs() == {P0: 10}, "nothing was committed: the next owner may begin elsewhere"


def test_a_topic_made_anew_begins_without_progress() -> None:
    fetcher = member(GREW, p0=10, p1=0)
    fetcher.committed(P0, 10)
    fetcher.lift(P0, 10)
    fetcher.topic_known(replace(view(GREW), topic_id=UUID(int=2)), 0)
    fetcher.seek(P1, 0)
    assert fetcher.needs() == {P0: 10} and fetcher.position(P0) is None


# -- announcements ----------------------------------------------------------------------------------------------------


def test_a_segment_with_an_open_gate_is_announced_before_its_first_record() -> None:
    fetcher = member(GREW, announcing=True, p1=0)
    assert fetcher.openings() == (), "the gate is closed"
    fetcher.told(P0, 10)
    assert fetcher.openings() == (P1,) and spans(fetcher) == {}
    fetcher.announced(P1)
    assert fetcher.openings() == () and spans(fetcher) == {1: (0, 30)}


def test_records_of_the_next_segment_come_after_its_announcement_only() -> None:
    fetcher = member(SHRANK, announcing=True, p0=10)
    fetcher.told(P1, 5)
    assert spans(fetcher) == {0: (10, 20)} and fetcher.openings() == ()
    hand_out(fetcher, P0, 20)
    assert spans(fetcher) == {} and fetcher.openings() == (P0,)
    fetcher.announced(P0)
    assert spans(fetcher) == {0: (20, 30)}


def test_a_segment_that_the_group_has_begun_is_not_announced_again() -> None:
    fetcher = member(GREW, announcing=True, p1=1)
    fetcher.told(P0, 10)
    assert fetcher.openings() == () and spans(fetcher) == {1: (1, 30)}


@pytest.mark.parametrize("announcing", [False, True])
def test_partitions_without_moved_keys_are_never_announced(announcing: bool) -> None:
    fetcher = member(Lineage.of_ends(2, (2, 3), ({0: 10, 1: 10},)), announcing=announcing, p1=0)
    assert spans(fetcher) == {1: (0, 30)} and fetcher.openings() == ()


BACK_AND_FORTH = Lineage.of_ends(1, (1, 2, 1, 2), ({0: 10}, {0: 10, 1: 5}, {0: 15}))
"""Partition 0 holds ten records, partition 1 five, partition 0 five more, and then both."""


def test_of_several_gates_the_first_is_what_is_needed_now() -> None:
    fetcher = member(BACK_AND_FORTH, p0=0, p1=0)
    hand_out(fetcher, P0, 10)
    assert fetcher.needs() == {P0: 10, P1: 5}, "partition 0 is not read to 15 before partition 1 is read to 5"
    fetcher.lift(P0, 10)
    hand_out(fetcher, P1, 5)
    assert fetcher.needs() == {P0: 10, P1: 5}
    fetcher.lift(P1, 5)
    hand_out(fetcher, P0, 15)
    assert fetcher.needs() == {P0: 15, P1: 5}
    assert fetcher.known(P0) is None, "the coordinator has said that gates that wait on it are open by time"
    fetcher.lift(P0, 15)
    assert spans(fetcher) == {0: (15, 30), 1: (5, 30)}
    assert fetcher.needs() == {P0: 10, P1: 5}, "what they wait on is still needed"
    fetcher.lift(P0, 10)
    assert spans(fetcher) == {0: (15, 30), 1: (5, 30)}, "they stay open as long as nothing moves"


def test_a_partition_that_counts_up_to_its_own_gate_only_opens_no_other() -> None:
    fetcher = member(BACK_AND_FORTH, p1=0)
    fetcher.told(P0, 4)
    fetcher.lift(P0, 9, is_bound=True)
    assert spans(fetcher) == {}
    assert fetcher.known(P0) == 4, "the coordinator has said how far it counts, and tells when it does further"
    fetcher.lift(P0, 10, is_bound=True)
    assert spans(fetcher) == {1: (0, 5)}


def test_records_of_a_topic_that_was_made_again_meanwhile_are_not_delivered_behind_its_gates() -> None:
    fetcher = member(GREW, p0=0)
    state = fetcher._state.partition(P0)
    state.topic_id = UUID(int=1)
    (first, *_) = fetcher.deliverable()
    fetcher.topic_known(replace(view(GREW), topic_id=UUID(int=2)), 0)
    assert spans(fetcher) == {} and not fetcher.is_next(first) and not fetcher.all_handed_out([first])
    fetcher.grant([(P1, UUID(int=2))])
    fetcher.begin(P1, offset=0)
    fetcher.committed(P0, 10)
    assert fetcher.needs() == {P0: 10}, "what was read of the topic before says nothing about this one"


def test_what_only_a_gate_behind_others_waits_on_stays_lifted() -> None:
    p2 = TopicPartition("t", 2)
    ends = ({0: 10}, {0: 12, 1: 5}, {0: 15}, {0: 18, 1: 7, 2: 3})
    fetcher = member(Lineage.of_ends(1, (1, 2, 1, 3, 1), ends), p0=0, p1=0, p2=0)
    for tp, offset in ((P0, 12), (P1, 5), (P0, 18), (P1, 7), (p2, 3)):
        for _ in range(5):
            for needed, up_to in fetcher.needs().items():
                if up_to <= (fetcher.position(needed) or 0):
                    fetcher.lift(needed, up_to)
        hand_out(fetcher, tp, offset)
    for _ in range(5):
        for needed, up_to in fetcher.needs().items():
            fetcher.lift(needed, up_to)
    assert spans(fetcher)[0] == (18, 30)
    assert p2 in fetcher.needs(), "its position may move, and close the gate again"
    assert spans(fetcher)[0] == (18, 30), "nothing has moved"
