"""The broker's own log: one line per event on standard error, as logfmt or JSON, each field by name.

An event is a short constant sentence; variable parts go into fields, so that lines can be searched and counted:

    events.warning("connection closed", peer="127.0.0.1:4242", reason="unknown API key 9999")
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import TextIO

_FIELDS = "anabranch_fields"
_ROOT = "anabranch"
LEVEL_NAMES = ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL")
"""Kafka's names of levels; nothing is written at TRACE alone."""
_LEVELS = (logging.DEBUG, logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL)


class EventLogger:
    """A named logger whose events carry fields."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(f"anabranch.{name}")

    def debug(self, event: str, **fields: object) -> None:
        """Log an event for developers."""
        self._log(logging.DEBUG, event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Log an event for operators."""
        self._log(logging.INFO, event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Log a fault of a peer or of the environment that was handled."""
        self._log(logging.WARNING, event, fields)

    def error(self, event: str, *, exception: BaseException | None = None, **fields: object) -> None:
        """Log a fault that needs attention."""
        self._log(logging.ERROR, event, fields, exception)

    def _log(self, level: int, event: str, fields: dict[str, object], error: BaseException | None = None) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, extra={_FIELDS: fields}, exc_info=error)


class EventLimit:
    """Admits so many events in `interval_s`, one by default, and counts the suppressed ones."""

    def __init__(self, interval_s: float, burst: int = 1) -> None:
        self._interval_s = interval_s
        self._burst = burst
        self._left = 0
        self._next = float("-inf")
        self._suppressed = 0

    def admit(self, now_s: float) -> int | None:
        """Return the number of events suppressed since the last admitted one; None if this one is suppressed, too."""
        if now_s >= self._next:
            self._next = now_s + self._interval_s
            self._left = self._burst
        if not self._left:
            self._suppressed += 1
            return None
        self._left -= 1
        suppressed, self._suppressed = self._suppressed, 0
        return suppressed


class _Lines(logging.Formatter):
    def _pairs(self, record: logging.LogRecord) -> dict[str, object]:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        pairs: dict[str, object] = {
            "ts": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            "from": record.name.removeprefix("anabranch."),
        }
        pairs.update(getattr(record, _FIELDS, {}))
        if record.exc_info and record.exc_info[1] is not None:
            pairs["exception"] = self.formatException(record.exc_info)
        return pairs


class Logfmt(_Lines):
    """`name=value` pairs on a line; values with spaces, quotes or line ends are quoted."""

    def format(self, record: logging.LogRecord) -> str:
        return " ".join(f"{name}={_logfmt(value)}" for name, value in self._pairs(record).items())


class JsonLines(_Lines):
    """One JSON object on a line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps({name: _plain(value) for name, value in self._pairs(record).items()})


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)


def _logfmt(value: object) -> str:
    text = str(value)
    if text and not any(character in ' "=\\' or character < " " for character in text):
        return text
    return json.dumps(text)


def set_up(form: str, level: str, stream: TextIO | None = None) -> None:
    """Send every event of the broker to `stream`, standard error by default."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonLines() if form == "json" else Logfmt())
    logger = logging.getLogger("anabranch")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False


def levels() -> dict[str, str]:
    """The level of each logger, by name: its own one, or that of the logger above it."""
    names = [_ROOT, *sorted(name for name in logging.root.manager.loggerDict if name.startswith(f"{_ROOT}."))]
    words = dict(zip(_LEVELS, LEVEL_NAMES, strict=True))
    return {name: words.get(logging.getLogger(name).getEffectiveLevel(), "INFO") for name in names}


def set_level(name: str, level: str | None) -> None:
    """Give a logger a level of LEVEL_NAMES; None: that of the logger above it."""
    number = logging.NOTSET if level is None else _LEVELS[LEVEL_NAMES.index(level.upper())]
    logging.getLogger(name).setLevel(number)
