"""Speed and size of a run's models: the two lines, the table, the card, the pictures, and reports without them."""

import dataclasses
import json
import re

import numpy as np
import pytest
from run_reports import STAGES, make, terminal

from prunekit.anatomy.records.sections import Section
from prunekit.delivery.pages.html_report import render_html
from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import COLOURS, to_png, to_svg
from prunekit.delivery.reports import formatting
from prunekit.delivery.reports.metrics import Metric, keras_metric
from prunekit.delivery.reports.report_sections import cards, sections_of
from prunekit.delivery.reports.rows import DISK, DOWNLOAD, RuntimeAdvice, StageRow
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.stages import size_line, speed_line, stage_section, with_measured_sizes

ACCURACY = keras_metric("accuracy")
FASTER = "Faster: 10.0 µs per call as litert-dynamic-int8, 40.0 µs before: 4.00x as fast; 2.00x as fast in the same format, litert."  # noqa: E501
SMALLER = "Smaller: 16.0 kB as litert-sparse, 160 kB before (10.0 %); after gzip 8.00 kB as litert-dynamic-int8, 150 kB before (5.3 %)."  # noqa: E501


def report(stages=STAGES, notes=("Latency: median of 9 rounds.",)):
    return dataclasses.replace(make(), stages=tuple(stages), stage_notes=tuple(notes))


def with_latency(*seconds):
    return [dataclasses.replace(row, latency=one) for row, one in zip(STAGES, seconds, strict=True)]


# ---- the lines -------------------------------------------------------------------------------------------------------


def test_one_line_says_how_much_faster_and_one_how_much_smaller():
    assert speed_line(STAGES) == FASTER
    assert size_line(STAGES) == SMALLER


def test_the_fastest_file_in_the_format_of_the_model_before_is_named_once():
    assert speed_line(STAGES[:5]) == "Faster: 20.0 µs per call as litert, 40.0 µs before: 2.00x as fast."


@pytest.mark.parametrize("after", [39e-6, 40e-6, 80e-6])
def test_a_difference_within_the_noise_is_no_speed(after):
    line = speed_line(with_latency(40e-6, *[after] * 5))
    assert line.startswith("Not faster: ") and f"({40e-6 / after:.2f}x)" in line


def test_a_file_that_grew_is_not_called_smaller():
    grown = [*STAGES[:1], dataclasses.replace(STAGES[3], bytes=170_000, gzip_bytes=150_000)]
    assert size_line(grown).startswith("Not smaller: 170 kB as litert, 160 kB before (106.2 %)")


@pytest.mark.parametrize(
    "stages",
    [(), STAGES[:3], STAGES[3:], with_latency(*[None] * 6), with_latency(0.0, *[1e-6] * 5)],
    ids=["nothing", "no file", "no model before", "not timed", "no time at all"],
)
def test_nothing_is_said_of_a_latency_that_was_not_measured(stages):
    assert speed_line(stages) == ""
    assert not [card for card in cards(report(stages)) if card[0] == "LiteRT latency"]


def test_a_model_that_did_not_convert_has_no_size_to_compare_with():
    assert size_line([StageRow("before", "before"), *STAGES[1:]]) == ""


# ---- one section for the terminal, the page and JSON -----------------------------------------------------------------


def test_the_terminal_the_page_and_the_json_have_the_same_figures():
    again = RunReport.from_dict(json.loads(json.dumps(report().to_dict(), allow_nan=False)))
    assert again.stages == STAGES
    page, text = render_html(again), terminal(again, 200)
    for line in (FASTER, SMALLER, "Latency: median of 9 rounds."):
        assert line in text.splitlines() and page.count(line) == 1
    row = next(line for line in text.splitlines() if line.startswith("exported: litert-sparse"))
    assert row.split() == "exported: litert-sparse 5 0.9700 21.0 µs 1.90x 16.0 kB 13.0 kB".split()
    assert ">exported: litert-sparse<" in page and ">21.0 µs<" in page
    assert ("LiteRT latency", "10.0 µs", "litert-dynamic-int8; 4.00x as fast as before (40.0 µs)") in cards(again)


def test_the_section_comes_first():
    assert [section.title for section in sections_of(report())][0] == "Speed and size"


def test_a_report_of_an_older_version_has_no_such_section():
    values = make().to_dict()
    del values["stages"], values["stage_notes"]
    found = RunReport.from_dict(values)
    assert "Speed and size" not in [section.title for section in sections_of(found)]


