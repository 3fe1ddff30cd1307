"""pk.reduce_dimension: layers alone against NumPy's mode-n product, and inside a model that goes on training."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import outputs

import prunekit as pk
from prunekit.reports import DimensionReport

pytestmark = pytest.mark.every_backend


def tensors(examples=60, windows=12, features=16, seed=0):
    """Five directions of features, and little else; means that differ."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(examples, windows, 5)) @ rng.normal(size=(5, features)) + rng.normal(size=features) * 3
    return (x + 0.05 * rng.normal(size=x.shape)).astype("float32")


def directions(x, axis, size):
    """Means and leading directions by NumPy's singular value decomposition."""
    unfolded = np.moveaxis(x.astype("float64"), axis, 0).reshape(x.shape[axis], -1)
    means = unfolded.mean(axis=1)
    return means, np.linalg.svd(unfolded - means[:, None], full_matrices=False)[0][:, :size]


AXES = {"features": 2, "windows": 1, -1: 2, 1: 1}


@pytest.mark.parametrize("axis", AXES)
def test_the_layers_are_the_product_along_one_dimension_and_its_transpose(axis):
    x, number = tensors(), AXES[axis]
    (reduce, restore), report = pk.reduce_dimension(data=x, size=4, axis=axis)
    means, vectors = directions(x, number, 4)
    moved = np.moveaxis(x - np.expand_dims(means, 1 if number == 1 else 0), number, -1)
    found = np.moveaxis(keras.ops.convert_to_numpy(reduce(x)), number, -1)
    signs = np.sign(np.sum(found * (moved @ vectors), axis=(0, 1)))
    np.testing.assert_allclose(found, moved @ vectors * signs, atol=2e-4)
    restored = keras.ops.convert_to_numpy(restore(reduce(x)))
    assert restored.shape == x.shape
    wanted = np.moveaxis(moved @ vectors @ vectors.T + means, -1, number)
    np.testing.assert_allclose(restored, wanted, atol=2e-4)
    error = np.square(x - wanted).sum() / np.square(moved).sum()
    assert report.error == report.sizes[3].error == pytest.approx(error, rel=1e-3)
    assert (report.axis, report.length, report.size, report.examples) == (number, x.shape[number], 4, 60)
    assert report.model_name is None and report.damage is None
    assert reduce.trainable and isinstance(reduce, L.EinsumDense)


def test_the_size_follows_from_an_energy():
    x = tensors()
    (reduce, _), report = pk.reduce_dimension(data=x, energy=0.99)
    assert report.size == 5 and report.error <= 0.01 < report.sizes[3].error
    assert tuple(reduce(x).shape) == (60, 12, 5)
    assert "16 -> 5 entries" in report.verdict() and "Entries of the dimension" in report.sections()[0].title


def test_images_have_a_dimension_reduced_and_windows_of_other_lengths_are_read():
    images = np.random.default_rng(0).normal(size=(10, 6, 5, 8)).astype("float32")
    (reduce, _), _ = pk.reduce_dimension(data=images, size=3)
    assert tuple(reduce(images).shape) == (10, 6, 5, 3)
    (reduce, restore), report = pk.reduce_dimension(data=[tensors(8, 12), tensors(8, 9)], size=3)
    assert tuple(restore(reduce(tensors(4, 20))).shape) == (4, 20, 16) and report.examples == 16


def sequences(compiled=True):
    keras.utils.set_random_seed(3)
    x = keras.Input((12, 16), name="x")
    y = L.Conv1D(20, 3, padding="same", activation="relu", name="conv")(x)
    y = L.GlobalAveragePooling1D(name="pool")(L.LSTM(10, return_sequences=True, name="lstm")(y))
    model = keras.Model(x, L.Dense(3, name="head")(y), name="net")
    if compiled:
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def labels(x):
    return x[:, :, :3].mean(axis=1).argmax(axis=-1)


@pytest.mark.parametrize(("axis", "length"), [("features", 20), ("windows", 12)])
def test_at_full_size_the_outputs_are_equal_and_at_fewer_entries_the_layers_do_what_they_do_alone(axis, length):
    model, x = sequences(compiled=False), tensors()
    whole, _ = pk.reduce_dimension(model, "lstm", x, size=length, axis=axis)
    np.testing.assert_allclose(outputs(whole, x)[0], outputs(model, x)[0], atol=1e-5)
    made, report = pk.reduce_dimension(model, "lstm", x, size=4, axis=axis)
    inner = keras.Model(model.input, model.get_layer("conv").output)(x)
    (reduce, restore), alone = pk.reduce_dimension(data=keras.ops.convert_to_numpy(inner), size=4, axis=axis)
    behind = keras.Input((12, 20))
    rest = keras.Model(behind, model.get_layer("head")(model.get_layer("pool")(model.get_layer("lstm")(behind))))
    np.testing.assert_allclose(outputs(made, x)[0], outputs(rest, restore(reduce(inner)))[0], atol=1e-4)
    assert report.error == pytest.approx(alone.error, rel=1e-3)
    assert (report.model_name, report.layer, report.damage.examples) == ("net", "lstm", 60)
    assert made.get_layer("lstm_reduce").kernel.shape[-1] == 4


