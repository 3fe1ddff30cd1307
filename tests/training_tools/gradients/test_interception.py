"""Interception: against gradients written out by hand, in every way to train."""

import gradient_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from intercepted_models import compiled, data, network
from keras import layers
from networks import sequential

import prunekit as pk
from prunekit.anatomy.layers.model_weights import places
from prunekit.training_tools.gradients import intercepting


def by_hand(model, x, y, at_hidden):
    """Gradients of the mean squared error with respect to the four weights, by NumPy in float64."""
    first, bias, last, end = (weight.numpy().astype("float64") for weight in model.weights)
    hidden = np.tanh(x @ first + bias)
    at_output = 2 * (hidden @ last + end - y) / y.size
    behind = at_hidden(at_output @ last.T) * (1 - hidden**2)
    return [x.T @ behind, behind.sum(0), hidden.T @ at_output, at_output.sum(0)]


def by_tape(model, x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
    return tape.gradient(loss, model.trainable_variables)


def stepped(model, update):
    """What an update by plain SGD at a rate of 1 took from the weights."""
    before = [weight.numpy() for weight in model.weights]
    update()
    return [old - weight.numpy() for old, weight in zip(before, model.weights, strict=True)]


def by_fit(model, x, y):
    return stepped(model, lambda: model.fit(x, y, batch_size=len(x), verbose=0))


def by_train_on_batch(model, x, y):
    return stepped(model, lambda: model.train_on_batch(x, y))


WAYS = {
    "a tape": (lambda model: None, by_tape),
    "a tf.function": (lambda model: None, lambda *args: tf.function(by_tape)(*args)),
    "an XLA function": (lambda model: None, lambda *args: tf.function(by_tape, jit_compile=True)(*args)),
    "fit": (compiled, by_fit),
    "fit, compiled by XLA": (lambda model: compiled(model, jit_compile=True), by_fit),
    "fit, not compiled": (lambda model: compiled(model, run_eagerly=True), by_fit),
    "fit, two steps a call": (lambda model: compiled(model, steps_per_execution=2), by_fit),
    "train_on_batch": (compiled, by_train_on_batch),
    "TapeLoop": (
        lambda model: pk.loops.TapeLoop(model, keras.optimizers.SGD(1.0), "mse"),
        lambda loop, x, y: stepped(loop.model, lambda: loop.step(x, y)),
    ),
}


@pytest.mark.parametrize("used_before", [False, True], ids=["new", "used before"])
@pytest.mark.parametrize("way", WAYS)
def test_what_the_function_returns_goes_further_back(way, used_before, precision):
    prepare, gradients_of = WAYS[way]
    model, (x, y) = network(), data(precision)
    trained = prepare(model) or model
    if used_before:
        gradients_of(trained, x, y)
    weights = model.get_weights()
    expected = by_hand(model, x, y, lambda gradient: np.clip(3 * gradient, -0.1, 0.2))
    with intercepting(model, {"hidden": lambda gradient: tf.clip_by_value(3 * gradient, -0.1, 0.2)}):
        found = gradients_of(trained, x, y)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9 if precision == "float64" else 2e-4, atol=1e-6)
    # Afterwards it is gone, from traces too.
    model.set_weights(weights)
    expected = by_hand(model, x, y, lambda gradient: gradient)
    for ours, theirs in zip(gradients_of(trained, x, y), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-9 if precision == "float64" else 2e-4, atol=1e-6)


def test_fit_with_pruning_is_intercepted_and_pruned():
    (x, y), model = data("float32"), compiled(network())
    pruning = pk.PruningCallback(
        pk.schedules.ConstantSparsity(0.5, frequency=1), include="last/kernel", allocation="uniform"
    )
    model.fit(x, y, verbose=0, callbacks=[pruning])
    before = model.get_weights()
    with intercepting(model, {"hidden": tf.zeros_like}):
        model.fit(x, y, verbose=0, epochs=2, callbacks=[pruning])
    assert all((old == new.numpy()).all() for old, new in zip(before[:2], model.weights[:2], strict=True))
    assert (model.layers[1].kernel.numpy() == 0).mean() == 0.5
    model.fit(x, y, verbose=0, callbacks=[pruning])
    assert all((old != new.numpy()).any() for old, new in zip(before[:2], model.weights[:2], strict=True))


