"""The settings of a broker as a Markdown table: `anabranch serve --settings --markdown` prints it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from anabranch.machines.controller.broker_configs import DYNAMIC, FIXED, OLDER
from anabranch.machines.controller.configs import TopicConfig
from anabranch.server.settings.table import described

_INTRODUCTION = """\
Made by `anabranch serve --settings --markdown`; names are Kafka's where Kafka has the setting. A dynamic setting is the
default of a topic's config, or one of background work, and can be changed while the broker runs, for one broker or
for all (KIP-226): with `IncrementalAlterConfigs`, in Kafka's tools `kafka-configs --alter --entity-type brokers`.
`AlterConfigs` replaces all dynamic settings of a broker: those that it does not name return to their defaults. The
others are read at the start.
"""
_OLDER = """\
These are other names that Kafka has for settings above. They are read at the start, and described with the value in
force: null where that is not a whole number of the unit. Of several names that a file gives for one setting, that with
the finest unit counts; of the environment, or of `--set`, any name replaces all that come before.
"""


def as_markdown() -> str:
    """Return the table of all settings: docs/settings.md."""
    settings = [(it.name, it.kind, it.default, it.doc) for it in described()]
    known = {name for name, *_ in settings}

    def more(of: Mapping[str, TopicConfig]) -> list[tuple[str, str, str, str]]:
        listed = [it for name, it in of.items() if name not in known]
        return [(it.broker_setting or it.name, it.type.name.lower(), it.default, it.documentation) for it in listed]

    def table(rows: Iterable[tuple[str, str, str, str]]) -> list[str]:
        lines = ["", "| name | type | default | dynamic | |", "| --- | --- | --- | --- | --- |"]
        for name, kind, default, doc in rows:
            value, dynamic = f"`{default}`" if default else "", "yes" if name in DYNAMIC else ""
            lines.append(f"| `{name}` | {kind} | {value} | {dynamic} | {doc} |")
        return lines

    lines = ["# Settings", "", *_INTRODUCTION.splitlines(), *table(settings)]
    lines += ["", "These are dynamic only, and not read at the start:", *table(more(DYNAMIC))]
    lines += ["", "These are fixed, and described to clients that look for them:", *table(more(FIXED))]
    lines += [
        "",
        *_OLDER.splitlines(),
        *table((name, it.type.name.lower(), "", it.documentation) for name, it in OLDER.items()),
    ]
    return "\n".join(lines) + "\n"
