"""The pictures: figures made without pyplot, histograms that count exact zeros apart."""

import sys

import numpy as np
import pytest
from run_reports import STAGES, make

from prunekit.delivery.plots import plots
from prunekit.delivery.plots.stage_plot import overview_figure
from prunekit.delivery.reports import plot_data
from prunekit.delivery.reports.stages import stage_section


def test_a_histogram_counts_exact_zeros_apart_and_every_value_once():
    before = np.array([0.5, -0.5, 1e-9, 0.0, 2.0, np.nan, np.inf])
    after = np.where(np.abs(before) > 0.6, before, 0)
    found = plot_data.weight_histogram(before, after, bins=10)
    assert len(found["edges"]) == 11
    assert (sum(found["before"]), found["zeros_before"], found["not_finite_before"]) == (4, 1, 2)
    assert (sum(found["after"]), found["zeros_after"], found["not_finite_after"]) == (1, 5, 1)


@pytest.mark.parametrize("values", [np.zeros(5), np.zeros(0), np.full(3, 7.0)], ids=["all zero", "empty", "all equal"])
def test_histograms_of_awkward_weights_are_drawn(values):
    histogram = plot_data.weight_histogram(values, values)
    assert plots.to_svg(plots.histogram_figure(histogram), "a histogram", prefix="h").lstrip().startswith("<svg")


def test_the_asked_line_follows_the_schedule_and_ends_at_its_last_event():
    report = make()
    line = plot_data.asked_line(report.schedule, report.events)
    # The described schedule does not say what the events say, so the line holds each event's value until the next.
    assert line == [(0.0, 0.0), (10, 0.0), (10, 0.7), (20, 0.7), (20, 0.89), (20, 0.89)]
    assert plot_data.asked_line(None, ()) == []


def test_only_the_largest_weights_are_drawn_in_the_models_order():
    rows = make(weights=60).after.weights
    shown = plot_data.largest(rows, 5)
    assert len(shown) == 5
    assert [row for row in rows if row in shown] == list(shown)


def test_the_overview_is_a_png_and_leaves_nothing_in_pyplot():
    report = make()
    section = stage_section(STAGES, report.main)
    figure = overview_figure(report, [picture for part in section.parts for picture in part.pictures])
    assert plots.to_png(figure).startswith(b"\x89PNG")
    _, latency, size = (panel.axes[0] for panel in figure.subfigs)
    assert [text.get_text() for text in latency.texts][:2] == ["before", "2. shrink"]
    assert "sparse" in [text.get_text() for text in size.texts]
    pyplot = sys.modules.get("matplotlib.pyplot")
    assert pyplot is None or not pyplot.get_fignums()


def test_two_pictures_on_a_page_share_no_identifiers():
    histogram = next(iter(make().histograms.values()))
    ids = [
        set(
            part.split('"')[0]
            for part in plots.to_svg(plots.histogram_figure(histogram), "x", prefix=p).split(' id="')[1:]
        )
        for p in ("a", "b")
    ]
    assert ids[0] and not ids[0] & ids[1]
