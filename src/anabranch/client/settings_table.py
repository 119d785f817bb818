"""The settings of the clients as a Markdown table: `python -m anabranch.client.settings_table` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any

from anabranch.client.settings import AdminSettings, ClientSettings, ConsumerSettings, ProducerSettings

CLIENTS: Mapping[str, type[ClientSettings]] = {
    "producer": ProducerSettings,
    "consumer": ConsumerSettings,
    "admin": AdminSettings,
}


def as_markdown() -> str:
    """Return the table of all settings: docs/client-settings.md."""
    lines = [
        "# Settings of the clients",
        "",
        "Made by `python -m anabranch.client.settings_table`; names are Kafka's where Kafka has the setting. As "
        "keyword arguments they are written with underscores.",
        "",
        "| name | of | type | default | |",
        "| --- | --- | --- | --- | --- |",
    ]
    found: dict[str, list[str]] = {}
    for client, model in CLIENTS.items():
        for item in fields(model):
            found.setdefault(item.name, []).append(client)
    for name, clients in found.items():
        items = {client: next(item for item in fields(CLIENTS[client]) if item.name == name) for client in clients}
        defaults = dict.fromkeys(_default(item) for item in items.values())
        item = items[clients[0]]
        of = "all" if len(clients) == len(CLIENTS) else ", ".join(clients)
        lines.append(f"| `{_dotted(name)}` | {of} | {_kind(item)} | {', '.join(defaults)} | {item.metadata['doc']} |")
    return "\n".join(lines) + "\n"


def _dotted(name: str) -> str:
    return name.replace("_", ".")


def _kind(item: Field[Any]) -> str:
    if item.metadata["kind"]:
        return str(item.metadata["kind"])
    kind = str(item.type).removesuffix(" | None")
    return {"bool": "boolean", "str": "string", "int": "int"}.get(kind, "list")


def _default(item: Field[Any]) -> str:
    value = item.default
    if isinstance(value, bool):
        value = str(value).lower()
    if isinstance(value, tuple):
        value = ", ".join(value)
    return f"`{value}`" if value not in (None, "") else ""


if __name__ == "__main__":
    print(as_markdown(), end="")
