"""How far signals spread: figures against NumPy and a tape of our own, statuses on networks built to earn them."""

import json
import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from networks import sequential

import prunekit as pk
from prunekit.initialization import initializers
from prunekit.initialization.signal_report import STATUSES, signal_report


def deep(activation="relu", hidden=8, units=64, last="softmax"):
    stack = [layers.Dense(units, activation, name=f"hidden_{i}") for i in range(hidden)]
    return keras.Sequential([keras.Input((16,)), *stack, layers.Dense(10, last, name="top")], name="deep")


@pytest.fixture
def batch():
    return np.random.default_rng(5).normal(size=(32, 16)).astype("float32")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_hold_what_numpy_and_a_tape_find(dtype):
    stack = [layers.Dense(6, "relu", dtype=dtype, name="hidden"), layers.Dense(3, dtype=dtype, name="top")]
    model = keras.Sequential([keras.Input((4,), dtype=dtype), *stack])
    x = np.random.default_rng(0).normal(size=(9, 4)).astype(dtype)
    y = np.random.default_rng(1).normal(size=(9, 3)).astype(dtype)
    report = signal_report(model, x, y=y, loss="mean_squared_error")
    with tf.GradientTape() as tape:
        hidden = stack[0](x)
        tape.watch(hidden)
        top = stack[1](hidden)
        loss = tf.reduce_mean((top - y) ** 2)
    gradients = [g.numpy() for g in tape.gradient(loss, [hidden, top])]
    for row, value, gradient in zip(report.layers, [hidden.numpy(), top.numpy()], gradients, strict=True):
        norm = np.sqrt((gradient**2).sum() / 9)
        found = [row.mean, row.std, row.zeros, row.gradient_std, row.gradient_norm, row.gradient_zeros]
        expected = [value.mean(), value.std(), (value == 0).mean(), gradient.std(), norm, (gradient == 0).mean()]
        assert np.allclose(found, expected, rtol=1e-5)
        assert row.shape == value.shape
    first, last = report.layers
    assert first.ratio == 1 and math.isclose(last.ratio, last.std / first.std)
    assert last.gradient_ratio == 1 and math.isclose(first.gradient_ratio, first.gradient_norm / last.gradient_norm)
    assert (report.status, report.examples, report.gradient_of) == ("healthy", 9, "the loss mean_squared_error")


def test_the_direction_at_the_outputs_has_norm_one_per_example_and_follows_the_seed(batch):
    model = deep(last=None)
    rows = [signal_report(model, batch, seed=seed).layers for seed in (0, 0, 1)]
    assert math.isclose(rows[0][-1].gradient_norm, 1, rel_tol=1e-6)
    assert rows[0] == rows[1] and rows[0] != rows[2]


def test_a_loss_may_be_a_function_or_an_object(batch, perceptron):
    x, y = batch[:, :8], np.zeros(32, int)
    named = signal_report(perceptron, x, y=y, loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    function = signal_report(
        perceptron, x, y=y, loss=lambda y, out: keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)
    )
    assert named.layers == function.layers


# ---------------------------------------------------------------- statuses


