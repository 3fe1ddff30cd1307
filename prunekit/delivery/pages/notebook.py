"""Renders results as HTML for notebooks, with the sections and the style of the report page."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.cost.cost import Cost
from prunekit.anatomy.records.reports import Report
from prunekit.anatomy.records.sections import Section
from prunekit.delivery.integers.integer_report import IntegerExport
from prunekit.delivery.pages import markup
from prunekit.delivery.pages.html_report import cards, section_html, style
from prunekit.delivery.pages.markup import Markup
from prunekit.delivery.plots.plots import to_svg
from prunekit.delivery.plots.sensitivity_plot import sensitivity_figure
from prunekit.delivery.plots.sweep_plot import sweep_figure
from prunekit.delivery.reports.comparison import RunComparison
from prunekit.delivery.reports.formatting import count, sparsity
from prunekit.delivery.reports.model_sections import (
    gradient_verdicts,
    layer_signals,
    model_costs,
    model_weights,
    skipped_weights,
    weight_changes,
)
from prunekit.delivery.reports.report_sections import sections_of, summary
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.sensitivity import SensitivityReport
from prunekit.delivery.reports.sweeps import SweepReport, sweep_table
from prunekit.initialization.signal_report import SignalReport
from prunekit.techniques.pruning.after_training.rounds import RoundsReport
from prunekit.techniques.quantize.quantization_report import QuantizationReport
from prunekit.techniques.shrink.channels.groups_report import GroupsReport
from prunekit.techniques.shrink.channels.shrink_report import ShrinkReport
from prunekit.techniques.shrink.graph.simplify_report import SimplifyReport
from prunekit.techniques.shrink.layers.block_report import BlocksReport
from prunekit.training_tools.gradients.diagnosis import Diagnosis
from prunekit.training_tools.loops.weight_changes import ChangeReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@functools.singledispatch
def html_of(result: object) -> str:
    """Returns a result as a piece of HTML: no scripts, no network access, all user text escaped.

    Raises:
        TypeError: There is no HTML for results of this type.
    """
    raise TypeError(f"A notebook shows reports, costs, sections and sweeps. Received: {type(result).__name__}.")


@html_of.register
def _(result: Section) -> str:
    return _block([], [result])


@html_of.register
def _(result: Report) -> str:
    figures = f"{count(result.zeros)} of {count(result.parameters)} weights are zero (sparsity "
    lines = [markup.paragraph(f"{figures}{sparsity(result.sparsity)}).", "verdict")]
    if result.notes:
        lines.append(markup.bullets(result.notes, "notes warn"))
    return _block(lines, [model_weights(result), *([skipped_weights(result.skipped)] if result.skipped else [])])


@html_of.register
def _(result: Cost) -> str:
    return _block([], [model_costs(result)])


@html_of.register
def _(result: SignalReport) -> str:
    return _block([], [layer_signals(result)])


@html_of.register
def _(result: Diagnosis) -> str:
    return _block([], [gradient_verdicts(result)])


@html_of.register
def _(result: ChangeReport) -> str:
    return _block([], [weight_changes(result)])


@html_of.register
def _(result: RoundsReport) -> str:
    return _block([], [result.section])


@html_of.register(BlocksReport)
@html_of.register(SimplifyReport)
def _(result: BlocksReport | SimplifyReport) -> str:
    return _block([], result.sections())


@html_of.register
def _(result: GroupsReport) -> str:
    figures = f"{count(len(result.groups))} groups with {count(result.channels)} channels can shrink."
    return _block([markup.paragraph(figures, "verdict")], result.sections())


@html_of.register(ShrinkReport)
@html_of.register(QuantizationReport)
@html_of.register(IntegerExport)
def _(result: ShrinkReport | QuantizationReport | IntegerExport) -> str:
    lines = [markup.paragraph(result.verdict(), "verdict")]
    if result.notes:
        lines.append(markup.bullets(result.notes, "notes warn"))
    return _block(lines, result.sections())


@html_of.register
def _(result: RunReport) -> str:
    lines = [markup.paragraph(result.verdict(), "verdict")]
    if result.all_notes:
        lines.append(markup.bullets(result.all_notes, "notes warn"))
    return _block([*lines, Markup(cards(summary(result)))], sections_of(result))


@html_of.register
def _(result: SweepReport) -> str:
    return _block(_drawn(result), [sweep_table(result).section])


@html_of.register
def _(result: RunComparison) -> str:
    return _block(_drawn(result.figures), result.sections())


@html_of.register
def _(result: SensitivityReport) -> str:
    if not result.rows:
        return _block([], result.sections())
    label = f"Damage of {len(result.targets)} weights at {len(result.levels)} levels; the tables have the figures."
    return _block([_figure(sensitivity_figure(result), label, result.to_dict())], result.sections())


def _drawn(report: SweepReport) -> list[Markup]:
    if not report.pareto:
        return []
    label = f"{report.main.title} against size of {len(report.points)} points; the table has the figures."
    return [_figure(sweep_figure(report), label, report.to_dict())]


def _figure(figure: Figure, label: str, values: Mapping[str, Any]) -> Markup:
    """Returns a figure as a section; `values` tell it apart from other figures of the notebook."""
    prefix = "f" + hashlib.sha256(repr(values).encode()).hexdigest()[:8]
    return Markup(f"<section>{to_svg(figure, label, prefix=prefix)}</section>")


def _block(head: list[Markup], sections: list[Section]) -> str:
    """Returns the parts in one element whose style does not reach the rest of the notebook."""
    content = repr([section.to_dict() for section in sections])
    # Ids differ between the outputs of a notebook.
    key = "p" + hashlib.sha256(content.encode()).hexdigest()[:8]
    body = markup.joined([*head, *(section_html(one, f"{key}-{number}") for number, one in enumerate(sections))])
    return f'<div class="prunekit">\n<style>\n{_nested_style()}</style>\n{body}\n</div>'


@functools.cache
def _nested_style() -> str:
    """The page's style, nested: `:root` and `body` of the page are the element itself."""
    page = style().replace(":root", "&").replace("\nbody {", "\n& {")
    own = "& { padding: 0.75rem; border-radius: 10px; overflow-x: auto; }\n"
    own += "& table { color: inherit; table-layout: auto; margin: 0; }\n& tr { background: none; }"
    # The class twice: the rules of Jupyter for tables have the specificity of one class.
    return f".prunekit.prunekit {{\n{page}\n{own}\n}}\n"
