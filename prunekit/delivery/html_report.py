"""Renders a run report as one self-contained HTML page: no scripts, no network access, all user text escaped."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from prunekit.delivery import formatting, markup, plots
from prunekit.delivery.formatting import MISSING, clean, count, is_number, number, short_count
from prunekit.delivery.markup import Markup
from prunekit.delivery.run_report import RunReport, bound_text, json_ready

if TYPE_CHECKING:
    from prunekit.anatomy.inspection import WeightRow

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def render_html(report: RunReport) -> str:
    """Returns the HTML page of a run: works offline, in light and dark themes, from a phone's width up."""
    sections = [
        ("pictures", "Pictures", _pictures(report)),
        ("weights", "Weights", _weights(report)),
        ("steps", "Steps taken", _steps(report)),
        ("expectations", "Expectations", _expectations(report)),
        ("exports", "Exported files", _exports(report)),
        ("runtimes", "Where sparsity pays off", _advice(report)),
        ("skipped", "Skipped weights, with reasons", _skipped(report.skipped_reasons)),
        ("recipe", "How to reproduce this run", _recipe(report)),
    ]
    links = markup.joined(Markup(f'<a href="#{key}">{markup.escaped(title)}</a>') for key, title, _ in sections)
    body = markup.joined(
        Markup(
            f'<section id="{key}" aria-labelledby="{key}-title"><h2 id="{key}-title">{markup.escaped(title)}</h2>\n'
            f"{part}</section>"
        )
        for key, title, part in sections
    )
    title = markup.escaped(report.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title} – prunekit report</title>\n<style>\n{_style()}</style>\n</head>\n<body>\n"
        f'<div class="page">\n{_header(report)}\n<nav aria-label="Sections">{links}</nav>\n{_cards(report)}\n'
        f"<main>\n{body}\n</main>\n<footer>Written by prunekit {markup.escaped(report.versions.get('prunekit', ''))}. "
        "MACs: multiply-accumulates for one example, forward. kB and MB: 1,000 and 1,000,000 bytes.</footer>\n"
        "</div>\n</body>\n</html>\n"
    )


@cache
def _style() -> str:
    return files("prunekit.delivery").joinpath("page.css").read_text(encoding="utf-8")


# ---- top of the page -------------------------------------------------------------------------------------------------


def _header(report: RunReport) -> str:
    total, failed = len(report.expectations), len(report.failed)
    badge = ""
    if failed:
        badge = markup.badge("bad", f"✗ {failed} of {total} expectations not met")
    elif total:
        badge = markup.badge("good", f"✓ {total} of {total} expectations met")
    notes = "".join(f"<li>{markup.escaped(note)}</li>" for note in report.all_notes)
    return (
        f'<header><p class="kicker">prunekit report · model {markup.escaped(report.after.model)}</p>\n'
        f"<h1>{markup.escaped(report.title)}</h1>\n"
        f'<p class="verdict">{markup.escaped(report.verdict())}</p>\n{badge}'
        + (f'<ul class="notes warn" aria-label="Notes">{notes}</ul>' if notes else "")
        + "</header>"
    )