@pytest.mark.parametrize(
    ("activation", "start"),
    [
        ("relu", initializers.HeNormal()),
        ("tanh", initializers.XavierUniform()),
        ("selu", initializers.LecunNormal()),
        ("tanh", initializers.Orthogonal()),
    ],
    ids=["he relu", "xavier tanh", "lecun selu", "orthogonal tanh"],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_start_that_suits_the_activation_is_healthy(activation, start, seed, batch):
    model = deep(activation, hidden=12)
    initializers.reinitialize(model, start, seed=seed)
    report = signal_report(model, batch)
    assert report.status == "healthy" and report.first_trouble is None
    assert "status: healthy" in str(report)


@pytest.mark.parametrize(
    ("model", "start", "expected", "where"),
    [
        (lambda: deep(), initializers.TruncatedNormal(200.0), "exploding", "hidden_0"),
        (lambda: deep(last=None), initializers.TruncatedNormal(200.0), "exploding", "hidden_0"),
        (lambda: deep(hidden=30, last=None), initializers.TruncatedNormal(1e3), "exploding", "hidden_"),
        (lambda: deep(), initializers.TruncatedNormal(0.02), "vanishing", "hidden_0"),
        (lambda: deep("sigmoid"), initializers.TruncatedNormal(0.1), "vanishing", "hidden_0"),
        (lambda: deep("tanh", 3), initializers.TruncatedNormal(20.0), "saturated", "hidden_0"),
        (lambda: deep("sigmoid", 3), initializers.TruncatedNormal(200.0), "saturated", "hidden_0"),
        (lambda: deep(hidden=1), initializers.TruncatedNormal(20.0), "saturated", "top"),
    ],
    ids="large|large linear|overflow|small|sigmoid|tanh|steep sigmoid|softmax".split("|"),
)
def test_a_start_that_does_not_suit_is_named(model, start, expected, where, batch):
    model = model()
    initializers.reinitialize(model, start, seed=1)
    report = signal_report(model, batch)
    assert report.status == expected and report.first_trouble.layer.startswith(where)
    assert f"status: {expected}, first at {report.first_trouble.layer}" in str(report)


def test_units_that_never_fire_are_dead(batch):
    model = deep(hidden=3)
    model.layers[1].bias.assign(np.full(64, -1e3))
    report = signal_report(model, batch)
    assert report.status == "dead" and report.first_trouble.layer == "hidden_1"
    assert report.layers[1].zeros == 1 and report.layers[0].status == "vanishing"  # no gradient comes through


def test_values_that_are_not_finite_are_exploding(batch):
    model = deep(hidden=2, last=None)
    model.layers[0].bias.assign(np.full(64, np.inf))
    assert {row.status for row in signal_report(model, batch).layers} == {"exploding"}


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_spreads_are_right_where_their_squares_are_out_of_range(scale):
    model = keras.Sequential([keras.Input((4,)), layers.Dense(5, "linear", name="dense")])
    x = np.random.default_rng(0).normal(size=(9, 4)).astype("float32") * np.float32(scale)
    (row,) = signal_report(model, x).layers
    values = np.asarray(x, np.float64) @ model.layers[0].kernel.numpy()
    assert math.isclose(row.std, values.std(), rel_tol=1e-5) and row.status == "healthy"


def test_a_softmax_over_many_classes_is_not_vanishing(batch):
    model = keras.Sequential([keras.Input((16,)), layers.Dense(5000, name="logits"), layers.Softmax()])
    report = signal_report(model, batch * 0.01)
    assert report.layers[1].std < 1e-3 * report.layers[0].std
    assert report.layers[1].ratio == 1 and report.status == "healthy"


@pytest.mark.parametrize("last", [[layers.Dense(7, "softmax")], [layers.Dense(7), layers.Softmax()]])
def test_gradients_start_before_the_softmax_that_a_model_ends_in(last, batch):
    model = keras.Sequential([keras.Input((16,)), layers.Dense(8, "tanh"), *last])
    direction = signal_report(model, batch).layers[-1]
    assert math.isclose(direction.gradient_norm, 1, rel_tol=1e-6)
    y = np.zeros(32, int)
    loss = signal_report(model, batch, y=y, loss="sparse_categorical_crossentropy").layers[-1]
    chances = model(batch).numpy() - np.eye(7)[y]
    assert math.isclose(loss.gradient_norm, np.sqrt(((chances / 32) ** 2).sum() / 32), rel_tol=1e-4)


def test_what_follows_a_normalisation_is_judged_by_the_scale_that_it_sets(batch):
    rest = [layers.Dense(8), layers.BatchNormalization(), layers.Dense(8, name="next"), layers.Dense(8, name="last")]
    model = keras.Sequential([keras.Input((16,)), *rest])
    after = signal_report(model, batch * 1e5).layers[1:]
    assert all(row.ratio < 1e-3 and row.status == "healthy" for row in after)
    model.layers[2].kernel.assign(model.layers[2].kernel * 1e-5)
    assert signal_report(model, batch * 1e5).layers[2].status == "vanishing"


def test_layers_before_the_first_kernel_only_prepare_data(batch):
    model = keras.Sequential([keras.Input((16,)), layers.Rescaling(1e-5), layers.Dense(3)])
    report = signal_report(model, batch * 1e5)
    assert [row.status for row in report.layers] == ["healthy", "healthy"] and report.layers[1].ratio == 1


# ---------------------------------------------------------------- models


def test_nothing_in_the_model_changes(batch):
    model = sequential((16,), layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(2))
    before = [variable.numpy() for variable in model.variables]
    state = dict(vars(model.layers[0]))
    reports = [signal_report(model, batch) for _ in range(2)]
    assert all(map(np.array_equal, before, [variable.numpy() for variable in model.variables]))
    assert reports[0] == reports[1]
    assert vars(model.layers[0]).keys() == state.keys() and vars(model.layers[0])["activation"] is state["activation"]
    assert 0.3 < reports[0].layers[2].zeros < 0.7 and signal_report(model, batch, training=False).layers[2].zeros < 0.2


class Branching(keras.Model):
    """Subclassed: a shared layer, a nested model, a dictionary in and out, a frozen layer."""

    def __init__(self):
        super().__init__()
        self.shared = layers.Dense(6, "relu", name="shared", trainable=False)
        self.inner = keras.Sequential([layers.Dense(6, name="deep"), layers.Dense(2, name="out")], name="inner")

    def call(self, inputs):
        left, right = self.shared(inputs["left"]), self.shared(inputs["right"])
        return {"a": self.inner(left + right), "b": left}


def test_subclassed_models_shared_layers_and_dictionaries_are_followed(batch):
    model = Branching()
    inputs = {"left": batch, "right": -batch}
    model(inputs)
    report = signal_report(model, inputs)
    assert [row.layer for row in report.layers] == ["shared", "shared (call 2)", "inner/deep", "inner/out"]
    assert all(row.gradient_norm > 0 for row in report.layers)


def test_recurrent_layers_are_one_row_and_lookups_start_the_model():
    model = keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            layers.Embedding(20, 8, name="tokens"),
            layers.Bidirectional(layers.LSTM(5, return_sequences=True, name="lstm"), name="both"),
            layers.TimeDistributed(layers.Dense(4, "relu"), name="each"),
            layers.GlobalAveragePooling1D(name="mean"),
            layers.Dense(2, name="top"),
        ]
    )
    report = signal_report(model, np.random.default_rng(0).integers(0, 20, (6, 7)))
    names = [row.layer for row in report.layers]
    assert names[0] == "tokens" and names[-3:] == ["each", "mean", "top"] and len(names) == 6
    assert all(row.gradient_norm > 0 for row in report.layers) and report.status == "healthy"


