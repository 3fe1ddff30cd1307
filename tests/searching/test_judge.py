"""What a search judges files by: metrics of their outputs, whatever the model adds, in batches."""

import keras
import numpy as np
import pytest
from keras import layers as L

from prunekit.core.outputs.output_error import output_error
from prunekit.delivery.reports.metrics import Metric
from prunekit.searching.judge import Judge, SearchData

pytestmark = pytest.mark.one_backend
RNG = np.random.default_rng(0)
X = RNG.normal(size=(900, 6)).astype("float32")
Y = (X[:, :3] @ RNG.normal(size=(3, 4))).argmax(-1)


class Watched(L.Layer):
    """Notes how many examples it is called with."""

    sizes: list[int | None]

    def call(self, inputs):
        self.sizes.append(inputs.shape[0])
        return inputs


class OwnLoss(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight, training) + 1.0


def network(kind=keras.Model, loss="sparse_categorical_crossentropy", metrics=("accuracy",), **options):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    watched = Watched()
    watched.sizes = []
    outputs = L.Dense(4, "softmax")(L.Dense(16, "relu", **options)(watched(inputs)))
    model = kind(inputs, outputs)
    model.compile("adam", loss, metrics=list(metrics))
    return model, watched


def test_the_model_computes_few_examples_at_a_time():
    model, watched = network()
    judge = Judge(model, SearchData((X, Y), 0))
    watched.sizes.clear()
    judge = Judge(model, SearchData((X, Y), 0))
    judge.drops(judge.outputs)
    assert max(size for size in watched.sizes if size is not None) <= 128


@pytest.mark.thorough
def test_without_labels_each_output_that_is_classes_has_to_agree():
    inputs = keras.Input((6,))
    model = keras.Model(inputs, [L.Dense(3, "softmax")(inputs), L.Dense(1)(inputs), L.Dense(4, "softmax")(inputs)])
    judge = Judge(model, SearchData(X, 0))
    first, value, second = judge.outputs
    assert judge.metric.name == "agreement" and judge.drops([first, 2 * value, second]) == (0, 0)
    assert judge.drops([first, value, second[:, ::-1]]) == (1, 1)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("kind", ["arrays", "batches"])
def test_examples_are_drawn_from_all_of_arrays(kind):
    numbers = np.arange(200_000)
    data = (numbers, numbers)
    if kind == "batches":
        data = [(part, part) for part in np.array_split(numbers, 9)]
    found = SearchData(data, 0)
    assert found.notes == [] and len(found.held_out) == 8192
    assert all(abs(np.mean(part) - 1e5) < 6e3 for part in (found.held_out, found.calibration, found.fitted))
    np.testing.assert_array_equal(found.held_out, found.labels)
    assert not set(found.held_out) & set(found.calibration)
    more = SearchData(data, 0, everything=True)
    np.testing.assert_array_equal(more.held_out, found.held_out)
    taught = set(more.trained[0])
    assert len(taught) == len(more.trained[0]) == 200_000 - 8192 and not taught & set(more.held_out)


@pytest.mark.thorough
def test_of_a_stream_the_first_examples_are_read_and_repeated_ones_are_noted():
    class Stream:
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            for start in range(0, 100_000, 500):
                numbers = np.arange(start, start + 500) % self.count
                yield numbers, numbers

    found = SearchData(Stream(100_000), 0)
    assert found.notes == ["The first 35,000 examples were read: shuffle the data if they have an order."]
    assert max(found.held_out) < 35_000
    # Of a function, which may have no end, fewer.
    assert SearchData(lambda: iter(Stream(100_000)), 0).notes[0].startswith("The first 2,500 examples were read")
    noted = SearchData(Stream(3000), 0).notes
    assert len(noted) == 2 and "of the 4,096 examples that judge are also among those that fit and choose" in noted[1]


@pytest.mark.thorough
def test_labels_that_are_texts_are_refused():
    with pytest.raises(ValueError, match="Labels are numbers. Received: '[a-d]'. Number the classes as in training"):
        SearchData((X, np.array(list("abcd"))[Y]), 0)


@pytest.mark.thorough
def test_batches_of_examples_of_several_lengths_are_refused():
    batches = [(np.zeros((100, length, 2), "float32"), np.zeros(100, int)) for length in (5, 7)]
    with pytest.raises(ValueError, match=r"reads examples of one shape. Received: .* \(5, 2\) and \(7, 2\). Pad them"):
        SearchData(batches, 0)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("classes", [True, False])
