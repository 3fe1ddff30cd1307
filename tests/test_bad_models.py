"""Models at the edge of what makes sense: done right, or refused in one clear line."""

import warnings

import keras
import numpy as np
import pytest

import prunekit as pk
from prunekit.anatomy.files.model_files import load_model

layers = keras.layers
PATTERNS = ("unstructured", "2:4", "block:2x2", "block:64x64", "block:999999x999999", "channel")


@keras.saving.register_keras_serializable("bad_models")
class Own(layers.Layer):
    """A layer with one weight of any type."""

    def __init__(self, kind="float32", rows=None, **options):
        super().__init__(**options)
        self.kind, self.rows = kind, rows

    def build(self, shape):
        rows = shape[-1] if self.rows is None else self.rows
        self.kernel = self.add_weight(shape=(rows, 4), dtype=self.kind, initializer="ones", trainable=False)

    def call(self, inputs):
        return inputs[..., :4] + keras.ops.cast(keras.ops.sum(self.kernel), inputs.dtype)

    def get_config(self):
        return {**super().get_config(), "kind": self.kind, "rows": self.rows}


@keras.saving.register_keras_serializable("bad_models")
class Subclassed(keras.Model):
    """Two layers of one name."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first, self.second = layers.Dense(8, name="fc"), layers.Dense(8, name="fc")

    def call(self, inputs):
        return self.second(self.first(inputs))


def sequential(*parts):
    return keras.Sequential([keras.Input((8,)), *parts])


def typed(kind):
    return sequential(layers.Dense(8, activation="relu", dtype=kind), layers.Dense(4, dtype=kind))


def filled(value, everywhere=True):
    model = typed("float32")
    for variable in model.weights if everywhere else model.weights[:1]:
        array = np.full(variable.shape, value, "float32")
        if not everywhere:
            array = variable.numpy()
            array[0, 0] = value
        variable.assign(array)
    return model


def shared():
    inputs, layer = keras.Input((8,)), layers.Dense(8, name="twice")
    return keras.Model(inputs, layers.Dense(4)(layer(layer(inputs))))


def same_names():
    inputs = keras.Input((8,))
    first = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="fc")], name="one")
    second = keras.Sequential([keras.Input((8,)), layers.Dense(4, name="fc")], name="two")
    return keras.Model(inputs, second(first(inputs)))


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 8), "float32"))
    return model


def frozen():
    model = typed("float32")
    model.trainable = False
    return model


def quantized():
    model = typed("float32")
    with warnings.catch_warnings(action="ignore"):
        model.quantize("int8")
    return model


SOUND = {
    "float16": lambda: typed("float16"),
    "bfloat16": lambda: typed("bfloat16"),
    "float64": lambda: typed("float64"),
    "mixed_bfloat16": lambda: typed("mixed_bfloat16"),
    "all zero": lambda: filled(0.0),
    "all minus zero": lambda: filled(-0.0),
    "all equal": lambda: filled(0.3),
    "all infinite": lambda: filled(np.inf),
    "all minus infinite": lambda: filled(-np.inf),
    "one infinite": lambda: filled(np.inf, everywhere=False),
    "the largest": lambda: filled(3.4e38),
    "an int weight beside": lambda: sequential(layers.Dense(8), Own("int32")),
    "a weight without entries beside": lambda: sequential(layers.Dense(8), Own(rows=0)),
    "shared": shared,
    "same names": same_names,
    "subclassed": subclassed,
    "frozen": frozen,
}
# Nothing here can be pruned; what the line says.
REFUSED = {
    "no weights": (
        lambda: sequential(layers.Activation("relu")),
        "has no weights to prune. Received: it has no weights",
    ),
    "no kernel": (lambda: sequential(layers.BatchNormalization()), "gamma, .*beta: a normalisation weight"),
    "int32": (lambda: sequential(Own("int32")), "its type int32 is not a floating-point type"),
    "int8": (lambda: sequential(Own("int8")), "its type int8 is not a floating-point type"),
    "bool": (lambda: sequential(Own("bool")), "its type bool is not a floating-point type"),
    "complex": (lambda: sequential(Own("complex64")), "its type complex64 is not a floating-point type"),
    "no entries": (
        lambda: keras.Sequential([keras.Input((0,)), layers.Dense(4)]),
        r"kernel: it has no entries: its shape is \(0, 4\)",
    ),
    "all NaN": (lambda: filled(np.nan), r"importances that are NaN.* \S+/kernel \(\d+\), \S+/kernel \(\d+\)"),
    "one NaN": (lambda: filled(np.nan, everywhere=False), r"Received NaN for: \w+/kernel \(1\)"),
    "quantized": (quantized, "the layer is quantized"),
    "not built": (lambda: keras.Sequential([layers.Dense(3)]), "is not built, so it has no weights yet"),
    "subclassed, not built": (Subclassed, "is not built, so it has no weights yet"),
    "a layer, not built": (lambda: layers.Dense(3), "is not built, so it has no weights yet"),
    "empty": (lambda: keras.Sequential([]), "is not built, so it has no weights yet"),
}
NO_MODELS = [None, 3, "model.keras", [], {}, np.ones(3), keras.layers.Dense, keras.ops.ones(3)]


def weights_of(model):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in model.weights]


def kernels(report, model):
    """The arrays of the report's targets."""
    found = dict(zip((row.name for row in report.weights), weights_of(model), strict=True))
    return [found[name] for name in report.targets]