def test_training_goes_on_and_the_model_is_as_it_was():
    model, x = sequences(), tensors()
    y = labels(x)
    model.fit(x, y, epochs=2, verbose=0)
    before = outputs(model, x)[0]
    made, report = pk.reduce_dimension(model, "conv", (x, y), energy=0.999)
    np.testing.assert_array_equal(outputs(model, x)[0], before)
    assert [one.name for one in report.damage.metrics][0] == "accuracy"
    steps = [int(keras.ops.convert_to_numpy(one.optimizer.iterations)) for one in (model, made)]
    assert steps[0] == steps[1] > 0
    kernel = keras.ops.convert_to_numpy(made.get_layer("conv_reduce").kernel)
    loss = made.evaluate(x, y, verbose=0)[0]
    made.fit(x, y, epochs=8, verbose=0)
    assert made.evaluate(x, y, verbose=0)[0] < loss
    assert np.abs(keras.ops.convert_to_numpy(made.get_layer("conv_reduce").kernel) - kernel).max() > 0


def test_without_restoring_layers_behind_read_the_reduced_dimension():
    model, x = sequences(compiled=False), tensors()
    made, _ = pk.reduce_dimension(model, "lstm", x, size=3, axis="windows", restore=False)
    assert tuple(made.get_layer("lstm").output.shape) == (None, 3, 10) and made.output_shape == (None, 3)
    assert "lstm_restore" not in {one.name for one in made.layers}
    with pytest.raises(ValueError, match="Without `restore`.*Pass restore=True"):
        pk.reduce_dimension(model, "lstm", x, size=3, restore=False)


def test_a_shared_layer_and_a_nested_model_have_it_at_each_call():
    keras.utils.set_random_seed(0)
    shared = L.Dense(16, name="shared")
    inner = keras.Sequential([keras.Input((12, 16)), L.Dense(7, name="deep")], name="inner")
    x = keras.Input((12, 16))
    model = keras.Model(x, inner(shared(shared(x))))
    data = tensors()
    for name in ("shared", "deep", "inner"):
        made, _ = pk.reduce_dimension(model, name, data, size=16)
        np.testing.assert_allclose(outputs(made, data)[0], outputs(model, data)[0], atol=2e-4)
    made, _ = pk.reduce_dimension(model, "shared", data, size=3)
    tensor = data
    for _ in range(2):
        for name in ("shared_reduce", "shared_restore", "shared"):
            tensor = made.get_layer(name)(tensor)
    np.testing.assert_allclose(outputs(made, data)[0], outputs(inner, tensor)[0], atol=1e-4)


@pytest.mark.one_backend
def test_the_saved_model_loads_without_prunekit(tmp_path):
    made, _ = pk.reduce_dimension(sequences(compiled=False), "lstm", tensors(), size=4)
    made.save(tmp_path / "m.keras")
    code = (
        "import sys, keras, numpy as np\n"
        f"m = keras.models.load_model({str(tmp_path / 'm.keras')!r})\n"
        "print(m(np.zeros((2, 12, 16), 'float32')).shape[-1], 'prunekit' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.split()[-2:] == ["3", "False"], done.stderr
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(outputs(loaded, tensors())[0], outputs(made, tensors())[0])


def masked():
    x = keras.Input((12,), dtype="int32")
    return keras.Model(x, L.LSTM(4, name="lstm")(L.Embedding(9, 16, mask_zero=True)(x)))


def open_windows():
    x = keras.Input((None, 16))
    return keras.Model(x, L.LSTM(4, name="lstm")(x))


REFUSALS = {
    "no data": (lambda: pk.reduce_dimension(size=3), ValueError, "data=None"),
    "an array for a model": (lambda: pk.reduce_dimension(tensors(), size=3), TypeError, "data=x"),
    "neither size nor energy": (lambda: pk.reduce_dimension(data=tensors()), ValueError, "Received: neither"),
    "both": (lambda: pk.reduce_dimension(data=tensors(), size=3, energy=0.9), ValueError, "Received: both"),
    "more than there are": (lambda: pk.reduce_dimension(data=tensors(), size=17), ValueError, "16 entries"),
    "no entries": (lambda: pk.reduce_dimension(data=tensors(), size=0), ValueError, "from 1"),
    "a size in text": (lambda: pk.reduce_dimension(data=tensors(), size="4"), TypeError, "an int"),
    "a percentage": (lambda: pk.reduce_dimension(data=tensors(), energy=99), ValueError, "below 1"),
    "the batch": (lambda: pk.reduce_dimension(data=tensors(), size=3, axis=0), ValueError, "not the batch"),
    "an axis": (lambda: pk.reduce_dimension(data=tensors(), size=3, axis="feature"), ValueError, '"features"'),
    "two dimensions": (lambda: pk.reduce_dimension(data=tensors()[0], size=3), ValueError, "use a Dense layer"),
    "NaN": (lambda: pk.reduce_dimension(data=tensors() * np.nan, size=3), ValueError, "finite"),
    "a layer alone": (lambda: pk.reduce_dimension(layer="lstm", data=tensors(), size=3), ValueError, "Pass both"),
    "no layer": (
        lambda: pk.reduce_dimension(sequences(), "lsmt", tensors(), size=3), ValueError, "Did you mean 'lstm'",
    ),
    "features that are flat": (
        lambda: pk.reduce_dimension(sequences(), "head", tensors(), size=3), ValueError, "use a Dense layer",
    ),
    "a mask": (
        lambda: pk.reduce_dimension(masked(), "lstm", np.ones((8, 12), "int32"), size=3), ValueError, "no mask",
    ),
    "an open length": (
        lambda: pk.reduce_dimension(open_windows(), "lstm", tensors(), size=3, axis="windows"), ValueError, "is open",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_call_is_answered_in_one_line(name):
    call, kind, match = REFUSALS[name]
    with pytest.raises(kind, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_a_report_is_public():
    _, report = pk.reduce_dimension(data=tensors(), size=3)
    assert isinstance(report, DimensionReport) and len(report.to_dict()["sizes"]) == 16
