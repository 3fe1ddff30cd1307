"""Renders results as HTML for notebooks, with the sections and the style of the report page."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.reports import SparsityReport
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
from prunekit.delivery.reports.report_sections import summary
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.sensitivity import SensitivityReport
from prunekit.delivery.reports.sweeps import SweepReport
from prunekit.techniques.quantize.quantization_report import QuantizationReport
from prunekit.techniques.shrink.channels.groups_report import GroupsReport
from prunekit.techniques.shrink.channels.shrink_report import ShrinkReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def html_of(result: object) -> str:
    """Returns a result as a piece of HTML: no scripts, no network access, all user text escaped.

    Raises:
        TypeError: There is no HTML for results of this type.
    """
    if not isinstance(result, Displayed):
        raise TypeError(f"A notebook shows reports, costs, sections and sweeps. Received: {type(result).__name__}.")
    return _block(_head(result), result.sections())


@functools.singledispatch
def _head(result: Any) -> list[Markup]:
    """Returns what stands above the sections, such as the verdict and the notes."""
    return []


@_head.register(ShrinkReport)
@_head.register(QuantizationReport)
@_head.register(IntegerExport)
def _(result: ShrinkReport | QuantizationReport | IntegerExport) -> list[Markup]:
    return _told(result.verdict(), result.notes)


@_head.register
def _(result: SparsityReport) -> list[Markup]:
    figures = f"{count(result.zeros)} of {count(result.parameters)} weights are zero (sparsity "
    return _told(f"{figures}{sparsity(result.sparsity)}).", result.notes)


@_head.register
def _(result: GroupsReport) -> list[Markup]:
    return _told(f"{count(len(result.groups))} groups with {count(result.channels)} channels can shrink.")


@_head.register
def _(result: RunReport) -> list[Markup]:
    return [*_told(result.verdict(), result.all_notes), Markup(cards(summary(result)))]


@_head.register
def _(result: RunComparison) -> list[Markup]:
    return _head(result.figures)


@_head.register
def _(result: SensitivityReport) -> list[Markup]:
    if not result.rows:
        return []
    label = f"Damage of {len(result.targets)} weights at {len(result.levels)} levels; the tables have the figures."
    return [_figure(sensitivity_figure(result), label, result.to_dict())]


@_head.register
def _(report: SweepReport) -> list[Markup]:
    if not report.pareto:
        return []
    label = f"{report.main.title} against size of {len(report.points)} points; the table has the figures."
    return [_figure(sweep_figure(report), label, report.to_dict())]


def _told(verdict: str, notes: Sequence[str] = ()) -> list[Markup]:
    return [markup.paragraph(verdict, "verdict"), *([markup.bullets(notes, "notes warn")] if notes else [])]


def _figure(figure: Figure, label: str, values: Mapping[str, Any]) -> Markup:
    """Returns a figure as a section; `values` tell it apart from other figures of the notebook."""
    prefix = "f" + hashlib.sha256(repr(values).encode()).hexdigest()[:8]
    return Markup(f"<section>{to_svg(figure, label, prefix=prefix)}</section>")


def _block(head: list[Markup], sections: Sequence[Section]) -> str:
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
