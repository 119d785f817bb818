"""The pictures of a run as SVG text: the river of its topic over time, and the path of one aircraft's records.

The river has four panels above one time axis: what was written and what was read, over the key space; the lag; and the
wait at each gate. A label is drawn only where it fits. Every shape has a tooltip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby, pairwise
from math import floor, log10
from typing import NamedTuple

from anabranch.demo.story import Piece, Span, Story, Wait

COLORS = ("#8ec1e8", "#f6c177", "#9bd19b", "#c7b5e6", "#f2a7b5", "#8fd3cf", "#d9c98a", "#b8bfc9")
"""The fill of each layout; they repeat from the ninth on."""
INK, GRAY, RED, GRID = "#1d2733", "#5b6673", "#c62f3b", "#d8dde3"
WIDTH, LEFT, RIGHT = 1120, 168, 16
RIVER_HEIGHT, LAG_HEIGHT, ROW_HEIGHT = 208, 92, 20
TOP, GAP, AXIS = 46, 26, 40
ROWS = 3
"""Rows of labels above the river."""
CHARACTER = 6.3
"""The width of a character of 11 px in a wide font."""
BOLD_CHARACTER = 7.0
PATH_HEIGHT, PATH_LEFT = 190, 64


class Cell(NamedTuple):
    """Keys between two bounds in one micro-batch, and the pieces that hold records of them, by layout."""

    keys: Span
    pieces: tuple[Piece, ...]
    late: tuple[bool, ...]
    """For each piece, whether an earlier micro-batch read later records of these keys."""


def color(layout: int) -> str:
    """The fill of a layout."""
    return COLORS[layout % len(COLORS)]


def ticks(high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return at most `most` + 1 round numbers from 0 to `high`, evenly apart; `whole` ones for counts."""
    if high <= 0:
        return [0.0]
    rough = max(high / most, 1.0) if whole else high / most
    unit = 10.0 ** floor(log10(rough))
    step = next(step for step in (unit, 2 * unit, 5 * unit, 10 * unit, 20 * unit) if step >= rough)
    return [step * i for i in range(int(high / step + 1e-9) + 1)]


def cells(pieces: Sequence[Piece]) -> list[Cell]:
    """Cut what one micro-batch read, by keys, so that within a cell the same is true of all keys."""
    bounds = sorted({bound for piece in pieces for span in (piece.keys, *piece.late) for bound in span})
    cut: list[Cell] = []
    for low, high in pairwise(bounds):
        keys = Span(low, high)
        here = tuple(sorted((piece for piece in pieces if piece.keys.overlap(keys)), key=lambda piece: piece.layout))
        late = tuple(any(span.overlap(keys) for span in piece.late) for piece in here)
        if cut and cut[-1] == (Span(cut[-1].keys.low, low), here, late):
            cut[-1] = Cell(Span(cut[-1].keys.low, high), here, late)
        elif here:
            cut.append(Cell(keys, here, late))
    return cut


def river(story: Story) -> str:
    """Draw the topic of a run from its beginning to its end."""
    return _River(story).draw()


