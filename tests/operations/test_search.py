"""pk.search: the bound holds on held-out examples, and what is delivered is what was measured."""

import json
import sys
import threading

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from digit_network import digit_network
from keras import layers as L
from stand_in_ray import StandInRay

import prunekit as pk
from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.operations.search import FILE, MODEL, REPORT
from prunekit.reports import SearchReport
from prunekit.searching import search_run, shared_scan, time_limit
from prunekit.searching.building import FORMS, build
from prunekit.searching.candidates import Level
from prunekit.searching.costs import Mixture
from prunekit.searching.judge import Judge, SearchData
from prunekit.searching.search_run import FILES, TABLES
from prunekit.searching.searched_model import SearchedModel


@pytest.fixture(scope="module")
def digits():
    return digit_network()


@pytest.fixture(scope="module")
def found(digits, tmp_path_factory):
    folder = tmp_path_factory.mktemp("search") / "found"
    before = [weight.numpy() for weight in digits[0].weights]
    result = pk.search(*digits, drop=0.02, output=folder)
    for was, weight in zip(before, digits[0].weights, strict=True):
        np.testing.assert_array_equal(was, weight.numpy())
    return result, folder


def test_the_bound_holds_on_examples_that_no_choice_has_seen(found):
    result, _ = found
    report = result.report
    assert isinstance(report, SearchReport) and report.metric.name == "accuracy"
    assert report.drop <= 0.02 and report.drop == pytest.approx(report.before - report.after)
    fitted, measured, choosing, judging = report.examples
    # Files are fitted to what measured the levels, too.
    assert fitted + choosing + judging == 897 and measured == 224
    assert report.bytes == len(result.file) < report.bytes_before / 3
    delivered = [point for point in report.points if point.delivered]
    assert len(delivered) == 1 and delivered[0].drop <= 0.02 and delivered[0].bytes == report.bytes
    assert all(point.bytes >= report.bytes for point in report.points if point.drop <= 0.02)
    assert 0 < report.gap <= 1e-3 or report.gap == 0
    assert report.rank_correlation is None or report.rank_correlation > 0.5


def test_the_report_tells_what_the_model_and_the_file_have(found):
    result, folder = found
    stored = keras.models.load_model(folder / MODEL)
    assert (folder / FILE).read_bytes() == result.file
    for row in result.report.groups:
        assert row.kept <= row.channels
        assert stored.get_layer(row.name).units if row.name == "hidden" else True
    kept = {row.name: row.kept for row in result.report.groups}
    assert stored.get_layer("conv").filters == kept["conv"] and stored.get_layer("hidden").units == kept["hidden"]
    for row in result.report.weights:
        kernel = stored.get_layer(row.name.split("/")[0]).kernel.numpy()
        most = max(len(np.unique(np.abs(kernel[..., i]))) for i in range(kernel.shape[-1]))
        assert most <= 2 ** (row.bits - 1)
    again = SearchReport(**{**vars(result.report)})
    assert json.loads((folder / REPORT).read_text())["bytes"] == again.bytes
    shown = result.report.sections()
    assert [section.title for section in shown] == [
        "The file",
        "Files that were made",
        "Techniques alone",
        "Weights",
        "Channels",
    ]
    assert f"on {result.report.examples[3]} held-out examples, which accept or reject a file" in shown[0].explanation
    assert shown[0].rows[0][0] == result.report.bytes and len(shown[1].rows) == len(result.report.points)


def test_another_question_begins_with_the_table(found, digits):
    _, folder = found
    table = (folder / TABLES["litert"]).read_bytes()
    told = []
    result = pk.search(*digits, bytes="6kB", output=folder, progress=lambda *one: told.append(one))
    assert (folder / TABLES["litert"]).read_bytes() == table and not any("measured" in text for *_, text in told)
    assert len(result.file) <= 6000 and result.report.asked_bytes == 6000
    assert result.report.bytes >= 0.9 * 6000 or result.report.drop <= 0.01