def test_mixed_precision_is_measured_in_float32(batch):
    model = keras.Sequential([keras.Input((16,)), layers.Dense(9, "relu", dtype="mixed_float16"), layers.Dense(2)])
    report = signal_report(model, batch * 100)
    assert report.status == "healthy" and report.layers[0].std > 10


def test_a_part_that_no_output_depends_on_has_no_gradient(batch):
    class Losing(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.lost = layers.Dense(3, name="used"), layers.Dense(3, name="lost")

        def call(self, x):
            self.lost(x)
            return self.used(x)

    model = Losing()
    model(batch)
    lost, used = signal_report(model, batch).layers
    assert lost.gradient_norm is None and lost.gradient_ratio is None and used.gradient_ratio == 1
    assert " - " in str(signal_report(model, batch))


# ---------------------------------------------------------------- the report and its errors


def test_the_report_is_a_table_and_a_dictionary(batch):
    report = signal_report(deep(hidden=2), batch)
    lines = str(report).splitlines()
    assert lines[0] == "deep: 32 examples, gradient of a random direction of its outputs"
    assert lines[1].split()[:4] == ["layer", "kind", "mean", "std"]
    assert [line.split()[0] for line in lines[2:-1]] == ["hidden_0", "hidden_1", "top"]
    described = json.loads(json.dumps(report.to_dict()))
    assert described["status"] == "healthy" and described["layers"][0]["activation"] == "relu"
    assert STATUSES[-1] == "healthy"


def test_half_a_loss_an_unbuilt_model_and_a_model_without_floats_are_refused(batch):
    with pytest.raises(ValueError, match="Received: y without loss"):
        signal_report(deep(), batch, y=np.zeros(32))
    with pytest.raises(ValueError, match="Received: loss without y"):
        signal_report(deep(), batch, loss="mse")
    with pytest.raises(ValueError, match="is not built"):
        signal_report(keras.Sequential([layers.Dense(3)]), batch)
    with pytest.raises(TypeError, match="works on Keras 3 models"):
        signal_report("model", batch)
    whole = keras.Sequential([keras.Input((3,), dtype="int32"), layers.Flatten(dtype="int32")])
    with pytest.raises(ValueError, match="No layer .* has floating-point outputs"):
        signal_report(whole, np.ones((2, 3), int))


# ---------------------------------------------------------------- the picture


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_is_written_and_the_same_each_time(batch, tmp_path, suffix):
    model = deep(hidden=3)
    initializers.reinitialize(model, initializers.TruncatedNormal(200.0), seed=1)
    report = initializers.signal_report(model, batch)
    paths = [pk.reports.signal_picture(report, tmp_path / f"{i}.{suffix}") for i in range(2)]
    first = paths[0].read_bytes()
    assert first == paths[1].read_bytes()
    assert first.startswith(b"\x89PNG") if suffix == "png" else b"hidden_1" in first and b"exploding" in first


def test_awkward_reports_are_drawn(tmp_path, batch):
    model = keras.Sequential([keras.Input((16,)), layers.Dense(3, name="$x_{$"), layers.Dense(2, name="<b>&")])
    for bias in (0.0, np.inf, np.nan):
        model.layers[0].bias.assign(np.full(3, bias))
        for inputs in (batch, 0 * batch):
            assert pk.reports.signal_picture(signal_report(model, inputs), str(tmp_path / "picture.svg")).exists()


def test_a_picture_of_another_kind_is_refused(tmp_path, batch):
    with pytest.raises(ValueError, match=r"as .png or .svg. Received: 'report.pdf'"):
        pk.reports.signal_picture(signal_report(deep(hidden=1), batch), "report.pdf")
