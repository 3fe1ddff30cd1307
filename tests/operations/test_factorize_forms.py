"""pk.factorize(..., form=...): convolutions as channels, separable and tucker; the best of them for each layer."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from keras import layers as L
from networks import outputs, sequential

import prunekit as pk
from prunekit.core.runtime.variable_values import replaced
from prunekit.techniques.factorize.factorizing import candidates
from prunekit.techniques.factorize.fitting import Fitting
from prunekit.techniques.factorize.forms import CHANNELS, SEPARABLE, TUCKER, Factors, Layout, Structure
from prunekit.techniques.factorize.layer_parts import layout_of
from prunekit.techniques.factorize.new_model import with_parts
from prunekit.techniques.factorize.options import FactorizeOptions

pytestmark = pytest.mark.every_backend

# Shape of the input, and the convolution.
CONVOLUTIONS = {
    "plain": ((9, 9, 6), L.Conv2D, (12, 3), {"activation": "relu"}),
    "same, strides": ((9, 8, 6), L.Conv2D, (12, (3, 4)), {"strides": 2, "padding": "same"}),
    "valid, strides": ((12, 11, 6), L.Conv2D, (12, (5, 3)), {"strides": 3, "use_bias": False}),
    "dilated": ((11, 11, 6), L.Conv2D, (12, 3), {"dilation_rate": 2, "padding": "same"}),
    "causal rows": ((14, 6), L.Conv1D, (12, 3), {"padding": "causal", "dilation_rate": 2}),
    "volume": ((6, 5, 7, 4), L.Conv3D, (9, (3, 2, 3)), {"strides": (1, 1, 2), "padding": "same"}),
}
FORMS = {
    name: (CHANNELS, TUCKER) if "rows" in name or "volume" in name else (CHANNELS, SEPARABLE, TUCKER)
    for name in CONVOLUTIONS
}
CASES = [(name, form) for name, forms in FORMS.items() for form in forms]


def model_and_data(name, examples=48):
    shape, kind, args, options = CONVOLUTIONS[name]
    keras.utils.set_random_seed(2)
    x = keras.Input(shape, name="x")
    y = kind(*args, name="conv", **options)(x)
    model = keras.Model(x, L.Dense(3, name="head")(L.Flatten(name="flat")(L.BatchNormalization(name="norm")(y))))
    rng = np.random.default_rng(3)
    model.set_weights([one + 0.05 * rng.normal(size=one.shape).astype("float32") for one in model.get_weights()])
    return model, rng.normal(size=(examples, *shape)).astype("float32")


def with_structure(model, x, structure_of, form):
    """(New model, values with which the model itself computes the same)."""
    options = FactorizeOptions(form=form, include="conv")
    targets, _ = candidates(model, options)
    found = Fitting(model, targets, options, x).factors(
        {one.name: [structure_of(layout_of(one), form)] for one in targets}
    )
    values = [(one, np.array(keras.ops.convert_to_numpy(value))) for one, value in found.values]
    return with_parts(model, targets, found)[0], values


def some(layout, form):
    return Structure(form, tuple(max(1, rank // 3) for rank in layout.full(form).ranks))


def difference(one, other):
    return max(float(np.abs(a - b).max() / np.abs(a).max()) for a, b in zip(one, other, strict=True))


@pytest.mark.every_backend(cases=5)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_at_full_rank_the_outputs_are_equal(name, form):
    model, x = model_and_data(name)
    made, _ = with_structure(model, x, Layout.full, form)
    assert difference(outputs(model, x), outputs(made, x)) < 3e-6
    assert len(made.layers) == len(model.layers) + (2 if form == TUCKER else 1)


@pytest.mark.every_backend(cases=5)
@pytest.mark.parametrize(("name", "form"), CASES)
def test_the_layers_compute_what_the_layer_computes_with_a_weight_of_low_rank(name, form):
    model, x = model_and_data(name)
    made, values = with_structure(model, x, some, form)
    with replaced(values):
        assert difference(outputs(model, x), outputs(made, x)) < 3e-6


def chain():
    """Five convolutions; those behind are fitted to the outputs from what those before compute."""
    layers = [L.Conv2D(8, 3, padding="same", activation="relu", name=f"conv_{number}") for number in range(5)]
    return sequential((8, 8, 3), *layers, L.GlobalAveragePooling2D(), L.Dense(4, name="head"))


@pytest.mark.every_backend(cases=1)
@pytest.mark.parametrize("form", [CHANNELS, SEPARABLE, TUCKER])
def test_nothing_is_fitted_to_the_rounding_of_layers_before(form):
    keras.utils.set_random_seed(0)
    model, x = chain(), np.random.default_rng(0).normal(size=(32, 8, 8, 3)).astype("float32")
    options = FactorizeOptions(form=form, include="conv_*")
    targets, _ = candidates(model, options)
    fitting = Fitting(model, targets, options, x)
    found = fitting.factors({one.name: [layout_of(one).full(form)] for one in targets})
    for one in targets:
        kernel = keras.ops.convert_to_numpy(one.variable).astype("float64")
        np.testing.assert_allclose(found.factors[one.name].matrix, kernel.reshape(-1, 8), atol=1e-12)
    made, _, _ = with_parts(model, targets, found)
    assert difference(outputs(model, x), outputs(made, x)) < 3e-6


def images(examples=256, seed=0):
    """Smooth images of four classes, so that neighbouring pixels are alike."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 4, examples)
    coarse = rng.normal(size=(examples, 4, 4, 2)) * 0.5
    coarse[np.arange(examples), y % 2, y // 2] += 2.0
    return (coarse.repeat(3, axis=1).repeat(3, axis=2) + 0.1 * rng.normal(size=(examples, 12, 12, 2))).astype(
        "float32"
    ), y


def classifier():
    keras.utils.set_random_seed(1)
    model = sequential(
        (12, 12, 2),
        L.Conv2D(16, 3, padding="same", activation="relu", name="first"),
        L.Conv2D(24, 3, strides=2, padding="same", activation="relu", name="second"),
        L.Conv2D(32, 3, activation="relu", name="third"),
        L.GlobalAveragePooling2D(name="pool"),
        L.Dense(4, name="head"),
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


@pytest.fixture(scope="module")
def trained():
    model, (x, y) = classifier(), images()
    model.fit(x, y, epochs=4, batch_size=32, verbose=0)
    return model, x, y


@pytest.mark.one_backend
@pytest.mark.parametrize("measure", ["parameters", "macs"])
def test_auto_loses_about_what_the_best_form_loses_and_reaches_the_share(trained, measure):
    model, x, y = trained
    total, forms = {}, ("channels", "separable", "tucker", "auto")
    for form in forms:
        smaller, report = pk.factorize(model, **{measure: 0.5}, data=(x, y), form=form)
        before, after = getattr(report, measure)
        assert 0.45 * before <= after <= 0.5 * before
        assert {"parameters": smaller.count_params, "macs": lambda made=smaller: pk.cost(made).macs}[measure]() == after
        total[form] = sum(one.error for one in report.layers)
        kinds = {one.form for one in report.layers if one.name != "head/kernel"}
        assert form == "auto" or kinds == {form}
    # The sizes are shared by what each layer loses alone; these errors have those of the layers before in them.
    assert total["auto"] <= 1.2 * min(total.values())
    assert total["auto"] < 0.8 * total["channels"]


def test_the_report_names_form_ranks_and_layers_and_what_other_forms_lose(trained):
    model, x, y = trained
    smaller, report = pk.factorize(model, parameters=0.4, data=(x, y), include="third")
    (row,) = report.layers
    assert set(row.by_form) == {"channels", "separable", "tucker"} and row.by_form[row.form] == row.error
    assert row.error == min(row.by_form.values())
    assert len(row.ranks) == len(row.added) == (2 if row.form == "tucker" else 1)
    sizes = sum(int(np.prod(smaller.get_layer(name).kernel.shape)) for name in (*row.added, "third"))
    assert row.parameters == (24 * 9 * 32, sizes)
    assert len(row.errors) == row.full == 32
    table = next(one for one in report.sections() if one.title == "Layers of low rank")
    assert row.form in table.rows[0] and row.form in str(report)
    assert report.to_dict()["layers"][0]["ranks"] == list(row.ranks)


@pytest.mark.parametrize("form", [SEPARABLE, TUCKER])
def test_the_optimizer_s_state_follows_by_the_chain_rule(trained, form):
    model, x, y = trained
    smaller, report = pk.factorize(model, rank={"third": 6}, data=(x, y), form=form)
    (row,) = report.layers
    names = [*row.added, "third"]
    array = keras.ops.convert_to_numpy
    kernels = [array(smaller.get_layer(name).kernel).astype("float64") for name in names]
    if form == SEPARABLE:
        arrays = (kernels[0][:, 0], kernels[1][0])
        assert kernels[0].shape == (3, 1, 24, 6) and kernels[1].shape == (1, 3, 6, 32)
    else:
        arrays = (kernels[0][0, 0], kernels[1].reshape(9, 6, 6), kernels[2][0, 0])
        assert kernels[0].shape == (1, 1, 24, 6) and kernels[2].shape == (1, 1, 6, 32)
    factors = Factors(form, arrays)

    def slot(made, name, kind):
        (found,) = [one for one in made.optimizer.variables if f"{name}_kernel_{kind}" in one.path]
        return array(found).astype("float64")

    for kind, squared in (("momentum", False), ("velocity", True)):
        wanted = factors.chained(slot(model, "third", kind).reshape(-1, 32), squared=squared)
        for name, value in zip(names, wanted, strict=True):
            np.testing.assert_allclose(slot(smaller, name, kind).reshape(value.shape), value, rtol=1e-3, atol=1e-7)
    loss = smaller.evaluate(x, y, verbose=0)[0]
    smaller.optimizer.learning_rate = 3e-4
    smaller.fit(x, y, epochs=3, batch_size=32, verbose=0)
    assert smaller.evaluate(x, y, verbose=0)[0] <= loss


@pytest.mark.one_backend
def test_a_rank_is_that_of_channels_and_an_energy_takes_the_smallest_form(trained):
    model, x, y = trained
    _, report = pk.factorize(model, rank=4, data=(x, y), include=["second", "third"])
    assert [(one.form, one.ranks) for one in report.layers] == [("channels", (4,))] * 2
    sizes = {}
    for form in ("auto", "channels", "separable", "tucker"):
        _, report = pk.factorize(model, energy=0.95, data=(x, y), include="third", form=form)
        sizes[form] = report.layers[0].parameters[1]
        assert report.layers[0].error <= 0.05
    assert sizes["auto"] == min(sizes.values()) < sizes["channels"]


@pytest.mark.one_backend
def test_what_has_no_such_form_stays_with_the_reason():
    keras.utils.set_random_seed(0)
    model = sequential(
        (8, 8, 6),
        L.Conv2D(16, 3, name="wide"),
        L.Conv2D(24, 1, name="point"),
        L.Conv2D(24, (1, 3), name="row"),
        L.Conv2D(24, 3, groups=2, name="grouped"),
        L.Flatten(name="flat"),
        L.Dense(30, name="dense"),
    )
    x = np.random.default_rng(0).normal(size=(32, 8, 8, 6)).astype("float32")
    _, report = pk.factorize(model, parameters=0.7, data=x, form="separable")
    reasons = {one.name: one.reason for one in report.skipped}
    assert "1 x 3 has no two sides" in reasons["row/kernel"]
    assert "by groups" in reasons["grouped/kernel"]
    # These have one form alone.
    _, report = pk.factorize(model, rank=2, data=x, form="separable")
    forms = {one.name: one.form for one in report.layers}
    assert forms == {"wide/kernel": "separable", "point/kernel": "channels", "dense/kernel": "pair"}


def test_channels_first():
    if BACKEND == "tensorflow":
        pytest.skip("TensorFlow convolves channels_first on GPUs alone")
    keras.utils.set_random_seed(0)
    x = keras.Input((6, 9, 9))
    model = keras.Model(x, L.Conv2D(12, 3, strides=2, padding="same", data_format="channels_first", name="conv")(x))
    data = np.random.default_rng(0).normal(size=(32, 6, 9, 9)).astype("float32")
    for form in (SEPARABLE, TUCKER):
        made, _ = with_structure(model, data, Layout.full, form)
        assert difference(outputs(model, data), outputs(made, data)) < 3e-6


@pytest.mark.one_backend
def test_without_data_each_form_is_fitted_to_synthetic_inputs(trained):
    model, x, _ = trained
    before = outputs(model, x)[0]
    for form in ("separable", "tucker"):
        smaller, report = pk.factorize(model, parameters=0.6, form=form)
        assert any("synthetic" in note for note in report.notes)
        assert np.square(outputs(smaller, x)[0] - before).sum() < 0.5 * np.square(before).sum()


@pytest.mark.one_backend
def test_the_new_model_is_saved_and_loads(trained, tmp_path):
    model, x, y = trained
    for form in ("separable", "tucker"):
        smaller, _ = pk.factorize(model, parameters=0.5, data=(x, y), form=form)
        smaller.save(tmp_path / f"{form}.keras")
        loaded = keras.models.load_model(tmp_path / f"{form}.keras")
        np.testing.assert_array_equal(outputs(loaded, x)[0], outputs(smaller, x)[0])


@tensorflow_only
def test_integers_follow_and_a_measured_size_is_reached(trained, tmp_path):
    model, x, y = trained
    smaller, report = pk.factorize(model, bytes=0.6, data=(x, y))
    assert report.layers and smaller.count_params() < 0.65 * model.count_params()
    integers = pk.quantize(smaller, (x, y))
    integers.export(tmp_path / "m.tflite")
    with integers.simulating():
        assert smaller.evaluate(x, y, verbose=0)[1] >= model.evaluate(x, y, verbose=0)[1] - 0.03