@pytest.mark.thorough
def test_files_that_were_made_are_known_to_the_next_questions(digits, tmp_path, monkeypatch):
    model, (images, labels) = digits
    calls, whole = [], search_run.build

    def counted(*arguments, **options):
        calls.append(arguments)
        return whole(*arguments, **options)

    monkeypatch.setattr(search_run, "build", counted)

    def asked(*, labels=labels, **question):
        calls.clear()
        result = pk.search(model, (images, labels), target="packed", output=tmp_path, **question)
        return result, len(calls)

    first, count = asked(drop=0.02)
    again, one = asked(drop=0.02)
    assert again.report.drop == first.report.drop and one == 1 < count
    assert len(again.report.points) == len(first.report.points)
    bolder, few = asked(drop=0.05)
    assert bolder.report.drop <= 0.05 and few < count and bolder.report.bytes <= first.report.bytes
    # A file of other labels, bounds or techniques is not known.
    assert asked(drop=0.02, labels=np.roll(labels, 3))[1] > 1
    assert asked(drop=0.02, techniques="quantize")[1] >= 1
    (tmp_path / FILES["packed"]).write_text("{")
    assert asked(drop=0.02)[1] == count


def test_a_table_of_another_model_is_measured_again(found, digits, tmp_path):
    _, folder = found
    (tmp_path / TABLES["litert"]).write_bytes((folder / TABLES["litert"]).read_bytes())
    other = keras.models.clone_model(digits[0])
    other.compile(loss=digits[0].loss, metrics=["accuracy"])
    other.set_weights([0.9 * weight.numpy() for weight in digits[0].weights])
    told = []
    again = pk.search(other, digits[1], bytes="20kB", output=tmp_path, progress=lambda *one: told.append(one))
    assert sum("measured" in text for *_, text in told) == 5
    gone = "scan-litert.json was of another model, or of other data or settings, and is made anew."
    assert again.report.notes == (gone,)


def test_the_file_is_the_one_that_was_judged(found, digits):
    result, folder = found
    model, (images, labels) = digits
    interpreter = Interpreter(model_path=str(folder / FILE))
    (given,), (computed,) = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], images.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], images)
    interpreter.invoke()
    computed = interpreter.get_tensor(computed["index"])
    accuracy = float((computed.argmax(-1) == labels).mean())
    dense = float((model.predict(images, verbose=0).argmax(-1) == labels).mean())
    assert dense - accuracy <= 0.03


def test_packed_files_get_zeros_and_agreement_stands_in_for_labels(digits):
    model, (images, _) = digits
    result = pk.search(model, images, drop=0.05, target="packed")
    report = result.report
    assert report.metric.name == "agreement" and report.before == 1.0 and report.drop <= 0.05
    assert report.bytes == len(result.packed) < len(result.file)
    assert max(row.sparsity for row in report.weights) >= 0.5


@pytest.mark.thorough
def test_a_metric_of_one_of_several_outputs_has_its_direction(digits):
    _, (images, labels) = digits
    inputs = keras.Input((8, 8, 1))
    x = L.Dense(8, activation="relu")(L.Flatten()(inputs))
    model = keras.Model(inputs, [L.Dense(10, name="digit")(x), L.Dense(1, name="size")(x)])
    loss = [keras.losses.SparseCategoricalCrossentropy(from_logits=True), "mse"]
    model.compile("adam", loss, metrics=[["accuracy"], ["mae"]])
    sizes = images.mean((1, 2))
    model.evaluate(images[:32], [labels[:32], sizes[:32]], verbose=0)
    judge = Judge(model, SearchData((images, [labels, sizes]), 0))
    assert (judge.metric.name, judge.metric.direction, judge.metric.fraction) == ("digit_accuracy", "max", True)
    worse = [np.zeros_like(one) for one in judge.outputs]
    assert judge.drops(worse)[0] == pytest.approx(judge.before[0] - judge.values(worse)[0])


