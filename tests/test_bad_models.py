"""Models, schedules, masks and data at the edge of what makes sense: done right, or refused in one clear line."""

import math
import warnings

import keras
import numpy as np
import pytest

import prunekit as pk
from prunekit.anatomy.model_files import load_model
from prunekit.recipe.loader import RecipeError
from prunekit.recipe.npy import read_npz
from prunekit.sparsity.patterns import Block
from prunekit.sparsity.schedules import SCHEDULES

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
    "no kernel": (lambda: sequential(layers.BatchNormalization()), "gamma: a normalisation weight"),
    "int32": (lambda: sequential(Own("int32")), "its type int32 is not a floating-point type"),
    "int8": (lambda: sequential(Own("int8")), "its type int8 is not a floating-point type"),
    "bool": (lambda: sequential(Own("bool")), "its type bool is not a floating-point type"),
    "complex": (lambda: sequential(Own("complex64")), "its type complex64 is not a floating-point type"),
    "no entries": (
        lambda: keras.Sequential([keras.Input((0,)), layers.Dense(4)]),
        r"kernel: it has no entries: its shape is \(0, 4\)",
    ),
    "all NaN": (lambda: filled(np.nan), r"Importances that are NaN .* \S+/kernel \(\d+\), \S+/kernel \(\d+\)"),
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
            pk.prune(model, 0.9, pattern=pattern)
        assert all(np.array_equal(a, b) for a, b in zip(before, weights_of(model), strict=True))
        return
    report = pk.prune(model, 0.5, pattern=pattern)
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
    pk.prune(model, 0.5, allocation="global")
    with warnings.catch_warnings(action="ignore"):
        model.save(tmp_path / "model.keras")
    for old, new in zip(weights_of(model), weights_of(load_model(tmp_path / "model.keras")), strict=True):
        assert old.tobytes() == new.tobytes()


