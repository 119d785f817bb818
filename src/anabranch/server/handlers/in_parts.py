"""Long requests, handled part by part.

A request that names many things is handled as requests of at most PARTITIONS_AT_A_TIME of them, one after another, and
answered once, with the answers joined; other work has its turn between two parts. That is sound for APIs that answer
for each thing on its own, which Kafka's do where they name many. A part that fails as a whole is the answer: an error
of the coordinator ends all parts.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from anabranch.server.context import NOTHING_TWICE, PARTITIONS_AT_A_TIME, BrokerContext, Large, RequestContext

if TYPE_CHECKING:
    from anabranch.server.handlers import Handler

T = TypeVar("T")
LENGTH_AT_ONCE = 160
"""Characters of a name that are as much work as a partition: a name is hashed, looked up, and perhaps quoted."""


class Parts(NamedTuple):
    """Which arrays of a request name things, and which arrays of its answer tell of them."""

    asked: str
    answered: str
    asked_inner: str = ""
    """The array of each element of `asked` that names things; empty where the elements are the things."""
    answered_inner: str = ""
    key: Callable[[Any], Hashable] | None = None
    """The identity of an element, where each thing is answered once, however often it is named: its answer is long, or
    it is changed for good. What a request says last of it counts."""
    key_inner: Callable[[Any], Hashable] | None = None
    """The same of what `asked_inner` names; None where that are numbers or strings."""
    unique: Callable[[Any], Hashable] | None = None
    """The identity of an element that a request may name once: the handler refuses those in `RequestContext.twice`."""
    asked_earlier: str = ""
    """The array in place of `asked` in earlier versions."""
    weight: int = 1
    """How many partitions are as much work as one element."""

    @property
    def at_a_time(self) -> int:
        """The elements of a part."""
        return max(1, PARTITIONS_AT_A_TIME // self.weight)

    def name_of(self, request: Any) -> str:
        """The name of the array of a request."""
        return self.asked_earlier if self.asked_earlier and not getattr(request, self.asked) else self.asked

    def of(self, request: Any) -> list[Any] | None:
        """The array of a request; None if it is null, for all there are."""
        found: list[Any] | None = getattr(request, self.name_of(request))
        return found

    def once(self, request: Any) -> None:
        """Drop what a request names again."""
        elements = self.of(request)
        if self.key is None or not elements:
            return
        if not self.asked_inner:
            setattr(request, self.name_of(request), list({self.key(it): it for it in elements}.values()))
            return
        places: dict[Hashable, tuple[list[Any], int]] = {}
        for element in elements:
            key, fresh = self.key(element), list[Any]()
            for it in getattr(element, self.asked_inner):
                before, place = places.setdefault(
                    (key, it if self.key_inner is None else self.key_inner(it)), (fresh, len(fresh))
                )
                if place < len(before):
                    before[place] = it
                else:
                    before.append(it)
            setattr(element, self.asked_inner, fresh)

    def twice(self, request: Any) -> Set[Hashable]:
        """Find what a request names more than once and may not."""
        elements = self.of(request)
        if self.unique is None or not elements or len(elements) < 2:
            return NOTHING_TWICE
        return {name for name, count in Counter(map(self.unique, elements)).items() if count > 1}

    def prepare(self, request: Any, call: RequestContext) -> RequestContext:
        """Drop what a request names again, and note what it may not name again."""
        self.once(request)
        twice = self.twice(request)
        return call._replace(twice=twice) if twice else call

    def long(self, request: Any) -> bool:
        """Whether a request is handled part by part."""
        elements = self.of(request)
        if not elements:
            return False
        if len(elements) >= self.at_a_time:
            return True
        return sum(_work(it, self.asked_inner) for it in elements) >= self.at_a_time

    def split(self, request: Any, at_a_time: int | None = None) -> Iterator[tuple[bool, Any]]:
        """Yield requests of few things each, and whether the first element of one goes on with the one before."""
        elements = self.of(request)
        assert elements is not None
        for continued, part in split(elements, self.asked_inner, at_a_time or self.at_a_time):
            made = copy(request)
            setattr(made, self.name_of(request), part)
            yield continued, made

    def join(self, whole: Any, part: Any, *, continued: bool) -> None:
        """Add the answer of a part to that of the parts before."""
        before, after = getattr(whole, self.answered), getattr(part, self.answered)
        if continued and self.answered_inner and before and after:
            getattr(before[-1], self.answered_inner).extend(getattr(after[0], self.answered_inner))
            after = after[1:]
        before.extend(after)


def work_of_name(name: str) -> int:
    """How many partitions are as much work as a name."""
    return 1 + len(name) // LENGTH_AT_ONCE


def _work(element: Any, inner: str) -> int:
    """How many partitions are as much work as an element: a name, or a struct with the array `inner`."""
    if isinstance(element, str):
        return work_of_name(element)
    return 1 + len(getattr(element, inner) or ()) if inner else 1


def split(
    elements: Sequence[Any], inner: str, at_a_time: int = PARTITIONS_AT_A_TIME
) -> Iterator[tuple[bool, list[Any]]]:
    """Cut elements, and the array `inner` of each, into stretches of so many, or of fewer whose names are long."""
    stretch: list[Any] = []
    room = at_a_time
    continued = False
    for element in elements:
        named = getattr(element, inner) if inner else None
        if not named or len(named) < room:
            stretch.append(element)
            room -= _work(element, inner)
        else:
            begin = 0
            while len(named) - begin > room:
                stretch.append(_stretch_of(element, inner, named[begin : begin + room]))
                yield continued, stretch
                begin += room
                stretch, room, continued = [], at_a_time, True
            stretch.append(_stretch_of(element, inner, named[begin:]))
            room -= len(named) - begin
        if room <= 0:
            yield continued, stretch
            stretch, room, continued = [], at_a_time, False
    if stretch:
        yield continued, stretch


def _stretch_of(element: Any, inner: str, named: list[Any]) -> Any:
    made = copy(element)
    setattr(made, inner, named)
    return made


async def handle_in_parts(
    handler: Handler, parts: Parts, broker: BrokerContext, request: Any, call: RequestContext
) -> Large | Any:
    """Handle a long request."""
    if parts.key is not None or parts.unique is not None:
        # Apart from the loop, where 200,000 elements would take too long.
        call = await asyncio.get_running_loop().run_in_executor(None, parts.prepare, request, call)
    answers: list[tuple[bool, Any]] = []
    for continued, part in parts.split(request):
        answer = handler(broker, part, call)
        if hasattr(answer, "__await__"):
            answer = await answer
        if getattr(answer, "error_code", 0):
            return answer
        answers.append((continued, answer))
        await asyncio.sleep(0)
    return Large(lambda: _joined(parts, answers))


def _joined(parts: Parts, answers: list[tuple[bool, Any]]) -> Any:
    """Make one answer of those to the parts, which are dropped; large ones are made here, one long answer at a time."""
    whole: Any = None
    answers.reverse()
    while answers:
        continued, answer = answers.pop()
        if isinstance(answer, Large):
            answer = answer.make()
        if getattr(answer, "error_code", 0):
            return answer
        if whole is None:
            whole = answer
        else:
            parts.join(whole, answer, continued=continued)
    return whole


async def gather_in_steps(found: Iterable[T], weigh: Callable[[T], int] = lambda each: 1) -> list[T]:
    """List what an iterator finds, of which there may be much; other work has its turn in between.

    `weigh`: by how many others one of them takes as long to find; a step ends with PARTITIONS_AT_A_TIME.
    """
    gathered: list[T] = []
    left = PARTITIONS_AT_A_TIME
    for each in found:
        gathered.append(each)
        left -= weigh(each)
        if left <= 0:
            left = PARTITIONS_AT_A_TIME
            await asyncio.sleep(0)
    return gathered
