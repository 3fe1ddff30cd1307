"""LevenbergMarquardt beside scipy and plain NumPy; pruned weights take no part."""

import keras
import numpy as np
import pytest
from keras import ops
from networks import dense_network

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.training_tools.loops.levenberg_marquardt import LevenbergMarquardt

optimize = pytest.importorskip("scipy.optimize")


class Decay(keras.layers.Layer):
    """a exp(-b x) + c."""

    def build(self, shape):
        self.factors = self.add_weight(shape=(3,), initializer="ones", name="factors")

    def call(self, x):
        return self.factors[0] * ops.exp(-self.factors[1] * x) + self.factors[2]


def set_precision(dtype):
    keras.config.set_floatx(dtype)
    keras.config.set_dtype_policy(dtype)


@pytest.fixture
def double():
    set_precision("float64")
    yield
    set_precision("float32")


def curve():
    x = np.linspace(0, 4, 50)[:, None]
    return x, 2.5 * np.exp(-1.3 * x) + 0.5 + 0.05 * np.random.default_rng(0).normal(size=x.shape)


def perceptron(inputs=3, hidden=12, outputs=2):
    return dense_network(inputs, activation="tanh", seed=4, hidden=hidden, out=outputs)


def regression(examples=40, inputs=3, outputs=2):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(examples, inputs))
    return x, np.stack([np.sin(x.sum(axis=1)), x[:, 0] * x[:, 1]], axis=1)[:, :outputs]


@pytest.mark.parametrize(("floatx", "tolerance"), [("float32", 2e-4), ("float64", 1e-8)])
def test_a_curve_fit_ends_in_the_optimum_of_scipy(floatx, tolerance, double):
    set_precision(floatx)
    x, y = curve()
    model = keras.Sequential([keras.Input((1,)), Decay()])
    history = LevenbergMarquardt(model).fit(x, y, epochs=50)

    def residuals(p):
        return (p[0] * np.exp(-p[1] * x) + p[2] - y).ravel()

    expected = optimize.least_squares(residuals, np.ones(3), method="lm", xtol=1e-14, ftol=1e-14, gtol=1e-14)
    np.testing.assert_allclose(model.get_weights()[0], expected.x, rtol=tolerance)
    assert history["loss"][-1] == pytest.approx(expected.cost, rel=max(tolerance, 1e-6))
    assert len(history["loss"]) < 50, "it stops where no step finds a way down"


def jacobian_by_differences(model, x):
    """Of the outputs, row by row, to the trainable variables: central differences."""
    variables = model.trainable_variables
    columns = []
    for variable in variables:
        value = variable.numpy()
        for place in range(value.size):
            sides = []
            for step in (1e-5, -1e-5):
                moved = value.copy().ravel()
                moved[place] += step
                variable.assign(moved.reshape(value.shape))
                sides.append(model(x).numpy().ravel())
            columns.append((sides[0] - sides[1]) / 2e-5)
        variable.assign(value)
    return np.stack(columns, axis=1)


@pytest.mark.parametrize("examples", [5, 60], ids=["fewer residuals than weights", "more residuals than weights"])
def test_a_step_is_that_of_plain_numpy(examples, double):
    model = perceptron()
    x, y = regression(examples)
    before = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    jacobian, residuals = jacobian_by_differences(model, x), (model(x).numpy() - y).ravel()
    damping = 0.7
    expected = before - np.linalg.solve(jacobian.T @ jacobian + damping * np.eye(before.size), jacobian.T @ residuals)
    figures = LevenbergMarquardt(model, damping=damping).step(x, y)
    after = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
    np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)
    assert figures["gradient"] == pytest.approx(np.abs(jacobian.T @ residuals).max(), rel=1e-6)
    assert figures["loss"] == pytest.approx(((model(x).numpy() - y) ** 2).sum() / 2)
    promised = -(jacobian.T @ residuals) @ (after - before) - ((jacobian @ (after - before)) ** 2).sum() / 2
    fall = (residuals**2).sum() / 2 - figures["loss"]
    assert figures["gain"] * promised == pytest.approx(fall, rel=1e-4)


def test_the_loss_never_rises_and_what_is_not_taken_changes_no_bit(double):
    model = perceptron()
    x, y = regression()
    trainer = LevenbergMarquardt(model)
    losses = trainer.fit(x, y, epochs=30)["loss"]
    assert all(later <= earlier for earlier, later in zip(losses, losses[1:], strict=False))
    before = model.get_weights()
    trainer.damping = 1e-15
    trainer._attempts = 1
    trainer._half_square = lambda *_: np.inf
    assert trainer.step(x, y)["gain"] == 0
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_pruned_weights_take_no_part_and_stay_zero(double):
    model = perceptron(hidden=20)
    x, y = regression()
    with Pruner(model, ConstantSparsity(0.75), allocation="uniform") as pruner:
        trainer = LevenbergMarquardt(model, pruner=pruner)
        kept = sum(int(mask.sum()) for mask in pruner.masks.values())
        assert trainer.size == kept + 20 + 2
        history = trainer.fit(x, y, epochs=15)
        assert sum(pruner.audit().values()) == 0
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    assert (model.layers[0].kernel.numpy() == 0).sum() == round(0.75 * 60)


