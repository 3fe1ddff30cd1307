"""pk.factorize: layers of each kind, targets, what is kept, and a model that goes on training."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from keras import layers as L
from networks import outputs

import prunekit as pk
from prunekit.core.runtime.variable_values import replaced
from prunekit.reports import FactorizeReport
from prunekit.techniques.factorize.factorizing import candidates
from prunekit.techniques.factorize.fitting import Fitting
from prunekit.techniques.factorize.forms import Layout, Structure
from prunekit.techniques.factorize.layer_parts import layout_of
from prunekit.techniques.factorize.new_model import with_parts
from prunekit.techniques.factorize.options import FactorizeOptions

pytestmark = pytest.mark.every_backend


def conv():
    x = keras.Input((12, 12, 6), name="x")
    y = L.Conv2D(16, 3, strides=2, padding="same", activation="relu", name="strided")(x)
    y = L.Conv2D(8, 1, use_bias=False, name="point")(L.BatchNormalization(name="norm")(y))
    y = L.Conv2D(8, 3, dilation_rate=2, name="dilated")(y)
    y = L.Flatten(name="flat")(L.DepthwiseConv2D(2, name="depthwise")(y))
    return keras.Model(x, L.Dense(5, name="head")(L.Dense(20, "gelu", name="hidden")(y)))


def conv_of_rows():
    x = keras.Input((14, 5), name="x")
    return keras.Model(x, L.Conv1D(9, 3, padding="causal", activation="tanh", name="rows")(x))


def einsum():
    x = keras.Input((10, 16), name="x")
    y = L.EinsumDense("abc,cde->abde", output_shape=(None, 4, 5), bias_axes="de", name="split")(x)
    y = L.EinsumDense("abde,dec->abc", output_shape=(None, 7), bias_axes="c", activation="relu", name="join")(y)
    return keras.Model(x, L.EinsumDense("...x,xy->...y", output_shape=9, bias_axes="y", name="dots")(y))


def attention():
    x = keras.Input((10, 16), name="x")
    y = L.Add(name="sum")([x, L.MultiHeadAttention(4, 8, name="attention")(x, x)])
    return keras.Model(x, L.Dense(6, name="out")(y))


def nested():
    inner = keras.Sequential([keras.Input((8,)), L.Dense(9, name="in"), L.Dense(7, name="mid")], name="inner")
    x = keras.Input((12,), name="x")
    return keras.Model(x, inner(_twice(L.Dense(8, activation="relu", name="shared"), L.Dense(8, name="first")(x))))


def _twice(layer, x):
    return layer(layer(x))


class Chain(keras.Model):
    def __init__(self):
        super().__init__()
        self.one, self.two = L.Dense(12, activation="relu", name="one"), L.Dense(4, name="two")

    def call(self, x):
        return self.two(self.one(x)) + 1.0


def subclassed():
    model = Chain()
    model(np.zeros((1, 9), "float32"))
    return model


SHAPES = {
    conv: (12, 12, 6),
    conv_of_rows: (14, 5),
    einsum: (10, 16),
    attention: (10, 16),
    nested: (12,),
    subclassed: (9,),
}


def model_and_data(build, examples=64):
    keras.utils.set_random_seed(2)
    model = build()
    rng = np.random.default_rng(3)
    model.set_weights([one + 0.05 * rng.normal(size=one.shape).astype("float32") for one in model.get_weights()])
    return model, rng.normal(size=(examples, *SHAPES[build])).astype("float32")


def difference(one, other):
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(one, other, strict=True))


def at_ranks(model, x, rank_of, form="channels"):
    """(New model, values with which the model itself computes the same)."""
    options = FactorizeOptions(form=form)
    targets, _ = candidates(model, options)
    fitting = Fitting(model, targets, options, x)
    layouts = {one.name: layout_of(one) for one in targets}
    forms = {name: layout.forms()[0] if not layout.window else form for name, layout in layouts.items()}
    found = fitting.factors({name: [rank_of(layouts[name], forms[name])] for name in layouts})
    return with_parts(model, targets, found)[0], [
        (one, np.array(keras.ops.convert_to_numpy(v))) for one, v in found.values
    ]


def a_third(layout, form):
    return Structure(form, tuple(max(1, rank // 3) for rank in layout.full(form).ranks))


@pytest.mark.parametrize("build", SHAPES)
def test_at_full_rank_the_outputs_are_equal(build):
    model, x = model_and_data(build)
    made, _ = at_ranks(model, x, Layout.full)
    assert len(made.layers) >= len(model.layers) + 1
    assert difference(outputs(model, x), outputs(made, x)) < 1e-5


@pytest.mark.parametrize("build", SHAPES)
def test_the_two_layers_compute_what_the_layer_computes_with_a_weight_of_low_rank(build):
    model, x = model_and_data(build)
    made, values = at_ranks(model, x, a_third)
    before = outputs(model, x)
    with replaced(values):
        assert difference(outputs(model, x), outputs(made, x)) < 2e-6
    # The model itself is as it was.
    assert difference(before, outputs(model, x)) == 0


def test_channels_first():
    if BACKEND == "tensorflow":
        pytest.skip("TensorFlow convolves channels_first on GPUs alone")
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 9, 9))
    model = keras.Model(x, L.Conv2D(12, 3, data_format="channels_first", name="c")(x))
    data = np.random.default_rng(0).normal(size=(32, 6, 9, 9)).astype("float32")
    made, _ = at_ranks(model, data, Layout.full)
    assert difference(outputs(model, data), outputs(made, data)) < 1e-5


def tokens(mask_zero):
    keras.utils.set_random_seed(0)
    x = keras.Input((10,), dtype="int32")
    y = L.Embedding(60, 24, mask_zero=mask_zero, name="table")(x)
    return keras.Model(x, L.LSTM(6, name="lstm")(y))


@pytest.mark.parametrize("mask_zero", [False, True])
def test_a_table_becomes_a_smaller_one_and_a_projection_and_masks_pass(mask_zero):
    model, rng = tokens(mask_zero), np.random.default_rng(0)
    x = rng.integers(0, 60, (128, 10)).astype("int32")
    made, _ = at_ranks(model, x, Layout.full)
    assert difference(outputs(model, x), outputs(made, x)) < 1e-5
    smaller, report = pk.factorize(model, rank={"table": 6}, data=x)
    assert tuple(smaller.get_layer("table").embeddings.shape) == (60, 6)
    (row,) = report.layers
    assert (row.added, row.rank, row.full, row.parameters) == (("table_projection",), 6, 24, (1440, 504))
    reasons = {one.name: one.reason for one in report.skipped}
    assert "no rule for the recurrent_kernel of LSTMCell" in reasons["lstm/recurrent_kernel"]


def classifier(compiled=True):
    keras.utils.set_random_seed(1)
    x = keras.Input((40,), name="x")
    y = L.Dense(60, activation="relu", name="hidden")(x)
    model = keras.Model(x, L.Dense(5, name="logits")(L.Dense(50, activation="relu", name="second")(y)), name="net")
    if compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def learned(examples=512):
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(examples, 8)) @ rng.normal(size=(8, 40)) + 0.3 * rng.normal(size=(examples, 40))).astype(
        "float32"
    )
    return x, (x[:, :5] + 0.1 * rng.normal(size=(examples, 5))).argmax(axis=1)


@pytest.fixture(scope="module")
def trained():
    model, (x, y) = classifier(), learned()
    model.fit(x, y, epochs=15, batch_size=32, verbose=0)
    return model, x, y


@pytest.mark.parametrize("measure", ["parameters", "macs"])
@pytest.mark.parametrize("share", [0.7, 0.4])
def test_a_share_is_reached_and_quality_kept(trained, measure, share):
    model, x, y = trained
    smaller, report = pk.factorize(model, **{measure: share}, data=(x, y))
    assert isinstance(report, FactorizeReport)
    before, after = getattr(report, measure)
    assert after <= share * before and after >= 0.9 * share * before
    real = {"parameters": smaller.count_params, "macs": lambda: pk.cost(smaller).macs}[measure]
    assert real() == after
    (accuracy,) = [one for one in report.damage.metrics if one.name == "accuracy"]
    assert accuracy.after >= accuracy.before - 0.02
    assert smaller.output_names == model.output_names


def test_the_report_has_the_error_of_every_rank_and_that_of_the_layer(trained):
    model, x, y = trained
    _, report = pk.factorize(model, rank=8, data=(x, y), include="hidden")
    (row,) = report.layers
    assert len(row.errors) == row.full == 40 and np.all(np.diff(row.errors) <= 1e-12)
    # The first layer reads the data themselves, so that its error is that of its curve.
    assert row.error == pytest.approx(row.errors[7], rel=1e-3, abs=1e-9)
    kernel = keras.ops.convert_to_numpy(model.get_layer("hidden").kernel).astype("float64")
    answers = x @ kernel
    centred = answers - answers.mean(axis=0)
    singular = np.square(np.linalg.svd(centred, compute_uv=False))
    assert row.errors[7] == pytest.approx(singular[8:].sum() / np.square(answers).sum(), rel=1e-3, abs=1e-9)
    assert "Layers of low rank" in [one.title for one in report.sections()]
    assert report.to_dict()["layers"][0]["rank"] == 8 and "rank 8 of 40" in str(report)


def test_biases_take_over_the_means(trained):
    model, x, y = trained
    rng = np.random.default_rng(4)
    offset = x + rng.normal(size=40).astype("float32") * 3
    errors = [
        pk.factorize(model, rank=3, data=offset, include="hidden", correct_biases=corrects)[1].layers[0].error
        for corrects in (True, False)
    ]
    assert errors[0] < 0.95 * errors[1]


def test_a_later_layer_is_fitted_to_what_the_layers_before_it_compute(trained):
    """The least error of all matrices of its rank, from the inputs that the factorized layer before it gives."""
    model, x, _ = trained
    made, report = pk.factorize(model, rank={"hidden": 3, "second": 5}, data=x)
    hidden = [
        keras.ops.convert_to_numpy(keras.Model(one.input, one.get_layer("hidden").output)(x)).astype("float64")
        for one in (model, made)
    ]
    wanted = hidden[0] @ keras.ops.convert_to_numpy(model.get_layer("second").kernel).astype("float64")
    given, centred = (one - one.mean(axis=0) for one in (hidden[1], wanted))
    best = given @ np.linalg.lstsq(given, centred, rcond=None)[0]
    left = np.square(centred - best).sum() + np.square(np.linalg.svd(best, compute_uv=False)[5:]).sum()
    (row,) = [one for one in report.layers if one.name == "second/kernel"]
    # The fit is damped by 1 % of the mean energy of an input.
    assert row.error == pytest.approx(left / np.square(wanted).sum(), rel=0.03)


def slots(model, name):
    return {
        one.path.rpartition("_")[2]: keras.ops.convert_to_numpy(one).astype("float64")
        for one in model.optimizer.variables
        if f"{name}_kernel" in one.path
    }


def test_training_goes_on_with_the_optimizer_s_state(trained):
    model, x, y = trained
    smaller, report = pk.factorize(model, rank={"hidden": 8}, data=(x, y))
    assert not any("starts anew" in note for note in report.notes)
    steps = [int(keras.ops.convert_to_numpy(one.optimizer.iterations)) for one in (model, smaller)]
    assert steps[0] == steps[1] > 0
    for name, value in slots(model, "second").items():
        np.testing.assert_array_equal(value, slots(smaller, "second")[name])
    # By the chain rule: W = A B.
    first = keras.ops.convert_to_numpy(smaller.get_layer("hidden_reduction").kernel).astype("float64")
    second = keras.ops.convert_to_numpy(smaller.get_layer("hidden").kernel).astype("float64")
    before, of_first, of_second = (
        slots(one, name) for one, name in ((model, "hidden"), (smaller, "hidden_reduction"), (smaller, "hidden"))
    )
    assert len(before) == len(of_first) == 2
    close = dict(rtol=1e-3, atol=1e-6)
    np.testing.assert_allclose(of_first["momentum"], before["momentum"] @ second.T, **close)
    np.testing.assert_allclose(of_second["momentum"], first.T @ before["momentum"], **close)
    np.testing.assert_allclose(of_first["velocity"], before["velocity"] @ np.square(second).T, **close)
    np.testing.assert_allclose(of_second["velocity"], np.square(first).T @ before["velocity"], **close)
    loss = smaller.evaluate(x, y, verbose=0)[0]
    smaller.optimizer.learning_rate = 3e-4
    smaller.fit(x, y, epochs=5, batch_size=32, verbose=0)
    assert smaller.evaluate(x, y, verbose=0)[0] <= loss and smaller.get_layer("hidden_reduction").trainable


def test_the_new_model_is_saved_and_loads_without_prunekit(trained, tmp_path):
    model, x, y = trained
    smaller, _ = pk.factorize(model, parameters=0.5, data=(x, y))
    smaller.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(outputs(loaded, x)[0], outputs(smaller, x)[0])


def test_without_data_less_is_kept_than_with_and_more_than_by_the_weights_alone(trained):
    model, x, y = trained
    before = outputs(model, x)[0]
    errors = []
    for data in ((x, y), None):
        smaller, report = pk.factorize(model, rank=6, data=data)
        errors.append(float(np.square(outputs(smaller, x)[0] - before).sum()))
    assert errors[0] < errors[1]
    assert any("synthetic" in note for note in report.notes)


@pytest.mark.parametrize("energy", [0.9, 0.999])
def test_an_energy_is_kept_in_each_layer_that_becomes_smaller(trained, energy):
    model, x, y = trained
    _, report = pk.factorize(model, energy=energy, data=(x, y))
    assert report.layers
    for row in report.layers:
        assert row.errors[row.rank - 1] <= 1 - energy
        assert row.rank == 1 or row.errors[row.rank - 2] > 1 - energy


@tensorflow_only
@pytest.mark.parametrize("measure", ["bytes"])
def test_a_measured_size_is_reached(trained, measure):
    model, x, y = trained
    smaller, report = pk.factorize(model, **{measure: 0.6}, data=(x, y))
    assert report.layers and smaller.count_params() < model.count_params()


@tensorflow_only
def test_integers_follow(trained, tmp_path):
    model, x, y = trained
    smaller, _ = pk.factorize(model, parameters=0.5, data=(x, y))
    report = pk.quantize(smaller, (x, y))
    report.export(tmp_path / "m.tflite")
    with report.simulating():
        assert smaller.evaluate(x, y, verbose=0)[1] >= model.evaluate(x, y, verbose=0)[1] - 0.02


REFUSALS = {
    "no target": ({}, ValueError, "One target says how small"),
    "two targets": ({"rank": 4, "energy": 0.9}, ValueError, "Received: rank, energy"),
    "a percentage": ({"parameters": 50}, ValueError, "For 50 %, pass 0.5"),
    "no rank": ({"rank": 0}, ValueError, "an int from 1"),
    "a rank that is text": ({"rank": "small"}, TypeError, "Received: 'small'"),
    "a pattern": ({"rank": {"hiden": 4}}, ValueError, "hiden"),
    "energy of 1": ({"energy": 1.0}, ValueError, "above 0 and below 1"),
    "what cannot be reached": ({"parameters": 0.01}, ValueError, "with rank 1 everywhere 0.0[0-9]+ is left"),
    "ranks that do not pay": ({"rank": 1000}, ValueError, "No layer becomes smaller.*its factors have"),
    "an unknown form": ({"rank": 4, "form": "tuckers"}, ValueError, "Did you mean 'tucker'"),
    "an unknown option": ({"rank": 4, "repair": "weights"}, TypeError, "repair"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_call_is_refused_and_changes_nothing(name):
    options, kind, match = REFUSALS[name]
    model = classifier(compiled=False)
    before = [np.array(one) for one in model.get_weights()]
    with pytest.raises(kind, match=match):
        pk.factorize(model, **options)
    for one, two in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_size_has_a_name():
    with pytest.raises(TypeError, match="pass parameters=0.5"):
        pk.factorize(classifier(), 0.5)


def test_zeros_of_a_pruned_weight_are_lost_with_a_note(trained):
    model, x, y = trained
    pruned = keras.models.clone_model(model)
    pruned.set_weights(model.get_weights())
    pk.prune(pruned, 0.5, (x, y))
    _, report = pk.factorize(pruned, rank=6, data=x)
    assert any("Zeros are lost in hidden/kernel" in note for note in report.notes)
