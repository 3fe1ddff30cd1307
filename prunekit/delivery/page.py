"""The report as one self-contained HTML page: no script, nothing fetched, everything that a user named is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from prunekit.delivery import plots, wording
from prunekit.delivery.record import RunReport, bound_text, json_ready
from prunekit.delivery.wording import MISSING, clean, count, is_number, number, short_count, size

if TYPE_CHECKING:
    from prunekit.anatomy.inspection import WeightRow

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_TALL = 30


class Markup(str):
    """HTML that is ready; any other string is escaped."""


def render_html(report: RunReport) -> str:
    """The page, UTF-8 text: one file that works without a network, in light and dark, from a phone's width up."""
    sections = [
        ("pictures", "Pictures", _pictures(report)),
        ("weights", "Weights", _weights(report)),
        ("steps", "Steps taken", _steps(report)),
        ("expectations", "Expectations", _expectations(report)),
        ("exports", "Exported files", _exports(report)),
        ("runtimes", "What the zeros buy, and where", _advice(report)),
        ("skipped", "What was left alone, and why", _skipped(report.skipped_reasons)),
        ("recipe", "How to get this again", _recipe(report)),
    ]
    links = _join(Markup(f'<a href="#{key}">{_text(title)}</a>') for key, title, _ in sections)
    body = _join(
        Markup(
            f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{_text(title)}</h2>\n'
            f"{part}</section>"
        )
        for key, title, part in sections
    )
    title = _text(report.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title} – prunekit report</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n"
        f'<div class="page">\n{_header(report)}\n<nav aria-label="Sections">{links}</nav>\n{_cards(report)}\n'
        f"<main>\n{body}\n</main>\n<footer>Written by prunekit {_text(report.versions.get('prunekit', ''))}. "
        "MACs: multiply-accumulates for one example, forward. kB and MB: 1,000 and 1,000,000 bytes.</footer>\n"
        "</div>\n</body>\n</html>\n"
    )


@cache
def _style() -> str:
    return files("prunekit.delivery").joinpath("page.css").read_text(encoding="utf-8")


# ---- pieces ----------------------------------------------------------------------------------------------------------


def _text(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(html.escape(clean(value)))


def _join(parts: Iterable[str]) -> Markup:
    return Markup("\n".join(parts))


def _badge(kind: str, text: str) -> Markup:
    return Markup(f'<span class="badge {kind}">{_text(text)}</span>')


def _small(main: object, below: object) -> Markup:
    return Markup(f'{_text(main)}<span class="sub">{_text(below)}</span>')


def _breakable(name: str) -> Markup:
    """A weight's name, which a narrow column breaks at its slashes."""
    return Markup(_text(name).replace("/", "/<wbr>"))


def _bytes(value: Any) -> Markup:
    """Bytes in units, the exact number for the pointer."""
    return Markup(f'<span title="{count(value)} bytes">{size(value)}</span>') if is_number(value) else Markup(MISSING)


def _table(
    label: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[object]], foot: Sequence[object] = ()
) -> Markup:
    """A table that scrolls by itself where it is too wide; the first cell of each row is its header.

    Args:
        label: What the table holds, read out before it.
        columns: (heading, class); class "number" aligns to the right.
        rows: Cells; what is not `Markup` is escaped.
        foot: Cells of a last row of totals.
    """
    head = "".join(f'<th scope="col" class="{css}">{_text(heading)}</th>' for heading, css in columns)
    classes = [css for _, css in columns]
    return _scrolling(label, f"<tr>{head}</tr>", classes, rows, foot)


def _scrolling(
    label: str,
    head: str,
    classes: Sequence[str],
    rows: Sequence[Sequence[object]],
    foot: Sequence[object] = (),
    kind: str = "",
) -> Markup:
    def line(cells: Sequence[object]) -> str:
        first, *rest = zip(cells, classes, strict=True)
        others = "".join(f'<td class="{css}">{_text(cell)}</td>' for cell, css in rest)
        return f'<tr><th scope="row" class="{first[1]}">{_text(first[0])}</th>{others}</tr>'

    body = "\n".join(map(line, rows))
    total = f"<tfoot>{line(foot)}</tfoot>" if foot else ""
    tall = " tall" if len(rows) > _TALL else ""
    # Focusable, so that a keyboard can scroll it.
    return Markup(
        f'<div class="scroll{tall}" role="region" tabindex="0" aria-label="{_text(label)}">\n<table class="{kind}">'
        f"<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>{total}</table></div>"
    )


def _paragraph(text: object, css: str = "hint") -> Markup:
    return Markup(f'<p class="{css}">{_text(text)}</p>')


# ---- top of the page -------------------------------------------------------------------------------------------------


