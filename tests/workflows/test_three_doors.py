"""Python, the command line and a recipe give the same weights for the same question."""

import keras
import numpy as np
import pytest

import prunekit as pk

PRUNED = {"sparsity": 0.8}
SHRUNK = {"channels": 0.5}
GRIDS = {"bits": 3}
FEWER = {"blocks": 1}
VALUES = {"clusters": 4}
FACTORS = {"parameters": 0.7}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A file of a small trained network, and its data beside it: inputs that come in orders that matter."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    inputs = keras.Input((12,))
    first = layers.Dense(24, "relu", name="first")(inputs)
    inner = layers.Dense(16, "relu", name="inner")(first)
    branch = layers.Dense(24, name="branch")(inner)
    outputs = layers.Dense(4, name="out")(layers.add([first, branch], name="sum"))
    model = keras.Model(inputs, outputs, name="net")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x = np.random.default_rng(2).normal(size=(300, 12)).astype("float32")
    y = np.argmax(np.sin(2 * x[:, :4]) + x[:, 4:8], axis=1)
    model.fit(x, y, epochs=3, verbose=0)
    folder = tmp_path_factory.mktemp("doors")
    np.savez(folder / "data.npz", x=x, y=y)
    model.save(folder / "net.keras")
    return folder / "net.keras"


def data_beside(path):
    with np.load(path.parent / "data.npz") as arrays:
        return arrays["x"], arrays["y"]


def in_python(name, options, path):
    model, data = keras.saving.load_model(path), data_beside(path)
    if name in ("prune", "quantize", "cluster"):
        target = [] if name == "quantize" else options.values()
        rest = options if name == "quantize" else {}
        getattr(pk, name)(model, *target, data, **rest)
        return model
    if name == "remove_blocks":
        return pk.remove_blocks(model, options["blocks"], data)[0]
    return pk.simplify(model)[0] if name == "simplify" else getattr(pk, name)(model, data=data, **options)[0]


def by_command(name, options, path, run, folder):
    given = [f"--{key}={value}" for key, value in options.items()]
    given += [] if name == "simplify" else [f"--data={path.parent / 'data.npz'}"]
    output = ["-o", "new.tflite", "--keras", "new.keras"] if name == "quantize" else ["-o", "new.keras"]
    code = run(name.replace("_", "-"), path, *given, *output)[0]
    assert code == 0
    return keras.saving.load_model(folder / "new.keras")


def by_recipe(name, options, path):
    data = data_beside(path)
    recipe = {"version": 1, "steps": [{name: options}]}
    return pk.compress(recipe, keras.saving.load_model(path), (data, data)).model


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("prune", PRUNED),
        ("shrink", SHRUNK),
        ("quantize", GRIDS),
        ("cluster", VALUES),
        ("factorize", FACTORS),
        ("remove_blocks", FEWER),
        ("simplify", {}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_weights_are_those_of_the_python_call(name, options, path, run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wanted = in_python(name, options, path).get_weights()
    before = keras.saving.load_model(path).get_weights()
    assert name == "simplify" or any(
        new.shape != old.shape or (new != old).any() for new, old in zip(wanted, before, strict=False)
    )
    for found in (by_command(name, options, path, run, tmp_path), by_recipe(name, options, path)):
        weights = found.get_weights()
        assert [one.shape for one in weights] == [one.shape for one in wanted]
        for new, old in zip(weights, wanted, strict=True):
            np.testing.assert_array_equal(new, old)