def test_a_run_that_measured_nothing_says_so_in_one_line():
    found = report((), ("Not measured: the recipe exports no LiteRT file.",))
    assert "Speed and size: Not measured: the recipe exports no LiteRT file." in terminal(found, 200).splitlines()
    (section,) = [one for one in sections_of(found) if one.title == "Speed and size"]
    assert not section.parts and not section.pictures


def test_names_of_files_are_shown_as_text():
    hostile = dataclasses.replace(STAGES[3], name="litert, <script>alert(1)</script>.tflite")
    page = render_html(report([*STAGES[:3], hostile]))
    assert "<script" not in page and "&lt;script&gt;" in page


def pictures(stages, main=ACCURACY):
    section = stage_section(stages, main)
    return {picture.data["figure"]: picture for part in section.parts for picture in part.pictures}


def test_a_picture_has_its_figures_as_a_text_alternative():
    drawn = pictures(STAGES)
    assert list(drawn) == ["latency", "bytes"]
    for number, row in enumerate(STAGES, start=1):
        accuracy = f"{number} {row.name}: {row.metrics['accuracy']:.4f} at "
        assert f"{accuracy}{formatting.latency(row.latency)}" in drawn["latency"].label
        after_gzip = f"{formatting.size(row.bytes)}, {formatting.size(row.gzip_bytes)} after gzip"
        assert f"{accuracy}{after_gzip}" in drawn["bytes"].label


def test_a_stage_without_metric_or_figure_has_a_row_and_no_point():
    stages = [*STAGES[:4], StageRow("after 4. finetune", "step", {}, 80_000, 14_000, 20e-6), StageRow("x", "file")]
    section = stage_section(stages, ACCURACY)
    assert len(section.parts[0].rows) == 6
    assert [point["number"] for point in pictures(stages)["latency"].data["points"]] == [1, 2, 3, 4]


def test_one_point_or_no_metric_is_no_picture():
    assert pictures(STAGES[:1]) == {}
    assert pictures(STAGES, None) == {}
    assert list(pictures(with_latency(*[None] * 6))) == ["bytes"]
    columns = [column.name for column in stage_section(STAGES, None).parts[0].columns]
    assert columns == ["Model", "Point", "Latency", "Speed", "Bytes", "gzip -9"]


def test_a_regression_is_drawn_against_its_metric():
    stages = [dataclasses.replace(row, metrics={"mae": 1 - row.metrics["accuracy"]}) for row in STAGES]
    drawn = pictures(stages, Metric("mae", "min"))["latency"]
    assert drawn.title == "MAE against latency"
    assert "MAE (lower is better)" in to_svg(PLOTS["stages"](drawn.data, 560), drawn.label, prefix="p")


# ---- the pictures ----------------------------------------------------------------------------------------------------


def labels(figure):
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize("width", [340, 560])
@pytest.mark.parametrize("what", ["latency", "bytes"])
def test_every_point_is_numbered_inside_the_picture_and_no_label_covers_another(what, width):
    figure = PLOTS["stages"](pictures(STAGES)[what].data, width)
    to_png(figure, scale=1)
    found = [int(number) for text in labels(figure) for number in text.split(", ")]
    assert sorted(set(found)) == [1, 2, 3, 4, 5, 6]
    boxes = [text.get_window_extent() for text in figure.axes[0].texts]
    assert all(0 <= box.x0 and box.x1 <= width for box in boxes)
    assert not any(one.overlaps(other) for index, one in enumerate(boxes) for other in boxes[:index])
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["before", "after a step", "exported file"]
    assert all(0 <= box.x0 and box.x1 <= width for box in [figure.legends[0].get_window_extent()])


@pytest.mark.parametrize("width", [340, 560])
@pytest.mark.parametrize("what", ["latency", "bytes"])
def test_an_integer_file_has_a_mark_of_its_own_and_the_legend_stays_inside(what, width):
    integer = dataclasses.replace(STAGES[5], name="litert-integer, model-int4.tflite")
    picture = pictures([*STAGES[:5], integer])[what]
    assert [point["kind"] for point in picture.data["points"]][-2:] == ["file", "integer"]
    figure = PLOTS["stages"](picture.data, width)
    to_png(figure, scale=1)
    marks = {line.get_label(): line.get_marker() for line in figure.axes[0].lines if line.get_label()[0] != "_"}
    assert len(set(marks.values())) == 4 and list(marks)[-1] == "integer file"
    box = figure.legends[0].get_window_extent()
    assert 0 <= box.x0 and box.x1 <= width