@pytest.mark.thorough
def test_a_regression_is_judged_by_its_metric():
    rng = np.random.default_rng(3)
    x = rng.normal(size=(800, 6)).astype("float32")
    y = (np.sin(x[:, :1]) + x[:, 1:2] * x[:, 2:3]).astype("float32")
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input((6,)), L.Dense(32, activation="relu"), L.Dense(24, "relu"), L.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    model.fit(x, y, epochs=10, verbose=0)
    report = pk.search(model, (x, y), drop=0.05).report
    assert report.metric.name == "mae" and report.drop <= 0.05 and report.after <= report.before + 0.05


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "needs a question"),
        ({"drop": 2}, "fraction, below 1. Received: drop=2. For 2 points, pass 0.02"),
        ({"drop": -0.1}, "drop must be a finite number, 0 or more"),
        ({"drop": 0.1, "target": "pack"}, "`target` is one of litert, packed"),
        ({"bytes": "many"}, "bytes"),
        ({"bytes": "6kB", "profile": "fast"}, "without one, the drop itself is. Received: profile='fast'"),
        ({"drop": 0.1, "profile": "quick"}, "`profile` is one of small, balanced, fast"),
        ({"drop": 0.1, "latency": "soon"}, "latency must be a time, such as 2ms"),
        ({"drop": 0.1, "time": "20 minutes"}, "time must be a time, such as 90s, 20min or 2h. Received: '20 minutes'"),
        ({"drop": 0.1, "time": float("nan")}, "time must be a finite number above 0"),
        ({"drop": 0.1, "latency": 3}, "at most 1, or a time such as '2ms'"),
        ({"bytes": 500}, "No file meets all bounds without training"),
    ],
)
def test_a_mistake_is_one_sentence(digits, found, options, words):
    with pytest.raises(ValueError, match=words):
        pk.search(*digits, output=found[1] if "bytes" in options else None, **options)


def test_what_cannot_be_searched_is_refused_first(digits):
    model, (images, labels) = digits
    with pytest.raises(ValueError, match="128 at least.*Received: 40"):
        pk.search(model, (images[:40], labels[:40]), drop=0.01)

    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = L.Dense(10)

        def call(self, inputs):
            return self.head(keras.ops.reshape(inputs, (-1, 64)))

    own = Own()
    own(images[:1])
    with pytest.raises(ValueError, match="follows the calls of a Sequential or functional model"):
        pk.search(own, (images, labels), drop=0.01)


def test_a_file_that_only_the_choice_likes_is_not_delivered(digits, found, tmp_path, monkeypatch):
    (tmp_path / TABLES["litert"]).write_bytes((found[1] / TABLES["litert"]).read_bytes())
    sizes = []

    def drops(self, outputs):
        sizes.append(len(sizes))
        return 0.0, 1.0

    monkeypatch.setattr(Judge, "drops", drops)
    with pytest.raises(ValueError, match="No file holds the drop without training. Received: drop=0.02; the nearest"):
        pk.search(*digits, drop=0.02, output=tmp_path)
    assert sizes and not (tmp_path / FILE).exists() and (tmp_path / TABLES["litert"]).exists()
    # The first file that is made loses nothing, also on the last examples; the smaller ones do there.
    monkeypatch.setattr(Judge, "drops", lambda self, outputs: (0.0, float(bool(sizes.append(0) or len(sizes) > 1))))
    sizes.clear()
    report = pk.search(*digits, drop=0.001, output=tmp_path).report
    assert len(report.points) > 1 and report.bytes == max(point.bytes for point in report.points)


# ---- Ray -------------------------------------------------------------------------------------------------------------


