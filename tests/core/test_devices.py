"""The training core beside XLA, and beside a GPU where there is one, within tolerances that the docs state."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from networks import sequential

import prunekit as pk

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
# As docs/doctor.md states them, for float32.
ONE_STEP = {"rtol": 1e-4, "atol": 1e-6}
THIRTY_STEPS = {"rtol": 1e-2, "atol": 1e-4}


@pytest.fixture(params=["XLA", "GPU:0"])
def other(request):
    """(device, whether XLA compiles) to compare with the CPU."""
    if request.param == "XLA":
        if BACKEND != "tensorflow":
            pytest.skip("JAX compiles every step, and PyTorch none")
        return "CPU:0", True
    if not gpu_found():
        pytest.skip(f"no GPU that {BACKEND} can use")
    return request.param, False


def gpu_found():
    if BACKEND == "torch":
        import torch

        return torch.cuda.is_available()
    if BACKEND == "jax":
        import jax

        # The first platform is the one that it computes on.
        return jax.default_backend() == "gpu"
    import tensorflow as tf

    return bool(tf.config.list_logical_devices("GPU"))


def network():
    keras.utils.set_random_seed(9)
    return sequential(
        (8, 8, 1),
        keras.layers.Conv2D(8, 3, activation="relu", name="conv"),
        keras.layers.Flatten(),
        keras.layers.Dense(32, "tanh", name="hidden"),
        keras.layers.Dense(4, name="logits"),
    )


def data():
    rng = np.random.default_rng(1)
    return rng.normal(size=(60, 8, 8, 1)).astype("float32"), rng.integers(0, 4, 60)


def trained(device, jit_compile, steps):
    """Weights, masks and measured changes after so many pruned updates."""
    with keras.device(device):
        model, optimizer = network(), keras.optimizers.Adam(0.003)
        schedule = (
            pk.schedules.OneShot(0.5) if steps == 1 else pk.schedules.PolynomialDecay(0.0, 0.8, 0, 20, frequency=5)
        )
        with (
            pk.Pruner(model, schedule, optimizer, allocation="uniform") as pruner,
            pk.loops.WeightChanges(model, optimizer) as changes,
        ):
            loop = pk.loops.TapeLoop(model, optimizer, LOSS, pruner, jit_compile=jit_compile)
            for _ in range(steps):
                loop.step(*data())
        assert sum(pruner.audit().values()) == 0
        return model.get_weights(), pruner.masks, [row.change for row in changes.report.weights]


@tensorflow_only
@pytest.mark.parametrize(("steps", "close"), [(1, ONE_STEP), (30, THIRTY_STEPS)], ids=["a step", "thirty steps"])
def test_a_pruned_training_gives_the_same_weights_and_changes(other, steps, close):
    weights, masks, changes = trained("CPU:0", False, steps)
    others, other_masks, other_changes = trained(*other, steps)
    assert {name: mask.sum() for name, mask in masks.items()} == {name: m.sum() for name, m in other_masks.items()}
    np.testing.assert_allclose(changes, other_changes, **close)
    differing = sum((masks[name] != other_masks[name]).sum() for name in masks)
    assert differing <= 0.01 * sum(mask.size for mask in masks.values()), "weights that are almost as large may swap"
    for one, another in zip(weights, others, strict=True):
        apart = ~np.isclose(one, another, **close)
        assert apart.mean() <= 0.02 if differing else not apart.any()


@pytest.mark.every_backend
@pytest.mark.parametrize("criterion", ["magnitude", "l2", "random"])
def test_masks_of_the_same_weights_are_the_same_to_the_last_bit(other, criterion):
    rng = np.random.default_rng(4)
    # A GPU draws other numbers; the second kernel has many ties.
    weights = [rng.normal(size=weight.shape).astype("float32") for weight in network().get_weights()]
    weights[2] = np.round(3 * weights[2])

    def kept(device):
        with keras.device(device):
            model = network()
            model.set_weights(weights)
            pk.prune(model, 0.63, criterion=criterion, allocation="uniform")
            return [np.array(weight != 0) for weight in model.get_weights()]

    for one, another in zip(kept("CPU:0"), kept(other[0]), strict=True):
        np.testing.assert_array_equal(one, another)


@tensorflow_only
def test_gradients_of_examples_and_products_are_the_same(other):
    import tensorflow as tf

    model, (x, y) = network(), data()
    vectors = [np.ones(variable.shape, "float32") for variable in model.trainable_variables]

    def found(device, jit_compile):
        with tf.device(device):

            @tf.function(jit_compile=jit_compile)
            def compute(x, y):
                norms = pk.gradients.per_example_norms(model, LOSS, x, y)
                return norms, pk.gradients.hvp(model, LOSS, x, y, vectors)

            return compute(tf.constant(x), tf.constant(y))

    norms, products = found("CPU:0", False)
    other_norms, other_products = found(*other)
    np.testing.assert_allclose(norms, other_norms, **ONE_STEP)
    for one, another in zip(products, other_products, strict=True):
        np.testing.assert_allclose(one, another, rtol=1e-3, atol=1e-5)
