"""pk.sensitivity: rows equal whole evaluations, the model stays as it is, scans continue where they were cut."""

import dataclasses
import json
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from scanned_models import Subclassed, branches_and_a_shared_layer

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.delivery.plots.sensitivity_plot import sensitivity_figure
from prunekit.delivery.reports.sensitivity import SensitivityReport

LEVELS = (0.5, 0.8)


def weights_of(model):
    return [array.tobytes() for array in model.get_weights()]


def classifier(kind=keras.Sequential, **options):
    keras.utils.set_random_seed(0)
    parts = [keras.Input((6,)), keras.layers.Dense(8, activation="relu", name="hidden")]
    parts.append(keras.layers.Dense(3, activation="softmax", name="out", kernel_regularizer=options.get("regularizer")))
    model = kind(parts, name="net")
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def labelled(examples=150):
    random = np.random.default_rng(0)
    return random.normal(size=(examples, 6)).astype("float32"), random.integers(0, 3, examples)


@pytest.fixture(scope="module")
def scan():
    model = classifier()
    return SimpleNamespace(model=model, report=pk.sensitivity(model, labelled(), sparsity=LEVELS, batch_size=64))


def check_against_whole_evaluations(model, data, report):
    inputs, labels = data
    dense = np.concatenate([np.ravel(leaf) for leaf in keras.tree.flatten(model.predict(inputs, verbose=0))])
    for target in find_targets(model)[0]:
        value = keras.ops.convert_to_numpy(target.variable)
        for level in LEVELS:
            row = next(one for one in report.rows if (one.target, one.value) == (target.name, level))
            pk.prune(model, level, include=[target.name], allocation="uniform", repair="none")
            assert np.count_nonzero(keras.ops.convert_to_numpy(target.variable) == 0) == row.entries
            wanted = model.evaluate(inputs, labels, batch_size=64, verbose=0, return_dict=True)
            found = np.concatenate([np.ravel(leaf) for leaf in keras.tree.flatten(model.predict(inputs, verbose=0))])
            target.variable.assign(value)
            assert row.metrics == pytest.approx(wanted, rel=1e-5)
            assert row.output_error == pytest.approx(np.linalg.norm(found - dense) / np.linalg.norm(dense), rel=1e-4)


def test_rows_are_those_of_whole_evaluations(scan):
    assert [row.target for row in scan.report.rows] == ["hidden/kernel"] * 2 + ["out/kernel"] * 2
    check_against_whole_evaluations(scan.model, labelled(), scan.report)


def test_several_outputs_and_weighted_examples():
    model, inputs = branches_and_a_shared_layer()
    model.compile("sgd", {"p": "mse", "q": "mae"}, metrics={"p": ["mae"], "q": ["mse"]})
    labels = {"p": np.ones((20, 2), "float32"), "q": np.ones((20, 1), "float32")}
    report = pk.sensitivity(model, (inputs, labels), sparsity=LEVELS)
    check_against_whole_evaluations(model, (inputs, labels), report)
    assert [metric.direction for metric in report.measures] == ["min"] * 5
    model = classifier()
    weights = np.linspace(0, 2, 150)
    report = pk.sensitivity(model, (*labelled(), weights), sparsity=0.5, batch_size=64)
    wanted = model.evaluate(*labelled(), sample_weight=weights, batch_size=64, verbose=0, return_dict=True)
    assert report.dense == pytest.approx(wanted, rel=1e-5)


class OwnTestStep(keras.Sequential):
    """Measures a figure of its own."""

    def test_step(self, data):
        inputs, labels = data
        results = super().test_step(data)
        return {**results, "twice": 2 * results["loss"]}


def test_a_test_step_of_the_models_own_is_used_and_regularization_counts():
    regularized = classifier(regularizer=keras.regularizers.L2(0.1))
    report = pk.sensitivity(regularized, labelled(), sparsity=LEVELS, batch_size=64)
    check_against_whole_evaluations(regularized, labelled(), report)
    report = pk.sensitivity(classifier(OwnTestStep), labelled(64), sparsity=0.5, batch_size=64)
    assert report.dense["twice"] == pytest.approx(2 * report.dense["loss"])
    assert report.notes == ("Each measurement evaluated the whole model: the model has a test_step of its own.",)


def test_a_regression_without_a_graph():
    model = Subclassed()
    model.compile("sgd", "mse", metrics=["mae"])
    data = labelled()[0], np.ones((150, 2), "float32")
    model(data[0][:1])
    report = pk.sensitivity(model, data, sparsity=LEVELS, batch_size=64)
    check_against_whole_evaluations(model, data, report)
    assert report.notes == ("Each measurement computed the whole model: it has no graph of layers.",)
    assert [metric.name for metric in report.measures] == ["mae", "loss"]


