"""What notebooks show of results, and their data frames."""

import builtins
import dataclasses
import html.parser
import json

import keras
import numpy as np
import pytest
import run_reports
from networks import dense_network

import prunekit as pk
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.reports import Skipped
from prunekit.anatomy.records.sections import Column, Section
from prunekit.delivery.integers.integer_comparison import TensorDifference
from prunekit.delivery.integers.integer_report import IntegerExport
from prunekit.delivery.litert.isolated_run import Comparison
from prunekit.delivery.pages.notebook import html_of
from prunekit.delivery.reports.report_sections import sections_of
from prunekit.delivery.reports.rows import ExportRow
from prunekit.delivery.reports.sweeps import SweepReport, swept_point
from prunekit.operations.export import ExportReport
from prunekit.techniques.pruning.after_training.rounds import Round
from prunekit.training_tools.loops.weight_changes import ChangeReport, WeightChange

HOSTILE = "<script>alert(1)</script>&"


@pytest.fixture(scope="module")
def model():
    return dense_network(8, seed=1, hidden=6, logits=3)


@pytest.fixture(scope="module")
def results(model, tmp_path_factory):
    batch = np.random.default_rng(2).normal(size=(6, 8)).astype("float32")
    run = run_reports.make()
    point = swept_point("a", {"final": 0.5}, run, "smallest")
    quantized = pk.quantize(keras.models.clone_model(model), batch, bits=4, exclude="logits")
    tensors = (TensorDifference("hidden", 1, 0.25), TensorDifference("logits", None, 0.0))
    near, far = Comparison(0.01, 0.002, None, None), Comparison(0.1, 0.05, 0.75, None)
    return {
        "report": pk.inspect(model),
        "cost": pk.cost(model),
        "signals": pk.initializers.signal_report(model, batch),
        "changes": ChangeReport("net", (WeightChange("hidden/kernel", 5, 0.1, 0.1, 0.2, 2.0),)),
        "diagnosis": pk.gradients.diagnose(model, "mse", batch, batch[:, :3]),
        "run": run,
        "sweep": SweepReport("net", tmp_path_factory.mktemp("sweep"), {"final": [0.5]}, "smallest", (point,)),
        "rounds": pk.reports.RoundsReport((Round(0, 0.0, 0, None), Round(1, 0.5, 24, 0.75)), pk.inspect(model)),
        "groups": pk.channel_groups(model),
        "shrink": pk.shrink(model, channels=0.5)[1],
        "quantized": quantized,
        "export": ExportReport((ExportRow("litert", "net.tflite", 900, 700, "ok", "", 0.0, None, None),)),
        "integers": IntegerExport(
            "net.tflite", 900, 700, 1200, (Skipped("x/tanh", "TANH"),), tensors, near, far, ("A remark.",)
        ),
        "section": Section("Table", (Column("Name"), Column("Value", "number")), (("a", 1.5),)),
    }


KINDS = (
    "report",
    "cost",
    "signals",
    "changes",
    "diagnosis",
    "run",
    "sweep",
    "rounds",
    "groups",
    "shrink",
    "section",
    "quantized",
    "export",
    "integers",
)