def test_nodes_of_a_cluster_measure_the_same_table(digits, found, tmp_path, monkeypatch):
    ray = StandInRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    part, lock, calls = shared_scan.scan_part, threading.Lock(), []

    def one_part(inputs, names):
        calls.append(list(names))
        if len(calls) == 1:
            raise RuntimeError("the node\nis gone")
        # The parts run in threads of one process here, and change weights of one model for a while.
        with lock:
            return part(inputs, names)

    monkeypatch.setattr(shared_scan, "scan_part", one_part)
    report = pk.search(*digits, drop=0.02, output=tmp_path, workers="ray").report
    assert ray.asked["num_cpus"] == 1 and ray.calls == [("init", None), ("shutdown",)]
    tables = [json.loads((folder / TABLES["litert"]).read_text()) for folder in (tmp_path, found[1])]
    rows = [
        {(row["weight"], row["bits"], row["form"], row["rank"]): row["error"] for row in one["weights"]}
        for one in tables
    ]
    assert rows[0] == pytest.approx(rows[1], rel=1e-3, abs=1e-9)
    assert sorted(name for part in calls for name in part) == sorted(
        {row["weight"] for row in tables[0]["weights"]} | {row["group"] for row in tables[0]["removals"]}
    )
    assert report.bytes == found[0].report.bytes
    gone = (
        f"Nodes could not measure {calls[0][0]}, which were left to this machine: Ray: RuntimeError: the node is gone"
    )
    assert report.notes == (gone,)


@pytest.mark.thorough
def test_without_ray_the_extra_is_named(digits, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"a search by Ray needs Ray.*pip install 'prunekit\[ray\]'"):
        pk.search(*digits, drop=0.02, workers="ray")


@pytest.mark.thorough
def test_the_real_ray_measures_the_same_table(digits, found, tmp_path):
    pytest.importorskip("ray")
    report = pk.search(*digits, drop=0.02, output=tmp_path, workers="ray").report
    assert report.notes == () and report.bytes == found[0].report.bytes


def test_one_file_that_cannot_be_made_does_not_end_the_search(digits, found, tmp_path, monkeypatch):
    (tmp_path / TABLES["litert"]).write_bytes((found[1] / TABLES["litert"]).read_bytes())
    made = search_run.build
    calls = []

    def build_some(*arguments, **options):
        calls.append(len(calls))
        if len(calls) == 1:
            raise IntegerExportError("A kernel is off.")
        return made(*arguments, **options)

    monkeypatch.setattr(search_run, "build", build_some)
    report = pk.search(*digits, drop=0.02, output=tmp_path).report
    assert report.drop <= 0.02 and "A file was not made: A kernel is off." in report.notes and len(calls) > 2


def test_a_damaged_table_is_measured_again_with_a_note(digits, tmp_path):
    (tmp_path / TABLES["litert"]).write_text("{")
    report = pk.search(*digits, bytes="8kB", output=tmp_path).report
    assert report.notes == ("scan-litert.json could not be read, and is made anew.",)


def test_layers_that_read_whole_numbers_or_end_in_floats_are_timed_where_they_can_be():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12,), dtype="int32")
    x = L.Embedding(40, 16, name="table")(inputs)
    x = L.SeparableConv1D(16, 3, padding="same", activation="softplus", name="separable")(x)
    x = L.GlobalAveragePooling1D()(x)
    model = keras.Model(inputs, L.Dense(8, activation="selu", name="head")(x))
    words = np.random.default_rng(0).integers(0, 40, (200, 12)).astype("int32")
    # Its outputs hardly differ between examples, relative to the steps of 8 bits.
    report = pk.search(model, words, drop=10.0, profile="fast").report
    assert report.seconds > 0 and report.points[0].counted_seconds > 0


def test_bounds_that_no_mixture_meets_are_answered_with_the_least(digits):
    with pytest.raises(
        ValueError,
        match=r"No file meets all bounds. Received: drop=0.02 and bytes=400; the least possible sum .* bytes",
    ):
        pk.search(*digits, drop=0.02, bytes=400)


# ---- time ------------------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def time(self):
        self.now += 1.0
        return self.now