@pytest.mark.parametrize("name", gradient_models.CASES)
def test_a_function_that_changes_nothing_changes_nothing(name, precision):
    model, x, y, loss = gradient_models.case(name)
    loss = keras.losses.get(loss)
    # The softmax of attention is not called where TensorFlow fuses it, and its dropout not in inference.
    unseen = (keras.layers.InputLayer, keras.layers.Softmax, keras.layers.Dropout)
    paths = {
        id(one.layer): one.full_path for one in places(model) if one.full_path and not isinstance(one.layer, unseen)
    }
    functions = {path: lambda gradient: gradient for path in paths.values()}

    def value_and_gradients():
        with tf.GradientTape() as tape:
            output = model(x, training=False)
            value = loss(y, output)
        gradients = tape.gradient(value, model.trainable_variables)
        return [output, value, *map(tf.convert_to_tensor, gradients)]

    expected = value_and_gradients()
    with intercepting(model, functions):
        found = value_and_gradients()
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if number < 2:
            np.testing.assert_array_equal(ours, theirs)
        # Where a tensor is used several times, TensorFlow adds its gradients up in another order.
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_two_trainings_with_and_without_a_function_that_changes_nothing_end_in_the_same_bits():
    x, y = data("float32", 30)
    ends = []
    for functions in (None, {"hidden": tf.identity, "last": pk.gradients.GradientStatistics()}):
        keras.utils.set_random_seed(1)
        model = network(activation="softmax")
        model.compile("adam", "categorical_crossentropy", jit_compile=False)
        if functions is None:
            history = model.fit(x, np.abs(y), epochs=3, verbose=0)
        else:
            with intercepting(model, functions):
                history = model.fit(x, np.abs(y), epochs=3, verbose=0)
        ends.append([*model.get_weights(), history.history["loss"]])
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("graph", [False, True], ids=["at once", "in a graph"])
def test_behind_a_softmax_the_gradient_at_the_logits_is_caught(graph, precision):
    model, (x, y) = network(activation="softmax"), data(precision)
    labels = np.eye(3, dtype=precision)[np.abs(y).argmax(1)]
    seen, loss = pk.gradients.GradientStatistics(), keras.losses.CategoricalCrossentropy()

    def gradients():
        with tf.GradientTape() as tape:
            value = loss(labels, model(x))
        return tape.gradient(value, model.trainable_variables)

    with intercepting(model, {"last": lambda gradient: 0 * seen(gradient)}):
        found = (tf.function(gradients) if graph else gradients)()
    assert all((gradient.numpy() == 0).all() for gradient in found)
    # Of a mean cross-entropy at the logits: (softmax - labels) / batch.
    expected = (model(x).numpy() - labels) / len(x)
    np.testing.assert_allclose(seen.read().largest, np.abs(expected).max(), rtol=1e-5)
    with intercepting(model, {"last": tf.zeros_like}), tf.GradientTape() as tape:
        value = tf.reduce_sum(tf.square(model(x)))
        found = tape.gradient(value, model.trainable_variables)
    assert all((gradient.numpy() == 0).all() for gradient in found)


