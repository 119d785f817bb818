"""Settings by Kafka's dotted names, as keyword arguments."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any


def as_keywords(client: type[Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Turn `{"linger.ms": "5"}` into `{"linger_ms": 5}`, text into what the client's settings want.

    Raises `TypeError` for a name that the client does not have, `ValueError` for text that says nothing.
    """
    known = dict(inspect.signature(client).parameters)
    keywords: dict[str, Any] = {}
    for name, value in config.items():
        keyword = name.replace(".", "_").replace("-", "_")
        if keyword not in known:
            names = ", ".join(sorted(parameter.replace("_", ".") for parameter in known))
            raise TypeError(f"{client.__name__} has no setting '{name}'; it has {names}")
        keywords[keyword] = _convert(name, value, str(known[keyword].annotation))
    return keywords


def _convert(name: str, value: Any, wanted: str) -> Any:
    if not isinstance(value, str):
        return value
    if wanted.startswith("bool"):
        if value.lower() not in ("true", "false"):
            raise ValueError(f"{name} is '{value}'; it can be true or false")
        return value.lower() == "true"
    if wanted == "int":
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"{name} is '{value}'; it must be a whole number") from None
    return value
