"""Every callback of a broker's event loop is timed, or known to be short: what is not timed is seen by no gauge."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.support.broker import ROOT

SOURCES = ROOT / "src" / "anabranch"
CALLBACK = {
    "call_soon": 0,
    "call_soon_threadsafe": 0,
    "add_done_callback": 0,
    "call_later": 1,
    "call_at": 1,
    "add_reader": 1,
    "add_writer": 1,
}
"""The place of the callback among the arguments."""
SHORT = {
    # Complete a future, or note that one is complete.
    "end",
    "waiter.wake",
    "_end",
    "_consume",
    "_log_failure",
    "self._created",
    "self._individual_created",
    "drop",
    # Forget a task.
    "self._asking.discard",
    "self._tasks.discard",
    "self._tasks.pop",
    "self.removing.pop",
    # Cancel the requests of a connection, at most 16 and one large one.
    "_cancel",
    # Begin a task, to which the time of what follows belongs.
    "self._refreshed",
    # Give work to a thread.
    "_clear_apart",
    # Once in the life of a broker, or after it ran out of descriptors: begin a thread, end one, watch a socket.
    "self._start_http",
    "lambda _: self._thread.shutdown(wait=False)",
    "self._again",
}


def callbacks() -> Iterator[tuple[str, ast.expr]]:
    for layer in ("runtime", "storage", "server"):
        for path in sorted((SOURCES / layer).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLBACK:
                    yield f"{path.relative_to(SOURCES)}:{node.lineno}", node.args[CALLBACK[node.func.attr]]


def test_every_callback_of_the_loop_is_timed_or_short() -> None:
    found = {place: ast.unparse(callback) for place, callback in callbacks()}
    assert len(found) > 25
    unseen = {place: text for place, text in found.items() if not text.startswith("timed(")}
    assert {place: text for place, text in unseen.items() if text not in SHORT} == {}
    assert SHORT - set(unseen.values()) == set(), "known to be short, and not there"
