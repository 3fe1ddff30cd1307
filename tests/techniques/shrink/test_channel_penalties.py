"""Penalties on whole channels during training: GroupLasso and GrowingRegularization, against NumPy."""

import keras
import numpy as np
import pytest
from keras import layers

import prunekit as pk

UNITS, INPUTS = 6, 4


def network(seed=0):
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((INPUTS,))
    x = layers.Dense(UNITS, name="hidden", use_bias=False)(inputs)
    x = layers.BatchNormalization(name="norm")(x)
    return keras.Model(inputs, layers.Dense(2, name="out")(layers.ReLU()(x)))


def data(count=32):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(count, INPUTS)).astype("float32")
    return x, x[:, :2] * [1.0, -2.0]


def weights_of_channels(model):
    """The weights that compute the hidden units: kernel, gamma and beta, shape (4 + 1 + 1, units)."""
    norm = model.get_layer("norm")
    return np.vstack([np.array(model.get_layer("hidden").kernel), np.array(norm.gamma), np.array(norm.beta)])


def trained(penalty=None, optimizer=None, epochs=1, model=None):
    model = network() if model is None else model
    if not model.compiled:
        model.compile(keras.optimizers.SGD(0.1) if optimizer is None else optimizer, "mse")
    model.fit(*data(), batch_size=32, epochs=epochs, verbose=0, shuffle=False, callbacks=[penalty] if penalty else [])
    return model