@pytest.mark.parametrize("calls", [(0,), (1,), (2,), (0, 2), "all"], ids=str)
def test_calls_of_a_shared_layer_are_distinguished(calls, precision):
    inputs = keras.Input((3,))
    shared = layers.Dense(3, "tanh", name="shared")
    model = keras.Model(inputs, layers.Dense(1, name="end")(shared(shared(shared(inputs)))))
    x = np.random.default_rng(2).normal(size=(4, 3)).astype(precision)
    with tf.GradientTape() as tape:
        value = x
        for call in range(3):
            value = shared(value)
            if calls == "all" or call in calls:
                # Its gradient is that of 3 * value.
                value = 3 * value - tf.stop_gradient(2 * value)
        loss = tf.reduce_sum(tf.square(model.layers[-1](value)))
    expected = tape.gradient(loss, model.trainable_variables)
    triple = lambda gradient: 3 * gradient  # noqa: E731
    with intercepting(model, {"shared": triple} if calls == "all" else {("shared", call): triple for call in calls}):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(model(x)))
        found = tape.gradient(loss, model.trainable_variables)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-10 if precision == "float64" else 1e-4)


def test_a_layer_inside_a_block_and_the_block_itself_both_count(precision):
    block = keras.Sequential([keras.Input((3,)), layers.Dense(3, name="inner"), layers.Dense(3)], name="block")
    model = keras.Sequential([keras.Input((3,)), block, layers.Dense(2)])
    x = np.ones((2, 3), precision)
    plain = by_tape(model, x, 0.0)
    with intercepting(model, {"block/inner": lambda gradient: 5 * gradient, "block": lambda gradient: 2 * gradient}):
        found = by_tape(model, x, 0.0)
    for ours, theirs, factor in zip(found, plain, (10, 10, 2, 2, 1, 1), strict=True):
        np.testing.assert_allclose(ours, factor * theirs.numpy(), rtol=1e-5)


def test_of_several_outputs_each_passes_through_the_function():
    inputs = keras.Input((3, 2))
    whole, *states = layers.LSTM(4, return_sequences=True, return_state=True, name="lstm")(inputs)
    model = keras.Model(inputs, [whole, *states])
    shapes = []
    with intercepting(model, {"lstm": lambda gradient: shapes.append(tuple(gradient.shape)) or gradient}):
        with tf.GradientTape() as tape:
            outputs = model(np.ones((5, 3, 2)))
            loss = tf.reduce_sum(outputs[0]) + tf.reduce_sum(outputs[2])
        tape.gradient(loss, model.trainable_variables)
    assert sorted(shapes) == [(5, 3, 4), (5, 4)], "the state that is not used has no gradient"


def test_gradients_of_rows_that_were_looked_up_arrive_whole():
    model = keras.Sequential([keras.Input((2,)), layers.Dense(3, name="rows")])
    with intercepting(model, {"rows": lambda gradient: tf.ensure_shape(gradient, (4, 3))}), tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(model(np.ones((4, 2))), [0, 2, 2]))
        found = tape.gradient(loss, model.trainable_variables)
    np.testing.assert_array_equal(found[1], [3, 3, 3])


def test_masks_travel_on():
    model = sequential((4,), layers.Embedding(5, 3, mask_zero=True, name="rows"), layers.LSTM(2, name="lstm"))
    x = np.array([[1, 2, 0, 0], [3, 0, 0, 0]])
    expected = model(x)
    with pytest.warns(UserWarning), intercepting(model, {"rows": tf.identity, "lstm": tf.identity}):
        np.testing.assert_array_equal(model(x), expected)
        assert model.layers[0](x)._keras_mask is not None


def test_mixed_precision_hands_on_half_precision_times_the_scale_of_the_loss():
    policy = keras.DTypePolicy("mixed_float16")
    model = sequential((5,), layers.Dense(6, name="hidden", dtype=policy), layers.Dense(3, name="last"))
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.0), initial_scale=1024.0)
    model.compile(optimizer, "mse", jit_compile=False)
    x, y = data("float32")
    kinds, statistics = [], pk.gradients.GradientStatistics()
    with intercepting(model, {"hidden": lambda gradient: kinds.append(gradient.dtype) or statistics(gradient)}):
        model.fit(x, y, verbose=0)
    assert set(kinds) == {tf.float16}
    at_output = 2 * (model(x).numpy() - y) / y.size
    expected = 1024 * np.abs(at_output @ model.layers[1].kernel.numpy().T).max()
    np.testing.assert_allclose(statistics.read().largest, expected, rtol=0.01)


