"""Metadata that does not fit the logs: found at a start, which is refused, and restored by `anabranch repair`.

The logs of a data directory belong to the topics in its metadata. Without the metadata, or with an older one, a start
would have clients create topics anew over the logs of others. The broker keeps a copy of the metadata beside the logs,
seconds old. A repair puts it in the place of the metadata, which is renamed, and brings it up to what the logs show:
leader epochs, and producer ids that were handed out. Where only some nodes are damaged, and the copy has them as they
were written, these nodes alone are taken from it. Where the write-ahead log is damaged, or the metadata lacks a log or
is older than the logs, the later one counts: the copy, or what is sound. Logs that it does not have are moved out of
the way into `unknown/`; a log whose recorded start is lost starts at its first file; damaged snapshots of producers are
renamed. Nothing is deleted. The new metadata is made beside the old, with all that it is to have, and then takes its
place: a repair that was interrupted is finished by the next one, and a start is refused until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from anabranch.base.errors import AnabranchError
from anabranch.base.ids import TopicPartition
from anabranch.machines.controller import nodes
from anabranch.runtime.disk import Disk
from anabranch.runtime.events import EventLogger
from anabranch.storage.checkpoints import CheckpointError
from anabranch.storage.directory import (
    METADATA_COPY_FILE,
    METADATA_FILE,
    METADATA_REPAIRED_FILE,
    UNKNOWN_DIRECTORY,
    DataDirectory,
)
from anabranch.storage.interface import MetadataStore
from anabranch.storage.log.survey import LogSurvey
from anabranch.storage.metadata.table import ROOT, Found, Row, changes_of, odd_file, read_tree, write_tree

events = EventLogger("repair")
NAMES_SHOWN = 5
_REMEDY = (
    "Restore metadata.sqlite from a copy, or have `anabranch repair --data {path}` restore it from the one that the "
    "broker keeps; nothing was changed."
)
_ODD_BESIDE = "{path} is no ordinary file, and SQLite would use it: move it out of the way; nothing was changed."


class MetadataLostError(AnabranchError):
    """The metadata does not fit the logs of the data directory."""


def check_metadata_file(directory: DataDirectory) -> None:
    """Refuse logs without metadata, and metadata older than its copy, before a file is made or changed.

    Where changes are in a write-ahead log, `check_metadata` compares it with the copy. MetadataLostError.
    """
    path = directory.path / METADATA_FILE
    logs = directory.logs()
    if (directory.path / METADATA_REPAIRED_FILE).exists():
        raise MetadataLostError(
            f"A repair of {path} was interrupted: let `anabranch repair --data {directory.path} --apply` finish it."
        )
    odd = odd_file(path)
    if odd == path:
        raise MetadataLostError(f"{path} is no ordinary file. " + _REMEDY.format(path=directory.path))
    if odd is not None:
        raise MetadataLostError(_ODD_BESIDE.format(path=odd))
    if logs and not (path.exists() and path.stat().st_size):
        raise MetadataLostError(
            f"{path} is {'empty' if path.exists() else 'missing'}, but there are logs of {_shown(logs)}. "
            + _REMEDY.format(path=directory.path)
        )
    if not path.with_name(f"{path.name}-wal").exists():
        _check_is_latest(directory, changes_of(path))


def _check_is_latest(directory: DataDirectory, here: int | None) -> None:
    """Refuse metadata that has seen fewer changes than its copy, where that is sound. MetadataLostError."""
    copy = directory.path / METADATA_COPY_FILE
    there = changes_of(copy)
    if here is None or there is None or here >= there:
        return
    copied = read_tree(copy)
    if copied is None or copied.damaged:
        events.warning("the copy of the metadata is damaged, and made anew", file=copy)
        return
    raise MetadataLostError(
        f"{directory.path / METADATA_FILE} has seen {here} changes, {copy.name} beside it {there}: it is an older "
        "copy. " + _REMEDY.format(path=directory.path)
    )


async def check_metadata(directory: DataDirectory, store: MetadataStore) -> None:
    """Refuse metadata that is older than its copy, of an earlier controller than the last, or without one of the logs.

    MetadataLostError.
    """
    _check_is_latest(directory, (await store.get(ROOT))[1])
    term = (
        int((await store.get(nodes.CONTROLLER_EPOCH))[0] or b"0") if await store.exists(nodes.CONTROLLER_EPOCH) else 0
    )
    if term < directory.term:
        raise MetadataLostError(
            f"{directory.path / METADATA_FILE} is of controller epoch {term}, the logs of {directory.term}: it is an "
            "older copy. " + _REMEDY.format(path=directory.path)
        )
    logs = directory.logs()
    known = {(node.path, bool(node.data)) for node in await store.subtree(nodes.TOPICS)}
    unknown = [log for log in logs if (nodes.partition_path(log.topic, log.partition), True) not in known]
    if unknown:
        raise MetadataLostError(
            f"{directory.path / METADATA_FILE} does not have {_shown(unknown)}, of which there are logs. "
            + _REMEDY.format(path=directory.path)
        )


Surveys = Mapping[TopicPartition, LogSurvey]
"""What the files of each log show."""


class Step(NamedTuple):
    """One step of a repair."""

    text: str
    do: Callable[[], None]


def plan_repair(path: Path, disk: Disk) -> tuple[DataDirectory, list[Step]]:
    """Plan the repair of a data directory, which is locked; nothing is changed yet. AnabranchError, OSError."""
    directory = DataDirectory(path, disk)
    try:
        surveys = {log: directory.survey(log) for log in directory.logs()}
        # The files of a log come first: the log may be moved.
        return directory, [*_log_steps(directory, surveys), *_metadata_steps(directory, surveys)]
    except BaseException:
        directory.release()
        raise


def _metadata_steps(directory: DataDirectory, surveys: Surveys) -> list[Step]:
    path = directory.path / METADATA_REPAIRED_FILE
    odd = odd_file(directory.path / METADATA_FILE)
    if odd not in (None, directory.path / METADATA_FILE):
        raise AnabranchError(_ODD_BESIDE.format(path=odd))
    found = read_tree(directory.path / METADATA_FILE, power_lost=directory.machine_restarted)
    copied = read_tree(directory.path / METADATA_COPY_FILE)
    if not path.exists():
        return _restoring_steps(directory, found, copied, surveys)
    made = read_tree(path)
    if made is not None and _is_unfinished(made, found, directory, surveys):
        text = f"finish the repair that was interrupted: put {path.name} in the place of {METADATA_FILE}"
        return [Step(text, directory.finish_restoring), *_moving(directory, made.sound, surveys, "it")]
    text = f"rename {path}, which is damaged, or after which {METADATA_FILE} has changed"
    return [
        Step(text, partial(directory.keep_damaged, path)),
        *_restoring_steps(directory, found, copied, surveys),
    ]


def _is_unfinished(made: Found, found: Found | None, directory: DataDirectory, surveys: Surveys) -> bool:
    """Whether what a repair has made is sound and the latest: no broker has gone on with the metadata since."""
    if made.damaged or _term(made.sound) < directory.term:
        return False
    if found is None:
        return True  # It was renamed already, and no broker starts while the new one is there.
    is_later = _changes_of(made) > _changes_of(found)
    return is_later and {*_unknown(surveys, made.sound)} <= {*_unknown(surveys, found.sound)}


def _changes_of(found: Found | None) -> int:
    """The number of changes that a tree has seen; 0 in files of earlier versions."""
    return 0 if found is None or ROOT not in found.sound else found.sound[ROOT].version


def _restoring_steps(
    directory: DataDirectory, found: Found | None, copied: Found | None, surveys: Surveys
) -> list[Step]:
    path, copy = directory.path / METADATA_FILE, directory.path / METADATA_COPY_FILE
    if found is None and not surveys and not directory.term and not _has_bytes(path):
        return []  # No broker has started here.
    restoring = partial(_restoring, directory, surveys, max(_changes_of(found), _changes_of(copied)) + 1)
    originals = None if found is None else _originals(found.damaged, copied)
    if found is not None and originals is not None:
        tree = {**found.sound, **originals}
        is_behind = _is_behind(tree, copied)
        may_be_older = _has_seen_less(tree, copied) or (
            bool(_unknown(surveys, tree)) and (is_behind or copied is None or bool(copied.damaged))
        )
        taken = sorted(originals.keys() - {ROOT})
        older = [node for node in taken if not found.damaged[node].stems_from(originals[node])]
        of_nodes = ""
        if taken:
            of_nodes = f"restore {_shown(taken)} of {path.name} from {copy.name}, as the checksums show that it was"
        if older:
            of_nodes += f". Of {_shown(older)} the copy has an earlier form: look at what was changed since"
        if found.is_cut and not is_behind and not may_be_older:
            text = f"restore {path.name} without {path.name}-wal, which is damaged: it has all changes itself"
            if not found.is_whole:
                text = (
                    f"restore {path.name} from what is sound of it: changes of its last transactions, for which "
                    f"{path.name}-wal is damaged, are lost"
                )
            text += f"; {of_nodes}" if taken else ""
            return restoring(text, tree, _changes(directory, tree, surveys), "what is sound")
        if not found.is_cut and _term(tree) >= directory.term and not may_be_older:
            text = of_nodes or f"write the root of {path.name} anew, which only counts changes"
            text += f"; the other {len(found.sound)} nodes are sound and stay"
            changes = _changes(directory, tree, surveys) if older else _ahead(tree, surveys)
            if not originals and not changes:
                return _moving(directory, tree, surveys, "the metadata")
            return restoring(text if originals else "", tree, changes, "the metadata")
        if not found.is_cut and not is_behind and not may_be_older:
            text = (
                f"keep {path.name}, which is of an earlier controller than the logs, as there is nothing later: what "
                "was changed since is lost"
            )
            text += f"; {of_nodes}" if taken else ""
            return restoring(text, tree, _changes(directory, tree, surveys), "the metadata")
    if copied is None or copied.damaged:
        raise AnabranchError(
            f"{copy} is missing or damaged, and {path} is so, too, or does not fit the logs: restore either from a "
            "copy of your own."
        )
    tree = copied.sound
    text = f"restore {path.name} from {copy.name}: {len(surveys) - len(_unknown(surveys, tree))} of {len(surveys)} "
    text += "logs are in it"
    if found is not None and (back := _topics(tree) - _topics(found.sound)):
        text += f"; topics that are only there, made in the last seconds or deleted: {_shown(sorted(back))}"
    return restoring(text, tree, _changes(directory, tree, surveys), "the copy")


def _restoring(
    directory: DataDirectory,
    surveys: Surveys,
    number: int,
    text: str,
    tree: Mapping[str, Row],
    changes: Mapping[str, bytes],
    what: str,
) -> list[Step]:
    """Put a tree with some changes in the place of the metadata, in one step: a repair may be interrupted.

    `number`: that of changes which it has seen from then on, later than all others.
    """
    if changes:
        text += "; " if text else ""
        text += f"bring {len(changes)} nodes up to the logs: {', '.join(sorted(changes)[:NAMES_SHOWN])}"
    rows = {**tree, **{name: _changed(tree.get(name), name, data) for name, data in changes.items()}}
    rows[ROOT] = Row(ROOT, number, 0, None, b"")
    write = partial(write_tree, tree=[rows[name] for name in sorted(rows)])
    return [
        Step(text, partial(directory.restore_metadata, write)),
        *_moving(directory, tree, surveys, what),
    ]


def _changed(row: Row | None, name: str, data: bytes) -> Row:
    return Row(name, 0, 0, None, data) if row is None else row._replace(version=row.version + 1, data=data, crc=None)


def _is_behind(tree: Mapping[str, Row], copied: Found | None) -> bool:
    """Whether the copy has changes that a tree does not have; files of earlier versions tell of most of them only."""
    if copied is None or copied.damaged:
        return False
    if _seen(tree) != _changes_of(copied):
        return _has_seen_less(tree, copied)
    rows = [row for row in copied.sound.values() if not row.session]
    return any(row.path not in tree or row.version > tree[row.path].version for row in rows)


def _has_seen_less(tree: Mapping[str, Row], copied: Found | None) -> bool:
    """Whether a sound copy has seen more changes than a tree."""
    return copied is not None and not copied.damaged and _seen(tree) < _changes_of(copied)


def _seen(tree: Mapping[str, Row]) -> int:
    return tree[ROOT].version if ROOT in tree else -1


def _moving(directory: DataDirectory, tree: Mapping[str, Row], surveys: Surveys, what: str) -> list[Step]:
    """Move the logs of which a tree does not know out of the way."""
    text = "move the log of {log}, which {what} does not have, into {to}/"
    return [
        Step(text.format(log=log, what=what, to=UNKNOWN_DIRECTORY), partial(directory.move_away, log))
        for log in _unknown(surveys, tree)
    ]


def _originals(damaged: Mapping[str, Row], copied: Found | None) -> dict[str, Row] | None:
    """Find damaged nodes in the copy: as they were written or, where they stand for themselves, in an earlier form.

    None where it does not have all of them.
    """
    sound = {ROOT: Row(ROOT, 0, 0, None, b""), **(copied.sound if copied is not None else {})}
    originals = {
        path: sound[path]
        for path, row in damaged.items()
        if path in sound and (row.stems_from(sound[path]) or _stands_for_itself(path))
    }
    return originals if len(originals) == len(damaged) else None


def _stands_for_itself(path: str) -> bool:
    """Whether no other node has to fit this one: configs, the ids of producers, which the logs tell, and the root."""
    return path in (ROOT, nodes.PRODUCER_IDS) or path.startswith((f"{nodes.CONFIGS}/", f"{nodes.GROUP_CONFIGS}/"))


def _ahead(tree: Mapping[str, Row], surveys: Surveys) -> dict[str, bytes]:
    """The nodes of partitions whose logs have later leader epochs."""
    changes: dict[str, bytes] = {}
    for log, found in surveys.items():
        name = nodes.partition_path(log.topic, log.partition)
        if _data(tree, name):
            node, latest = nodes.read_partition(name, tree[name].data), found.latest_epoch
            if latest > node.leader_epoch:
                changes[name] = nodes.put_partition(log.topic, log.partition, replace(node, leader_epoch=latest)).data
    return changes


def _changes(directory: DataDirectory, tree: Mapping[str, Row], surveys: Surveys) -> dict[str, bytes]:
    """The nodes of an earlier tree that the logs are ahead of, or may be."""
    changes = _ahead(tree, surveys)
    seen = max((found.producer_id for found in surveys.values()), default=-1)
    # Ids may have been handed out, and used, in the seconds after the copy was made: a block more is skipped.
    size = nodes.PRODUCER_ID_BLOCK_SIZE
    given_below = max(int(_data(tree, nodes.PRODUCER_IDS) or b"0"), (seen // size + 1) * size)
    changes[nodes.PRODUCER_IDS] = b"%d" % (given_below + size)
    if directory.term > _term(tree):
        changes[nodes.CONTROLLER_EPOCH] = b"%d" % directory.term
    return changes


def _log_steps(directory: DataDirectory, surveys: Surveys) -> list[Step]:
    steps = []
    for log, found in surveys.items():
        base = found.first_base
        if base is not None and _log_start_is_lost(directory, log, base):
            text = f"start the log of {log} at offset {base}, where its first file begins"
            steps.append(Step(text, partial(directory.start_log_at, log, base)))
        for path in found.damaged_snapshots:
            text = f"rename {path}, which is damaged; producers that nothing else tells of are forgotten"
            steps.append(Step(text, partial(directory.keep_damaged, path)))
    return steps


def _log_start_is_lost(directory: DataDirectory, log: TopicPartition, first_base: int) -> bool:
    try:
        known = directory.checkpoints.known(str(log))
    except CheckpointError:
        return True
    if known.log_start is None:
        return False
    return known.log_start < first_base or (known.synced is not None and known.log_start > known.synced)


def _has_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _unknown(logs: Iterable[TopicPartition], tree: Mapping[str, Row]) -> list[TopicPartition]:
    return [log for log in logs if not _data(tree, nodes.partition_path(log.topic, log.partition))]


def _topics(tree: Mapping[str, Row]) -> set[str]:
    return {path.rpartition("/")[2] for path in tree if path == nodes.topic_path(path.rpartition("/")[2])}


def _term(tree: Mapping[str, Row]) -> int:
    return int(_data(tree, nodes.CONTROLLER_EPOCH) or b"0")


def _data(tree: Mapping[str, Row], path: str) -> bytes:
    return tree[path].data if path in tree else b""


def _shown(logs: Sequence[TopicPartition] | Sequence[str]) -> str:
    names = ", ".join(map(str, logs[:NAMES_SHOWN]))
    return names if len(logs) <= NAMES_SHOWN else f"{names} and {len(logs) - NAMES_SHOWN} more"