class _River:
    def __init__(self, story: Story) -> None:
        self.story = story
        self.scale = (WIDTH - LEFT - RIGHT) / max(story.took_s, 1e-9)
        self.written = TOP
        self.read = self.written + RIVER_HEIGHT + GAP
        self.lag = self.read + RIVER_HEIGHT + GAP
        self.gates = self.lag + LAG_HEIGHT + GAP
        self.bottom = self.gates + ROW_HEIGHT * max(1, len(story.waits)) + 6

    def x(self, at_s: float) -> float:
        return LEFT + max(0.0, min(at_s, self.story.took_s)) * self.scale

    def draw(self) -> str:
        parts = [
            *self._frame(),
            *self._written(),
            *self._read(),
            *self._lag(),
            *self._gates(),
            *self._resizes(),
        ]
        return _svg(WIDTH, self.bottom + AXIS, parts, f"The topic over {self.story.took_s:.0f} seconds")

    # -- what all panels share -----------------------------------------------------------------------------------------

    def _frame(self) -> Iterator[str]:
        yield from _title(self.written, "Written", "to which partition", "all keys, top to bottom", "color: the layout")
        yield from _title(self.read, "Read", "one column is", "one micro-batch", "of the Spark query")
        yield from _title(self.lag, "Lag", "records sent and", "not yet processed")
        yield from _title(
            self.gates, "Gates", *(("newer records", "wait for", "older ones") if len(self.story.waits) > 2 else ())
        )
        for top, height in ((self.written, RIVER_HEIGHT), (self.read, RIVER_HEIGHT), (self.lag, LAG_HEIGHT)):
            yield _rect(LEFT, top, WIDTH - LEFT - RIGHT, height, "#f4f6f8")
        for at in ticks(self.story.took_s, 12):
            yield _line(self.x(at), self.bottom, self.x(at), self.bottom + 4, GRAY)
            yield _text(self.x(at), self.bottom + 17, f"{at:g}", anchor="middle", fill=GRAY)
        yield _line(LEFT, self.bottom, WIDTH - RIGHT, self.bottom, GRAY)
        yield _text(WIDTH - RIGHT, self.bottom + 33, "seconds since the run began", anchor="end", fill=GRAY)

    def _resizes(self) -> Iterator[str]:
        """Yield a line through all panels for each resize, with its label left of it, in the lowest free row."""
        free = [0.0] * ROWS
        bottom = self.bottom if self.story.waits else self.gates - GAP
        for resize in self.story.resizes:
            at = self.x(resize.begin_s)
            label = f"{resize.before} → {resize.after} partitions"
            begin = at - 4 - len(label) * BOLD_CHARACTER
            row = next((row for row, taken in enumerate(free) if begin >= taken), ROWS - 1)
            free[: row + 1] = [at + 4] * (row + 1)
            tip = f"resize from {resize.before} to {resize.after} partitions in {resize.took_ms:.0f} ms"
            yield _line(at, TOP - 15 - 13 * row, at, bottom, GRAY, dash="4 3", tip=tip)
            yield _text(at - 4, TOP - 6 - 13 * row, label, anchor="end", weight="600", tip=tip)

    # -- panels --------------------------------------------------------------------------------------------------------

    def _written(self) -> Iterator[str]:
        stopped = self.story.sent[-1][0]
        ruled = {layout.number: layout for layout in self.story.layouts}
        for segment in self.story.segments:
            layout = ruled[segment.layout]
            begin, end = self.x(layout.begin_s), self.x(min(layout.end_s, max(stopped, layout.begin_s)))
            top, height = self.written + segment.keys.low * RIVER_HEIGHT, segment.keys.size * RIVER_HEIGHT
            tip = (
                f"partition {segment.partition} in layout {segment.layout} ({layout.partitions} partitions): "
                f"{segment.records:,} records"
            )
            yield _rect(begin, top, end - begin, height, color(segment.layout), stroke="#fff", tip=tip)
            yield _label(
                begin, top, end - begin, height, (f"p{segment.partition}  {segment.records:,}", f"p{segment.partition}")
            )
        if self.x(stopped) + 110 < WIDTH - RIGHT:
            yield _text(self.x(stopped) + 8, self.written + RIVER_HEIGHT / 2 + 4, "all records are sent", fill=GRAY)

    def _read(self) -> Iterator[str]:
        for number, pieces in groupby(self.story.pieces, key=lambda piece: piece.batch):
            batch = self.story.batches[number]
            begin, width = self.x(batch.begin_s), self.x(batch.end_s) - self.x(batch.begin_s)
            for cell in cells(list(pieces)):
                top, height = self.read + cell.keys.low * RIVER_HEIGHT, cell.keys.size * RIVER_HEIGHT
                share = width / len(cell.pieces)
                for turn, (piece, late) in enumerate(zip(cell.pieces, cell.late, strict=True)):
                    left = begin + turn * share
                    tip = (
                        f"micro-batch {number}: {piece.end - piece.start:,} records of partition {piece.partition}, "
                        f"layout {piece.layout}, offsets {piece.start:,} to {piece.end:,}"
                        + (" - after later records of the same keys" if late else "")
                    )
                    yield _rect(left, top, share, height, color(piece.layout), stroke="#fff", tip=tip)
                    if late:
                        yield _rect(left, top, share, height, "url(#late)", tip=tip)
                    else:
                        yield _label(left, top, share, height, (f"p{piece.partition}",))

    def _lag(self) -> Iterator[str]:
        most = max(lag for _, lag in self.story.lag)
        scale = (LAG_HEIGHT - 14) / max(1, most)
        base = self.lag + LAG_HEIGHT
        for tick in ticks(most, 4, whole=True)[1:]:
            yield _line(LEFT, base - tick * scale, WIDTH - RIGHT, base - tick * scale, GRID)
        points = " ".join(f"{self.x(at):.1f},{base - lag * scale:.1f}" for at, lag in self.story.lag)
        end = self.x(self.story.lag[-1][0])
        yield f'<polygon points="{LEFT},{base} {points} {end:.1f},{base}" fill="#6b7a8c" fill-opacity=".45"/>'
        for tick in ticks(most, 4, whole=True)[1:]:
            yield _text(LEFT + 4, base - tick * scale - 3, f"{tick:,.0f}", fill=GRAY)

    def _gates(self) -> Iterator[str]:
        if not self.story.waits:
            without = "none: every record was handed on as soon as it was there, in whatever order"
            with_ = "none was closed in front of a record: the reader kept up"
            yield _text(LEFT, self.gates + 14, with_ if self.story.ordering == "key" else without, fill=GRAY)
        waits = sorted(self.story.waits, key=lambda wait: (wait.layout, wait.partition))
        for row, wait in enumerate(waits):
            yield from self._gate(wait, self.gates + row * ROW_HEIGHT)

    def _gate(self, wait: Wait, top: float) -> Iterator[str]:
        begin, end = self.x(wait.begin_s), self.x(wait.end_s)
        named = _named(wait.on)
        label = f"{wait.end_s - wait.begin_s:.1f} s for {named}"
        tip = f"{wait.records:,} records of partition {wait.partition}, layout {wait.layout}, waited for {named}"
        yield _text(LEFT - 8, top + 14, f"p{wait.partition}, layout {wait.layout}", anchor="end", fill=GRAY)
        yield _rect(begin, top + 2, max(1.0, end - begin), ROW_HEIGHT - 4, color(wait.layout), tip=tip)
        width = len(label) * CHARACTER
        if width + 10 <= end - begin:
            yield _text(begin + 5, top + 14, label, tip=tip)
        elif end + 5 + width <= WIDTH - RIGHT:
            yield _text(end + 5, top + 14, label, tip=tip)
        else:
            yield _text(begin - 5, top + 14, label, anchor="end", tip=tip)


