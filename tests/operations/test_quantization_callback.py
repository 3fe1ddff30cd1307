"""Quantization in `fit`: what is trained, validated and left behind, alone and with other callbacks."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from quantized_training import KERNELS, LOSS, X, Y, fit, is_on_a_grid_of, kernels, network, quantizing

import prunekit as pk
from prunekit.techniques.quantize.quantization_state import unique_weights

pytestmark = pytest.mark.every_backend


def test_the_model_ends_on_integers_and_keeps_its_accuracy():
    model = network()
    fit(model, epochs=4)
    floats = model.evaluate(X, Y, verbose=0)[1]
    callback = quantizing(bits=4)
    history = fit(model, callback, epochs=4).history
    assert all(is_on_a_grid_of(values, 4) for values in kernels(model).values())
    with callback.report.simulating():
        assert model.evaluate(X, Y, verbose=0)[1] >= floats - 0.02
    assert history["loss"][-1] < history["loss"][0]
    assert callback.report.method == "training" and {one.name for one in callback.report.weights} == KERNELS
    assert {one.bits for one in callback.report.weights} == {4}


def test_validation_in_fit_measures_the_model_on_integers_and_the_last_one_is_what_is_left():
    model = network()
    callback = quantizing(bits=3)
    history = fit(model, callback, validation_data=(X, Y), validation_batch_size=64).history
    with callback.report.simulating():
        found = model.evaluate(X, Y, batch_size=64, verbose=0)
    np.testing.assert_allclose(found, [history["val_loss"][-1], history["val_accuracy"][-1]], rtol=1e-4)
    assert abs(model.evaluate(X, Y, batch_size=64, verbose=0)[0] - found[0]) > 1e-6


def test_nothing_is_left_in_the_model():
    model = network()
    fit(model, epochs=1, validation_data=(X[:32], Y[:32]))
    names = [one.path for one in model.weights]
    attributes = {id(owner): set(vars(owner)) for owner in (model.optimizer, *model._flatten_layers())}
    slots = [tuple(one.shape) for one in model.optimizer.variables]
    fit(model, quantizing(), validation_data=(X, Y))
    assert [one.path for one in model.weights] == names
    assert [tuple(one.shape) for one in model.optimizer.variables] == slots
    for owner in (model.optimizer, *model._flatten_layers()):
        assert set(vars(owner)) == attributes[id(owner)]


@pytest.mark.parametrize("options", [{}, {"begin_step": 3, "freeze_step": 5}], ids=["whole", "begun later and frozen"])
def test_a_training_on_integers_advances_the_random_seeds_as_any_other(options):
    """Without calibration: Keras draws the dropout of a recurrent layer in inference, too."""

    def seeds(*callbacks):
        keras.utils.set_random_seed(0)
        x = keras.Input((8, 8, 1))
        y = keras.layers.LSTM(6, dropout=0.5, seed=1)(keras.layers.Reshape((8, 8))(x))
        y = keras.layers.Dropout(0.5, seed=2)(y)
        model = keras.Model(x, keras.layers.BatchNormalization()(keras.layers.Dense(10)(y)))
        model.compile("sgd", LOSS)
        fit(model, *callbacks, epochs=1)
        found = [one for one in model.variables if "int" in keras.backend.standardize_dtype(one.dtype)]
        return [keras.ops.convert_to_numpy(one).tolist() for one in found]

    expected = seeds()
    assert [seed for seed, _ in expected] == [1, 2] and all(count >= 8 for _, count in expected)
    assert seeds(quantizing(None, activation_bits="float", **options)) == expected


class Watch(keras.callbacks.Callback):
    """Sees the model between batches, as any callback of the user."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append((len(self.model.trainable_variables), "call" in vars(self.model)))


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_between_batches_the_model_is_its_own(first):
    model, watch, callback = network(), Watch(), quantizing()
    fit(model, *((watch, callback) if first else (callback, watch)))
    assert set(watch.seen) == {(len(model.trainable_variables), False)}


def test_a_training_that_ends_before_it_begins_is_followed_by_a_quantization_after_training():
    model = network()
    trained = quantizing(begin_step=10**6)
    with pytest.warns(UserWarning, match="ended after 8 updates, and quantization begins at update 1,000,000"):
        fit(model, trained, epochs=1)
    other = network()
    fit(other, epochs=1)
    after = pk.quantize(other, X[:64], method="nearest")
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert trained.report.ranges == after.ranges
    assert "quantized without training" in trained.report.notes[0]


def test_before_it_begins_the_training_is_in_floating_point():
    model = network()
    states = []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: states.append([np.array(one) for one in model.get_weights()])
    )
    # An epoch has eight updates.
    callback = quantizing(bits=3, begin_step=8)
    fit(model, callback, keep, epochs=2)
    other = network()
    fit(other, epochs=1)
    for one, two in zip(states[0], other.get_weights(), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)
    plain = network()
    fit(plain, epochs=2)
    assert any(np.abs(one - two).max() > 1e-4 for one, two in zip(states[1], plain.get_weights(), strict=True))