def test_the_model_stays_as_it_was_to_the_bit_also_after_an_interruption():
    model = classifier()
    before = weights_of(model)

    def interrupt(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pk.sensitivity(model, labelled(), sparsity=0.5, progress=interrupt)
    assert weights_of(model) == before
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=[fails_when_pruned(model)], run_eagerly=True)
    with pytest.raises(RuntimeError, match="in the middle"):
        pk.sensitivity(model, labelled(), sparsity=0.5)
    assert weights_of(model) == before
    pk.sensitivity(classifier(), labelled()[0], sparsity=0.5)
    assert weights_of(model) == before


def fails_when_pruned(model):
    def metric(labels, outputs):
        if (keras.ops.convert_to_numpy(model.layers[0].kernel) == 0).any():
            raise RuntimeError("in the middle")
        return keras.ops.mean(outputs)

    return metric


def test_a_scan_continues_where_it_was_interrupted(tmp_path, monkeypatch):
    def interrupt(done, total, name):
        raise KeyboardInterrupt

    folder = tmp_path / "scan"
    with pytest.raises(KeyboardInterrupt):
        pk.sensitivity(classifier(), labelled(), sparsity=LEVELS, output=folder, progress=interrupt)
    kept = json.loads((folder / "sensitivity.json").read_text())
    assert not kept["complete"] and {row["target"] for row in kept["rows"]} == {"hidden/kernel"}
    # A row that is not measured again shows that the earlier one is kept.
    kept["rows"][0]["output_error"] = 7.0
    (folder / "sensitivity.json").write_text(json.dumps(kept))
    done = pk.sensitivity(classifier(), labelled(), sparsity=LEVELS, output=folder)
    assert done.complete and done.rows[0].output_error == 7.0
    assert (folder / "sensitivity.png").read_bytes()[:4] == b"\x89PNG"
    monkeypatch.setattr("prunekit.operations.sensitivity.SensitivityScan", None)
    assert pk.sensitivity(classifier(), labelled(), sparsity=LEVELS, output=folder) == done


def test_a_scan_of_something_else_is_not_continued(tmp_path):
    pk.sensitivity(classifier(), labelled(), sparsity=0.5, output=tmp_path)
    with pytest.raises(ValueError, match=r"other settings: sparsity was \[0.5\] then, and is \[0.8\] now"):
        pk.sensitivity(classifier(), labelled(), sparsity=0.8, output=tmp_path)
    with pytest.raises(ValueError, match="is a scan of another data"):
        pk.sensitivity(classifier(), (labelled()[0] + 1, labelled()[1]), sparsity=0.5, output=tmp_path)
    changed = classifier()
    changed.layers[0].kernel.assign(changed.layers[0].kernel * 2)
    with pytest.raises(ValueError, match=r"is a scan of another model\. Choose another output directory, or"):
        pk.sensitivity(changed, labelled(), sparsity=0.5, output=tmp_path)
    assert pk.sensitivity(changed, labelled(), sparsity=0.5, output=tmp_path, force=True).complete
    (tmp_path / "sensitivity.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        pk.sensitivity(changed, labelled(), sparsity=0.5, output=tmp_path)


def test_the_report_becomes_json_tables_a_frame_and_a_picture(scan):
    report = scan.report
    values = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert values["sensitivity_version"] == 1
    assert {(row["technique"], row["level"]) for row in values["rows"]} == {("prune", "sparsity")}
    assert SensitivityReport.from_dict(values).to_dict() == report.to_dict()
    sections = report.sections()
    assert [section.title for section in sections][:3] == [
        *("Accuracy by sparsity", "Loss by sparsity", "Output error by sparsity")
    ]
    assert [row[0] for row in sections[0].rows] == ["hidden/kernel", "out/kernel"]
    frame = report.to_dataframe()
    assert list(frame.index) == [row.target for row in report.rows] and "accuracy" in frame
    assert "<svg" in report._repr_html_()
    unmeasured = dataclasses.replace(report, rows=report.rows[:2])
    texts = [text.get_text() for axes in sensitivity_figure(unmeasured).axes for text in axes.texts]
    assert len(texts) == 8 and not unmeasured.complete
    with pytest.raises(ValueError, match="is one of output_error, accuracy, loss. Received: 'auc'"):
        report.values("auc")
    with pytest.raises(ValueError, match="no sensitivity scan: 'rows' is missing"):
        SensitivityReport.from_dict({name: value for name, value in values.items() if name != "rows"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 1.5}, "must be a fraction removed"),
        ({"sparsity": 0.0}, "numbers between 0 and 1"),
        ({"sparsity": []}, "numbers between 0 and 1"),
        ({"criterion": "movement"}, "needs a training"),
        ({"criterion": "synflow"}, "100 rounds"),
        ({"pattern": "2:4", "sparsity": 0.7}, "2:4"),
        ({"include": ["nothing"]}, "matches no layer"),
        ({"memory": 0}, "above 0"),
        ({"memory": "500"}, "memory must be bytes, such as 500MB, 1GB or 1e9. Received: '500'"),
        ({"batch_size": 0}, "at least 1"),
    ],
    ids=str,
)
def test_wrong_options_are_refused(scan, options, message):
    with pytest.raises(ValueError, match=message):
        pk.sensitivity(scan.model, labelled(), **options)


