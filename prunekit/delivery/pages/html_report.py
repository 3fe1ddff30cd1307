"""Renders a run's sections as one self-contained HTML page: no scripts, no network access, all user text escaped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from prunekit.anatomy.records.sections import Picture, Section
from prunekit.delivery.pages import markup
from prunekit.delivery.pages.markup import Markup
from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import to_svg
from prunekit.delivery.reports.formatting import NO_ROWS, clean
from prunekit.delivery.reports.report_sections import sections_of, summary
from prunekit.delivery.reports.run_report import RunReport

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Widths of a wide picture in CSS pixels, by the CSS class of the window's width.
_WIDTHS = {"wide": 560, "narrow": 340}
_WIDTH = 340
# Number of cards above the first section; a phone shows them in two rows.
_CARDS = 4


def render_html(report: RunReport) -> str:
    """Returns the HTML page of a run: works offline, in light and dark themes, from a phone's width up."""
    sections = [(_anchor(number, section.title), section) for number, section in enumerate(sections_of(report), 1)]
    links = markup.joined(Markup(f'<a href="#{key}">{markup.escaped(one.title)}</a>') for key, one in sections)
    body = markup.joined(section_html(section, key) for key, section in sections)
    contents = f"<details><summary>{len(sections)} sections</summary>{links}</details>"
    title = markup.escaped(report.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title} – prunekit report</title>\n<style>\n{style()}</style>\n</head>\n<body>\n"
        f'<div class="page">\n{_header(report)}\n{cards(summary(report))}\n'
        f'<nav aria-label="Sections">{contents}</nav>\n<main>\n{body}\n</main>\n'
        f"<footer>Written by prunekit {markup.escaped(report.versions.get('prunekit', ''))}. "
        "MACs: multiply-accumulates for one example, forward. kB and MB: 1,000 and 1,000,000 bytes.</footer>\n"
        "</div>\n</body>\n</html>\n"
    )


def _anchor(number: int, title: str) -> str:
    """Returns an id that differs between the sections of a page: "s3-steps-taken"."""
    return "-".join([f"s{number}", *re.findall(r"[a-z0-9]+", title.lower())])


@cache
def style() -> str:
    """The style sheet of the page."""
    return files("prunekit.delivery.pages").joinpath("page.css").read_text(encoding="utf-8")


# ---- top of the page -------------------------------------------------------------------------------------------------


def _header(report: RunReport) -> str:
    total, failed = len(report.expectations), len(report.failed)
    badge = ""
    if failed:
        badge = markup.badge("bad", f"✗ {failed} of {total} expectations not met")
    elif total:
        badge = markup.badge("good", f"✓ {total} of {total} expectations met")
    return (
        f'<header><p class="kicker">prunekit report · model {markup.escaped(report.after.model_name)}</p>\n'
        f"<h1>{markup.escaped(report.title)}</h1>\n"
        f'<p class="verdict">{markup.escaped(report.verdict())}</p>\n{badge}'
        + (markup.bullets(report.all_notes, "notes warn") if report.all_notes else "")
        + "</header>"
    )


def cards(section: Section) -> str:
    """Returns the cards of a summary: a label, a figure and what it is compared with; the first ones stay in sight."""
    made = [
        f'<div class="card"><dt>{markup.escaped(label)}</dt><dd class="figure">{markup.escaped(figure)}</dd>'
        f'<dd class="against">{markup.escaped(against)}</dd></div>'
        for label, figure, against in section.rows
    ]
    # One card alone is shown, since its fold would take as much room.
    shown = len(made) if len(made) <= _CARDS + 1 else _CARDS
    first, more = ("\n".join(part) for part in (made[:shown], made[shown:]))
    title = markup.escaped(section.title)
    found = f'<dl class="cards" aria-label="{title}">\n{first}\n</dl>'
    if not more:
        return found
    folded = f'<dl class="cards" aria-label="{title}, continued">\n{more}\n</dl>'
    return f"{found}\n<details><summary>{len(made) - shown} more figures</summary>{folded}</details>"


# ---- sections --------------------------------------------------------------------------------------------------------


def section_html(section: Section, key: str) -> Markup:
    """Returns a section as HTML; `key` is its id, and begins the ids inside it."""
    return Markup(
        f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{markup.escaped(section.title)}</h2>\n'
        f"{markup.joined(_content(section, key))}</section>"
    )


def _content(section: Section, key: str) -> Iterator[Markup]:
    """Yields explanation, table, pictures, text, notes and parts of a section; `key` begins the ids inside it."""
    if section.explanation:
        yield markup.paragraph(section.explanation)
    if section.rows:
        yield markup.table(section)
    if section.pictures:
        size = "pictures" if any(picture.wide for picture in section.pictures) else "histograms"
        drawn = (_picture(picture, f"{key}-{number}") for number, picture in enumerate(section.pictures))
        yield Markup(f'<div class="{size}">{markup.joined(drawn)}</div>')
    if section.text:
        # Line by line: `clean` replaces line breaks, because a name with a line break could forge a line.
        lines = "\n".join(markup.escaped(line) for line in section.text.splitlines())
        yield Markup(f'<pre tabindex="0">{lines}</pre>')
    for note in section.notes:
        yield markup.paragraph(note)
    if section.columns and not section.rows and not section.notes:
        yield markup.paragraph(NO_ROWS)
    for number, part in enumerate(section.parts, start=1):
        yield from _part(part, f"{key}-{number}")


def _part(part: Section, key: str) -> Iterator[Markup]:
    title = markup.escaped(part.title)
    if part.shown == "folded":
        content = markup.joined(_content(part, key))
        yield Markup(f"<details><summary>{title}</summary>{content}</details>")
        return
    yield Markup(f"<h3>{title}</h3>")
    yield from _content(part, key)


def _picture(picture: Picture, key: str) -> Markup:
    caption = f"<b>{markup.escaped(picture.title)}</b>{markup.escaped(picture.caption)}"
    return Markup(f"<figure><figcaption>{caption}</figcaption>\n{_drawing(picture, key)}</figure>")


def _drawing(picture: Picture, key: str) -> Markup:
    draw = PLOTS.get(picture.plot)
    if draw is None:
        return markup.paragraph(f"This version of prunekit has no plot {clean(picture.plot)!r}.")
    widths = _WIDTHS if picture.wide else {"": _WIDTH}
    return markup.joined(
        to_svg(draw(picture.data, width), picture.label, prefix=f"{key}-{width}", css_class=css)
        for css, width in widths.items()
    )