def test_probabilities_that_an_integer_file_rounds_are_hardly_changed(classes):
    logits = 6 * RNG.normal(size=(900, 4)).astype("float32")
    sure = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True) if classes else 1 / (1 + np.exp(-logits[:, :1]))
    model = keras.Sequential([keras.Input(sure.shape[1:]), L.Activation("linear")])
    judge = Judge(model, SearchData(sure, 0))
    (before,) = judge.outputs
    rounded = np.clip(np.round(before * 256), 0, 255) / 256
    assert output_error([before], [rounded]) ** 2 > 10 * judge.error([rounded])
    assert judge.error([rounded]) < 0.01 < judge.error([before[::-1]])


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(("count", "fitted", "held_out"), [(9000, 1024, 7976), (4700, 604, 4096), (900, 450, 450)])
def test_layers_of_files_are_fitted_to_examples_that_neither_choose_nor_judge(count, fitted, held_out):
    numbers = np.arange(count)
    data = SearchData((numbers, numbers), 0)
    calibration = set(data.calibration)
    assert calibration >= {*data.fitted, *data.measured} and not calibration & set(data.held_out)
    assert (len(calibration), len(data.held_out)) == (fitted, held_out)


class OwnStep(keras.Model):
    """A model as the guides of Keras write them, with a metric that its `test_step` updates."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.own = keras.metrics.Mean(name="mae")

    @property
    def metrics(self):
        return [*super().metrics, self.own]

    def test_step(self, data):
        return super().test_step(data)


@pytest.mark.thorough
def test_metrics_that_outputs_do_not_tell_are_not_taken():
    model, _ = network(OwnStep)
    assert Judge(model, SearchData((X, Y), 0)).metric.name == "accuracy"


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("kind", "options"), [(keras.Model, {"activity_regularizer": keras.regularizers.L2(0.1)}), (OwnLoss, {})]
)
def test_the_metric_is_that_of_the_outputs_where_the_model_adds_to_its_loss(kind, options):
    model, _ = network(kind, **options)
    data = SearchData((X, Y), 0)
    judge = Judge(model, data)
    classes = judge.outputs[0].argmax(-1) == data.labels
    middle = data.choosing
    assert judge.metric.name == "accuracy"
    assert judge.before == pytest.approx((classes[:middle].mean(), classes[middle:].mean()), abs=1e-6)
    # Outputs that always name one class are not those of the model.
    wrong = np.tile(np.eye(4, dtype="float32")[data.labels[0]], (len(judge.outputs[0]), 1))
    expected = [
        was - (data.labels[part] == data.labels[0]).mean()
        for was, part in zip(judge.before, (slice(0, middle), slice(middle, None)), strict=True)
    ]
    assert judge.drops([wrong]) == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="The drop is that of a metric of outputs: accuracy. Received: loss"):
        Judge(model, data, Metric("loss", "min"))


@pytest.mark.thorough
def test_a_loss_that_outputs_do_not_tell_is_refused():
    model, _ = network(loss="mse", metrics=(), activity_regularizer=keras.regularizers.L2(0.1))
    labels = np.eye(4, dtype="float32")[Y] * 0.3
    with pytest.raises(ValueError, match="a model that is without a metric, whose loss its outputs do not tell"):
        Judge(model, SearchData((X, labels), 0))


@pytest.mark.thorough
def test_labels_that_are_not_finite_are_refused():
    model, _ = network(loss="mse", metrics=())
    labels = np.eye(4, dtype="float32")[Y]
    labels[::9] = np.nan
    with pytest.raises(ValueError, match="the loss of the model as it is. Received: nan on these examples. Look for"):
        Judge(model, SearchData((X, labels), 0))


class OwnAccuracy(keras.metrics.SparseCategoricalAccuracy):
    """A metric of the user's own, which is one of Keras."""


def agreement(labels, outputs):
    return keras.ops.cast(keras.ops.equal(keras.ops.ravel(labels), keras.ops.argmax(outputs, -1)), "float32")


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("metrics", "judged", "notes"),
    [
        ([keras.metrics.SparseTopKCategoricalAccuracy(2, name="top")], Metric("top", "max", fraction=True), 0),
        ([OwnAccuracy(name="right")], Metric("right", "max", fraction=True), 0),
        # What its name says is not what it is.
        ([keras.metrics.SparseCategoricalCrossentropy(name="accuracy")], Metric("accuracy", "min"), 0),
        ([agreement, "accuracy"], Metric("accuracy", "max", fraction=True), 1),
        ([agreement], Metric("accuracy", "max", fraction=True), 1),
    ],
)
def test_the_metric_is_known_by_its_class_whatever_its_name(metrics, judged, notes):
    judge = Judge(network(metrics=metrics)[0], SearchData((X, Y), 0))
    assert judge.metric == judged
    told = "The drop is that of the accuracy: whether higher or lower values of agreement are better is known only for"
    assert [note.startswith(told) for note in judge.notes] == [True] * notes
