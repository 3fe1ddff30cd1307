"""The pictures of a quantization: ranges of tensors, errors of weights."""

import json
import math
import re

import pytest
from matplotlib.colors import to_rgba

from prunekit.anatomy.records.sections import MOST_BARS, Section
from prunekit.delivery.pages.html_report import section_html
from prunekit.delivery.pages.notebook import html_of
from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import COLOURS, to_png, to_svg
from prunekit.techniques.quantize.placement.stored_bytes import StoredWeight
from prunekit.techniques.quantize.quantization_report import QuantizationReport, QuantizedWeight, TensorRange

WIDTHS = (340, 560)
HOSTILE = {
    "formula": "$a$/kernel",
    "markup": "a<b>&/kernel",
    "long": "x" * 300,
    "bidi": "\u202eleft",
    "empty": "",
}


def ranges(*bounds, chosen="data"):
    return [{"name": f"layer_{i}", "low": low, "high": high, "chosen": chosen} for i, (low, high) in enumerate(bounds)]


def errors(*values, bits=8):
    return [{"name": f"block_{i}/kernel", "error": value, "bits": bits} for i, value in enumerate(values)]


def drawn(plot, rows, width=560):
    figure = PLOTS[plot]({plot: rows}, width)
    to_png(figure, scale=1)
    return figure


def bars(figure):
    return list(figure.axes[0].patches)


def points(figure):
    return [line for line in figure.axes[0].lines if line.get_marker() not in ("None", None)]


def shown_ticks(axes):
    return [label for label in axes.get_xticklabels() if label.get_text()]


def apart(boxes, gap=0.0):
    ordered = sorted(boxes, key=lambda box: box.x0)
    return all(right.x0 - left.x1 > gap for left, right in zip(ordered, ordered[1:], strict=False))


def many(count):
    return [(-(10.0 ** -(i % 4)) * (i % 2), 10.0 ** (i % 3) + i) for i in range(count)]


# ---- ranges ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bounds", [[(0.0, 0.00025)], [(-1, 2.5), (0, 3)], many(150)], ids=["one", "two", "150"])
def test_each_range_is_a_bar_from_low_to_high_in_a_row_of_its_own(bounds, width):
    figure = drawn("ranges", ranges(*bounds), width)
    (axes,) = figure.axes
    ends = [end for bar in bars(figure) for end in (bar.get_x(), bar.get_x() + bar.get_width())]
    assert ends == pytest.approx([end for pair in bounds for end in pair])
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"layer_{i}" for i in range(len(bounds))]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == len(bounds) and all(0 <= box.x0 and box.x1 <= width for box in boxes)
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in zip(boxes, boxes[1:], strict=False))


@pytest.mark.parametrize("width", WIDTHS)
def test_ranges_of_a_hundredth_and_of_a_hundred_are_readable_in_one_picture(width):
    figure = drawn("ranges", ranges((-0.01, 0.01), (0, 1), (0, 100)), width)
    assert figure.axes[0].get_xscale() == "symlog"
    lengths = [bar.get_window_extent().width for bar in bars(figure)]
    assert lengths[0] > 0.1 * width / 2 and lengths == sorted(lengths)
    assert [text.get_text() for text in figure.axes[0].texts] == ["−0.01 to 0.01", "0 to 1", "0 to 100"]
    assert "logarithmic on both sides of 0" in figure.axes[0].get_xlabel()


def test_ranges_of_similar_size_are_on_a_linear_axis():
    axes = drawn("ranges", ranges((-1, 2.5), (0, 6))).axes[0]
    assert (axes.get_xscale(), axes.get_xlabel()) == ("linear", "range")


def test_a_range_that_the_kernel_prescribes_is_hollow_and_in_the_legend():
    rows = [*ranges((0, 6)), {"name": "softmax", "low": 0.0, "high": 0.996, "chosen": "kernel"}]
    data, kernel = bars(drawn("ranges", rows))
    assert data.get_facecolor() == to_rgba(COLOURS["after"]) and kernel.get_facecolor()[3] == 0
    assert kernel.get_linewidth() > 1
    legends = [
        [text.get_text() for text in drawn("ranges", found).legends[0].get_texts()]
        for found in (rows, rows[:1], rows[1:])
    ]
    both = ["chosen from data", "prescribed by the kernel"]
    assert legends == [both, both[:1], both[1:]]


