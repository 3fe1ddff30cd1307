"""Sections of reports: plain data that the terminal, the page and JSON render alike, whoever made them."""

import dataclasses
import json
import math

import pytest
from run_reports import HOSTILE, make, terminal

from prunekit import cli
from prunekit.anatomy.records.plain_data import plain
from prunekit.anatomy.records.sections import KINDS, Column, Picture, Section
from prunekit.delivery.pages import markup
from prunekit.delivery.pages.html_report import render_html
from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.reports import formatting, report_sections
from prunekit.delivery.reports.report_sections import cards, sections_of
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.terminal_report import FittedTable

LONG = "a_very_long_name/" * 30 + "kernel"
AWKWARD = Section(
    "Ch<a>nnels & \x1b[31m[bold]more",
    (
        Column("Layer", "name"),
        Column("Shape", "shape", under="Layer"),
        Column("before", "count", group="Channels"),
        Column("after", "count", group="Channels"),
        Column("Error", "number", digits=2),
        Column("Zeros", "sparsity"),
        Column("Size", "bytes"),
        Column("Time", "seconds"),
        Column("State", "status"),
        Column("Why", "text", keep=1),
        Column("Neighbours", "names"),
    ),
    (
        (HOSTILE, (3, 3, 16), 16, 8, math.nan, 0.5, 2000, 1.5, "ok", None, tuple(f"n{i}" for i in range(40))),
        (LONG, (), None, None, math.inf, math.nan, None, None, "refused", "<why> & \n how", ()),
        ("x", None, True, 0, "not measured", 1.5, 0, 0.0, "failed", "", ("a",)),
    ),
    ("Total", "", 16, 8, None, None, 2000, 1.5, "", "", ""),
    explanation="How to <read> it.",
    notes=("Mind the </section>.",),
    pictures=(Picture("Zer<o>s", "caption", "label", "sparsity", {"sparsities": {HOSTILE: 0.5}}, wide=True),),
    parts=(
        Section("Empty <part>", (Column("Name"),)),
        Section("Folded", text="a: <b>\n", shown="folded"),
    ),
)  # fmt: skip


def with_sections(*sections):
    report = make()
    step = {"kind": "shrink", "name": "half", "seconds": 1.0, "history": {}, "accuracy": None}
    return dataclasses.replace(report, steps=(*report.steps, {**step, "sections": list(sections)}))


def test_a_section_survives_strict_json_there_and_back():
    values = json.loads(json.dumps(AWKWARD.to_dict(), allow_nan=False))
    again = Section.from_dict(values)
    assert again.to_dict() == values
    assert (again.columns, again.pictures, again.parts) == (AWKWARD.columns, AWKWARD.pictures, AWKWARD.parts)
    assert again.rows[0] == (*AWKWARD.rows[0][:4], None, *AWKWARD.rows[0][5:]), "nan has no place in JSON"
    assert again.rows[2] == AWKWARD.rows[2]
    assert Section.from_dict({**values, "from a newer version": 1}) == again


def test_a_steps_own_section_is_in_the_terminal_the_page_and_the_json():
    for section in (AWKWARD, AWKWARD.to_dict()):
        report = with_sections(section)
        values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
        assert values["steps"][-1]["sections"] == [AWKWARD.to_dict()]
        again = RunReport.from_dict(values)
        page, lines = render_html(again), terminal(again).splitlines()
        assert again.to_dict() == report.to_dict()
        assert "Ch&lt;a&gt;nnels &amp; \ufffd[31m[bold]more (step 3, shrink)</h2>" in page
        assert "Ch<a>nnels & \ufffd[31m[bold]more (step 3, shrink)" in lines


def test_the_terminal_shows_awkward_values_as_text_and_nothing_twice():
    text = terminal(with_sections(AWKWARD))
    row = next(line for line in text.splitlines() if line.startswith(LONG))
    assert row[len(LONG) :].split() == ["scalar", *"– – – – – – refused".split(), "<why>", "&", "\ufffd", "how"]
    row = next(line for line in text.splitlines() if line.startswith(HOSTILE) and "3×3×16" in line)
    assert row.split()[1:-40] == "3×3×16 16 8 – 0.500 2.00 kB 1.5 s ok –".split()
    assert "\x1b" not in text
    assert "Empty <part>: No rows." in text
    assert "Mind the </section>." in text
    assert text.count("How to <read> it.") == text.count("a: <b>") == 0, "of the page alone"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_terminal_of_any_width_folds_names_and_shortens_lists(width):
    text = terminal(
        with_sections(Section("S", AWKWARD.columns[::10], [row[::10] for row in AWKWARD.rows])), width, True
    )
    assert max(map(len, text.splitlines())) <= width
    assert "34 more" in " ".join(text.split()).replace("and ", "") and "n39" not in text


def test_the_page_escapes_everything_and_draws_what_it_knows():
    unknown = Picture("Radar", "", "", "r<a>dar", {})
    page = render_html(with_sections(AWKWARD, dataclasses.replace(AWKWARD, pictures=(unknown,))))
    for raw in ("<a>", "<read>", "</section>.", "<why>", "<part>", "Zer<o>s", HOSTILE, "a: <b>", "\x1b"):
        assert raw not in page
    assert "has no plot &#x27;r&lt;a&gt;dar&#x27;" in page
    assert '<h3>Empty &lt;part&gt;</h3>\n<p class="hint">No rows.</p>' in page
    assert '<i style="width:100.0%"></i>' in page, "a bar does not leave its frame"
    ids = page.split(' id="')[1:]
    assert len({one.split('"')[0] for one in ids}) == len(ids)


