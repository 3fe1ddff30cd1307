"""The picture of a sweep, and the front that it shows."""

import dataclasses
import itertools
import math
import random
from pathlib import Path

import numpy as np
import pytest
import run_reports
from matplotlib.backends.backend_agg import FigureCanvasAgg

from prunekit.delivery.plots.plots import to_png
from prunekit.delivery.plots.sweep_plot import sweep_figure
from prunekit.delivery.reports.sweeps import SweepReport, SweptPoint, swept_point


def swept(name, accuracy, size, outcome="done", **values):
    metrics = {} if accuracy is None else {"accuracy_after": accuracy}
    values = values or {"name": name}
    return SweptPoint(name, values, outcome, metrics=metrics, size=size, size_of="" if size is None else "litert")


def report_of(points, over=None):
    return SweepReport(
        "net", Path("out"), over or {"name": [found.name for found in points]}, "smallest", tuple(points)
    )


class TestFront:
    @pytest.mark.parametrize("seed", range(60))
    def test_it_is_every_point_that_no_other_beats(self, seed):
        chance = random.Random(seed)
        pairs = [(chance.choice((None, 0.5, 0.7, 0.9)), chance.choice((None, 0, 10, 20, 30))) for _ in range(seed % 10)]
        figures = [*pairs, *pairs[:2]]
        report = report_of([swept(str(index), *pair) for index, pair in enumerate(figures)])
        measured = [pair for pair in figures if None not in pair]
        wanted = {
            str(index)
            for index, pair in enumerate(figures)
            if None not in pair and not any(a >= pair[0] and s <= pair[1] and (a, s) != pair for a, s in measured)
        }
        assert {found.name for found in report.pareto} == wanted
        sizes = [found.size for found in report.pareto]
        assert sizes == sorted(sizes)

    def test_an_accuracy_that_is_no_number_takes_no_part(self):
        assert report_of([swept("a", math.nan, 1), swept("b", 0.5, 2)]).pareto == (swept("b", 0.5, 2),)

    def test_a_format_exported_twice_counts_as_it_was_exported_last(self):
        made = run_reports.make()
        (row, *_) = made.exports
        twice = dataclasses.replace(made, exports=(dataclasses.replace(row, bytes=1), row))
        found = swept_point("a", {}, twice, "smallest")
        assert (found.size, found.size_of) == (row.bytes, row.format)
        assert swept_point("a", {}, twice, "litert-sparse").size is None


class TestPicture:
    def boxes(self, report):
        """What is written beside the points, and where, in pixels."""
        figure = sweep_figure(report)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.draw_without_rendering()
        (axes,) = figure.axes
        return {text.get_text(): text.get_window_extent(renderer) for text in axes.texts}

    def test_the_line_is_the_front_and_the_axes_say_what_they_show(self):
        points = [("c", 0.95, 3000), ("beaten", 0.6, 2000), ("a", 0.5, 1000), ("b", 0.8, 1500)]
        undrawn = dataclasses.replace(swept("d", None, 900), size_of="keras")
        report = report_of([*(swept(*point) for point in points), undrawn])
        (axes,) = sweep_figure(report).axes
        line, dots, beaten = axes.lines
        for drawn in (line, dots):
            assert list(drawn.get_xdata()) == [found.size for found in report.pareto] == [1000, 1500, 3000]
            assert list(drawn.get_ydata()) == [found.accuracy for found in report.pareto] == [0.5, 0.8, 0.95]
        assert line.get_linestyle() == "-" and line.get_drawstyle() == "steps-post"
        assert (list(beaten.get_xdata()), list(beaten.get_ydata())) == ([2000], [0.6])
        assert axes.get_xlabel() == "bytes of the smallest exported file (litert)" and axes.get_ylabel() == "accuracy"

    def test_labels_never_cover_each_other(self):
        rng = np.random.default_rng(0)
        points = [
            swept(str(i), 0.9 + rng.normal() / 50, int(rng.integers(10_000, 12_000)), final=i / 40, width=1)
            for i in range(40)
        ]
        boxes = self.boxes(report_of(points, {"final": [i / 40 for i in range(40)], "width": [1]}))
        assert 8 <= len(boxes) < 40 and all(text.startswith("final 0") and "width" not in text for text in boxes)
        for one, other in itertools.combinations(boxes.values(), 2):
            assert not one.overlaps(other)

    def test_names_are_text_and_nothing_else(self):
        names = ["$x^2$", "\\frac{", "a\nb\x1b[31m", "x" * 300]
        points = [swept(name, 0.5 + i / 10, 100 * 3**i) for i, name in enumerate(names)]
        texts = self.boxes(report_of(points))
        assert {"name $x^2$", "name \\frac{", "name a\ufffdb\ufffd[31m"} < set(texts)
        assert max(map(len, texts)) <= 34

    @pytest.mark.parametrize(
        "points",
        [
            [swept("one", 0.9, 1000)],
            [swept("same", 0.9, 1000), swept("alike", 0.9, 1000, "not met")],
            [swept("nothing", 0.0, 0), swept("huge", 1.0, 10**12)],
            [swept("small", 0.9, 10), swept("large", 0.91, 10**9), swept("unmeasured", None, None, "failed")],
        ],
        ids=["one", "alike", "nothing and huge", "far apart"],
    )
    def test_any_sweep_with_a_front_can_be_drawn(self, points):
        assert to_png(sweep_figure(report_of(points))).startswith(b"\x89PNG")

    def test_the_same_sweep_is_the_same_picture(self):
        report = report_of([swept("a", 0.9, 1000), swept("b", 0.8, 1000), swept("c", 0.95, 3000, "not met")])
        assert to_png(sweep_figure(report)) == to_png(sweep_figure(report))

    def test_without_a_measured_point_there_is_nothing_to_draw(self):
        with pytest.raises(ValueError, match="needs a point with accuracy and size. Received: none"):
            sweep_figure(report_of([swept("a", None, 5)]))
