"""Any metric in a run: in progress, plan, expectations, report, pictures, and in a sweep."""

import json

import keras
import numpy as np
import pytest
from backends import BACKEND
from tiny_recipes import one_shot, recipe

from prunekit.delivery.pages.html_report import render_html
from prunekit.delivery.reports.report_sections import exports, metrics, pictures, steps
from prunekit.delivery.reports.run_report import RunReport
from prunekit.delivery.reports.sweeps import SweepReport, SweptPoint, swept_point
from prunekit.recipe.run.runner import compress, plan
from prunekit.recipe.text.loader import RecipeError, load_recipe

COMPILE = {"optimizer": {"name": "adam", "learning_rate": 0.01}, "loss": "mse", "metrics": ["mae"], "batch_size": 16}
SCHEDULE = {"type": "linear", "final_sparsity": 0.5, "end": {"epochs": 1}, "frequency": 2}
STEPS = [
    {"train": {"epochs": 1}},
    {"prune": {"epochs": 2, "schedule": SCHEDULE, "allocation": "uniform"}},
    {"export": {"formats": ["keras"]}},
    {"expect": {"metrics": {"mae": {"max": 9}}, "drop": {"mae": 9, "loss": 99, "relative": True}}},
]


def model():
    keras.utils.set_random_seed(3)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(12, "relu"), keras.layers.Dense(2)], name="net")


def data():
    rng = np.random.default_rng(5)
    inputs = rng.normal(size=(70, 8)).astype("float32")
    return (inputs, inputs[:, :2] * 2), (inputs[:20], inputs[:20, :2] * 2)


@pytest.fixture(scope="module")
def regression(tmp_path_factory):
    events = []
    output = tmp_path_factory.mktemp("regression") / "run"
    document = recipe(*STEPS, compile=COMPILE)
    found = compress(document, model(), data(), output, progress=events.append)
    return found, events, output


@pytest.mark.every_backend(cases=0)
def test_a_regression_shows_its_metrics_wherever_a_classification_shows_its_accuracy(regression):
    found, events, output = regression
    report = found.report
    assert [(metric.name, metric.direction) for metric in report.measures] == [("mae", "min"), ("loss", "min")]
    measured = found.model.evaluate(*data()[1], verbose=0, return_dict=True)
    assert report.metrics["mae_after"] == pytest.approx(measured["mae"], rel=1e-6)
    assert set(report.metrics) == {"mae_before", "mae_after", "loss_before", "loss_after"}
    assert [step for step, _ in report.curve] == [0, 5, 10]
    assert report.curve[-1][1] == pytest.approx(measured["mae"], rel=1e-6)
    assert f"the MAE is {measured['mae']:.4g}, " in report.verdict()
    assert any(event.text.startswith("epoch 1/2, mae ") and ", loss " in event.text for event in events)
    assert [(row["what"], row["met"]) for row in report.expectations] == [
        ("mae", True),
        ("relative drop of mae", True),
        ("relative drop of loss", True),
    ]
    stored = RunReport.from_dict(json.loads((output / "report.json").read_text()))
    assert (stored.measures, stored.metrics) == (report.measures, report.metrics)
    assert stored.steps[1]["metrics"] == pytest.approx({"mae": measured["mae"], "loss": measured["loss"]}, rel=1e-6)


@pytest.mark.every_backend
def test_the_tables_and_the_picture_of_a_regression_name_the_metric(regression):
    report = regression[0].report
    table = metrics(report)
    assert [row[0] for row in table.rows] == ["mae (main)", "loss"]
    assert [column.name for column in steps(report).columns][4] == "MAE after"
    exported = exports(report)
    assert exported.columns[7].name == "MAE"
    assert exported.rows[0][7] == pytest.approx(report.metrics["mae_after"], rel=1e-5)
    (schedule,) = [picture for picture in pictures(report).pictures if picture.plot == "schedule"]
    assert (schedule.data["metric"], schedule.data["baseline"]) == ("MAE", report.metrics["mae_before"])
    assert "Validation MAE from" in schedule.label