def test_prunekit_report_shows_a_steps_own_section(tmp_path, capsys):
    (tmp_path / "report.json").write_text(json.dumps(with_sections(AWKWARD).to_dict(), allow_nan=False))
    assert cli.run(["report", str(tmp_path)]) == 0
    assert "(step 3, shrink)" in capsys.readouterr().out
    assert cli.run(["report", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"][-1]["sections"] == [AWKWARD.to_dict()]


@pytest.mark.parametrize(
    "damaged",
    [
        3,
        {},
        {"title": 3},
        {"title": "x", "rows": [[1]]},
        {"title": "x", "columns": [{"name": "a", "kind": "radar"}]},
        {"title": "x", "columns": [{"name": "a"}], "rows": [[{}]]},
        {"title": "x", "parts": [{"title": "y", "parts": [{"title": "z"}]}]},
    ],
)
def test_prunekit_report_names_a_damaged_section_in_one_line(tmp_path, capsys, damaged):
    values = with_sections().to_dict()
    values["steps"][-1]["sections"] = [damaged]
    (tmp_path / "report.json").write_text(json.dumps(values))
    assert cli.run(["report", str(tmp_path)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "not a report that this version of prunekit reads" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("make_section", "message"),
    [
        (lambda: Column("x", "radar"), "kind is one of label, text.*'radar'"),
        (lambda: Column("x", keep=99), "keep must be at most 17. Received: keep=99"),
        (lambda: Section("x", (Column("a"),), ((1, 2),)), "'x' has 1 values, one for each column"),
        (lambda: Section("x", (Column("a"),), (), ("t", 2)), "has 1 values"),
        (lambda: Section("x", (Column("a", under="b"),)), "must stand under one other column.*'b'"),
        (lambda: Section("x", shown="sometimes"), "shown always, page, folded. Received: 'sometimes'"),
        (lambda: Section("x", parts=(Section("y", parts=(Section("z"),)),)), "nest one level"),
    ],
)
def test_a_section_in_a_bad_state_cannot_exist(make_section, message):
    with pytest.raises(ValueError, match=message):
        make_section()


@pytest.mark.parametrize("value", [object(), {"a": 1}, b"x", 1j, [1.5]])
def test_a_cell_holds_plain_values_only(value):
    with pytest.raises(TypeError, match="A cell of a section is None"):
        Section("x", (Column("a"),), ((value,),))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, math.nan, -math.inf, True, 0, -1.5, 10**30, "text", "", (), ("a", 3)])
def test_every_kind_of_column_takes_every_value(kind, value):
    assert isinstance(formatting.cell(value, Column("x", kind)), str)
    section = Section("x", (Column("a"), Column("b", kind)), (("row", value),))
    assert '<th scope="row" class="name">row</th>' in markup.table(section)
    assert list(FittedTable(section).plain_lines())[1].startswith("row")


def test_the_terminal_and_the_page_have_the_same_sections():
    report = make()
    page, text = render_html(report), terminal(report)
    for section in sections_of(report):
        assert f">{section.title}</h2>" in page
        assert (section.title in text) == (section.shown == "always")
    assert all(picture.plot in PLOTS for section in sections_of(report) for picture in section.pictures)
    json.dumps(plain([section.to_dict() for section in sections_of(report)]), allow_nan=False)


def without_macs(report, names):
    """The report of a model whose inputs have no fixed size: the figures of `names` are unknown."""
    rows = [
        dataclasses.replace(row, macs=None, sparse_macs=None) if row.name in names else row
        for row in report.after.weights
    ]
    return dataclasses.replace(report, after=dataclasses.replace(report.after, weights=tuple(rows)))


def test_multiply_accumulates_that_are_not_known_are_no_zeros():
    report = make()
    names = [row.name for row in report.after.weights]
    nothing = RunReport.from_dict(json.loads(json.dumps(without_macs(report, names).to_dict())))
    assert nothing.after.macs is None
    figures = {label: (figure, text) for label, figure, text in cards(nothing)}
    assert figures["MACs without zeros"] == ("–", "not known: see the notes")
    table = next(section for section in sections_of(nothing) if section.title == "Pruned weights")
    index = [column.name for column in table.columns].index("MACs")
    assert {row[index] for row in table.rows} == {None} and table.total[index] is None
    assert formatting.cell(table.total[index], table.columns[index]) == "–"
    largest = max(report.after.weights, key=lambda row: row.macs)
    partly = without_macs(report, [largest.name])
    known = formatting.short_count(report.after.macs - largest.macs)
    assert f"at least {known}" in dict((label, text) for label, _, text in cards(partly))["MACs without zeros"]
    assert f"at least {known}" in terminal(partly, width=300)
    assert f"at least {known}" in render_html(partly)


@pytest.mark.parametrize(
    ("what", "measured", "notes"), [("sparsity", 0.799831, 1), ("sparsity", 0.8, 0), ("accuracy", 0.79999999, 0)]
)
def test_a_sparsity_below_its_bound_by_rounding_is_explained(what, measured, notes):
    rows = ({"what": what, "bound": {"min": 0.8}, "measured": measured, "met": True},)
    found = report_sections.expectations(dataclasses.replace(make(), expectations=rows))
    assert len(found.notes) == notes
