"""The record of a run, its page and its terminal form."""

import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console
from run_reports import HOSTILE, make, terminal

from prunekit.anatomy.cost.inspection import SparsityReport
from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.pages.html_report import render_html
from prunekit.delivery.reports.report_sections import bound_text
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.terminal_report import inspect_table


def test_a_report_survives_strict_json_there_and_back():
    report = make()
    text = json.dumps(report.to_dict(), allow_nan=False)
    again = RunReport.from_dict(json.loads(text))
    assert again.to_dict() == report.to_dict()
    assert again.after.weights == report.after.weights
    assert again.exports == report.exports
    assert again.metrics["loss_after"] is None, "infinity has no place in JSON"


@pytest.mark.parametrize("values", [[], {"report_version": 99}, {"title": "x"}, {"before": 3, "after": 4}])
def test_what_is_not_a_report_is_refused(values):
    with pytest.raises((ValueError, TypeError)):
        RunReport.from_dict(values)


def test_the_verdict_says_in_one_sentence_what_was_achieved():
    report = make()
    zeros = sum(row.zeros for row in report.after.weights)
    verdict = report.verdict()
    assert verdict.startswith(f"{zeros} of 600 weights in 3 weight matrices are exactly zero")
    assert "0.9000, 0.9100 before pruning" in verdict
    assert "litert, 2.00 kB (900 B with gzip)" in verdict
    assert verdict.count(". ") == 0


class Page(HTMLParser):
    """Tags, scripts, addresses and text of a page; fails on a table cell outside a row."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.words = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "xlink:href") and value]

    def handle_data(self, data):
        self.words.append(data)


def test_the_page_is_whole_self_contained_and_escapes_what_users_named():
    text = render_html(make())
    page = Page(text)
    assert "script" not in page.tags
    assert "A <b>run</b> & more" in page.words, "the title's markup is shown, not obeyed"
    assert HOSTILE in " ".join(page.words)
    assert all(address.startswith(("#", "data:")) for address in page.addresses)
    assert not re.search(r"url\((?!#)", text), "styles fetch nothing"
    assert page.tags.count("svg") >= 5, "bars, schedule, three histograms"
    for heading in ("Pruned weights", "Steps taken", "Expectations", "Exported files", "Where sparsity pays off"):
        assert heading in page.words
    joined = " ".join(page.words)
    for said in ("wrong on <ARM64>", "no sparse convolutions", "abc123", "mind the <gap>", "a/bias, b/bias"):
        assert said in joined
    assert "nan" not in joined.lower().split()


def test_the_page_and_the_terminal_say_how_far_updates_moved_a_weight():
    report = make()
    row = next(line for line in terminal(report).splitlines() if line.startswith(report.after.weights[0].name))
    assert row.split()[-1] == "0.0025"
    assert ">Moved per update</th>" in render_html(report) and '<td class="number">0.0025</td>' in render_html(report)
    assert "Moved per update" in terminal(report)
    assert "Moved per update" not in terminal(dataclasses.replace(report, changes={}))


def test_a_page_of_two_hundred_weights_stays_small():
    assert len(render_html(make(weights=200)).encode()) < 1_000_000


def test_every_picture_has_a_name_for_those_who_cannot_see_it():
    text = render_html(make())
    assert len(re.findall(r"<svg[^>]*role=\"img\"[^>]*aria-label=\"[^\"]+\"", text)) == text.count("<svg")


def test_a_pipe_gets_plain_lines_that_nothing_cuts():
    lines = terminal(make()).splitlines()
    row = next(line for line in lines if line.startswith("litert-sparse"))
    assert row.rstrip().endswith("wrong on <ARM64>")
    assert any(re.fullmatch(r"accuracy +not met +at least 0.95 +0.9", line) for line in lines)
    assert any(re.fullmatch(r"a bias +2  a/bias, b/bias", line) for line in lines)
    assert not any(ord(letter) in range(0x2500, 0x2580) for line in lines for letter in line), "no box drawing"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_of_any_width_is_not_overrun(width):
    lines = terminal(make(), width, is_terminal=True).splitlines()
    assert max(len(line) for line in lines) <= width


def test_the_table_of_a_model_marks_what_was_pruned():
    text = io.StringIO()
    Console(file=text, width=120).print(inspect_table(make().after))
    assert f"{HOSTILE} *" in text.getvalue()
    assert "Whole model" in text.getvalue()


@pytest.mark.parametrize(
    ("bound", "text"),
    [({"min": 0.96}, "at least 0.96"), ({"max": 10}, "at most 10"), ({"min": 0.5, "max": 0.9}, "between 0.5 and 0.9")],
)
def test_bounds_are_said_in_words(bound, text):
    assert bound_text(bound) == text


def test_a_terminal_of_eighty_columns_leaves_columns_out_and_breaks_no_name_of_usual_length():
    lines = terminal(make(), 80, is_terminal=True).splitlines()
    (row,) = [line for line in lines if line.startswith("block_1/kernel")]
    assert "unstructured" in row
    assert not any("Sparse MACs" in line for line in lines), "the first column to go"


def test_many_weights_left_alone_for_one_reason_are_a_few_names_on_a_terminal_and_all_in_a_pipe():
    report = make()
    skipped = tuple(Skipped(f"layer_{i}/bias", "a bias") for i in range(40))
    report = dataclasses.replace(report, after=dataclasses.replace(report.after, skipped=skipped))
    assert "layer_5/bias and 34 more" in " ".join(terminal(report, 80, is_terminal=True).split())
    assert "layer_39/bias" in terminal(report)


def test_a_run_of_which_nothing_is_known_is_shown_all_the_same():
    empty = SparsityReport("m", ())
    report = RunReport("nothing", {}, {}, 0, (), empty, empty, {"accuracy_after": math.nan})
    assert report.verdict() == "No weight was pruned."
    assert "No weight was pruned." in render_html(report)
    assert "No weight was pruned." in terminal(report)
    json.dumps(report.to_dict(), allow_nan=False)


def test_a_terminal_escape_in_a_layers_name_does_not_reach_the_terminal():
    report = make()
    rows = tuple(dataclasses.replace(row, name=f"\x1b[31m[bold]{row.name}\n") for row in report.after.weights)
    report = dataclasses.replace(report, after=dataclasses.replace(report.after, weights=rows, targets=()))
    for text in (terminal(report), terminal(report, 200, is_terminal=True)):
        assert "\x1b" not in text
        assert "[bold]block_0/kernel" in text
    assert "\x1b" not in render_html(report)


def test_zeros_of_a_rounding_are_not_pruned():
    found = make()
    steps = ({"kind": "quantize", "name": "8 bits"},)
    after = dataclasses.replace(found.after, targets=())
    rounded = dataclasses.replace(found, steps=steps, after=after)
    assert rounded.pruned == [] and rounded.pruned_sparsity == 0.0
    # Zeros that the model had before the run are those of an earlier pruning.
    assert dataclasses.replace(rounded, before=after).pruned == list(after.weights)
    assert dataclasses.replace(rounded, steps=()).pruned == list(after.weights)