def _header(report: RunReport) -> str:
    total, failed = len(report.expectations), len(report.failed)
    badge = ""
    if failed:
        badge = _badge("bad", f"✗ {failed} of {total} expectations not met")
    elif total:
        badge = _badge("good", f"✓ {total} of {total} expectations met")
    notes = "".join(f"<li>{_text(note)}</li>" for note in report.all_notes)
    return (
        f'<header><p class="kicker">prunekit report · model {_text(report.after.model)}</p>\n'
        f"<h1>{_text(report.title)}</h1>\n"
        f'<p class="verdict">{_text(report.verdict())}</p>\n{badge}'
        + (f'<ul class="notes warn" aria-label="Notes">{notes}</ul>' if notes else "")
        + "</header>"
    )


def _cards(report: RunReport) -> str:
    cards = "\n".join(
        f'<div class="card"><dt>{_text(label)}</dt><dd class="figure">{_text(figure)}</dd>'
        f'<dd class="against">{_text(against)}</dd></div>'
        for label, figure, against in report.cards()
    )
    return f'<dl class="cards" aria-label="Summary">\n{cards}\n</dl>'


# ---- pictures --------------------------------------------------------------------------------------------------------


def _pictures(report: RunReport) -> Markup:
    parts = []
    if report.pruned:
        parts.append(_sparsity_picture(report))
    if report.events:
        parts.append(_schedule_picture(report))
    if not parts and not report.histograms:
        return _paragraph("Nothing was pruned, so there is nothing to draw.")
    grid = Markup(f'<div class="pictures">{_join(parts)}</div>') if parts else Markup("")
    return _join([grid, _histograms(report)])


def _picture(title: str, below: str, svg: str) -> Markup:
    return Markup(f"<figure><figcaption><b>{_text(title)}</b>{_text(below)}</figcaption>\n{svg}</figure>")


def _sparsity_picture(report: RunReport) -> Markup:
    shown = plots.largest(report.pruned)
    overall = report.pruned_sparsity
    below = f"Dashed: {wording.sparsity(overall)} over all pruned weights."
    if len(shown) < len(report.pruned):
        below = f"The {len(shown)} largest of {len(report.pruned)}, in model order. {below}"
    low, high = (wording.sparsity(bound(row.sparsity for row in shown)) for bound in (min, max))
    label = f"Bar chart of sparsity per weight: {len(shown)} weights between {low} and {high}."
    label += " The table below has them all."
    both = (
        plots.to_svg(
            plots.sparsity_figure(shown, width=width, overall=overall), label, prefix=f"s{width}", css_class=css
        )
        for css, width in (("wide", 560), ("narrow", 340))
    )
    return _picture("Sparsity per weight", below, _join(both))


def _schedule_picture(report: RunReport) -> Markup:
    until = max((step for step, _ in report.curve), default=0)
    asked = plots.asked_line(report.schedule, report.events, until)
    last, baseline = report.events[-1], report.metrics.get("accuracy_before")
    updates = "1 mask update" if len(report.events) == 1 else f"{len(report.events):,} mask updates"
    below = f"{updates}; the last at step {last.step:,} asked {wording.sparsity(last.asked)} "
    below += f"and reached {wording.sparsity(last.reached)}."
    points = [value for _, value in report.curve if is_number(value)]
    label = f"Line chart of sparsity against training step. {below}"
    if points:
        label += f" Validation accuracy from {wording.accuracy(points[0])} to {wording.accuracy(points[-1])}."
    both = (
        plots.to_svg(
            plots.schedule_figure(report.events, asked, report.curve, baseline=baseline, width=width),
            label,
            prefix=f"c{width}",
            css_class=css,
        )
        for css, width in (("wide", 560), ("narrow", 340))
    )
    return _picture("The schedule, as asked and as reached", below, _join(both))


def _histograms(report: RunReport) -> Markup:
    if not report.histograms:
        return Markup("")
    sizes = {row.name: row.size for row in report.after.weights}
    names = sorted(report.histograms, key=lambda name: -sizes.get(name, 0))[: plots.MOST_HISTOGRAMS]
    chosen = [name for name in report.histograms if name in names]
    pictures = []
    for index, name in enumerate(chosen):
        found = report.histograms[name]
        zeros, was = found["zeros_after"], found["zeros_before"]
        below = f"{count(zeros)} exact zeros, {count(was)} before"
        strange = found.get("not_finite_before", 0) + found.get("not_finite_after", 0)
        below += f"; {count(strange)} values that are not finite are not drawn" if strange else ""
        label = f"Histogram of {name} before and after pruning, with exact zeros as a bar of their own: {below}."
        pictures.append(_picture(name, below, plots.to_svg(plots.histogram_figure(found), label, prefix=f"h{index}")))
    total = len(report.pruned)
    limit = f" The {len(chosen)} largest of {total} pruned weights." if len(chosen) < total else ""
    text = f"Exact zeros have a bar and a scale of their own, so that they do not hide the other values.{limit}"
    heading = Markup("<h3>Values of the weights before and after</h3>")
    return _join([heading, _paragraph(text), f'<div class="histograms">{_join(pictures)}</div>'])