@pytest.mark.every_backend
def test_one_update_applies_the_proximal_operator_of_the_group_lasso():
    plain, strength, rate = trained(), 1.7, 0.1
    penalized = trained(pk.penalties.GroupLasso(strength))
    w = weights_of_channels(plain)
    norm = np.sqrt((w**2).sum(axis=0))
    wanted = w * np.maximum(0, 1 - rate * strength * np.sqrt(INPUTS + 2) / norm)
    np.testing.assert_allclose(weights_of_channels(penalized), wanted, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(np.array(penalized.get_layer("out").kernel), np.array(plain.get_layer("out").kernel))


@pytest.mark.every_backend
def test_a_strong_penalty_makes_channels_exactly_zero_and_their_removal_is_exact():
    penalty, model = pk.penalties.GroupLasso(0.3), network()
    for variable in (model.get_layer("hidden").kernel, model.get_layer("norm").gamma):
        variable.assign(np.array(variable) * np.where(np.arange(UNITS) < 2, 0.05, 1.0))
    trained(penalty, epochs=8, model=model)
    zero = ~weights_of_channels(model).any(axis=0)
    np.testing.assert_array_equal(np.flatnonzero(zero), [0, 1])
    np.testing.assert_array_equal(penalty.norms()["hidden"] == 0, zero)
    smaller, report = pk.shrink(model, channels="nonzero")
    assert report.channels == (UNITS, UNITS - zero.sum())
    x, _ = data()
    np.testing.assert_allclose(*(keras.ops.convert_to_numpy(one(x)) for one in (model, smaller)), rtol=1e-4, atol=1e-5)


@pytest.mark.every_backend
def test_growing_regularization_divides_the_selected_channels():
    rate, plain = 0.1, network()
    penalty = pk.penalties.GrowingRegularization(0.5, increase=2.0, frequency=2, ceiling=5.0)
    model = network()
    model.compile(keras.optimizers.SGD(rate), "mse")
    # No gradient reaches the weights: what changes them is the penalty alone.
    x, _ = data()
    model.get_layer("out").kernel.assign(np.zeros((UNITS, 2), "float32"))
    model.get_layer("out").trainable = False
    model.compile(keras.optimizers.SGD(rate), "mse")
    before = weights_of_channels(plain)
    model.fit(x, np.zeros((32, 2)), batch_size=4, epochs=1, verbose=0, callbacks=[penalty])
    # The sum over 4 entries of kernels that compute and of those that read the unit.
    (selected,) = penalty.selected.values()
    assert len(selected) == UNITS // 2
    wanted = before.copy()
    for update in range(8):
        wanted[:, selected] /= 1 + rate * min(2.0 * (1 + update // 2), 5.0)
    np.testing.assert_allclose(weights_of_channels(model), wanted, rtol=1e-5)


def test_growing_regularization_selects_what_shrink_removes():
    penalty = pk.penalties.GrowingRegularization(0.5, increase=20.0, frequency=1, ceiling=1e4)
    model = trained(penalty, epochs=10)
    _, report = pk.shrink(model, channels=0.5)
    assert not set(report.groups[0].kept) & set(penalty.selected["hidden"].tolist())
    before = penalty.selected["hidden"]
    trained(penalty, model=model)
    np.testing.assert_array_equal(penalty.selected["hidden"], before)


def test_adaptive_optimizers_do_not_rescale_the_penalty():
    plain, penalized = trained(optimizer="adam"), trained(pk.penalties.GroupLasso(30.0), optimizer="adam")
    w = weights_of_channels(plain)
    factor = np.maximum(0, 1 - 1e-3 * 30 * np.sqrt(INPUTS + 2) / np.sqrt((w**2).sum(axis=0)))
    np.testing.assert_allclose(weights_of_channels(penalized), w * factor, rtol=1e-4, atol=1e-6)


def test_batches_that_only_accumulate_gradients_shrink_nothing():
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    model = network()
    model.compile(optimizer, "mse")
    before = np.array(model.get_layer("hidden").kernel)
    x, y = data()
    model.fit(x[:16], y[:16], batch_size=16, verbose=0, callbacks=[pk.penalties.GroupLasso(1.0)])
    np.testing.assert_array_equal(np.array(model.get_layer("hidden").kernel), before)
    model.fit(x, y, batch_size=16, verbose=0, callbacks=[pk.penalties.GroupLasso(1.0)])
    assert (np.abs(np.array(model.get_layer("hidden").kernel)) < np.abs(before)).mean() > 0.5


def test_a_fit_without_the_callback_and_after_it_has_no_penalty():
    model = trained()
    trained(pk.penalties.GroupLasso(1e6), model=model)
    assert not weights_of_channels(model).any()
    for layer in ("hidden", "norm"):
        model.get_layer(layer).set_weights(network().get_layer(layer).get_weights())
    trained(model=model)
    assert weights_of_channels(model).any()
    assert "apply" not in vars(model.optimizer)


def test_a_second_fit_does_not_trace_again():
    traces = []

    def loss(truth, prediction):
        traces.append(None)
        return keras.ops.mean((truth - prediction) ** 2)

    model, penalty = network(), pk.penalties.GroupLasso(0.5)
    model.compile(keras.optimizers.SGD(0.1), loss)
    trained(penalty, model=model)
    first, before = len(traces), weights_of_channels(model)
    trained(penalty, model=model)
    assert len(traces) == first
    assert not np.array_equal(weights_of_channels(model), before)
    model.compile(keras.optimizers.SGD(1e-6), loss)
    before = weights_of_channels(model)
    trained(penalty, model=model)
    # Compiled again, it has another learning rate, which the penalty takes too.
    np.testing.assert_allclose(weights_of_channels(model), before, rtol=1e-4, atol=1e-5)


def test_a_loop_of_ones_own():
    import tensorflow as tf

    model, optimizer = network(), keras.optimizers.SGD(0.1)
    x, y = data()

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    with pk.penalties.GroupLasso(1e6).applied(model, optimizer):
        step()
    assert not weights_of_channels(model).any()


def test_together_with_masks_of_channel_groups():
    model = network()
    model.compile("sgd", "mse")
    masks = pk.PruningCallback(
        pk.schedules.ConstantSparsity(0.4, 0, frequency=1), policy="channel_groups", allocation="uniform"
    )
    model.fit(*data(), batch_size=8, epochs=3, verbose=0, callbacks=[pk.penalties.GroupLasso(0.1), masks])
    assert sum(masks.pruner.audit().values()) == 0
    smaller, _ = pk.shrink(model, channels="nonzero")
    assert smaller.get_layer("hidden").units < UNITS


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = layers.Dense(UNITS, activation="relu", name="hidden"), layers.Dense(2, name="out")

    def call(self, inputs):
        return self.out(self.hidden(inputs))


def unbuilt():
    return keras.Sequential([layers.Dense(UNITS, activation="relu", name="hidden"), layers.Dense(2, name="out")])


@pytest.mark.every_backend(cases=1)
@pytest.mark.parametrize("make", [Subclassed, unbuilt])
@pytest.mark.parametrize("place", [0, 1])
def test_a_model_that_fit_builds_has_a_penalty_from_its_first_update_on(make, place):
    model = make()
    model.compile(keras.optimizers.SGD(0.1), "mse")
    masks = pk.PruningCallback(pk.schedules.ConstantSparsity(0.3, 0), policy="channel_groups", allocation="uniform")
    callbacks = [masks]
    callbacks.insert(place, pk.penalties.GroupLasso(1e6))
    model.fit(*data(), batch_size=32, verbose=0, callbacks=callbacks)
    assert not np.array(model.get_layer("hidden").kernel).any() and np.array(model.get_layer("out").kernel).any()
    assert sum(masks.pruner.audit().values()) == 0


def test_an_update_that_a_loss_scale_skips_shrinks_nothing():
    inner = keras.optimizers.SGD(0.1)
    model = network()
    model.compile(keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), "mse")
    before = weights_of_channels(model)
    x, y = data()
    model.fit(np.full_like(x, np.inf), y, batch_size=32, verbose=0, callbacks=[pk.penalties.GroupLasso(1.0)])
    np.testing.assert_array_equal(weights_of_channels(model), before)
    model.fit(x, y, batch_size=32, verbose=0, callbacks=[pk.penalties.GroupLasso(1e6)])


def test_excluded_and_frozen_layers_get_no_penalty():
    model = network()
    model.get_layer("hidden").trainable = False
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="no channels that can be removed"):
        model.fit(*data(), verbose=0, callbacks=[pk.penalties.GroupLasso(1.0)])
    with pytest.raises(ValueError, match="no channels that can be removed"):
        trained(pk.penalties.GroupLasso(1.0, exclude=["hidden"]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pk.penalties.GroupLasso(0.0), "strength"),
        (
            lambda: pk.penalties.GrowingRegularization(50),
            r"is left, in \(0, 1\). Received: .*For 50 %, pass 0.5",
        ),
        (lambda: pk.penalties.GrowingRegularization(0), "the fraction that is left"),
        (lambda: pk.penalties.GrowingRegularization(frequency=0), "frequency"),
        (lambda: pk.penalties.GrowingRegularization(allocation="erk"), "uniform, per_kind, global"),
    ],
)
def test_numbers_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_norms_before_a_training_are_refused():
    with pytest.raises(RuntimeError, match="once a training"):
        pk.penalties.GroupLasso(1.0).norms()


@pytest.mark.parametrize(
    "penalty", [pk.penalties.GroupLasso(), pk.penalties.GrowingRegularization()], ids=["lasso", "growing"]
)
def test_a_frozen_model_is_refused(compiled, batches, penalty):
    compiled.trainable = False
    with pytest.raises(ValueError, match=r"A penalty acts on weights that are trained. Received: .* all frozen"):
        compiled.fit(**batches, callbacks=[penalty])