@pytest.mark.parametrize(
    "bounds",
    [
        [(0, 0)],
        [(0, 0), (0, 1e-9), (-1e9, 5)],
        [(-5, 0), (-0.01, 0), (-0.011, 100)],
        [(-3e-9, 5), (0, 0.02)],
        [(-0.0123, 0.0025)],
        [(0, 1e-12), (-4.31, 3.77)],
        [(-250, -0.0), (0, 1)],
    ],
    ids=str,
)
@pytest.mark.parametrize("width", WIDTHS)
def test_ticks_of_ranges_stay_apart_and_have_zero(bounds, width):
    figure = drawn("ranges", ranges(*bounds), width)
    ticks = shown_ticks(figure.axes[0])
    assert "0" in [tick.get_text() for tick in ticks]
    assert apart([tick.get_window_extent() for tick in ticks])
    assert all(bar.get_window_extent().width >= 0 and bar.get_linewidth() > 0 for bar in bars(figure))


# ---- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 150])
def test_each_error_is_a_point_in_a_row_of_its_own(count, width):
    values = [1e-5 * 1.07**i for i in range(count)]
    figure = drawn("errors", errors(*values), width)
    (axes,) = figure.axes
    assert axes.get_xscale() == "log"
    assert [line.get_xdata()[0] for line in points(figure)] == values
    assert [line.get_ydata()[0] for line in points(figure)] == list(range(count))
    assert [label.get_text() for label in axes.get_yticklabels()][-1].endswith("kernel")
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(0 <= box.x0 and box.x1 <= width for box in boxes)
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in zip(boxes, boxes[1:], strict=False))


def test_bits_differ_in_colour_or_marker_and_are_in_the_legend():
    rows = [{"name": f"w{bits}", "error": 2.0**-bits, "bits": bits} for bits in (8, 2, 3, 4, 5, 6, 7, 16, 8)]
    figure = drawn("errors", rows)
    marks = [(line.get_marker(), line.get_markerfacecolor()) for line in points(figure)]
    assert len(set(marks)) == 8 and marks[0] == marks[-1]
    assert len({marker for marker, _ in marks}) == 8
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == [f"{bits} bits" for bits in (2, 3, 4, 5, 6, 7, 8, 16)]


@pytest.mark.parametrize("small", [0.0, 1e-30])
def test_an_error_of_zero_is_a_hollow_point_at_the_end_of_the_axis(small):
    figure = drawn("errors", errors(0.2, small, 1e-4))
    start, _ = figure.axes[0].get_xlim()
    filled, hollow, other = points(figure)
    assert hollow.get_xdata()[0] == start and hollow.get_markerfacecolor() == "none"
    assert {filled.get_markerfacecolor(), other.get_markerfacecolor()} == {COLOURS["after"]}
    assert figure.axes[0].texts[1].get_text() == {0.0: "0", 1e-30: "1e−30"}[small]
    names = [label.get_window_extent().x1 for label in figure.axes[0].get_yticklabels()]
    assert max(names) <= hollow.get_window_extent().x0


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_an_unknown_error_has_a_row_without_a_point(value):
    figure = drawn("errors", errors(value, 0.01))
    assert len(points(figure)) == 1
    assert [text.get_text() for text in figure.axes[0].texts] == ["–", "0.01"]


@pytest.mark.parametrize(
    "values", [(0.0, 0.0), (3.3e-4,), (2e-5, 2.1e-5), (1e-16, 1.3), (1e-10, 1e-9, 0.0), (25.0, 1e-3)], ids=str
)
@pytest.mark.parametrize("width", WIDTHS)
def test_ticks_of_errors_stay_apart(values, width):
    figure = drawn("errors", errors(*values), width)
    ticks = shown_ticks(figure.axes[0])
    assert len(ticks) >= 2
    assert apart([tick.get_window_extent() for tick in ticks])


# ---- all ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plot", ["ranges", "errors", "channels"])
@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE)
def test_names_of_layers_are_drawn_as_they_are(name, plot):
    row = {"name": name, "low": -1, "high": 1, "chosen": "kernel", "error": 0.1, "bits": 4, "before": 3, "after": 1}
    text = to_svg(PLOTS[plot]({"groups" if plot == "channels" else plot: [row]}, 560), "label", prefix="p")
    assert "\u202e" not in text and "<b>" not in text and "x" * 31 not in text
    assert ("$a$/kernel" in text) == (name == HOSTILE["formula"])