def test_a_pattern_with_one_sparsity_has_that_level():
    report = pk.sensitivity(classifier(), labelled(), pattern="2:4", exclude=["hidden"])
    assert report.levels == (0.5,) and [row.entries for row in report.rows] == [12]


def test_criteria_read_the_data_and_a_model_without_labels_has_output_errors(scan):
    report = pk.sensitivity(scan.model, labelled()[0], sparsity=0.5, criterion="wanda")
    assert not report.dense and not report.measures and all(row.output_error > 0 for row in report.rows)
    assert report.notes[0].startswith("Only output errors")


def test_the_command_writes_a_scan_that_a_recipe_reads(run, tmp_path):
    model = classifier()
    model.save("net.keras")
    inputs, labels = labelled()
    np.savez("data.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    arguments = ("sensitivity", "net.keras", "--data", "data.npz", "--sparsity", "0.5,0.9", "-o", "scan")
    code, out, err = run(*arguments)
    assert code == 0 and "Output error by sparsity" in out and "[1/" in err
    assert (tmp_path / "scan" / "sensitivity.png").stat().st_size > 1000
    assert json.loads(run(*arguments, "--json")[1])["complete"] is True
    code, _, err = run(*arguments[:4], "--sparsity", "0.5,half")
    assert code == 2 and "expected numbers such as 0.5 or 0.5,0.8" in err
    steps = [{"prune": {"sparsity": 0.6, "allocation": {"type": "sensitivity", "file": "scan/sensitivity.json"}}}]
    result = pk.compress({"version": 1, "steps": steps}, model, (labelled(), labelled()), tmp_path / "run")
    assert sum(int((kernel == 0).sum()) for kernel in result.model.get_weights() if kernel.ndim > 1) == round(
        0.6 * sum(kernel.size for kernel in result.model.get_weights() if kernel.ndim > 1)
    )


def test_rows_of_other_techniques_are_not_mixed_with_those_of_pruning(scan):
    report = scan.report
    row = dataclasses.replace(report.rows[0], technique="quantize", level="bits", output_error=7.0)
    both = dataclasses.replace(report, rows=(*report.rows, row))
    assert both.values("output_error") == report.values("output_error")


def rounded(kernel, bits):
    """Returns the nearest values of a kernel of a Dense layer, one scale for each output, in plain NumPy."""
    scale = np.abs(kernel).max(axis=0) / (2 ** (bits - 1) - 1)
    return (np.round(kernel / scale) * scale).astype("float32")


def test_rows_of_bits_are_those_of_the_model_with_one_rounded_weight(scan):
    model, (inputs, labels) = scan.model, labelled()
    before = weights_of(model)
    report = pk.sensitivity(model, (inputs, labels), bits=8, batch_size=64)
    assert weights_of(model) == before
    assert (report.technique, report.level, report.levels) == ("quantize", "bits", (8,))
    dense = model.predict(inputs, verbose=0)
    for layer, row in zip(model.layers, report.rows, strict=True):
        value = keras.ops.convert_to_numpy(layer.kernel).copy()
        layer.kernel.assign(rounded(value, 8))
        wanted = model.evaluate(inputs, labels, batch_size=64, verbose=0, return_dict=True)
        found = model.predict(inputs, verbose=0)
        layer.kernel.assign(value)
        assert (row.target, row.technique, row.level, row.value) == (f"{layer.name}/kernel", "quantize", "bits", 8)
        assert row.metrics == pytest.approx(wanted, rel=1e-5)
        assert row.output_error == pytest.approx(np.linalg.norm(found - dense) / np.linalg.norm(dense), rel=1e-3)
        assert 0 < row.entries <= value.size


def test_fewer_bits_cost_more_and_the_report_says_bits(scan):
    report = pk.sensitivity(scan.model, labelled(), bits=(4, 2, 8), exclude="out", batch_size=64)
    errors = report.values("output_error")["hidden/kernel"]
    assert report.levels == (2, 4, 8) and errors[0] > errors[1] > errors[2] > 0
    assert [one.name for one in report.skipped] == ["out/kernel"]
    titles = [section.title for section in report.sections()]
    assert titles[:3] == ["Accuracy by bits", "Loss by bits", "Output error by bits"]
    assert "nearest values of so many bits" in report.sections()[2].explanation
    figure = sensitivity_figure(report)
    assert [axes.get_xlabel() for axes in figure.axes] == ["bits of the weight"] * 2
    assert figure.get_suptitle() == "net: one weight rounded at a time"
    assert SensitivityReport.from_dict(json.loads(json.dumps(report.to_dict()))) == report


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 1}, "bits must be at least 2"),
        ({"bits": (4, 9)}, "bits must be at most 8"),
        ({"bits": ()}, "one or more numbers from 2 to 8"),
        ({"bits": 4, "sparsity": 0.5}, "none is pruned. Received: `bits` and sparsity. Scan twice"),
        ({"bits": 4, "criterion": "wanda", "pattern": "2:4"}, "Received: `bits` and criterion, pattern"),
        ({"bits": 4, "include": "nothing"}, "matches no layer"),
    ],
    ids=str,
)
def test_wrong_bits_are_refused(scan, options, message):
    with pytest.raises(ValueError, match=message):
        pk.sensitivity(scan.model, labelled(), **options)