def moving_statistics(model):
    return [np.array(keras.ops.convert_to_numpy(model.get_layer(name).moving_mean)) for name in ("norm", "norm_2")]


class Statistics(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.after = []

    def on_train_batch_end(self, batch, logs=None):
        self.after.append(moving_statistics(self.model))


@pytest.mark.parametrize(("freeze_step", "frozen_from"), [(3, 3), (None, 12), (-1, 16), (0, 0)])
def test_batch_normalizations_are_frozen_from_a_step_on(freeze_step, frozen_from):
    model, statistics = network(), Statistics()
    # Two epochs of eight updates: four fifths are 12.
    fit(model, pk.QuantizationCallback(X[:64], freeze_step=freeze_step), statistics, epochs=2)
    moved = [
        any((one != two).any() for one, two in zip(before, after, strict=True))
        for before, after in zip(statistics.after[:-1], statistics.after[1:], strict=True)
    ]
    # `moved[i]` is about update i + 1, counted from 0.
    assert moved == [step < frozen_from for step in range(1, 16)]
    gamma = keras.ops.convert_to_numpy(model.get_layer("norm").gamma)
    assert (gamma != 1).all()


def test_with_pruning_the_zeros_are_exact_and_in_the_grids():
    model = network()
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, begin_step=1, end_step=12, frequency=2)
    pruning, callback = pk.PruningCallback(schedule, allocation="uniform"), quantizing(bits=4, begin_step=3)
    for order in ((pruning, callback), (callback, pruning)):
        fit(model, *order, epochs=2)
        assert not any(pruning.pruner.audit().values())
        for name, mask in pruning.pruner.masks.items():
            assert (kernels(model)[name][~mask] == 0).all()
        assert all(is_on_a_grid_of(values, 4) for values in kernels(model).values())


REFUSALS = {
    "no data": (dict(data=None), ValueError, "activation_bits=8 reads calibration data. Received: data=None"),
    "unknown option": (dict(bit=4), TypeError, "Did you mean 'bits'"),
    "option of rounding without training": (dict(method="gptq"), TypeError, "method"),
    "one bit": (dict(bits=1), ValueError, "`bits` is the number of bits"),
    "a begin before the first step": (dict(begin_step=-1), ValueError, "begin_step"),
    "a freeze at half a step": (dict(freeze_step=1.5), TypeError, "freeze_step"),
    "no rate": (dict(range_learning_rate=0), ValueError, "`range_learning_rate` is a number above 0 and below 1"),
    "a rate that is text": (dict(range_learning_rate="fast"), ValueError, "Received: 'fast'"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_options_are_refused_before_fit(name):
    options, kind, match = REFUSALS[name]
    with pytest.raises(kind, match=match):
        pk.QuantizationCallback(**{"data": X[:64], **options})


def test_two_in_one_list_are_refused_before_the_first_update():
    with pytest.raises(ValueError, match="may contain one QuantizationCallback. Received: 2"):
        fit(network(), quantizing(), quantizing(exclude="logits"))


def test_a_frozen_model_is_refused():
    model = network(compiled=False)
    model.trainable = False
    model.compile("sgd", LOSS)
    with pytest.raises(ValueError, match="All weights of .* are frozen"):
        fit(model, quantizing())


def test_a_pattern_that_matches_nothing_is_refused_before_the_first_update():
    model = network()
    before = [np.array(one) for one in model.get_weights()]
    with pytest.raises(ValueError, match="nothing_like_it"):
        fit(model, quantizing(include="nothing_like_it"))
    for one, two in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_data_of_another_shape_are_refused_before_the_first_update():
    with pytest.raises(ValueError, match=r"8, 8, 1"):
        fit(network(), pk.QuantizationCallback(np.zeros((4, 7, 7, 1), "float32")))


def test_results_do_not_exist_before_the_end_of_fit():
    with pytest.raises(RuntimeError, match="exists once `fit` has ended"):
        _ = quantizing().report


def test_weights_alone_need_no_data():
    model = network()
    callback = pk.QuantizationCallback(bits=4, activation_bits="float")
    fit(model, callback, epochs=1)
    assert callback.report.ranges == () and all(is_on_a_grid_of(one, 4) for one in kernels(model).values())


def test_a_layer_that_is_excluded_is_trained_in_floating_point():
    model = network()
    callback = quantizing(bits=3, exclude="logits")
    fit(model, callback, epochs=1)
    assert not is_on_a_grid_of(kernels(model)["logits/kernel"], 3)
    assert {one.name for one in callback.report.weights} == KERNELS - {"logits/kernel"}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict(jit_compile=True), marks=pytest.mark.thorough),
        dict(steps_per_execution=2),
        dict(run_eagerly=True),
    ],
    ids=str,
)
def test_compiled_and_eager_steps(options):
    if BACKEND == "torch" and "jit_compile" in options:
        pytest.skip("torch.compile needs a compiler of C++")
    if BACKEND == "torch" and "steps_per_execution" in options:
        pytest.skip("Keras runs one step at a time on PyTorch")
    model = network(**options)
    callback = quantizing(bits=4)
    history = fit(model, callback, epochs=2, validation_data=(X, Y)).history
    assert history["loss"][-1] < history["loss"][0]
    assert all(is_on_a_grid_of(one, 4) for one in kernels(model).values())