@pytest.mark.parametrize(
    ("plot", "data", "colours"),
    [
        ("ranges", {"ranges": ranges((-1, 1)) + ranges((0, 1), chosen="kernel")}, ("after", "muted", "ink", "grid")),
        ("errors", {"errors": errors(0.1, bits=8) + errors(0.2, bits=4)}, ("after", "metric", "ink", "grid")),
        ("channels", {"groups": [{"name": "a", "before": 8, "after": 3}]}, ("before", "after", "ink", "muted")),
    ],
)
def test_colours_of_pictures_follow_the_theme_of_the_page(plot, data, colours):
    text = to_svg(PLOTS[plot](data, 560), "label", prefix="p")
    used = set(re.findall(r"var\(--\w+, #\w+\)", text))
    assert {f"var(--{name}, {COLOURS[name]})" for name in colours} <= used


# ---- the report ------------------------------------------------------------------------------------------------------


def report(layers, *, activations=True, error=lambda index: 1e-4 * (1 + index % 7), name="layer_{}"):
    weights = tuple(
        QuantizedWeight(f"{name.format(i)}/kernel", (8, 4), 8, "per tensor", 1, 0, error(i), StoredWeight(32))
        for i in range(layers)
    )
    found = tuple(
        TensorRange(name.format(i), 1, 8, -float(i % 5), 1.0 + i % 9, 0.1, 0, "data" if i else "kernel")
        for i in range(layers)
    )
    return QuantizationReport("net", "nearest", weights, found if activations else (), (), 32 * layers)


def pictures(found):
    return {picture.plot: picture for section in found.sections() for picture in section.pictures}


def test_a_report_draws_all_rows_of_its_tables():
    found = pictures(report(3))
    assert [row["name"] for row in found["errors"].data["errors"]] == [f"layer_{i}/kernel" for i in range(3)]
    assert [row["chosen"] for row in found["ranges"].data["ranges"]] == ["kernel", "data", "data"]
    assert {picture.caption for picture in found.values()} == {"In the model's order."}
    assert found["errors"].label == (
        "Points: errors of 3 weights, from 0.0001 to 0.0003 at layer_2/kernel. The table has the figures."
    )
    assert "3 ranges between -2 and 3, 1 of them prescribed by kernels" in found["ranges"].label


def test_pictures_of_150_layers_have_the_widest_ranges_and_the_largest_errors():
    whole = report(150)
    found = pictures(whole)
    shown = {plot: [row["name"] for row in picture.data[plot]] for plot, picture in found.items()}
    numbers = {plot: [int(re.search(r"\d+", name)[0]) for name in names] for plot, names in shown.items()}
    for plot, word in (("ranges", "widest"), ("errors", "largest")):
        assert len(shown[plot]) == MOST_BARS and numbers[plot] == sorted(numbers[plot])
        assert found[plot].caption == f"The 60 {word} of 150, in the model's order; the table has the others."
    width = {one.name: one.high - one.low for one in whole.ranges}
    assert min(width[name] for name in shown["ranges"]) >= max(
        value for name, value in width.items() if name not in shown["ranges"]
    )
    error = {one.name: one.error for one in whole.weights}
    assert min(error[name] for name in shown["errors"]) >= max(
        value for name, value in error.items() if name not in shown["errors"]
    )
    assert [len(section.rows) for section in whole.sections()][:2] == [150, 150]


def test_a_report_without_ranges_or_weights_has_no_picture_of_them():
    assert list(pictures(report(2, activations=False))) == ["errors"]
    assert pictures(report(0)) == {}


def test_the_page_and_the_notebook_show_both_pictures_with_text_for_screen_readers():
    found = report(2, name="<b>&{}", error=lambda index: 0.0)
    pages = ["".join(section_html(section, f"s{i}") for i, section in enumerate(found.sections())), html_of(found)]
    for page in pages:
        labels = re.findall(r'<svg role="img" class="picture wide" aria-label="([^"]*)"', page)
        assert [label.split(" ")[0] for label in labels] == ["Points:", "Bars"]
        assert "from 0 to 0 at &lt;b&gt;&amp;0/kernel" in labels[0]
        assert "<b>&" not in page


def test_sections_with_these_pictures_survive_json():
    for section in report(2).sections():
        assert Section.from_dict(json.loads(json.dumps(section.to_dict()))).to_dict() == section.to_dict()