def path(story: Story) -> str:
    """Draw which micro-batch read each record of the followed aircraft, in the order in which they were sent."""
    count, batches = len(story.followed), len(story.batches)
    across = (WIDTH - PATH_LEFT - RIGHT - 16) / max(1, count - 1)
    down = (PATH_HEIGHT - 16) / max(1, batches - 1)
    parts = [_rect(PATH_LEFT, 0, WIDTH - PATH_LEFT - RIGHT, PATH_HEIGHT, "#f4f6f8")]
    for tick in ticks(batches - 1, 5, whole=True):
        y = PATH_HEIGHT - 8 - tick * down
        parts += [
            _line(PATH_LEFT, y, WIDTH - RIGHT, y, GRID),
            _text(PATH_LEFT - 8, y + 4, f"{tick:g}", anchor="end", fill=GRAY),
        ]
    turned = f'transform="translate(16 {PATH_HEIGHT / 2:g}) rotate(-90)" text-anchor="middle"'
    parts.append(f'<text {turned} fill="{GRAY}">micro-batch</text>')
    lowest = batches
    dots: list[str] = []
    for at, batch in zip(range(count - 1, -1, -1), reversed(story.followed), strict=True):
        overtaken = batch > lowest
        lowest = min(lowest, batch)
        x, y = PATH_LEFT + 8 + at * across, PATH_HEIGHT - 8 - batch * down
        tip = f"record {at + 1}, read by micro-batch {batch}" + (
            ", after a record that was sent later" if overtaken else ""
        )
        dots.append(_dot(x, y, RED if overtaken else "#2f6fae", tip))
    parts += reversed(dots)
    for tick in ticks(count, 10, whole=True)[1:]:
        x = PATH_LEFT + 8 + (tick - 1) * across
        parts.append(
            _text(x, PATH_HEIGHT + 16, f"{tick:g}", anchor="middle" if x < WIDTH - RIGHT - 12 else "end", fill=GRAY)
        )
    label = f"flights of {story.tailnum}, in the order in which they were sent"
    parts.append(_text(WIDTH - RIGHT, PATH_HEIGHT + 32, label, anchor="end", fill=GRAY))
    return _svg(WIDTH, PATH_HEIGHT + 40, parts, f"The records of {story.tailnum}")