def units_of(array, pattern):
    """A row for each unit that a pattern keeps or removes as a whole: one weight, a block, a channel."""
    rows, columns = array.shape
    if pattern == "block:2x2":
        return array.reshape(rows // 2, 2, columns // 2, 2).transpose(0, 2, 1, 3).reshape(-1, 4)
    return array.T if pattern == "channel" else array.reshape(-1, 1)


def assert_half_is_gone(before, after, pattern):
    """Exactly half of the units are zeros, or those that were zeros already; the others are as they were."""
    if pattern == "2:4":
        groups = [(array.T.reshape(-1, 4) == 0).sum(1) for array in (before, after)]
        np.testing.assert_array_equal(groups[1], np.maximum(groups[0], 2))
        np.testing.assert_array_equal(after[after != 0], before[after != 0])
        return
    old, new = units_of(before, pattern), units_of(after, pattern)
    gone = ~new.any(1)
    assert gone.sum() == max(len(old) // 2, (~old.any(1)).sum())
    np.testing.assert_array_equal(new[~gone], old[~gone])


# Every model with one pattern, every pattern with two models.
@pytest.mark.parametrize(
    ("name", "pattern"),
    [(name, PATTERNS[i % len(PATTERNS)]) for i, name in enumerate(SOUND)]
    + [(name, pattern) for pattern in PATTERNS for name in ("bfloat16", "one infinite")],
)
def test_half_of_an_odd_model_is_pruned_exactly(name, pattern):
    model = SOUND[name]()
    before = weights_of(model)
    zero = not any(array.any() for array in before)
    if pattern.startswith("block:") and pattern != "block:2x2":
        with pytest.raises(ValueError, match="leaves nothing|none would be left|no block|keeps|blocks"):
            pk.prune(model, 0.9, pattern=pattern, allocation="uniform", repair="none")
        assert all(np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
        return
    report = pk.prune(model, 0.5, pattern=pattern, allocation="uniform", repair="none")
    names = dict(zip((row.name for row in report.weights), before, strict=True))
    for name, array in zip(report.targets, kernels(report, model), strict=True):
        if zero:
            assert not array.any()
        else:
            assert_half_is_gone(names[name], array, pattern)
        assert not (np.signbit(array.astype("float32")) & (array == 0)).any() or zero


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
def test_an_odd_model_is_inspected_costed_and_saved(make, tmp_path):
    model = make()
    report = pk.inspect(model)
    arrays = weights_of(model)
    assert report.parameters == sum(array.size for array in arrays)
    assert report.zeros == sum(array.size - np.count_nonzero(array) for array in arrays)
    assert pk.cost(model).parameters == report.parameters
    assert str(report)
    with warnings.catch_warnings(action="ignore"):
        # Where all weights are alike, one layer would go whole; tests of emptied weights look at what is said.
        pk.prune(model, 0.5, allocation="global")
        model.save(tmp_path / "model.keras")
    for old, new in zip(weights_of(model), weights_of(load_model(tmp_path / "model.keras")), strict=True):
        assert old.tobytes() == new.tobytes()


def trained(model, pattern="unstructured"):
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(16, 8)).astype("float32")
    labels = np.zeros((16, model(inputs[:1]).shape[-1]), "float32")
    callback = pk.PruningCallback(
        pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=4, frequency=2), pattern=pattern, allocation="global"
    )
    model.fit(inputs, labels, batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    return callback


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float64", "all zero", "all equal", "same names", "shared", "subclassed"]
)
@pytest.mark.filterwarnings("ignore:Sparsity 0.5 leaves at most one unit of these weights")
def test_an_odd_model_is_pruned_while_it_trains(name):
    model = SOUND[name]()
    callback = trained(model)
    assert not any(callback.pruner.audit().values())
    assert abs(callback.pruner.sparsity - 0.5) < 0.02
    for target, mask in callback.pruner.masks.items():
        row = next(row for row in callback.report.weights if row.name == target)
        assert row.zeros >= mask.size - np.count_nonzero(mask)


@pytest.mark.parametrize("name", ["all infinite", "one infinite", "the largest"])
def test_a_model_that_becomes_nan_is_refused_with_its_masks_held(name):
    with pytest.raises(ValueError, match="Masks cannot be calculated from importances that are NaN"):
        trained(SOUND[name]())


def test_a_frozen_model_is_not_trained():
    with pytest.raises(
        ValueError, match="All weights of .* are frozen, so `fit` updates none of them. Prune the model with pk.prune"
    ):
        trained(frozen())


def test_a_model_that_is_not_built_is_built_by_fit():
    model = keras.Sequential([layers.Dense(8), layers.Dense(4)])
    model.compile("sgd", "mse")
    callback = pk.PruningCallback(pk.schedules.OneShot(sparsity=0.5), allocation="uniform")
    model.fit(np.ones((8, 8), "float32"), np.ones((8, 4), "float32"), verbose=0, callbacks=[callback])
    assert [int((layer.kernel.numpy() == 0).sum()) for layer in model.layers] == [32, 16]


@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED)
def test_a_model_without_anything_to_prune_is_refused_in_one_line(make, match):
    for prune in (
        lambda model: pk.prune(model, 0.5, allocation="uniform"),
        lambda model: pk.Pruner(model, pk.schedules.OneShot(sparsity=0.5), allocation="uniform"),
    ):
        with pytest.raises(ValueError, match=match) as refused:
            prune(make())
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [name for name in REFUSED if "built" not in name and name != "empty"])
def test_a_model_without_anything_to_prune_can_be_looked_at(name):
    model = REFUSED[name][0]()
    with warnings.catch_warnings(action="ignore"):
        report = pk.inspect(model)
        assert report.parameters == sum(array.size for array in weights_of(model)) == pk.cost(model).parameters
    assert 0.0 <= report.sparsity <= 1.0 and str(report)


