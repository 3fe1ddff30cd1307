"""pk.prune with calibration data: exact sparsity, layers fitted one after another, repairs, and an unchanged rest."""

import keras
import numpy as np
import pytest
from keras import layers, ops
from networks import dense_network

import prunekit as pk
from prunekit.techniques.pruning.policies.sparsegpt import SparseGPT

REPAIRS = ("none", "outputs", "weights")


@pytest.fixture(scope="module")
def x():
    return np.random.default_rng(0).normal(size=(96, 8, 8, 3)).astype("float32")


def sequential():
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(12, 3, padding="same", activation="relu", name="conv"),
            layers.DepthwiseConv2D(3, name="depthwise"),
            layers.Conv2D(16, 1, use_bias=False, name="point"),
            layers.BatchNormalization(name="normal"),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10, name="head"),
        ]
    )


def functional():
    inputs = keras.Input((8, 8, 3))
    base = keras.Sequential([keras.Input((8, 8, 3)), layers.Conv2D(8, 3, name="inner")], name="base")
    x = base(inputs)
    left, right = layers.Conv2D(8, 3, groups=2, padding="same", name="left")(x), layers.Conv2D(8, 1, name="right")(x)
    x = layers.Reshape((36, 8))(layers.Add()([left, right]))
    x = layers.MultiHeadAttention(2, 4, name="attention")(x, x) + x
    x = layers.Bidirectional(layers.GRU(5), name="both")(x[:, :6])
    return keras.Model(inputs, [layers.Dense(4, name="first")(x), layers.Dense(2, name="second")(x)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.conv, self.flat, self.dense = layers.Conv2D(6, 3), layers.GlobalMaxPooling2D(), layers.Dense(4)

    def call(self, inputs):
        return self.dense(self.flat(self.conv(inputs)))


def subclassed():
    model = Subclassed()
    model(np.zeros((1, 8, 8, 3), "float32"))
    return model


MODELS = {"sequential": sequential, "subclassed": subclassed, "functional": functional}


@pytest.fixture(scope="module", params=[*list(MODELS)[:2], pytest.param("functional", marks=pytest.mark.thorough)])
def model(request):
    keras.utils.set_random_seed(3)
    made = MODELS[request.param]()
    made.start = [ops.convert_to_numpy(weight) for weight in made.weights]
    return made


@pytest.fixture
def fresh(model):
    model.set_weights(model.start)
    return model


def outputs(model, x):
    return np.concatenate([ops.convert_to_numpy(one) for one in keras.tree.flatten(model(x, training=False))], axis=-1)


@pytest.mark.every_backend
@pytest.mark.parametrize("criterion", ["sparsegpt", "magnitude", "wanda", "output_error"])
def test_sparsity_is_exact_and_a_repair_lowers_the_output_error(fresh, x, criterion):
    before = outputs(fresh, x)
    errors = {}
    for repair in ("none", "weights"):
        fresh.set_weights(fresh.start)
        report = pk.prune(fresh, 0.6, x, criterion=criterion, repair=repair, allocation="uniform")
        targets = [row for row in report.weights if row.name in report.targets]
        assert all(row.zeros == round(0.6 * row.size) for row in targets)
        assert [error.name for error in report.layer_errors].sort() == list(report.targets).sort()
        errors[repair] = np.square(outputs(fresh, x) - before).mean()
    assert errors["weights"] < errors["none"]


@pytest.mark.parametrize("repair", REPAIRS)
def test_reported_errors_are_those_of_the_layers(x, repair):
    keras.utils.set_random_seed(0)
    model = sequential()
    ends = {name: keras.Model(model.inputs[0], model.get_layer(name).output) for name in ("depthwise", "point", "head")}
    before = {name: outputs(end, x) for name, end in ends.items()}
    biases = {name: model.get_layer(name).bias for name in ends}
    biases = {name: 0 if bias is None else ops.convert_to_numpy(bias) for name, bias in biases.items()}
    report = pk.prune(
        model,
        0.5,
        x,
        criterion="magnitude",
        repair=repair,
        include=["conv", "depthwise", "point", "head"],
        allocation="uniform",
    )
    errors = {error.name: error.error for error in report.layer_errors}
    for name, end in ends.items():
        kernel = "depthwise/kernel" if name == "depthwise" else f"{name}/kernel"
        energy = np.square(before[name] - biases[name]).sum()
        expected = np.square(outputs(end, x) - before[name]).sum() / energy
        np.testing.assert_allclose(errors[kernel], expected, rtol=1e-2, atol=1e-6)


@pytest.mark.every_backend
def test_biases_take_the_mean_and_moving_statistics_follow(x):
    keras.utils.set_random_seed(0)
    model = sequential()
    inputs = keras.Model(model.inputs[0], [model.get_layer("point").output, model.get_layer("head").output])
    before = [ops.convert_to_numpy(one) for one in inputs(x)]
    moving = [ops.convert_to_numpy(one) for one in model.get_layer("normal").non_trainable_variables]
    pk.prune(model, 0.7, x, criterion="magnitude", repair="outputs", allocation="uniform")
    after = [ops.convert_to_numpy(one) for one in inputs(x)]
    np.testing.assert_allclose(after[1].mean(axis=0), before[1].mean(axis=0), atol=1e-5)
    now = [ops.convert_to_numpy(one) for one in model.get_layer("normal").non_trainable_variables]
    axes = (0, 1, 2)
    np.testing.assert_allclose(now[0] - moving[0], after[0].mean(axes) - before[0].mean(axes), atol=1e-5)
    np.testing.assert_allclose(now[1] / moving[1], after[0].var(axes) / before[0].var(axes), rtol=1e-3)


def test_a_layer_is_fitted_to_its_former_outputs_from_the_inputs_it_receives_now(x):
    model = dense_network(12, seed=0, first=20, second=6)
    flat = x.reshape(-1, 12)
    wanted = ops.convert_to_numpy(model(flat))
    pk.prune(model, 0.5, flat, criterion="output_error", allocation="uniform")
    hidden = ops.convert_to_numpy(model.layers[0](flat)).astype("float64")
    kernel = ops.convert_to_numpy(model.layers[1].kernel)
    for output in range(6):
        kept = np.flatnonzero(kernel[:, output])
        rows = np.column_stack([hidden[:, kept], np.ones(len(hidden))])
        best = np.linalg.lstsq(rows, wanted[:, output], rcond=None)[0]
        # Damping, one hundredth of the mean squared input, moves the fit by little.
        np.testing.assert_allclose(kernel[kept, output], best[:-1], rtol=0.2, atol=0.02)


@pytest.mark.parametrize(
    ("pattern", "holds"),
    [
        ("2:4", lambda kernel: ((kernel.reshape(-1, 4, kernel.shape[-1]) != 0).sum(axis=1) == 2).all()),
        ("block:4x1", lambda kernel: np.isin((kernel.reshape(-1, 4, kernel.shape[-1]) != 0).sum(axis=1), (0, 4)).all()),
        ("channel", lambda kernel: (kernel == 0).all(axis=0).sum() == kernel.shape[-1] // 2),
    ],
)
def test_patterns_hold_after_a_reconstruction(x, pattern, holds):
    model = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(8, 3), layers.Conv2D(8, 3, name="conv"), layers.Dense(4, name="dense")]
    )
    pk.prune(model, 0.5, x[:8], criterion="sparsegpt", pattern=pattern, include=["conv", "dense"], allocation="uniform")
    for layer in model.layers[1:]:
        kernel = ops.convert_to_numpy(layer.kernel)
        for position in kernel.reshape(-1, 8, kernel.shape[-1]):
            assert holds(position) or pattern == "channel"
        assert abs((kernel == 0).mean() - 0.5) < 1e-6
        assert holds(kernel.reshape(-1, kernel.shape[-1]))


def test_layers_in_branches_nested_models_attention_and_loops_are_pruned(x):
    keras.utils.set_random_seed(3)
    model = functional()
    before = outputs(model, x[:8])
    report = pk.prune(model, 0.5, x[:8], criterion="sparsegpt", allocation="uniform")
    assert len(report.layer_errors) == len(report.targets) == 13
    assert all(row.zeros == round(0.5 * row.size) for row in report.weights if row.name in report.targets)
    assert np.square(outputs(model, x[:8]) - before).mean() < 0.2 * np.square(before).mean()


@pytest.mark.every_backend
def test_zeros_of_an_earlier_pruning_stay(x):
    model = sequential()
    pk.prune(model, 0.4, allocation="uniform")
    zeros = [ops.convert_to_numpy(model.get_layer(name).kernel) == 0 for name in ("conv", "point", "head")]
    pk.prune(model, 0.7, x, criterion="sparsegpt", allocation="uniform")
    for was, name in zip(zeros, ("conv", "point", "head"), strict=True):
        kernel = ops.convert_to_numpy(model.get_layer(name).kernel)
        assert not kernel[was].any() and np.count_nonzero(kernel == 0) == round(0.7 * kernel.size)


def test_an_interruption_leaves_the_model_as_it_was(x):
    model = sequential()
    start = [ops.convert_to_numpy(weight) for weight in model.weights]

    def interrupt(done, total, name):
        assert (total, name) == (3, "point/kernel" if done == 2 else "conv/kernel")
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pk.prune(model, 0.5, x, criterion="sparsegpt", progress=interrupt, allocation="uniform")
    for before, weight in zip(start, model.weights, strict=True):
        np.testing.assert_array_equal(before, ops.convert_to_numpy(weight))


def test_data_are_needed_and_repairs_are_named(x):
    model = sequential()
    with pytest.raises(ValueError, match="'hessian' is collected from data. Received: no data"):
        pk.prune(model, 0.5, criterion="sparsegpt", allocation="uniform")
    with pytest.raises(ValueError, match="`repair` is one of none, outputs, weights. Received: 'bias'"):
        pk.prune(model, 0.5, x, repair="bias", criterion="magnitude", allocation="uniform")
    report = pk.prune(model, 0.5, x, policy="tfmot")
    assert any(note.startswith("The data were not read for pruning: the policy") for note in report.notes)


def test_sparsity_zero_changes_nothing(x):
    model = sequential()
    start = [ops.convert_to_numpy(weight) for weight in model.weights]
    report = pk.prune(model, 0.0, x, criterion="sparsegpt", allocation="uniform")
    for before, weight in zip(start, model.weights, strict=True):
        np.testing.assert_array_equal(before, ops.convert_to_numpy(weight))
    assert [error.error for error in report.layer_errors] == [0, 0, 0]


def test_criteria_of_untrained_models_are_repaired_only_if_asked(x):
    model, labels = sequential(), np.zeros(len(x), "int32")
    model.compile("sgd", "sparse_categorical_crossentropy")
    start = ops.convert_to_numpy(model.get_layer("head").kernel)
    report = pk.prune(model, 0.5, (x, labels), criterion="snip", allocation="uniform")
    kernel = ops.convert_to_numpy(model.get_layer("head").kernel)
    np.testing.assert_array_equal(kernel[kernel != 0], start[kernel != 0])
    assert not report.layer_errors
    assert pk.prune(model, 0.7, (x, labels), criterion="snip", repair="weights", allocation="uniform").layer_errors
    with pytest.raises(ValueError, match='selects in 100 rounds. Pass repair="none"'):
        pk.prune(model, 0.8, x, criterion="synflow", repair="weights", allocation="uniform")


def test_float64_weights_that_stay_lose_no_bit(x):
    model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(6, name="dense", dtype="float64")])
    start = ops.convert_to_numpy(model.layers[0].kernel)
    pk.prune(model, 0.5, x.reshape(-1, 12), repair="none", criterion="magnitude", allocation="uniform")
    kernel = ops.convert_to_numpy(model.layers[0].kernel)
    assert kernel.dtype == np.float64
    np.testing.assert_array_equal(kernel[kernel != 0], start[kernel != 0])


