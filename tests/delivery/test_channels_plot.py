"""The picture of groups of channels before and after a removal."""

import pytest

from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import to_png


def drawn(groups, width=560):
    return PLOTS["channels"]({"groups": groups}, width)


def bars(count):
    return [{"name": f"block_{i}_conv", "before": 8 * (i + 1), "after": 3 * (i + 1)} for i in range(count)]


@pytest.mark.parametrize("width", [340, 560])
@pytest.mark.parametrize("count", [1, 3, 60])
def test_each_group_has_a_bar_before_and_a_bar_after_from_top_to_bottom(count, width):
    figure = drawn(bars(count), width)
    (axes,) = figure.axes
    before, after = ([bar.get_width() for bar in container] for container in axes.containers)
    assert before == [8 * (i + 1) for i in range(count)] and after == [3 * (i + 1) for i in range(count)]
    bottom, top = axes.get_ylim()
    assert bottom > top
    assert [label.get_text() for label in axes.get_yticklabels()] == [one["name"] for one in bars(count)]


@pytest.mark.parametrize("width", [340, 560])
@pytest.mark.parametrize("count", [3, 60])
def test_texts_are_inside_the_picture_and_rows_do_not_overlap(count, width):
    groups = [{**one, "before": 100_000 + one["before"], "after": 99_000} for one in bars(count)]
    figure = drawn(groups, width)
    to_png(figure, scale=1)
    texts = figure.axes[0].texts
    boxes = [text.get_window_extent() for text in texts]
    assert len(texts) == count and texts[0].get_text() == "100,008 → 99,000"
    assert all(0 <= box.x0 and box.x1 <= width for box in boxes)
    assert all(upper.y0 >= lower.y1 - 1 for upper, lower in zip(boxes, boxes[1:], strict=False))


def test_a_group_that_stays_whole_has_one_figure():
    figure = drawn([{"name": "a", "before": 1280, "after": 1280}, {"name": "b", "before": 4, "after": 0}])
    assert [text.get_text() for text in figure.axes[0].texts] == ["1,280", "4 → 0"]


def test_a_removal_without_groups_is_drawn():
    assert to_png(drawn([])).startswith(b"\x89PNG")