def trained(model, pattern="unstructured"):
    model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(16, 8)).astype("float32")
    labels = np.zeros((16, model(inputs[:1]).shape[-1]), "float32")
    callback = pk.PruningCallback(
        pk.PolynomialDecay(final_sparsity=0.5, end_step=4, frequency=2), pattern=pattern, allocation="global"
    )
    model.fit(inputs, labels, batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    return callback


@pytest.mark.parametrize(
    "name", ["float16", "bfloat16", "float64", "all zero", "all equal", "same names", "shared", "subclassed"]
)
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
    with pytest.raises(ValueError, match="Importances that are NaN have no rank"):
        trained(SOUND[name]())


def test_a_frozen_model_is_not_trained():
    with pytest.raises(
        ValueError, match="fit updates nothing of .* whose weights are all frozen: prune it with pk.prune"
    ):
        trained(frozen())


def test_a_model_that_is_not_built_is_not_trained():
    model = keras.Sequential([layers.Dense(8), layers.Dense(4)])
    model.compile("sgd", "mse")
    callback = pk.PruningCallback(pk.OneShot(sparsity=0.5))
    with pytest.raises(ValueError, match="is not built, so it has no weights yet. Call it once on a batch of data"):
        model.fit(np.ones((8, 8), "float32"), np.ones((8, 4), "float32"), verbose=0, callbacks=[callback])


@pytest.mark.parametrize(("make", "match"), REFUSED.values(), ids=REFUSED)
def test_a_model_without_anything_to_prune_is_refused_in_one_line(make, match):
    for prune in (
        lambda model: pk.prune(model, 0.5),
        lambda model: pk.Pruner(model, pk.OneShot(sparsity=0.5)),
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
    for use in (pk.inspect, pk.cost, lambda model: pk.prune(model, 0.5), lambda m: pk.Pruner(m, pk.OneShot())):
        with pytest.raises(TypeError, match="prunekit works on Keras 3 models. Received: ") as refused:
            use(value)
        assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("sparsity", "kept"), [(0.0, 1), (0.49, 1), (0.5, 1), (0.51, 0), (0.999, 0)], ids=lambda value: str(value)
)
@pytest.mark.parametrize("allocation", ["uniform", "global", "erk"])
def test_a_single_weight_is_kept_or_removed(sparsity, kept, allocation):
    model = keras.Sequential([keras.Input((1,)), layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    if allocation == "erk" and not kept:
        with pytest.raises(ValueError, match="ERK keeps at least one entry of every weight"):
            pk.prune(model, sparsity, allocation=allocation)
        return
    report = pk.prune(model, sparsity, allocation=allocation)
    assert np.count_nonzero(model.get_weights()[0]) == kept == 1 - report.zeros


def test_one_weight_competes_with_itself():
    # With one target, TensorFlow's split is asked for no places at all.
    model = sequential(layers.Dense(4))
    pk.prune(model, 0.25, allocation="global")
    assert np.count_nonzero(model.get_weights()[0]) == 24


@pytest.mark.slow
def test_a_hundred_million_weights_are_pruned_in_fit_and_at_once():
    model = keras.Sequential([keras.Input((10_000,)), layers.Dense(10_000, use_bias=False)])
    report = pk.prune(model, 0.9)
    assert report.zeros == 90_000_000 == report.parameters - np.count_nonzero(model.weights[0].numpy())
    model.compile("sgd", "mse")
    callback = pk.PruningCallback(pk.OneShot(sparsity=0.95))
    ones = np.ones((2, 10_000), "float32")
    model.fit(ones, ones, batch_size=1, verbose=0, callbacks=[callback])
    assert callback.pruner.sparsity == 0.95 and not any(callback.pruner.audit().values())


# ---- patterns and schedules ------------------------------------------------------------------------------------------


def test_a_block_larger_than_the_weight_is_the_weight():
    importance = keras.ops.convert_to_tensor(np.arange(35, dtype="float32").reshape(5, 7))
    for pooling, expected in (("average", 17.0), ("max", 34.0)):
        # Padded to its own size, this block would be of 10 ** 18 weights.
        block = Block(10**9, 10**9, pooling)
        assert float(keras.ops.squeeze(block.pool(importance, (0,), (1,)))) == expected
        assert block.units((5, 7), (0,), (1,)) == 1
        assert np.array(block.expand(keras.ops.ones((1, 1, 1), "bool"), (5, 7), (0,), (1,))).all()
    tall = Block(10**9, 2).pool(importance, (0,), (1,))
    np.testing.assert_allclose(np.ravel(tall), [14.5, 16.5, 18.5, 20.0])


@pytest.mark.parametrize(
    "pattern",
    ["1:" + "9" * 5000, "block:" + "9" * 5000 + "x1", "2:4:8", "block:4", "4:2", "0:4", "block:0x1", "", " 2:4"],
)
def test_a_pattern_of_senseless_numbers_is_refused(perceptron, pattern):
    with pytest.raises(ValueError, match="Unknown pattern|needs 0 < n < m|at least one weight") as refused:
        pk.prune(perceptron, 0.5, pattern=pattern)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, -math.inf, -1, 10**400, -(10**400), 10**5000, "3", None, True, 1j, [1], np.array([1])],
    ids=lambda value: f"{type(value).__name__} {repr(value)[:8] if type(value) is not int else value.bit_length()}",
)
def test_a_schedule_of_senseless_numbers_is_refused(kind, value):
    for name in kind.__dataclass_fields__:
        if value == -1 and name == "end_step" and kind is SCHEDULES["constant"]:
            continue
        with pytest.raises((ValueError, TypeError), match=name) as refused:
            kind(**{name: value})
        assert type(refused.value) in (ValueError, TypeError)
        assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


@pytest.mark.parametrize("steps", [2**62, 10**15])
@pytest.mark.parametrize("kind", SCHEDULES.values(), ids=SCHEDULES)
def test_a_schedule_of_huge_steps_is_one(kind, steps):
    fields = kind.__dataclass_fields__
    chosen = {"end_step": steps, "step": steps, "sparsities": ((steps, 0.5),), "frequency": steps}
    schedule = kind(**{name: value for name, value in chosen.items() if name in fields})
    assert schedule(steps) == schedule.final_sparsity
    assert 0.0 <= schedule(steps - 1) <= schedule.final_sparsity
    assert schedule.latest_update(steps) is not None and len(schedule.update_steps(10)) <= 1
    assert schedule(10**400) == schedule.final_sparsity


@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint8])
def test_numbers_of_numpy_are_numbers(number):
    schedule = pk.PolynomialDecay(final_sparsity=np.float32(0.5), end_step=number(8), frequency=number(2))
    assert schedule == pk.PolynomialDecay(final_sparsity=0.5, end_step=8, frequency=2)
    assert type(schedule.end_step) is int and schedule(number(8)) == 0.5