@pytest.fixture
def in_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16" if BACKEND != "jax" else "mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


def test_mixed_precision_trains_ranges_in_float32(in_mixed_precision):
    model = network()
    callback = quantizing(bits=4)
    history = fit(model, callback, epochs=3).history
    assert history["loss"][-1] < history["loss"][0]
    assert all(is_on_a_grid_of(one, 4) for one in kernels(model).values())
    assert any(np.any(one != 0) for one in callback._run.work.values())


def test_a_model_with_several_outputs_and_a_shared_layer():
    keras.utils.set_random_seed(0)
    first, second = keras.Input((6,), name="first"), keras.Input((6,), name="second")
    shared = keras.layers.Dense(5, activation="relu", name="shared")
    joined = keras.layers.Concatenate(name="both")([shared(first), shared(second)])
    outputs = {"a": keras.layers.Dense(1, name="a")(joined), "b": keras.layers.Dense(2, name="b")(joined)}
    model = keras.Model({"first": first, "second": second}, outputs)
    model.compile(keras.optimizers.Adam(0.01), {"a": "mse", "b": "mae"})
    generator = np.random.default_rng(0)
    inputs = {name: generator.normal(size=(64, 6)).astype("float32") for name in ("first", "second")}
    labels = {"a": inputs["first"].sum(axis=1, keepdims=True), "b": inputs["second"][:, :2]}
    callback = pk.QuantizationCallback(inputs, bits=4)
    history = model.fit(inputs, labels, epochs=5, batch_size=16, verbose=0, callbacks=[callback]).history
    assert history["loss"][-1] < history["loss"][0]
    weights = unique_weights(callback.report.state.placement)
    assert {one.name for one in weights} == {"shared/kernel", "a/kernel", "b/kernel"} and len(weights) == 3


@tensorflow_only
def test_the_file_computes_what_was_trained(tmp_path):
    model = network()
    callback = quantizing(bits=4)
    fit(model, callback)
    made = callback.report.export(tmp_path / "model.tflite")
    assert made.bytes == (tmp_path / "model.tflite").stat().st_size
    assert made.simulation.max_error < 0.05 and max(one.largest or 0 for one in made.tensors) <= 1
    assert made.float_model is not None


@tensorflow_only
def test_the_file_of_a_training_in_mixed_precision_has_its_ranges_and_computes_in_float32(in_mixed_precision, tmp_path):
    model = network()
    callback = quantizing(bits=4)
    fit(model, callback)
    layers = {one.name: one.dtype_policy for one in model._flatten_layers()}
    before = model.predict(X, verbose=0)
    made = callback.report.export(tmp_path / "model.tflite")
    assert made.simulation.max_error < 0.05 and max(one.largest or 0 for one in made.tensors) <= 1
    assert {one.name: one.dtype_policy for one in model._flatten_layers()} == layers
    np.testing.assert_array_equal(model.predict(X, verbose=0), before)


def test_a_model_that_waits_for_its_first_batch_is_built_from_the_calibration_data():
    keras.utils.set_random_seed(3)
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")
    model = keras.Sequential([keras.layers.Flatten(), hidden, keras.layers.Dense(10, name="out")])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    callback = pk.QuantizationCallback(X)
    fit(model, callback)
    assert [one.name for one in callback.report.weights] == ["hidden/kernel", "out/kernel"]
    assert callback.report.method == "training"


def test_without_data_such_a_model_is_refused_with_the_remedy():
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    if keras.backend.backend() != "tensorflow":
        pytest.skip("Keras builds models before callbacks there")
    with pytest.raises(ValueError, match="is not built.*a QuantizationCallback or ClusterCallback from its data"):
        fit(model, pk.QuantizationCallback(activation_bits="float"))


def test_normalizations_freeze_after_quantization_begins():
    with pytest.raises(ValueError, match="`freeze_step` is at least `begin_step`. Received: begin_step=10"):
        pk.QuantizationCallback(X, begin_step=10, freeze_step=5)
    assert pk.QuantizationCallback(X, begin_step=10, freeze_step=-1).freeze_step == -1