def test_quantized_layers_are_intercepted_in_the_call_that_keras_makes_of_them():
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4, name="hidden"), layers.Dense(3)])
    model.layers[0].enable_lora(2)
    model.layers[0].quantize("int8")
    (x, y), hidden = data("float32"), model.layers[0]
    compiled(model)
    before = [weight.numpy() for weight in hidden.trainable_weights]
    with intercepting(model, {"hidden": tf.zeros_like}):
        model.fit(x, y, verbose=0)
    assert all((old == new.numpy()).all() for old, new in zip(before, hidden.trainable_weights, strict=True))
    model.fit(x, y, verbose=0)
    assert any((old != new.numpy()).any() for old, new in zip(before, hidden.trainable_weights, strict=True))


# Refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "error", "message"),
    [
        ({}, TypeError, "at least one"),
        ([("hidden", tf.identity)], TypeError, "dictionary of layers' names"),
        ({"hidden": 3.0}, TypeError, "a function gradient -> gradient. Received: 3.0 for 'hidden'"),
        ({"hiden": tf.identity}, ValueError, "Did you mean 'hidden'"),
        ({3: tf.identity}, TypeError, "takes a layer's name"),
        ({("hidden", -1): tf.identity}, ValueError, "counted from 0"),
        ({"hidden": tf.identity, ("hidden", 0): tf.identity}, ValueError, "Each call of a layer has one function"),
    ],
)
def test_what_is_no_interception_is_refused_before_anything_happens(functions, error, message):
    model = network()
    with pytest.raises(error, match=message):
        with intercepting(model, functions):
            raise AssertionError
    assert "call" not in vars(model.layers[0])


def test_models_that_are_not_built_are_refused():
    with pytest.raises(ValueError, match="not built"), intercepting(keras.Sequential([layers.Dense(2)]), {"x": abs}):
        pass


def test_a_call_that_does_not_take_place_is_refused_in_the_pass():
    model = network()
    with pytest.raises(ValueError, match="'hidden' is called 1 times in a pass of the model. Received: call 1"):
        with intercepting(model, {("hidden", 1): tf.identity}):
            model(np.ones((2, 5)))


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda gradient: None, TypeError, "'hidden' returns a gradient. Received: None"),
        (lambda gradient: gradient[:, :2], ValueError, r"\(None, 6\), float32. Received: \(None, 2\), float32"),
        (lambda gradient: tf.cast(gradient, "float64"), ValueError, r"Received: \(None, 6\), float64"),
        (lambda gradient: 0.0, ValueError, r"Received: \(\), float32"),
    ],
    ids=["nothing", "another shape", "another type", "a number"],
)
def test_what_is_no_gradient_is_refused_in_fit(function, error, message):
    model, (x, y) = compiled(network()), data("float32")
    with pytest.raises(error, match=message), intercepting(model, {"hidden": function}):
        model.fit(x, y, verbose=0)


def test_another_number_of_examples_is_refused_where_it_shows_only_while_running():
    model, (x, y) = compiled(network()), data("float32")
    with pytest.raises(tf.errors.InvalidArgumentError, match="returns another shape"):
        with intercepting(model, {"hidden": lambda gradient: gradient[:1]}):
            model.fit(x, y, verbose=0)


def test_a_missing_gradient_is_an_error():
    model, (x, y) = network(), data("float32")
    traced = tf.function(by_tape)
    traced(model, x, y)
    with pytest.warns(UserWarning, match="No gradient came back to 'hidden'.*keeps its old trace") as told:
        with intercepting(model, {"hidden": tf.identity}):
            traced(model, x, y)
    assert len(told) == 1
    with pytest.warns(UserWarning, match="No gradient came back to 'last'") as told:
        with intercepting(model, {"last": tf.identity}):
            model(x)
    assert len(told) == 1
