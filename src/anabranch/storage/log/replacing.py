"""Puts compacted segments in the place of those that they were made of: names in the log's thread, syncs in others.

For a few groups of segments at a time, `S` the new one of a group and `O` the old ones:

    S.cleaned -> S.swap      then sync the names: from here on a start finishes the rest (`recovery`)
    read from S, not from O  then remove O, and sync: nothing but S has these offsets
    S.swap -> S              then sync, and give the index its name

Where S is to be the newest file, because the segment of the next appends has none yet, that one is made before: a start
takes all but the newest file for one that may be compacted. And before any S the log has a checkpoint of the cleaner,
which tells that it may be (`may_be_compacted`): a log that is written anew for another one may never have a mark of its
own.

What stands on the right of `then` is handed out as work for another thread. Meanwhile everything may happen to the log
but a second cleaning: where records of O are deleted, S is put away again, or leaves with them. After an error the log
goes on with O before the second line, and with S behind it: then `resuming` does the rest, before the log is cleaned
again. Until then the files with the names of S are those of O.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence
from functools import partial
from pathlib import Path

from anabranch.runtime.disk import Disk
from anabranch.storage.log.batch_files import source_of
from anabranch.storage.log.cleaner import Cleaned, CleanedGroup
from anabranch.storage.log.log import LocalLog
from anabranch.storage.log.marks import Mark, load_marks, note_clean
from anabranch.storage.log.recovery import CLEANED_SUFFIX, SWAP_SUFFIX, remove_covered
from anabranch.storage.log.segment import Segment, path_of

Work = Callable[[], None]
"""Work that blocks; OSError."""
GROUPS_AT_A_TIME = 8
"""Segments that are put in place in one step of the log's thread, a millisecond or two; their syncs are shared."""


def finish(log: LocalLog, cleaned: Cleaned) -> int:
    """Put the new segments in place at once; answer the bytes that were saved. Blocks; OSError."""
    steps = finishing(log, cleaned)
    while True:
        try:
            work = next(steps)
        except StopIteration as done:
            return int(done.value)
        work()


def finishing(log: LocalLog, cleaned: Cleaned) -> Generator[Work, None, int]:
    """Put the new segments in place; yields work for another thread, returns the bytes that were saved.

    An OSError of the work is thrown in, and comes out again.
    """
    saved, end = 0, cleaned.clean_to
    if cleaned.groups and not load_marks(log):  # From here on offsets may be missing: also of a log that is no subject.
        yield partial(note_clean, log, Mark(0, cleaned.now_ms))
    for begin in range(0, len(cleaned.groups), GROUPS_AT_A_TIME):
        groups = cleaned.groups[begin : begin + GROUPS_AT_A_TIME]
        replaced = yield from _Replacing(log, cleaned).run(groups)
        saved += sum(sum(source.size for source in group.sources) - group.size for group in replaced)
        deleted = [group.bases[0] for group in groups if group not in replaced]
        end = min([end, *deleted])
    if end > cleaned.files.dirty_from:
        yield partial(note_clean, log, Mark(end, cleaned.now_ms))
    return saved


def resuming(log: LocalLog) -> Generator[Work, None, int]:
    """Finish what an error has interrupted, if anything; as `finishing`, and it saves nothing."""
    segments = [segment for segment in log.segments if not segment.is_named]
    if segments:
        yield from _give_names(log, segments)
    return 0


def _give_names(log: LocalLog, segments: Sequence[Segment]) -> Generator[Work, None, None]:
    """Remove what new segments, which are in the log, replace, and give their files the names."""
    disk, directory = log.disk, log.directory
    yield partial(remove_covered, disk, directory, [(segment.base_offset, segment.end) for segment in segments])
    try:
        for segment in segments:
            if segment in log.segments:
                disk.rename(segment.path, path_of(directory, segment.base_offset))
                segment.named("")
        yield partial(disk.sync_directory, directory)
    finally:
        for segment in segments:
            if segment in log.segments and segment.is_named:
                segment.index.move(Segment(disk, directory, segment.base_offset, 0).index.paths)


class _Replacing:
    """Replaces segments of one log."""

    def __init__(self, log: LocalLog, cleaned: Cleaned) -> None:
        self._log = log
        self._disk: Disk = cleaned.files.disk
        self._directory: Path = cleaned.files.directory
        self._index_interval = cleaned.index_interval

    def run(self, groups: Sequence[CleanedGroup]) -> Generator[Work, None, list[CleanedGroup]]:
        """Put new segments in place; return the groups of which no records were deleted meanwhile."""
        log, disk, directory = self._log, self._disk, self._directory
        sync = partial(disk.sync_directory, directory)
        if log.segments.make_last():
            yield sync
        there = [group for group in groups if self._is_there(group)]
        placed: dict[int, Segment] = {}
        try:
            for group in there:
                disk.rename(self._path(group, CLEANED_SUFFIX), self._path(group, SWAP_SUFFIX))
            yield sync
            for group in there:
                if self._is_there(group):
                    segment = Segment(disk, directory, group.bases[0], self._index_interval, suffix=CLEANED_SUFFIX)
                    segment.named(SWAP_SUFFIX)
                    log.segments.put_in_place(group.bases, segment)
                    placed[group.bases[0]] = segment
        except OSError:
            self._put_away([group for group in there if group.bases[0] not in placed])
            raise
        self._put_away([group for group in there if group.bases[0] not in placed])
        yield from _give_names(log, [*placed.values()])
        return [group for group in there if group.bases[0] in placed]

    def _is_there(self, group: CleanedGroup) -> bool:
        """Whether the segments of a group are in the log as they were when they were read."""
        segments = self._log.segments
        first = segments.index_of(group.bases[0])
        return [source_of(it) for it in segments[first : first + len(group.sources)]] == list(group.sources)

    def _put_away(self, groups: Sequence[CleanedGroup]) -> None:
        """Give new segments the names of unfinished ones, which the next start or cleaning removes.

        One of which that fails is removed by the next cleaning (`cleaner`).
        """
        for group in groups:
            disk, swap = self._disk, self._path(group, SWAP_SUFFIX)
            with contextlib.suppress(OSError):
                if disk.exists(swap):
                    disk.rename(swap, self._path(group, CLEANED_SUFFIX))

    def _path(self, group: CleanedGroup, suffix: str = "") -> Path:
        return path_of(self._directory, group.bases[0], suffix)
