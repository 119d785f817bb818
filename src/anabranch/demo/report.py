"""The report of the demo: one HTML page that needs neither network nor script, from the stories of its runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from anabranch.demo.flights import LATE_MINUTES, Result
from anabranch.demo.picture import RED, color, path, river
from anabranch.demo.story import Difference, Story

EXAMPLES = 12
"""Wrong aircraft that are shown at once; all others are behind a click."""

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1160px; padding: 28px 20px 60px; color: #1d2733;
font: 15px/1.55 system-ui, sans-serif; }
h1 { font-size: 27px; line-height: 1.2; margin: 0 0 6px; } h2 { font-size: 20px; margin: 44px 0 4px; }
h3 { font-size: 15px; margin: 26px 0 6px; } p { max-width: 78ch; margin: 8px 0; } svg { width: 100%; height: auto; }
.lead, .note { color: #4a5562; } .cards { display: flex; flex-wrap: wrap; gap: 14px; margin: 20px 0; }
.card { flex: 1 1 300px; border: 1px solid #d8dde3; border-radius: 10px; padding: 14px 18px; }
.card b { display: block; font-size: 30px; line-height: 1.25; } .good b { color: #1d7a45; } .bad b { color: #c62f3b; }
.key { max-width: none; } .key span { display: inline-block; margin-right: 18px; }
.key i { display: inline-block; width: 14px; height: 11px;
margin-right: 6px; border-radius: 2px; } table { border-collapse: collapse; font-size: 14px; margin: 8px 0; }
th, td { padding: 3px 16px 3px 0; text-align: right; border-bottom: 1px solid #e6eaee; } th { font-weight: 600; }
th:first-child, td:first-child { text-align: left; } summary { cursor: pointer; color: #2f6fae; margin: 6px 0; }
""".strip()


def page(stories: Sequence[Story], aircraft: int) -> str:
    """Write the report on the runs of a demo that compared `aircraft` results."""
    records = stories[0].records
    changes = ", then ".join(f"from {resize.before} to {resize.after}" for resize in stories[0].resizes)
    body = [
        "<h1>A topic that changes its partitions while it is read</h1>",
        f'<p class="lead">{records:,} flights of 2013 were sent to Anabranch, while a Spark query followed every '
        f"aircraft and the number of partitions changed: {changes}.</p>",
        '<div class="cards">',
        *(_verdict(story, aircraft) for story in stories),
        "</div>",
        *_introduction(stories),
    ]
    for story in stories:
        body += _run(story)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Anabranch: the demo's report</title>\n<style>\n{STYLE}\n</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _verdict(story: Story, aircraft: int) -> str:
    wrong = len(story.differences)
    mood = "bad" if wrong else "good"
    how = "in order of keys, which is the default" if story.ordering == "key" else "without order, for contrast"
    return f'<div class="card {mood}"><b>{wrong:,} of {aircraft:,}</b>aircraft with a wrong result, {how}</div>'


def _introduction(stories: Sequence[Story]) -> Iterator[str]:
    yield "<h3>What it is about</h3>"
    yield (
        "<p>A <b>topic</b> is a log that programs write records to and read records from. It is divided into "
        "<b>partitions</b> (p0, p1, ...), so that work can be shared. Every record has a <b>key</b>, here the tail "
        "number of an aircraft, which says in which partition it goes. When the number of partitions changes, a new "
        "<b>layout</b> begins, and some keys move: their older records are in one partition, their newer ones in "
        "another.</p>"
        "<p>A reader that takes from all partitions what is there may then see the newer records of an aircraft before "
        "the older ones. Anabranch knows where each layout ends in each partition, and keeps a <b>gate</b> closed in "
        "front of the newer records until the older ones of the same keys have been read.</p>"
    )
    yield "<h3>How to read the pictures</h3>"
    striped = (
        f" <span style='color:{RED}'>Red stripes</span> mark records that were read after later ones of the same keys."
        if any(story.is_late for story in stories)
        else ""
    )
    yield (
        "<p>Time runs from left to right. From top to bottom lie all keys, so that one height is one aircraft "
        "where records are written and where they are read; a partition is as high as its share of the keys. "
        "Colors are layouts: at every height they should be read in the order in which they were written."
        f"{striped} Point at a shape for its figures.</p>"
    )