# ---- tables ----------------------------------------------------------------------------------------------------------


def _weights(report: RunReport) -> Markup:
    pruned = report.pruned or list(report.after.weights)
    names = {row.name for row in pruned}
    others = [row for row in report.after.weights if row.name not in names]
    parts = [
        _paragraph("Wide tables scroll sideways.", "hint phone"),
        _weight_table("Pruned weights" if report.pruned else "Weights", report, pruned, total=True),
    ]
    if others:
        figures = (sum(row.size for row in others), sum(row.zeros for row in others))
        text = "{}: {} parameters, {} of them zero".format(
            "1 other weight" if len(others) == 1 else f"{len(others)} other weights", *map(count, figures)
        )
        table = _weight_table("Other weights", report, others, total=False)
        parts.append(Markup(f"<details><summary>{text}</summary>{table}</details>"))
    parts.append(
        _paragraph(
            "Sparse MACs leave out multiplications by zero. gzip: each weight compressed by itself, level 9. Moved per "
            "update: L2 norm of what an optimizer update changed, over that of the weight, on average."
        )
    )
    return _join(parts)


_WEIGHT_HEAD = (
    '<tr><th scope="col" rowspan="2" class="name">Weight</th><th scope="col" rowspan="2">Sparsity</th>'
    '<th scope="col" rowspan="2" class="number">Parameters</th>'
    '<th scope="colgroup" colspan="2" class="group">Zeros</th><th scope="col" rowspan="2">Pattern</th>'
    '<th scope="col" rowspan="2" class="number">MACs</th>'
    '<th scope="colgroup" colspan="2" class="group">Sparse MACs</th>'
    '<th scope="col" rowspan="2" class="number">Bytes, raw</th>'
    '<th scope="colgroup" colspan="2" class="group">Bytes, gzip</th>'
    '<th scope="col" rowspan="2" class="number">Moved per update</th></tr><tr>'
    + '<th scope="col" class="number">before</th><th scope="col" class="number">after</th>' * 3
    + "</tr>"
)
_WEIGHT_CLASSES = ("name", "bars", *["number"] * 3, "pattern", *["number"] * 7)


def _weight_table(label: str, report: RunReport, rows: Sequence[WeightRow], *, total: bool) -> Markup:
    before = {row.name: row for row in report.before.weights}
    cells = [_weight_cells(report, row, before.get(row.name)) for row in rows]
    old, new = report.before, report.after
    foot: tuple[object, ...] = ()
    if total:
        gzip = [_bytes(report.gzip_total(when)) for when in ("before", "after")]
        zeros, macs = (count(old.zeros), count(new.zeros)), (short_count(old.sparse_macs), short_count(new.sparse_macs))
        name = _small("Whole model", f"all {len(new.weights)} weights")
        counts = (_bar(new.sparsity), count(new.parameters), *zeros, "", short_count(new.macs), *macs)
        foot = (name, *counts, _bytes(new.bytes), *gzip, "")
    return _scrolling(label, _WEIGHT_HEAD, _WEIGHT_CLASSES, cells, foot, kind="weights")


def _weight_cells(report: RunReport, row: WeightRow, before: WeightRow | None) -> tuple[object, ...]:
    compressed = report.compressed.get(row.name, {})
    return (
        _small(_breakable(row.name), f"{wording.shape(row.shape)} · {row.role.replace('_', ' ')}"),
        _bar(row.sparsity),
        count(row.size),
        count(before.zeros) if before else MISSING,
        count(row.zeros),
        row.pattern,
        short_count(row.macs),
        short_count(before.sparse_macs) if before else MISSING,
        short_count(row.sparse_macs),
        _bytes(row.bytes),
        _bytes(compressed.get("before")),
        _bytes(compressed.get("after")),
        number(report.relative_change(row.name), 2),
    )


def _bar(value: float) -> Markup:
    return Markup(
        '<span style="white-space:nowrap"><span class="bar" aria-hidden="true">'
        f'<i style="width:{100 * value:.1f}%"></i>'
        f"</span>{wording.sparsity(value)}</span>"
    )