@pytest.mark.parametrize("value", NO_MODELS, ids=lambda value: type(value).__name__)
def test_what_is_no_model_is_refused(value):
    for use in (
        pk.inspect,
        pk.cost,
        lambda model: pk.prune(model, 0.5, allocation="uniform"),
        lambda m: pk.Pruner(m, pk.schedules.OneShot(), allocation="uniform"),
    ):
        with pytest.raises(TypeError, match="prunekit works on Keras 3 models. Received: ") as refused:
            use(value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sparsity", "kept"), [(0.0, 1), (0.49, 1), (0.5, 1), (0.51, 0), (0.999, 0)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
@pytest.mark.filterwarnings("ignore:Sparsity .* leaves:UserWarning")
def test_a_single_weight_is_removed_only_where_none_need_be_kept(sparsity, kept, allocation):
    def lone():
        return keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones")])

    model = lone()
    if allocation == "erk":
        # It keeps one entry of every weight, whatever is asked.
        kept = 1
    report = pk.prune(model, sparsity, allocation=allocation, keep_one=False)
    assert np.count_nonzero(model.get_weights()[0]) == kept == 1 - report.zeros
    model = lone()
    pk.prune(model, sparsity, allocation=allocation)
    assert np.count_nonzero(model.get_weights()[0]) == 1


def test_one_weight_competes_with_itself():
    # With one target, TensorFlow's split is asked for no places at all.
    model = sequential(layers.Dense(4))
    pk.prune(model, 0.25, allocation="global")
    assert np.count_nonzero(model.get_weights()[0]) == 24


@pytest.mark.thorough
def test_a_hundred_million_weights_are_pruned_in_fit_and_at_once():
    model = keras.Sequential([keras.Input((10_000,)), layers.Dense(10_000, use_bias=False)])
    report = pk.prune(model, 0.9, allocation="uniform")
    assert report.zeros == 90_000_000 == report.parameters - np.count_nonzero(model.weights[0].numpy())
    model.compile("sgd", "mse")
    callback = pk.PruningCallback(pk.schedules.OneShot(sparsity=0.95), allocation="uniform")
    ones = np.ones((2, 10_000), "float32")
    model.fit(ones, ones, batch_size=1, verbose=0, callbacks=[callback])
    assert callback.pruner.sparsity == 0.95 and not any(callback.pruner.audit().values())