def test_a_pruned_step_is_the_dense_step_of_the_kept_columns(double):
    model = perceptron()
    x, y = regression()
    with Pruner(model, ConstantSparsity(0.5), allocation="uniform") as pruner:
        masks = [pruner.masks[target.name] for target in pruner.targets]
        kept = np.concatenate([masks[0].ravel(), np.ones(12, bool), masks[1].ravel(), np.ones(2, bool)])
        before = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
        jacobian, residuals = jacobian_by_differences(model, x)[:, kept], (model(x).numpy() - y).ravel()
        change = np.linalg.solve(jacobian.T @ jacobian + np.eye(kept.sum()), -jacobian.T @ residuals)
        LevenbergMarquardt(model, pruner=pruner, damping=1.0).step(x, y)
        expected = before.copy()
        expected[kept] += change
        after = np.concatenate([np.ravel(weight) for weight in model.get_weights()])
        np.testing.assert_allclose(after, expected, rtol=1e-5, atol=1e-7)


def test_masks_that_change_while_it_trains_are_followed(double):
    model = perceptron(hidden=20)
    x, y = regression()
    sizes = []
    with Pruner(model, PolynomialDecay(0.0, 0.8, 0, 8, frequency=2), allocation="uniform") as pruner:
        trainer = LevenbergMarquardt(model, pruner=pruner)
        for _ in range(10):
            trainer.step(x, y)
            sizes.append(trainer.size)
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 0.5 * sizes[0]
    assert trainer._linear.traces == 1


def test_a_classifier_learns_through_residuals():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 2)).astype("float32")
    y = (np.hypot(*x.T) > 1.1).astype("int32")
    model = perceptron(2, 10, 2)
    LevenbergMarquardt(model, "classes").fit(x, y, epochs=40)
    assert (model.predict(x, verbose=0).argmax(axis=1) == y).mean() > 0.95


def test_mini_batches_and_a_residual_of_the_users():
    x, y = regression(50)
    model = perceptron()
    history = LevenbergMarquardt(model, lambda truth, output: ops.tanh(output - truth)).fit(x, y, 8, batch_size=16)
    assert len(history["loss"]) == 8 * 4
    assert np.mean(history["loss"][-4:]) < np.mean(history["loss"][:4])


def test_batches_of_different_sizes_need_one_trace():
    x, y = regression(50)
    trainer = LevenbergMarquardt(perceptron())
    trainer.fit(x, y, 2, batch_size=16)
    assert trainer._linear.traces == 1


def test_what_does_not_fit_into_memory_is_refused_with_the_figure():
    x, y = regression(50)
    with pytest.raises(ValueError, match=r"100 residuals x 74 weights need 0.00 GB .* Received: a limit of 0.00 GB"):
        LevenbergMarquardt(perceptron(), memory_limit=1000).step(x, y)
    large = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(3000), keras.layers.Dense(10)])
    with pytest.raises(ValueError, match=r"640 residuals x 3,033,010 weights need .* GB .* a limit of 1.00 GB"):
        LevenbergMarquardt(large, memory_limit=10**9).step(np.zeros((64, 1000)), np.zeros((64, 10)))


def test_what_cannot_be_is_refused():
    model = perceptron()
    x, y = regression()
    with pytest.raises(ValueError, match="'difference', 'classes', or a function .* Received: 'mse'"):
        LevenbergMarquardt(model, "mse")
    with pytest.raises(ValueError, match="damping is above zero. Received: damping=0"):
        LevenbergMarquardt(model, damping=0)
    with pytest.raises(ValueError, match="tried at least once. Received: attempts=0"):
        LevenbergMarquardt(model, attempts=0)
    with pytest.raises(ValueError, match="residuals are not finite"):
        LevenbergMarquardt(model).step(x, np.full_like(y, np.nan))
    with pytest.raises(ValueError, match="one row per example.* Received: x with 40, y with 39"):
        LevenbergMarquardt(model).step(x, y[:39])
    with pytest.raises(ValueError, match=r"y of shape \(40, 1\) for outputs of shape \(40, 2\)"):
        LevenbergMarquardt(model).step(x, y[:, :1])
    with pytest.raises(ValueError, match="Received: batch_size=0"):
        LevenbergMarquardt(model).fit(x, y, batch_size=0)
    with pytest.raises(TypeError, match="`pruner` is a pk.Pruner"):
        LevenbergMarquardt(model, pruner=model)
    optimizer = keras.optimizers.SGD()
    with (
        Pruner(model, ConstantSparsity(0.5), optimizer, allocation="uniform") as pruner,
        pytest.raises(ValueError, match="must have none. Received: a pruner with SGD"),
    ):
        LevenbergMarquardt(model, pruner=pruner)