def _steps(report: RunReport) -> Markup:
    if not report.steps:
        return _paragraph("No step was recorded.")
    columns = (
        ("Step", "name"),
        ("What", "text"),
        ("Took", "number"),
        ("Epochs", "number"),
        ("Accuracy after", "number"),
    )
    rows = []
    for index, step in enumerate(report.steps, start=1):
        history = step.get("history") or {}
        epochs = max((len(values) for values in history.values()), default=0)
        name, took = step.get("name") or step.get("kind"), wording.duration(step.get("seconds"))
        metrics = "; ".join(f"{metric} {_course(values)}" for metric, values in history.items() if values)
        what = _small(name, metrics) if metrics else name
        done = wording.accuracy(step.get("accuracy"))
        rows.append((f"{index}. {step.get('kind', '')}", what, took, count(epochs) if epochs else MISSING, done))
    total = wording.duration(sum(step["seconds"] for step in report.steps if is_number(step.get("seconds"))))
    table = _table("Steps taken", (*columns,), rows, ("Total", "", total, "", ""))
    return _join([_paragraph("Metrics: first epoch → last epoch."), table])


def _course(values: Sequence[Any]) -> str:
    if len(values) == 1:
        return number(values[0])
    return f"{number(values[0])} → {number(values[-1])}"


def _expectations(report: RunReport) -> Markup:
    if not report.expectations:
        return _paragraph("The recipe expects nothing in particular.")
    columns = (("What", "name"), ("Result", ""), ("Expected", "short"), ("Measured", "number"))
    rows = [
        (
            row.get("what", ""),
            _badge("good", "✓ met") if row.get("met") else _badge("bad", "✗ not met"),
            bound_text(row.get("bound")),
            number(row.get("measured"), 6) if is_number(row.get("measured")) else "not measured",
        )
        for row in report.expectations
    ]
    return _table("Expectations", columns, rows)


_STATUS = {"ok": ("good", "✓ ok"), "refused": ("warn", "refused"), "failed": ("bad", "✗ failed")}


def _exports(report: RunReport) -> Markup:
    if not report.exports:
        return _paragraph("The recipe exports nothing.")
    heads = ("Bytes", "gzip -9", "Largest error", "Agreement", "Accuracy")
    columns = (("Format", "name"), ("Status", ""), *((head, "number") for head in heads), ("Note", "text"))
    rows = [
        (
            _small(row.format, row.file or "no file"),
            _badge(*_STATUS.get(row.status, ("warn", row.status))),
            _bytes(row.bytes),
            _bytes(row.gzip_bytes),
            number(row.max_error, 2),
            wording.accuracy(row.agreement),
            wording.accuracy(row.accuracy),
            row.note or "",
        )
        for row in report.exports
    ]
    text = (
        "Each file was opened again and run on real inputs. Largest error: against the Keras model, as a fraction of "
        "the range of its outputs. Agreement: the fraction of inputs with the same most likely class."
    )
    return _join([_paragraph(text), _table("Exported files", columns, rows)])


def _advice(report: RunReport) -> Markup:
    if not report.advice:
        return _paragraph("No runtime was looked at.")
    columns = (("Runtime", "name"), ("What it buys", "short"), ("Why", "text"))
    return _table("Runtimes", columns, [(row.runtime, row.what_it_buys, row.why) for row in report.advice])


def _skipped(reasons: dict[str, list[str]]) -> Markup:
    if not reasons:
        return _paragraph("Nothing was left alone.")
    rows = [(reason, count(len(names)), ", ".join(map(clean, names))) for reason, names in reasons.items()]
    return _table("Weights left alone", (("Reason", "name"), ("Weights", "number"), ("Which", "text")), rows)


# ---- how to get it again ---------------------------------------------------------------------------------------------


def _recipe(report: RunReport) -> Markup:
    facts = [("seed", str(report.seed)), *report.versions.items()]
    plain = [(name, value) for name, value in facts]
    hashes = [(name, Markup(f"<code>{_text(value)}</code>")) for name, value in report.hashes.items()]
    parts = [
        Markup("<h3>Versions and seed</h3>"),
        _table("Versions and seed", (("What", "name"), ("Value", "text")), plain),
    ]
    if hashes:
        parts += [Markup("<h3>SHA-256</h3>"), _table("Hashes", (("Of", "name"), ("SHA-256", "text")), hashes)]
    # Line by line, since `clean` takes line breaks for what they are in a name: a way to forge a line.
    lines = "\n".join(_text(line) for line in _as_yaml(report.recipe).splitlines())
    parts.append(Markup(f'<details><summary>The locked recipe</summary><pre tabindex="0">{lines}</pre></details>'))
    return _join(parts)


def _as_yaml(recipe: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(json_ready(recipe), sort_keys=False, allow_unicode=True, width=100)