def _run(story: Story) -> Iterator[str]:
    ordered = story.ordering == "key"
    yield f"<h2>{'In order of keys' if ordered else 'Without order'}</h2>"
    yield f'<p class="lead">{_summary(story)}</p>'
    layouts = "".join(
        f'<span><i style="background:{color(number)}"></i>layout {number}: {count} partitions</span>'
        for number, count, _, _ in story.layouts
    )
    late = (
        f'<span><i style="background:repeating-linear-gradient(45deg,{RED},{RED} 2px,#fff 2px,#fff 5px)"></i>'
        "read after later records of the same keys</span>"
    )
    yield f'<p class="key">{layouts}{late if story.is_late else ""}</p>'
    yield river(story)
    if story.followed:
        yield f"<h3>One aircraft: {escape(str(story.tailnum))}</h3>"
        yield f"<p>{_path_summary(story)}</p>"
        yield path(story)
    if story.differences:
        yield from _wrong(story)


def _summary(story: Story) -> str:
    took = ", ".join(f"{resize.took_ms:.0f}" for resize in story.resizes)
    text = (
        f"{story.records:,} records, sent within {_sending_s(story):.0f} seconds, were read in {len(story.batches)} "
        f"micro-batches. The resizes took {took} milliseconds."
    )
    if story.waits:
        longest = max(wait.end_s - wait.begin_s for wait in story.waits)
        text += f" Records waited at {len(story.waits)} gates, at most {longest:.1f} seconds."
    return text


def _sending_s(story: Story) -> float:
    return story.sent[-1][0] - story.sent[min(1, len(story.sent) - 1)][0]


def _path_summary(story: Story) -> str:
    count = len(story.followed)
    if not story.overtaken:
        return f"Each dot is one of its {count:,} flights. None was read before an earlier one: the dots only rise."
    return (
        f"Each dot is one of its {count:,} flights. {story.overtaken:,} of them (red) were read after one "
        "that was sent later: where the dots fall back, the query saw the past after the future."
    )


def _wrong(story: Story) -> Iterator[str]:
    yield f"<h3>The {len(story.differences):,} aircraft that came out wrong</h3>"
    yield (
        f"<p>The query counts, for each aircraft, its departures, the longest run of departures that were more than "
        f"{LATE_MINUTES} minutes late, and the largest increase in delay from one departure to the next. Red is what "
        "the query found; beside it is what a plain pass over the file finds.</p>"
    )
    first = sorted(story.differences, key=_legs, reverse=True)[:EXAMPLES]
    yield _table(first)
    if len(story.differences) > len(first):
        yield f"<details><summary>all {len(story.differences):,}</summary>{_table(story.differences)}</details>"


def _legs(difference: Difference) -> int:
    return difference.expected.legs if difference.expected else 0


def _table(differences: Sequence[Difference]) -> str:
    head = (
        "<tr><th>aircraft</th><th>departures</th><th>longest run of late ones</th><th>largest increase (min)</th></tr>"
    )
    return f"<table>{head}{''.join(_row(each) for each in differences)}</table>"


def _row(difference: Difference) -> str:
    figures = zip(_figures(difference.expected), _figures(difference.found), strict=True)
    cells = "".join(
        f"<td>{right}</td>" if right == found else f'<td>{right} <b style="color:{RED}">{found}</b></td>'
        for right, found in figures
    )
    return f"<tr><td>{escape(difference.tailnum)}</td>{cells}</tr>"


def _figures(result: Result | None) -> tuple[str, str, str]:
    return ("none",) * 3 if result is None else (f"{result.legs:,}", f"{result.longest:,}", f"{result.jump:g}")