def test_the_page_of_a_regression_draws_the_metric(regression):
    page = render_html(regression[0].report)
    assert "validation MAE" in page and "MAE before pruning" in page
    assert "ccuracy" not in page


def test_a_plan_says_what_is_measured_and_in_which_direction():
    planned = plan(recipe(*STEPS, compile=COMPILE), model(), data())
    assert [(metric.name, metric.better) for metric in planned.metrics] == [
        ("mae", "lower is better"),
        ("loss", "lower is better"),
    ]
    assert planned.to_dict()["metrics"][0] == {"name": "mae", "direction": "min", "fraction": False}


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"expect": {"metrics": {"mea": {"max": 1}}}}, r"steps\[1\].expect: no metric 'mea' is measured. Did"),
        (
            {"expect": {"metrics": {"accuracy": {"min": 0.5}}}},
            r"steps\[1\].expect: no metric 'accuracy' is measured. Valid",
        ),
    ],
    ids=["misspelt", "accuracy of a regression"],
)
def test_an_expectation_of_what_is_not_measured_is_refused_before_a_weight_moves(step, message):
    with pytest.raises(RecipeError, match=message):
        plan(recipe({"train": {"epochs": 1}}, step, compile=COMPILE), model(), data())


def test_a_drop_of_a_metric_without_a_direction_is_refused():
    own = {"factory": "test_compile_settings:new_spread"}
    document = recipe(one_shot(0.5), {"expect": {"drop": {"spread": 1}}}, compile={**COMPILE, "metrics": ["mae", own]})
    with pytest.raises(
        RecipeError, match=r"imports and runs Python code \(compile: test_compile_settings:new_spread\)"
    ):
        plan(document, model(), data())
    with pytest.raises(RecipeError, match="whether a drop of 'spread' is a lower or a higher value is known only"):
        plan(document, model(), data(), trust=True)


def test_a_metric_of_a_factory_is_measured_after_every_step():
    own = {"factory": "test_compile_settings:new_spread", "direction": "min"}
    settings = {**COMPILE, "metrics": [own], "monitor": "spread"}
    found = compress(recipe(*STEPS[:2], compile=settings), model(), data(), trust=True)
    outputs = keras.ops.convert_to_numpy(found.model(data()[1][0]))
    assert found.report.metrics["spread_after"] == pytest.approx(np.ptp(outputs, axis=1).mean(), rel=1e-5)
    assert found.report.main.name == "spread"


class Distance(keras.Model):
    """A model whose training step has metrics of its own."""

    def __init__(self):
        super().__init__(name="distance")
        self.dense = keras.layers.Dense(2)
        self.far = keras.metrics.Mean(name="far")

    def call(self, inputs):
        return self.dense(inputs)

    @property
    def metrics(self):
        return [*super().metrics, self.far]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.far.update_state(keras.ops.max(keras.ops.abs(y - y_pred)))
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def test_a_metric_of_the_models_own_may_be_the_main_one():
    settings = {**COMPILE, "metrics": [], "monitor": {"name": "far", "direction": "min"}}
    keras.utils.set_random_seed(3)
    found = compress(recipe(*STEPS[:2], compile=settings), Distance(), data())
    assert [metric.name for metric in found.report.measures] == ["far", "loss"]
    assert found.report.metrics["far_after"] > 0


def test_the_locked_recipe_of_a_regression_names_its_metrics_and_is_read_again(regression):
    locked = load_recipe(regression[2] / "recipe.lock.yaml", data_given=True)
    assert (locked.compile.metrics, locked.steps[3].settings.drops) == (("mae",), {"mae": 9.0, "loss": 99.0})
    defaults = load_recipe(recipe(STEPS[0], compile={"loss": "mse"}), data_given=True)
    assert defaults.compile.metrics == ()


# ---- several outputs -------------------------------------------------------------------------------------------------