def test_the_report_lists_the_errors(x):
    report = pk.prune(sequential(), 0.5, x, criterion="magnitude", allocation="uniform")
    # Corrected biases were zero before.
    zeros = {row.name: row.zeros for row in report.weights}
    assert zeros["head/bias"] == 0 and report.before.weights[-1].zeros == 10
    assert "output error" in str(report) and len(report.to_dict()["layer_errors"]) == 3


def test_in_training_the_kept_weights_are_set_to_the_best_fit(x):
    model = keras.Sequential([keras.Input((12,)), layers.Dense(8, name="dense")])
    flat = x.reshape(-1, 12)
    start = ops.convert_to_numpy(model.layers[0].kernel)
    with pk.Pruner(model, pk.schedules.OneShot(0.5), data=flat, criterion="sparsegpt", allocation="uniform") as pruner:
        kernel = ops.convert_to_numpy(model.layers[0].kernel)
        kept = pruner.masks["dense/kernel"]
    assert kept.sum() == 48 and not kernel[~kept].any()
    change = np.square(flat @ (kernel - start)).sum()
    assert change < np.square(flat @ (np.where(kept, start, 0) - start)).sum()


@pytest.mark.parametrize("pattern", ["unstructured", "block:2x1"])
def test_no_layer_has_a_larger_error_than_with_wanda(fresh, x, pattern):
    errors = {}
    for criterion, repair in (("wanda", "none"), ("sparsegpt", "weights")):
        fresh.set_weights(fresh.start)
        report = pk.prune(fresh, 0.5, x, criterion=criterion, repair=repair, pattern=pattern, allocation="uniform")
        errors[criterion] = {row.name: row.error for row in report.layer_errors}
    for name, error in errors["sparsegpt"].items():
        assert error < errors["wanda"][name], name


def test_no_weights_are_fitted_that_the_layers_find_again(fresh, x, monkeypatch):
    def fitted(*_):
        raise AssertionError("fitted on the inputs of the unpruned model")

    monkeypatch.setattr(SparseGPT, "fitted", fitted)
    report = pk.prune(fresh, 0.5, x[:8], criterion="sparsegpt", allocation="layer_error")
    assert report.layer_errors
