"""The picture of a file's bytes after several compressors."""

import pytest

from prunekit.delivery.packing.pack_report import PackedSize, PackReport
from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import COLOURS, to_png, to_svg


def report(*others, before=429_152, after=56_858):
    return PackReport("net.pack", "litert", before, after, 100, 10, 80.0, 20, tuple(PackedSize(*one) for one in others))


def picture(*others, **sizes):
    (found,) = report(*others, **sizes).sections()[0].pictures
    return found


def drawn(found, width=560):
    figure = PLOTS[found.plot](found.data, width)
    to_png(figure, scale=1)
    return figure


@pytest.mark.parametrize("width", [340, 560])
@pytest.mark.parametrize(
    "others", [(), (("gzip -9", 79_421), ("xz -9e", 65_052), ("zstd -22", 69_152), ("brotli -q 11", 66_652))]
)
def test_bars_are_the_bytes_from_those_of_the_file_to_those_of_the_packed_file(others, width):
    (axes,) = drawn(picture(*others), width).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "not compressed",
        *(name for name, _ in others),
        "prunekit pack",
    ]
    assert [bar.get_width() for bar in axes.patches] == [429_152, *(size for _, size in others), 56_858]
    assert axes.texts[-1].get_text() == "56,858"
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(0 <= box.x0 and box.x1 <= width for box in boxes)
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in zip(boxes, boxes[1:], strict=False))


def test_the_packed_file_alone_has_the_colour_of_results():
    figure = drawn(picture(("gzip -9", 79_421)))
    text = to_svg(figure, "label", prefix="p")
    assert text.startswith("<svg")
    colours = [bar.get_facecolor()[:3] for bar in figure.axes[0].patches]
    assert colours[0] == colours[1] != colours[2]
    assert len({COLOURS["before"], COLOURS["after"]}) == 2


def test_the_text_alternative_has_all_sizes():
    label = picture(("gzip -9", 79_421)).label
    assert label == "Bars: not compressed 429,152 bytes, gzip -9 79,421 bytes, prunekit pack 56,858 bytes."


def test_a_packed_file_that_is_the_largest_is_drawn():
    assert to_png(drawn(picture(("gzip -9", 90), before=100, after=1_000))).startswith(b"\x89PNG")