def test_a_scan_of_bits_continues_and_is_no_scan_of_sparsities(tmp_path, monkeypatch):
    def interrupt(done, total, name):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pk.sensitivity(classifier(), labelled(), bits=(4, 8), output=tmp_path, progress=interrupt)
    kept = json.loads((tmp_path / "sensitivity.json").read_text())
    kept["rows"][0]["output_error"] = 7.0
    (tmp_path / "sensitivity.json").write_text(json.dumps(kept))
    done = pk.sensitivity(classifier(), labelled(), bits=(4, 8), output=tmp_path)
    assert done.complete and done.rows[0].output_error == 7.0
    with pytest.raises(ValueError, match="weights were rounded then, and are pruned now"):
        pk.sensitivity(classifier(), labelled(), sparsity=0.5, output=tmp_path)
    with pytest.raises(ValueError, match="it has no rows of sparsity; scan with `sparsity`"):
        pk.allocations.SensitivityAllocation(tmp_path / "sensitivity.json")


def test_the_command_scans_bits_that_choose_bits_reads(run, tmp_path):
    model = classifier()
    model.save("net.keras")
    inputs, labels = labelled()
    np.savez("data.npz", x_train=inputs, y_train=labels, x_test=inputs, y_test=labels)
    arguments = ("sensitivity", "net.keras", "--data", "data.npz", "--bits", "4,8", "-o", "scan")
    code, out, _ = run(*arguments)
    assert code == 0 and "Output error by bits" in out
    code, _, err = run(*arguments[:4], "--bits", "4,half")
    assert code == 2 and "expected numbers such as 8 or 4,8" in err
    scanned = pk.choose_bits(model, inputs, budget=1000, scan="scan/sensitivity.json")
    measured = pk.choose_bits(model, inputs, budget=1000)
    assert scanned.bits == measured.bits
    for one, other in zip(scanned.weights, measured.weights, strict=True):
        assert one.bytes == other.bytes and one.errors == pytest.approx(other.errors, rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda labels: labels + 1, "tells 3 classes apart, numbered from 0 to 2. Received: labels from 1 to 3"),
        (lambda labels: labels - 1, "Received: labels from -1 to 1"),
        (
            lambda labels: np.eye(3)[labels],
            r"one class number for each .* labels of shape \(150, 3\)",
        ),
    ],
    ids=["from 1", "from -1", "one-hot"],
)
def test_labels_that_number_no_classes_are_refused_wherever_they_are_read(change, message):
    inputs, labels = labelled()
    data = (inputs, change(labels))
    readers = [
        lambda: pk.sensitivity(classifier(), data, batch_size=150),
        lambda: pk.prune(classifier(), 0.5, [data], criterion="snip"),
        lambda: pk.shrink(classifier(), channels=0.5, data=[data], criterion="taylor"),
    ]
    for reader in readers:
        with pytest.raises(ValueError, match=message) as refused:
            reader()
        assert "\n" not in str(refused.value)


def test_a_class_that_the_loss_ignores_is_no_label_out_of_range():
    model = classifier()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(ignore_class=-1))
    inputs, labels = labelled()
    assert pk.sensitivity(model, (inputs, np.where(labels == 2, -1, labels)), sparsity=LEVELS).complete


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("", "expected the path of an output directory"),
        ("mine.unfinished", "has the name of an unfinished run into mine"),
        ("run", "is a run directory. Choose another output directory for the scan."),
    ],
)
def test_a_scan_is_not_written_where_a_run_is(tmp_path, monkeypatch, folder, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.lock.yaml").touch()
    with pytest.raises(ValueError, match=message):
        pk.sensitivity(classifier(), labelled(), sparsity=0.5, output=folder)
