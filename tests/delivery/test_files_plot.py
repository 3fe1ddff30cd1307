"""The picture of the files that a search made."""

import pytest

from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import to_png
from prunekit.delivery.reports.metrics import keras_metric
from prunekit.searching.search_report import SearchPoint, SearchReport

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
    }
    assert axes.lines[0].get_ydata()[0] == 0.005 and axes.get_ylabel() == "drop of accuracy"
    assert "68,576 bytes: 0.0034" in picture.label


def test_without_an_allowed_drop_all_files_hold_it():
    figure, _ = drawn(report(None, POINTS[:2]))
    assert {one.get_label() for one in figure.axes[0].collections} == {"made and measured", "delivered"}
    assert not figure.axes[0].lines
