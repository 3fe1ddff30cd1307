"""GradientStatistics: against NumPy over all gradients, which the test keeps and the statistics do not."""

import dataclasses
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import prunekit as pk

AWKWARD = {
    "usual": lambda rng: [rng.normal(size=(size, 3, 2)) for size in (5, 5, 2)],
    "with zeros": lambda rng: [np.maximum(rng.normal(size=(4, 6)), 0) for _ in range(3)],
    "all zero": lambda rng: [np.zeros((4, 6)), np.zeros((1, 6))],
    "tiny": lambda rng: [1e-25 * rng.normal(size=(4, 6)) for _ in range(3)],
    "huge": lambda rng: [1e25 * rng.normal(size=(4, 6)) for _ in range(3)],
    "of very different scales": lambda rng: [scale * rng.normal(size=(4, 6)) for scale in (1e-6, 1e6, 1.0)],
    "far from zero": lambda rng: [100 + rng.normal(size=(40, 6)) for _ in range(3)],
    "with NaN and infinity": lambda rng: [np.array([[1.0, np.nan, -3], [np.inf, 0, 2]]), rng.normal(size=(3, 3))],
    "all NaN, then numbers": lambda rng: [np.full((2, 3), np.nan), rng.normal(size=(3, 3))],
    "one number per example": lambda rng: [rng.normal(size=7), rng.normal(size=3)],
    "a scalar": lambda rng: [np.array(-2.5)],
    "an empty batch among others": lambda rng: [rng.normal(size=(3, 4)), np.zeros((0, 4)), rng.normal(size=(3, 4))],
}


def figures_of(gradients):
    """The same from all numbers at once, in float64."""
    kept = [np.asarray(gradient, "float64") for gradient in gradients]
    numbers = np.concatenate([each.ravel() for each in kept])
    finite = numbers[np.isfinite(numbers)]
    norms = [np.linalg.norm(np.where(np.isfinite(row), row, 0)) for each in kept for row in np.atleast_1d(each)]
    return pk.gradients.GradientFigures(
        gradients=len(kept),
        numbers=numbers.size,
        not_finite=numbers.size - finite.size,
        zeros=float((finite == 0).mean()),
        mean=finite.mean(),
        standard_deviation=finite.std(),
        root_mean_square=np.sqrt(np.square(finite).mean()),
        largest=np.abs(finite).max(),
        example_norm=np.mean(norms),
        largest_example_norm=np.max(norms),
    )


def assert_figures(found, expected, precision):
    tolerance = 1e-12 if precision == "float64" else 2e-6
    for name, value in dataclasses.asdict(found).items():
        wanted = getattr(expected, name)
        # A mean that cancels is as exact as the numbers are large.
        slack = tolerance * expected.largest if name == "mean" else 0
        if name == "standard_deviation":
            slack = tolerance * abs(expected.mean)
        np.testing.assert_allclose(value, wanted, rtol=5 * tolerance, atol=slack, err_msg=name)


@pytest.mark.parametrize("compiled", [False, True], ids=["at once", "compiled"])
@pytest.mark.parametrize("kind", AWKWARD)
def test_figures_are_those_of_all_numbers_at_once(kind, compiled, precision):
    statistics = pk.gradients.GradientStatistics()
    gradients = [gradient.astype(precision) for gradient in AWKWARD[kind](np.random.default_rng(0))]
    shape = [None, *gradients[0].shape[1:]] if gradients[0].ndim else []
    count = tf.function(statistics, input_signature=[tf.TensorSpec(shape, precision)]) if compiled else statistics
    for gradient in gradients:
        np.testing.assert_array_equal(count(tf.constant(gradient)), gradient)
    assert_figures(statistics.read(), figures_of(gradients), precision)


def test_gradients_in_float16_are_summed_up_in_float32():
    statistics = pk.gradients.GradientStatistics()
    gradients = [np.full((300, 300), 3.0, "float16"), np.full((300, 300), 1.0, "float16")]
    for gradient in gradients:
        assert statistics(tf.constant(gradient)).dtype == "float16"
    assert_figures(statistics.read(), figures_of(gradients), "float32")


def test_the_state_is_ten_numbers_however_many_pass_and_is_forgotten_by_reset():
    statistics = pk.gradients.GradientStatistics()
    with pytest.raises(RuntimeError, match="no gradient has passed"):
        statistics.read()
    for _ in range(3):
        statistics(tf.ones((50, 50)))
    (state,) = (value for value in vars(statistics).values() if isinstance(value, tf.Variable))
    assert vars(statistics).keys() == {"_state"} and state.shape == (10,)
    assert statistics.read().numbers == 7500
    statistics.reset()
    with pytest.raises(RuntimeError, match="no gradient has passed"):
        statistics.read()


@pytest.mark.parametrize("xla", [False, True], ids=["plain", "xla"])
def test_a_training_is_summed_up_inside_its_compiled_step(xla, precision):
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(40, 5)).astype(precision), rng.normal(size=(40, 2)).astype(precision)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "relu", name="hidden"), keras.layers.Dense(2)])
    # At a rate of zero each epoch sees the same gradients, so that they are known without keeping them in the step.
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=xla)
    statistics = pk.gradients.GradientStatistics()
    with pk.gradients.intercepting(model, {"hidden": statistics}):
        model.fit(x, y, batch_size=16, epochs=2, verbose=0, shuffle=False)
    kernel = model.layers[1].kernel.numpy().astype("float64")
    apart = (model(x).numpy() - y).astype("float64")
    batches = [apart[begin : begin + 16] for begin in (0, 16, 32)] * 2
    assert_figures(statistics.read(), figures_of([each / len(each) @ kernel.T for each in batches]), precision)


def test_one_object_at_two_layers_sums_up_both():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="a"), keras.layers.Dense(1, name="b")])
    statistics = pk.gradients.GradientStatistics()
    with pk.gradients.intercepting(model, {"a": statistics, "b": statistics}), tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(np.ones((2, 3))))
        tape.gradient(loss, model.trainable_variables)
    assert (statistics.read().gradients, statistics.read().numbers) == (2, 2 * 3 + 2 * 1)


DISTRIBUTED = """
import numpy as np, tensorflow as tf, keras, prunekit as pk
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="a"), keras.layers.Dense(1, name="b")])
    model.compile("sgd", "mse", jit_compile=False)
    try:
        pk.gradients.GradientStatistics()
    except RuntimeError as error:
        print(error)
x, before = np.ones((8, 3), "float32"), [weight.numpy() for weight in model.layers[0].weights]
statistics = pk.gradients.GradientStatistics()
functions = {"b": statistics, ("a", 0): tf.zeros_like}
with pk.gradients.intercepting(model, functions):
    model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
assert all((old == new.numpy()).all() for old, new in zip(before, model.layers[0].weights)), "not intercepted"
print(statistics.read().gradients, statistics.read().numbers)
"""


@pytest.mark.thorough
def test_two_replicas_are_intercepted_and_summed_up_in_one_state():
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [sys.executable, "-c", DISTRIBUTED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.strip().splitlines()
    assert "Make it outside" in lines[0]
    assert lines[-1] == "8 16"