@pytest.mark.parametrize(
    ("options", "kind", "match"),
    [
        ({"include": 3}, TypeError, "`include` takes a pattern or a list of patterns. Received: 3"),
        ({"exclude": None}, TypeError, "`exclude` takes a pattern or a list of patterns. Received: None"),
        ({"include": ["re:" + "(" * 5000 + ")" * 5000]}, ValueError, "is no regular expression"),
        ({"keep_zeros": "no"}, TypeError, "`keep_zeros` is True or False. Received: 'no'"),
        ({"origin": "start"}, TypeError, "`origin` is a step of the optimizer"),
        ({"origin": math.nan}, TypeError, "`origin` is a step of the optimizer"),
        ({"origin": True}, TypeError, "`origin` is a step of the optimizer"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_options_of_the_wrong_kind_are_refused(perceptron, options, kind, match):
    with pytest.raises(kind, match=match):
        pk.prune(perceptron, 0.5, **options)
    with pytest.raises(kind, match=match):
        pk.Pruner(perceptron, pk.OneShot(), **options)


# ---- masks and gradients ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "masks",
    [
        [],
        [np.ones((8, 16), bool)],
        [np.ones((8, 16), bool), np.zeros((4, 16), bool)],
        [np.ones((8, 16), bool), True],
        [np.ones((8, 16), bool), None],
        [np.ones((8, 16), bool), "x"],
        [np.ones((8, 16), bool)] * 3,
    ],
    ids=["none", "one too few", "transposed", "a scalar", "None", "text", "one too many"],
)
def test_masks_of_a_wrong_shape_are_refused_and_none_is_taken(perceptron, masks):
    pruner = pk.Pruner(perceptron, pk.OneShot(sparsity=0.5))
    before = pruner.masks
    with pytest.raises(
        ValueError, match=r"One mask for each target, of its shape: \[\(8, 16\), \(16, 4\)\]. Received: "
    ):
        pruner.store.replace(masks)
    assert all(np.array_equal(before[name], mask) for name, mask in pruner.masks.items())


@pytest.mark.parametrize("kind", ["bool", "int32", "float32", "uint8"])
def test_masks_of_another_type_keep_what_is_not_zero(perceptron, kind):
    pruner = pk.Pruner(perceptron, pk.OneShot(sparsity=0.0))
    masks = [np.random.default_rng(1).integers(0, 2, target.shape).astype(kind) for target in pruner.targets]
    pruner.store.replace(masks)
    for given, taken in zip(masks, pruner.masks.values(), strict=True):
        np.testing.assert_array_equal(given != 0, taken)


@pytest.mark.parametrize("count", [0, 3, 5])
def test_gradients_that_are_not_one_per_variable_are_refused(perceptron, count):
    pruner = pk.Pruner(perceptron, pk.OneShot(sparsity=0.5))
    with pytest.raises(ValueError, match=f"aligned with the 4 trainable variables. Received: {count}"):
        pruner.mask_gradients([None] * count)


# ---- data that end early ---------------------------------------------------------------------------------------------


def batches(count, failing=None):
    for _ in range(count):
        yield np.ones((4, 8), "float32"), np.zeros((4, 4), "float32")
    if failing is not None:
        raise failing


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
@pytest.mark.parametrize("count", [1, 7])
def test_data_that_end_early_leave_a_sparse_model(perceptron, count):
    perceptron.compile("sgd", "mse")
    callback = pk.PruningCallback(pk.PolynomialDecay(final_sparsity=0.5, end_step=10, frequency=2))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        perceptron.fit(batches(count), steps_per_epoch=5, epochs=2, verbose=0, callbacks=[callback])
    pruner = callback.pruner
    assert not any(pruner.audit().values())
    # Keras takes one batch more than it trains on, to look at its shapes, and gives it back.
    assert pruner.step_count <= 10 and pruner.sparsity == pytest.approx(callback.report.target_sparsity)
    assert any("lands on sparsity 0.5 at step 10" in str(one.message) for one in caught) == (pruner.step_count < 9)


@pytest.mark.filterwarnings("ignore:`shuffle=True` was passed:UserWarning")
def test_data_that_break_leave_a_sparse_model_that_can_go_on(perceptron, samples):
    perceptron.compile("sgd", "sparse_categorical_crossentropy")
    callback = pk.PruningCallback(pk.PolynomialDecay(final_sparsity=0.5, end_step=8, frequency=1))

    def breaking():
        for i in range(3):
            yield samples[0][i : i + 4], samples[1][i : i + 4]
        raise OSError(5, "the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):
        perceptron.fit(breaking(), steps_per_epoch=5, epochs=2, verbose=0, callbacks=[callback])
    reached = callback.pruner.sparsity
    assert 0.0 < reached < 0.5 and not any(callback.pruner.audit().values())
    perceptron.fit(*samples, batch_size=10, epochs=2, verbose=0, callbacks=[callback])
    assert callback.pruner.sparsity == 0.5 and not any(callback.pruner.audit().values())


def test_data_with_nan_are_named(perceptron, samples):
    inputs, labels = samples
    inputs[33] = np.nan
    perceptron.compile("sgd", "sparse_categorical_crossentropy")
    callback = pk.PruningCallback(pk.PolynomialDecay(final_sparsity=0.5, end_step=20, frequency=2))
    with pytest.raises(ValueError, match="look for a loss that became NaN"):
        perceptron.fit(inputs, labels, batch_size=4, epochs=2, verbose=0, callbacks=[callback])


@pytest.mark.parametrize("cut", [0.05, 0.5, 0.95])
def test_data_files_that_end_early_are_refused(tmp_path, cut):
    np.savez(tmp_path / "whole.npz", x=np.arange(1000.0))
    content = (tmp_path / "whole.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(content[: int(cut * len(content))])
    with pytest.raises(RecipeError, match="cut.npz is not a whole npz file"):
        read_npz(tmp_path / "cut.npz", {"inputs": "x"})


def test_fewer_labels_than_inputs_are_refused(perceptron, samples):
    inputs, labels = samples
    recipe = {
        "version": 1,
        "compile": {},
        "steps": [{"prune": {"epochs": 1, "schedule": {"type": "one_shot", "sparsity": 0.5}}}],
    }
    for data in (((inputs, labels[:-1]), samples), (samples, (inputs[:3], labels))):
        with pytest.raises(RecipeError, match="hold as many examples"):
            pk.compress(recipe, model=perceptron, data=data)