# -- SVG ---------------------------------------------------------------------------------------------------------------


def _svg(width: float, height: float, parts: Iterable[str], name: str) -> str:
    stripes = (
        '<defs><pattern id="late" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        f'<rect width="2.4" height="6" fill="{RED}" fill-opacity=".75"/></pattern></defs>'
    )
    body = "\n".join((stripes, *(part for part in parts if part)))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(name)}" font-family="system-ui, sans-serif" font-size="11">\n{body}\n</svg>'
    )


def _title(top: float, name: str, *lines: str) -> Iterator[str]:
    yield f'<text x="0" y="{top + 13:g}" font-size="14" font-weight="600" fill="{INK}">{escape(name)}</text>'
    for row, line in enumerate(lines):
        yield _text(0, top + 31 + 15 * row, line, fill=GRAY)


def _rect(
    x: float, y: float, width: float, height: float, fill: str, *, stroke: str | None = None, tip: str | None = None
) -> str:
    edge = f' stroke="{stroke}" stroke-width=".8"' if stroke else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.0, width):.1f}" height="{height:.1f}" fill="{fill}"{edge}'
        f"{_tipped('rect', tip)}"
    )


def _line(
    x1: float, y1: float, x2: float, y2: float, stroke: str, *, dash: str | None = None, tip: str | None = None
) -> str:
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}"{dashed}{_tipped("line", tip)}'
    )


def _dot(x: float, y: float, fill: str, tip: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{fill}"{_tipped("circle", tip)}'


def _tipped(element: str, tip: str | None) -> str:
    return f"><title>{escape(tip)}</title></{element}>" if tip else "/>"


def _text(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    fill: str = INK,
    weight: str = "400",
    tip: str | None = None,
) -> str:
    title = f"<title>{escape(tip)}</title>" if tip else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{fill}" font-weight="{weight}">'
        f"{title}{escape(text)}</text>"
    )


def _label(x: float, y: float, width: float, height: float, choices: Sequence[str]) -> str:
    """Return the first text that fits into a box, in its middle; nothing if none does."""
    for text in choices:
        if len(text) * CHARACTER + 4 <= width and height >= 13:
            middle = f'x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}"'
            return f'<text {middle} text-anchor="middle" fill="{INK}" pointer-events="none">{escape(text)}</text>'
    return ""


def _named(partitions: Sequence[int]) -> str:
    names = [f"p{partition}" for partition in partitions]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}" if names else "others"