def two_outputs(as_mapping):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(12, "relu")(inputs)
    outputs = [keras.layers.Dense(2, name="left")(hidden), keras.layers.Dense(3, "softmax", name="right")(hidden)]
    return keras.Model(inputs, dict(zip(("left", "right"), outputs, strict=True)) if as_mapping else outputs)


def labelled():
    return [(x, {"left": y, "right": np.arange(len(x)) % 3}) for x, y in data()]


@pytest.mark.parametrize("as_mapping", [False, True], ids=["list", "mapping"])
@pytest.mark.short(cases=1)
def test_every_output_has_its_metrics_and_its_loss(as_mapping):
    settings = {
        "optimizer": "adam",
        "loss": {"left": "mse", "right": "sparse_categorical_crossentropy"},
        "metrics": {"left": ["mae"], "right": ["accuracy"]},
        "monitor": "right_accuracy",
        "batch_size": 16,
    }
    expected = {
        "expect": {"metrics": {"right_accuracy": {"min": 0}, "left_mae": {"max": 9}}, "drop": {"left_loss": 99}}
    }
    document = recipe(*STEPS[:3], expected, compile=settings)
    found = compress(document, two_outputs(as_mapping), labelled())
    names = ["right_accuracy", "left_mae", "left_loss", "right_loss", "loss"]
    assert [metric.name for metric in found.report.measures] == names
    measured = found.model.evaluate(*labelled()[1], verbose=0, return_dict=True)
    for name in names:
        assert found.report.metrics[f"{name}_after"] == pytest.approx(measured[name], rel=1e-5)
        assert found.report.exports[0].metrics[name] == pytest.approx(measured[name], rel=1e-5)
    assert [row["met"] for row in found.report.expectations] == [True] * 3


# ---- older reports ---------------------------------------------------------------------------------------------------


def test_a_report_of_an_older_version_shows_its_accuracy(regression):
    old = regression[0].report.to_dict()
    del old["measures"]
    old["metrics"] = {"accuracy_before": 0.75, "accuracy_after": 0.5}
    for step in old["steps"]:
        del step["metrics"]
        step["accuracy"] = 0.5
    for row in old["exports"]:
        del row["metrics"]
        row["accuracy"] = 0.25
    report = RunReport.from_dict(old)
    assert "; the accuracy is 0.5000, 0.7500 before pruning" in report.verdict()
    assert metrics(report).rows == (("accuracy", "0.7500", "0.5000", "−0.2500", "higher is better"),)
    assert [row[4] for row in steps(report).rows] == [0.5] * 4
    assert exports(report).rows[0][7] == 0.25


# ---- sweeps ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(BACKEND != "tensorflow", reason="arithmetic on a report")
def test_a_sweep_compares_points_by_the_main_metric_in_its_direction(regression, tmp_path):
    from prunekit.delivery.plots.sweep_plot import sweep_figure
    from prunekit.delivery.reports.sweeps import point_line, sweep_csv, sweep_table

    point = swept_point("a", {"final": 0.5}, regression[0].report, "smallest")
    assert point.main == regression[0].report.metrics["mae_after"]

    def with_mae(name, mae, size):
        figures = {"mae_after": mae, "loss_after": 2 * mae}
        return SweptPoint(name, {"final": name}, "done", metrics=figures, size=size, measures=point.measures)

    points = (with_mae("a", 2.0, 10), with_mae("b", 1.0, 20), with_mae("c", 1.5, 30))
    report = SweepReport("net", tmp_path, {"final": ["a", "b", "c"]}, "smallest", points)
    assert [point.name for point in report.pareto] == ["a", "b"]
    assert [column.name for column in sweep_table(report).section.columns][:3] == ["final", "mae", "loss"]
    assert sweep_csv(report).splitlines()[0].startswith("final,outcome,mae,mae_before,loss,loss_before,sparsity,")
    assert report.to_dict()["main"] == {"name": "mae", "direction": "min", "fraction": False}
    assert sweep_figure(report).axes[0].get_ylabel() == "MAE (lower is better)"
    assert "done, mae 2, 10 B" in point_line(type("Event", (), {"point": points[0], "ended": 1, "points": 3}))