def _cards(report: RunReport) -> str:
    cards = "\n".join(
        f'<div class="card"><dt>{markup.escaped(label)}</dt><dd class="figure">{markup.escaped(figure)}</dd>'
        f'<dd class="against">{markup.escaped(against)}</dd></div>'
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
        return markup.paragraph("Nothing was pruned, so there is nothing to draw.")
    grid = Markup(f'<div class="pictures">{markup.joined(parts)}</div>') if parts else Markup("")
    return markup.joined([grid, _histograms(report)])


def _picture(title: str, below: str, svg: str) -> Markup:
    return Markup(
        f"<figure><figcaption><b>{markup.escaped(title)}</b>{markup.escaped(below)}</figcaption>\n{svg}</figure>"
    )


def _sparsity_picture(report: RunReport) -> Markup:
    shown = plots.largest(report.pruned)
    overall = report.pruned_sparsity
    below = f"Dashed: {formatting.sparsity(overall)} over all pruned weights."
    if len(shown) < len(report.pruned):
        below = f"The {len(shown)} largest of {len(report.pruned)}, in model order. {below}"
    low, high = (formatting.sparsity(bound(row.sparsity for row in shown)) for bound in (min, max))
    label = f"Bar chart of sparsity per weight: {len(shown)} weights between {low} and {high}."
    label += " The table below has them all."
    both = (
        plots.to_svg(
            plots.sparsity_figure(shown, width=width, overall=overall), label, prefix=f"s{width}", css_class=css
        )
        for css, width in (("wide", 560), ("narrow", 340))
    )
    return _picture("Sparsity per weight", below, markup.joined(both))


def _schedule_picture(report: RunReport) -> Markup:
    until = max((step for step, _ in report.curve), default=0)
    asked = plots.asked_line(report.schedule, report.events, until)
    last, baseline = report.events[-1], report.metrics.get("accuracy_before")
    updates = "1 mask update" if len(report.events) == 1 else f"{len(report.events):,} mask updates"
    below = f"{updates}; the last at step {last.step:,} asked {formatting.sparsity(last.asked)} "
    below += f"and reached {formatting.sparsity(last.reached)}."
    points = [value for _, value in report.curve if is_number(value)]
    label = f"Line chart of sparsity against training step. {below}"
    if points:
        label += f" Validation accuracy from {formatting.accuracy(points[0])} to {formatting.accuracy(points[-1])}."
    both = (
        plots.to_svg(
            plots.schedule_figure(report.events, asked, report.curve, baseline=baseline, width=width),
            label,
            prefix=f"c{width}",
            css_class=css,
        )
        for css, width in (("wide", 560), ("narrow", 340))
    )
    return _picture("Sparsity schedule: requested and reached", below, markup.joined(both))


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
    return markup.joined([heading, markup.paragraph(text), f'<div class="histograms">{markup.joined(pictures)}</div>'])


# ---- tables ----------------------------------------------------------------------------------------------------------


def _weights(report: RunReport) -> Markup:
    pruned = report.pruned or list(report.after.weights)
    names = {row.name for row in pruned}
    others = [row for row in report.after.weights if row.name not in names]
    parts = [
        markup.paragraph("Wide tables scroll sideways.", "hint phone"),
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
        markup.paragraph(
            "Sparse MACs leave out multiplications by zero. gzip: each weight compressed by itself, level 9. Moved per "
            "update: L2 norm of what an optimizer update changed, over that of the weight, on average."
        )
    )
    return markup.joined(parts)


_WEIGHT_HEAD = (
    '<tr><th scope="col" rowspan="2" class="name">Weight</th><th scope="col" rowspan="2">Sparsity, pattern</th>'
    '<th scope="col" rowspan="2" class="number">Parameters</th>'
    '<th scope="colgroup" colspan="2" class="group">Zeros</th>'
    '<th scope="col" rowspan="2" class="number">MACs</th>'
    '<th scope="colgroup" colspan="2" class="group">Sparse MACs</th>'
    '<th scope="col" rowspan="2" class="number">Bytes,<br>raw</th>'
    '<th scope="colgroup" colspan="2" class="group">Bytes, gzip</th>'
    '<th scope="col" rowspan="2" class="number">Moved<br>per update</th></tr><tr>'
    + '<th scope="col" class="number">before</th><th scope="col" class="number">after</th>' * 3
    + "</tr>"
)
_WEIGHT_CLASSES = ("name", "bars", *["number"] * 10)


def _weight_table(label: str, report: RunReport, rows: Sequence[WeightRow], *, total: bool) -> Markup:
    before = {row.name: row for row in report.before.weights}
    cells = [_weight_cells(report, row, before.get(row.name)) for row in rows]
    old, new = report.before, report.after
    foot: tuple[object, ...] = ()
    if total:
        gzip = [markup.bytes_of(report.gzip_total(when)) for when in ("before", "after")]
        zeros, macs = (count(old.zeros), count(new.zeros)), (short_count(old.sparse_macs), short_count(new.sparse_macs))
        name = markup.small("Whole model", f"all {len(new.weights)} weights")
        counts = (_bar(new.sparsity), count(new.parameters), *zeros, short_count(new.macs), *macs)
        foot = (name, *counts, markup.bytes_of(new.bytes), *gzip, "")
    return markup.scrolling_table(label, _WEIGHT_HEAD, _WEIGHT_CLASSES, cells, foot, kind="weights")


def _weight_cells(report: RunReport, row: WeightRow, before: WeightRow | None) -> tuple[object, ...]:
    compressed = report.compressed.get(row.name, {})
    return (
        markup.small(markup.breakable(row.name), f"{formatting.shape(row.shape)} · {row.role.replace('_', ' ')}"),
        markup.small(_bar(row.sparsity), row.pattern),
        count(row.size),
        count(before.zeros) if before else MISSING,
        count(row.zeros),
        short_count(row.macs),
        short_count(before.sparse_macs) if before else MISSING,
        short_count(row.sparse_macs),
        markup.bytes_of(row.bytes),
        markup.bytes_of(compressed.get("before")),
        markup.bytes_of(compressed.get("after")),
        number(report.relative_change(row.name), 2),
    )


def _bar(value: float) -> Markup:
    return Markup(
        '<span style="white-space:nowrap"><span class="bar" aria-hidden="true">'
        f'<i style="width:{100 * value:.1f}%"></i>'
        f"</span>{formatting.sparsity(value)}</span>"
    )


def _steps(report: RunReport) -> Markup:
    if not report.steps:
        return markup.paragraph("No step was recorded.")
    columns = (
        ("Step", "name"),
        ("Name", "text"),
        ("Duration", "number"),
        ("Epochs", "number"),
        ("Accuracy after", "number"),
    )
    rows = []
    for index, step in enumerate(report.steps, start=1):
        history = step.get("history") or {}
        epochs = max((len(values) for values in history.values()), default=0)
        name, took = step.get("name") or step.get("kind"), formatting.duration(step.get("seconds"))
        metrics = "; ".join(f"{metric} {_course(values)}" for metric, values in history.items() if values)
        what = markup.small(name, metrics) if metrics else name
        done = formatting.accuracy(step.get("accuracy"))
        rows.append((f"{index}. {step.get('kind', '')}", what, took, count(epochs) if epochs else MISSING, done))
    total = formatting.duration(sum(step["seconds"] for step in report.steps if is_number(step.get("seconds"))))
    table = markup.table("Steps taken", (*columns,), rows, ("Total", "", total, "", ""))
    return markup.joined([markup.paragraph("Metrics: first epoch → last epoch."), table])


def _course(values: Sequence[Any]) -> str:
    if len(values) == 1:
        return number(values[0])
    return f"{number(values[0])} → {number(values[-1])}"


def _expectations(report: RunReport) -> Markup:
    if not report.expectations:
        return markup.paragraph("The recipe states no expectations.")
    columns = (("Quantity", "name"), ("Result", ""), ("Expected", "short"), ("Measured", "number"))
    rows = [
        (
            row.get("what", ""),
            markup.badge("good", "✓ met") if row.get("met") else markup.badge("bad", "✗ not met"),
            bound_text(row.get("bound")),
            number(row.get("measured"), 6) if is_number(row.get("measured")) else "not measured",
        )
        for row in report.expectations
    ]
    return markup.table("Expectations", columns, rows)


_STATUS = {"ok": ("good", "✓ ok"), "refused": ("warn", "refused"), "failed": ("bad", "✗ failed")}


def _exports(report: RunReport) -> Markup:
    if not report.exports:
        return markup.paragraph("The recipe exports nothing.")
    heads = ("Bytes", "gzip -9", "Largest error", "Agreement", "Accuracy")
    columns = (("Format", "name"), ("Status", ""), *((head, "number") for head in heads), ("Note", "text"))
    rows = [
        (
            markup.small(row.format, row.file or "no file"),
            markup.badge(*_STATUS.get(row.status, ("warn", row.status))),
            markup.bytes_of(row.bytes),
            markup.bytes_of(row.gzip_bytes),
            number(row.max_error, 2),
            formatting.accuracy(row.agreement),
            formatting.accuracy(row.accuracy),
            row.note or "",
        )
        for row in report.exports
    ]
    text = (
        "Each file was opened again and run on real inputs. Largest error: against the Keras model, as a fraction of "
        "the range of its outputs. Agreement: the fraction of inputs with the same most likely class."
    )
    return markup.joined([markup.paragraph(text), markup.table("Exported files", columns, rows)])


def _advice(report: RunReport) -> Markup:
    if not report.advice:
        return markup.paragraph("No runtime was assessed.")
    columns = (("Runtime", "name"), ("Benefit", "short"), ("Why", "text"))
    return markup.table("Runtimes", columns, [(row.runtime, row.what_it_buys, row.why) for row in report.advice])


def _skipped(reasons: dict[str, list[str]]) -> Markup:
    if not reasons:
        return markup.paragraph("No weight was skipped.")
    rows = [(reason, count(len(names)), ", ".join(map(clean, names))) for reason, names in reasons.items()]
    return markup.table("Skipped weights", (("Reason", "name"), ("Weights", "number"), ("Names", "text")), rows)


# ---- reproducing the run ---------------------------------------------------------------------------------------------


def _recipe(report: RunReport) -> Markup:
    facts = [("seed", str(report.seed)), *report.versions.items()]
    plain = [(name, value) for name, value in facts]
    hashes = [(name, Markup(f"<code>{markup.escaped(value)}</code>")) for name, value in report.hashes.items()]
    parts = [
        Markup("<h3>Versions and seed</h3>"),
        markup.table("Versions and seed", (("Name", "name"), ("Value", "text")), plain),
    ]
    if hashes:
        parts += [Markup("<h3>SHA-256</h3>"), markup.table("Hashes", (("Part", "name"), ("SHA-256", "text")), hashes)]
    # Line by line: `clean` replaces line breaks, because a name with a line break could forge a line.
    lines = "\n".join(markup.escaped(line) for line in _as_yaml(report.recipe).splitlines())
    parts.append(Markup(f'<details><summary>The locked recipe</summary><pre tabindex="0">{lines}</pre></details>'))
    return markup.joined(parts)


def _as_yaml(recipe: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(json_ready(recipe), sort_keys=False, allow_unicode=True, width=100)