def test_a_search_ends_in_time_and_the_next_one_measures_what_it_lacked(digits, found, tmp_path, monkeypatch):
    monkeypatch.setattr(time_limit, "time", Ticking())
    report = pk.search(*digits, drop=0.02, time="10s", output=tmp_path).report
    rows = json.loads((tmp_path / TABLES["litert"]).read_text())
    measured = {row["weight"] for row in rows["weights"]} | {row["group"] for row in rows["removals"]}
    late, over = report.notes
    named = {"conv/kernel", "hidden/kernel", "logits/kernel", "conv", "hidden"} - measured
    assert named and late.startswith("There was no time to measure") and all(name in late for name in named)
    # Its files were chosen without the errors that the table lacks, and are not known to a search with all of them.
    assert set(json.loads((tmp_path / FILES["litert"]).read_text())["settings"]["missing"]) == named
    # What is worth most is measured, and one file is made, whatever the time.
    assert measured and over == "The time was over before all files were made."
    assert report.drop <= 0.02 and len(report.points) == 1 and report.bytes > found[0].report.bytes
    monkeypatch.undo()
    again = pk.search(*digits, drop=0.02, output=tmp_path).report
    assert again.notes == () and again.bytes == found[0].report.bytes
    assert json.loads((tmp_path / FILES["litert"]).read_text())["settings"]["missing"] == []


@pytest.mark.thorough
def test_after_the_time_the_best_file_within_bounds_is_made(digits, found, tmp_path, monkeypatch):
    (tmp_path / TABLES["litert"]).write_bytes((found[1] / TABLES["litert"]).read_bytes())
    monkeypatch.setattr(time_limit, "time", Ticking())
    report = pk.search(*digits, bytes="7kB", time="1s", output=tmp_path).report
    assert 4000 < report.bytes <= 7000 and len(report.points) <= 2 and not report.alone
    with_quantization = pk.search(*digits, bytes="12kB", time="1s", techniques="quantize").report
    assert "conv/kernel" in str(with_quantization.notes) and "hidden/kernel" not in str(with_quantization.notes)


@pytest.mark.thorough
def test_a_search_with_time_enough_finds_what_one_without_a_limit_does(digits, found):
    assert pk.search(*digits, drop=0.02, time="1 h").report.bytes == found[0].report.bytes


# ---- report and levels -----------------------------------------------------------------------------------------------


def test_the_front_has_what_no_other_file_beats(found):
    report = found[0].report
    front = report.front
    assert front and {one.bytes for one in front} <= {one.bytes for one in report.points}
    drops = [one.drop for one in front]
    assert drops == sorted(drops, reverse=True)
    (alone,) = [section for section in report.sections() if section.title == "Techniques alone"]
    names = ["shrink", "factorize", "quantize", "shrink and factorize and quantize"]
    assert [row[0] for row in alone.rows] == names
    assert alone.rows[-1][1] <= min(row[1] for row in alone.rows)


def test_the_price_of_bits_of_a_level_is_that_of_the_file(digits):
    model, (images, _) = digits
    subject = SearchedModel(model, images[:256])
    sizes = []
    for rate in (0.0, 1.0):
        levels = {name: Level(0.0, 4, rate) for name in subject.products}
        mixture = Mixture(levels, {}, 0.0, {"bytes": 0.0}, 0.0)
        sizes.append(build(subject, mixture, images[:256], images[256:300], FORMS["packed"], memory=1e9).bytes)
    assert sizes[1] < 0.8 * sizes[0]


@pytest.mark.thorough
def test_several_inputs_in_a_list_are_batches_of_examples():
    keras.utils.set_random_seed(0)
    first, second = keras.Input((12,)), keras.Input((12,))
    x = L.Dense(24, activation="relu")(L.Concatenate()([first, second]))
    model = keras.Model([first, second], L.Dense(5)(x))
    rows = [np.random.default_rng(seed).normal(size=(300, 12)).astype("float32") for seed in range(2)]
    labels = np.random.default_rng(2).integers(0, 5, 300)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    report = pk.search(model, [(rows, labels)], drop=0.2).report
    assert report.drop <= 0.2 and report.examples[1:] == (75, 75, 75)