def test_no_axis_shows_an_accuracy_above_1():
    perfect = [dataclasses.replace(row, metrics={"accuracy": 1.0}) for row in STAGES]
    (axes,) = PLOTS["stages"](pictures(perfect)["latency"].data, 560).axes
    assert max(axes.get_yticks()) <= 1 < axes.get_ylim()[1]


def test_a_label_is_nearest_to_its_own_point_among_crowded_ones():
    latencies = (9.6e-6, 3.6e-6, 3.6e-6, 3.5e-6, 3.6e-6, 2.5e-6)
    values = (0.989, 0.983, 0.992, 0.994, 0.994, 0.994)
    rows = zip(STAGES, latencies, values, strict=True)
    crowded = [dataclasses.replace(row, latency=one, metrics={"accuracy": value}) for row, one, value in rows]
    figure = PLOTS["stages"](pictures(crowded)["latency"].data, 340)
    to_png(figure, scale=1)
    (axes,) = figure.axes
    places = {text.get_text(): text for text in axes.texts}
    assert list(places) == ["1", "2", "3", "4, 5", "6"]
    for name, text in places.items():
        box = text.get_window_extent()
        away = {other: np.hypot(*_outside(box, axes.transData.transform(one.xy))) for other, one in places.items()}
        assert away[name] <= min(away.values()) + 2


def _outside(box, point):
    """Distance of a point from a box along each axis."""
    ends = (box.x0, box.x1), (box.y0, box.y1)
    return [max(low - place, place - high, 0) for (low, high), place in zip(ends, point, strict=True)]


def test_hollow_points_of_a_narrow_picture_have_no_labels():
    picture = pictures(STAGES)["bytes"]
    counts = {width: len(PLOTS["stages"](picture.data, width).axes[0].texts) for width in (340, 560)}
    assert counts[340] < counts[560]


def test_of_files_that_are_about_as_fast_the_smallest_is_named():
    close = [*STAGES[:5], dataclasses.replace(STAGES[5], latency=19.9e-6), dataclasses.replace(STAGES[4], name="x")]
    close[-1] = dataclasses.replace(close[-1], latency=20.2e-6, bytes=9_000)
    assert speed_line(close).startswith("Faster: 20.2 µs per call as x, ")


def test_the_table_of_the_runtimes_has_the_measured_sizes():
    estimates = [RuntimeAdvice(name, "about 0.09", "why") for name in (DOWNLOAD, DISK, "GPU")]
    download, disk, other = with_measured_sizes(estimates, STAGES)
    assert download.what_it_buys == "measured: 8.00 kB as litert-dynamic-int8, 150 kB before (5.3 %)"
    assert disk.what_it_buys == "measured: 16.0 kB as litert-sparse, 160 kB before (10.0 %)"
    assert other is estimates[2] and with_measured_sizes(estimates, ()) == tuple(estimates)


def test_points_at_one_place_share_a_label():
    same = [dataclasses.replace(row, latency=1e-3, metrics={"accuracy": 0.9}) for row in STAGES]
    assert labels(PLOTS["stages"](pictures(same)["latency"].data, 560)) == ["1, 2, 3, 4, 5, 6"]


def test_marks_differ_in_more_than_colour_and_follow_the_theme():
    figure = PLOTS["stages"](pictures(STAGES)["bytes"].data, 560)
    marks = {line.get_label(): line.get_marker() for line in figure.axes[0].lines if line.get_label()[0] != "_"}
    assert len(set(marks.values())) == len(marks) == 3
    text = to_svg(figure, "label", prefix="p")
    assert {f"var(--{name}, {COLOURS[name]})" for name in ("muted", "after", "zero", "ink", "before")} <= set(
        re.findall(r"var\(--\w+, #\w+\)", text)
    )


@pytest.mark.parametrize(("least", "scale"), [(20e-6, "linear"), (1e-6, "log"), (0.0, "linear")])
def test_figures_far_apart_are_drawn_on_a_logarithmic_axis(least, scale):
    figure = PLOTS["stages"](pictures(with_latency(40e-6, *[least] * 5))["latency"].data, 560)
    assert figure.axes[0].get_xscale() == scale
    assert to_png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00 µs"),
        (4.266e-6, "4.27 µs"),
        (21.44e-6, "21.4 µs"),
        (999.4e-6, "999 µs"),
        (999.6e-6, "1.00 ms"),
        (0.0352, "35.2 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_a_latency_has_three_digits(seconds, text):
    assert formatting.latency(seconds) == text


def test_the_section_survives_json():
    section = stage_section(STAGES, ACCURACY, ("note",))
    assert Section.from_dict(json.loads(json.dumps(section.to_dict()))).to_dict() == section.to_dict()