class Checker(html.parser.HTMLParser):
    """Collects the tags that stay open, the ids, and the attributes that load something."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.loads = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids += [values["id"]] if "id" in values else []
        self.loads += [value for name, value in values.items() if name in ("src", "href") and not value.startswith("#")]
        if tag not in ("wbr", "br", "path", "use", "meta", "line", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in self.open:
            assert self.open.pop() == tag


@pytest.mark.parametrize("kind", KINDS)
def test_a_result_is_one_element_without_scripts_or_requests(results, kind):
    text = results[kind]._repr_html_()
    found = Checker(text)
    assert (found.open, found.loads) == ([], [])
    assert "<script" not in text and "@import" not in text
    assert len(found.ids) == len(set(found.ids))
    assert text.startswith('<div class="prunekit">')


def test_a_run_has_the_sections_of_its_page(results):
    text = results["run"]._repr_html_()
    titles = [section.title for section in sections_of(results["run"])]
    assert len(titles) > 5
    assert all(f">{title}</h2>" in text for title in titles)
    assert results["run"].verdict()[:40] in text


def test_a_removal_of_channels_shows_what_is_left_and_the_picture(results):
    text = results["shrink"]._repr_html_()
    assert "39 of 75 parameters" in text and "3 of 6 channels are left." in text
    assert "6 → 3" in text and "<svg" in text


def test_a_quantization_shows_weights_ranges_and_what_stays_in_floating_point(results):
    text = results["quantized"]._repr_html_()
    assert all(f">{title}</h2>" in text for title in ("Quantized weights", "Ranges of tensors", "In floating point"))
    assert results["quantized"].verdict().partition(":")[0] in text and "excluded by" in text


def test_an_integer_file_shows_its_tensors_and_remarks(results):
    text = results["integers"]._repr_html_()
    assert all(f">{title}</h2>" in text for title in ("Integer file", "Tensors of the file and of the simulation"))
    assert "In floating point: x/tanh: TANH." in text and "A remark." in text


def test_the_style_reaches_nothing_outside_the_element(results):
    style = results["cost"]._repr_html_().partition("<style>")[2].partition("</style>")[0]
    depth, outside = 0, ""
    for character in style:
        depth -= character == "}"
        outside += character if depth == 0 else ""
        depth += character == "{"
    assert outside.replace("{", "").replace("}", "").split() == [".prunekit.prunekit"]
    assert ":root" not in style and "\nbody" not in style


def test_names_of_users_are_escaped(results):
    row = results["report"].weights[0]
    report = dataclasses.replace(
        results["report"], model_name=HOSTILE, weights=(dataclasses.replace(row, name=HOSTILE),), notes=(HOSTILE,)
    )
    text = html_of(report)
    assert "<script" not in text and text.count("&lt;script&gt;") == 4


def test_outputs_of_one_notebook_have_different_ids(results):
    ids = [set(Checker(results[kind]._repr_html_()).ids) for kind in KINDS]
    assert sum(map(len, ids)) == len(set.union(*ids))


def test_other_results_are_refused():
    with pytest.raises(TypeError, match="A notebook shows reports, costs, sections and sweeps. Received: int"):
        html_of(3)


@pytest.mark.parametrize("kind", KINDS)
def test_every_report_has_sections_values_a_frame_and_a_text(results, kind):
    result = results[kind]
    sections = result.sections()
    assert isinstance(sections, tuple) and all(isinstance(section, Section) for section in sections)
    assert set(json.loads(json.dumps(result.to_dict(), allow_nan=False))) >= {
        *(item.name for item in dataclasses.fields(result)),
        *result.derived,
    }
    assert len(result.to_dataframe()) >= 1 and str(result)


def test_every_public_report_says_what_its_sections_and_rows_are():
    public = {getattr(pk.reports, name) for name in dir(pk.reports) if name.endswith("Report")}
    classes = Displayed.__subclasses__()
    assert len(public) > 6 and all(issubclass(one, Displayed) for one in public)
    for one in classes:
        assert one.makes or one.sections is not Displayed.sections, one
        assert one.main_items or one.to_dataframe is not Displayed.to_dataframe, one
        assert one.main_items in ("", *(item.name for item in dataclasses.fields(one))), one


@pytest.mark.parametrize(
    ("kind", "index", "columns"),
    [
        ("report", "hidden/kernel", {"shape", "zeros", "sparsity", "macs"}),
        ("cost", "hidden", {"parameters", "macs", "activation_bytes"}),
        ("signals", "hidden", {"mean", "std", "status"}),
        ("changes", "hidden/kernel", {"change", "relative"}),
        ("diagnosis", "hidden/kernel", {"status", "rms"}),
        ("sweep", "a", {"final", "outcome", "accuracy_after", "size", "pareto"}),
        ("groups", "hidden", {"channels", "parts", "weight", "axis", "shape"}),
        ("section", "a", {"Value"}),
    ],
)
def test_a_data_frame_has_a_row_for_each_item(results, kind, index, columns):
    frame = results[kind].to_dataframe()
    assert frame.index[0] == index
    assert columns <= set(frame.columns)


def test_the_data_frame_of_a_run_compares_with_before(results):
    frame, run = results["run"].to_dataframe(), results["run"]
    row = next(row for row in run.after.weights if row.name == run.after.targets[0])
    before = next(old for old in run.before.weights if old.name == row.name)
    found = frame.loc[row.name]
    assert (found["zeros"], found["zeros_before"], found["pruned"]) == (row.zeros, before.zeros, True)
    assert set(frame[frame["pruned"]].index) == set(run.after.targets)


def test_without_pandas_the_extra_is_named(results, monkeypatch):
    imported = builtins.__import__

    def without_pandas(name, *arguments, **others):
        if name == "pandas":
            raise ImportError(name)
        return imported(name, *arguments, **others)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    with pytest.raises(ImportError, match=r"needs pandas, which is not installed: pip install 'prunekit\[notebook\]'"):
        results["cost"].to_dataframe()


def test_an_empty_table_is_an_empty_data_frame():
    assert Section("Table", (Column("Name"),)).to_dataframe().empty
