"""The picture of the files that a search made."""

import warnings
from dataclasses import replace

import pytest

from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import to_png
from prunekit.delivery.reports.metrics import keras_metric
from prunekit.searching.search_report import SearchPoint, SearchReport, TechniqueAlone

POINTS = (
    SearchPoint(0.06, 0.055, 50_000, 56_392, 0.0054),
    SearchPoint(0.039, 0.04, 64_000, 68_576, 0.0034, delivered=True),
    SearchPoint(0.02, 0.02, 81_000, 86_216, 0.001),
)


def report(allowed=0.005, points=POINTS):
    return SearchReport(
        "net", "litert", keras_metric("accuracy"), 0.99, 0.987, allowed, None, (256, 256, 900, 900), 1_686_568, 68_576,
        0.0, points, (), (),
    )  # fmt: skip


def drawn(found, width=560):
    (picture,) = found.sections()[1].pictures
    figure = PLOTS[picture.plot](picture.data, width)
    assert to_png(figure, scale=1).startswith(b"\x89PNG")
    return figure, picture


@pytest.mark.parametrize("width", [340, 560])
def test_files_stand_at_their_bytes_and_drops_and_the_allowed_drop_is_a_line(width):
    figure, picture = drawn(report(), width)
    (axes,) = figure.axes
    dots = {collection.get_label(): collection.get_offsets().tolist() for collection in axes.collections}
    assert dots == {
        "too much is lost": [[56_392, 0.0054]],
        "made and measured": [[86_216, 0.001]],
        "delivered": [[68_576, 0.0034]],
        "the model in float32": [[1_686_568, 0.0]],
    }
    assert axes.lines[0].get_ydata()[0] == 0.005 and axes.get_ylabel() == "drop of accuracy"
    assert "68,576 bytes: 0.0034" in picture.label


def test_without_an_allowed_drop_all_files_hold_it():
    figure, _ = drawn(report(None, POINTS[:2]))
    labels = {one.get_label() for one in figure.axes[0].collections}
    assert labels == {"made and measured", "delivered", "the model in float32"}
    assert not figure.axes[0].lines


@pytest.mark.parametrize("width", [340, 560])
def test_times_have_a_chart_of_their_own_and_techniques_alone_stand_on_the_axes(width):
    points = tuple(replace(one, seconds=1e-5 * n, trained=n == 2) for n, one in enumerate(POINTS, start=1))
    alone = (TechniqueAlone("shrink", 0.04, 90_000, 3e-5), TechniqueAlone("all", 0.04, 60_000, 2e-5))
    timed = replace(report(points=points), seconds=2e-5, seconds_before=9e-5, alone=alone)
    (picture,) = timed.sections()[1].pictures
    figure = PLOTS[picture.plot](picture.data, width)
    left, right = figure.axes
    dots = {one.get_label(): one.get_offsets().tolist() for one in right.collections}
    assert dots["delivered"] == [[2e-5, 0.0034]] and dots["the model in float32"] == [[9e-5, 0.0]]
    assert [one[0] for one in dots["one alone, counted"]] == [3e-5]
    assert [one.get_text() for one in left.texts] == ["shrink"]
    (legend,) = figure.legends
    assert "diamonds: trained" in [one.get_text() for one in legend.get_texts()]


@pytest.mark.parametrize("width", [300, 560])
def test_costs_far_apart_leave_room_for_the_chart(width):
    alone = (TechniqueAlone("shrink and quantize", 0.04, 12.0), TechniqueAlone("all", 0.04, 9.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure, _ = drawn(replace(report(), alone=alone), width)
    low, high = figure.axes[0].get_xlim()
    assert low < 12 and high > 1_686_568 and figure.axes[0].get_position().width > 0.4
