"""MaskStore: gradients masked, slots cleared, weights held, everything put back."""

import keras
import numpy as np
import pytest
from backends import BACKEND, PRECISIONS, tensorflow_only
from keras import ops

from prunekit.anatomy.layers.targets import find_targets
from prunekit.techniques.pruning.masks.mask_store import MaskStore

pytestmark = pytest.mark.every_backend


@pytest.fixture
def store(perceptron):
    targets, _ = find_targets(perceptron)
    store = MaskStore(targets, perceptron)
    rng = np.random.default_rng(5)
    store.replace([rng.random(target.shape) < 0.5 for target in targets])
    return store


def pruned(store, name):
    return ~store.masks[name]


def test_masks_are_true_where_weights_are_kept_and_weights_are_zero_elsewhere(perceptron, store):
    for layer in perceptron.layers:
        weights = layer.kernel.numpy()
        np.testing.assert_array_equal(weights == 0, pruned(store, f"{layer.name}/kernel"))
    assert not np.signbit(perceptron.layers[0].kernel.numpy()[pruned(store, "hidden/kernel")]).any(), "zeros, not -0"


def test_gradients_are_zero_at_pruned_positions_and_unchanged_elsewhere(perceptron, store):
    variables = perceptron.trainable_variables
    gradients = [keras.random.normal(v.shape) for v in variables]
    masked = store.mask_gradients(gradients, variables)
    for before, after, variable in zip(gradients, masked, variables, strict=True):
        mask = store.masks.get(f"{variable.path.split('/')[-2]}/{variable.name}", np.ones(variable.shape, bool))
        after, before = ops.convert_to_numpy(after), ops.convert_to_numpy(before)
        np.testing.assert_array_equal(after, np.where(mask, before, 0))


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_gradient_that_is_not_finite_at_a_pruned_position_becomes_zero(perceptron, store, bad):
    hidden = perceptron.layers[0].kernel
    (masked,) = store.mask_gradients([ops.full(hidden.shape, bad)], [hidden])
    assert (ops.convert_to_numpy(masked)[pruned(store, "hidden/kernel")] == 0).all()


@pytest.mark.skipif(BACKEND == "jax", reason="has no variables of its own")
def test_none_stays_none_and_native_variables_are_recognised(perceptron, store):
    hidden, logits = perceptron.layers[0].kernel, perceptron.layers[1].kernel
    none, masked = store.mask_gradients([None, ops.ones(logits.shape)], [hidden.value, logits.value])
    assert none is None
    np.testing.assert_array_equal(ops.convert_to_numpy(masked), store.masks["logits/kernel"].astype("float32"))


@tensorflow_only
def test_indexed_slices_stay_sparse_and_are_masked_row_by_row():
    import tensorflow as tf

    model = keras.Sequential([keras.Input((3,), dtype="int32"), keras.layers.Embedding(6, 4, name="words")])
    targets, _ = find_targets(model)
    store = MaskStore(targets, model)
    mask = np.random.default_rng(1).random((6, 4)) < 0.5
    store.replace([mask])
    # Row 2 twice, as when a word occurs twice in a batch.
    slices = tf.IndexedSlices(tf.ones((3, 4)), tf.constant([2, 5, 2]), tf.constant([6, 4]))
    (masked,) = store.mask_gradients([slices], model.trainable_variables)
    assert isinstance(masked, tf.IndexedSlices)
    np.testing.assert_array_equal(masked.indices.numpy(), [2, 5, 2])
    np.testing.assert_array_equal(masked.values.numpy(), mask[[2, 5, 2]].astype("float32"))


def test_audit_counts_leaks_and_enforce_removes_them(perceptron, store):
    assert store.audit() == {"hidden/kernel": 0, "logits/kernel": 0}
    kernel = perceptron.layers[0].kernel
    kernel.assign(np.ones(kernel.shape))
    assert store.audit() == {"hidden/kernel": int(pruned(store, "hidden/kernel").sum()), "logits/kernel": 0}
    kernel.assign(np.full(kernel.shape, np.nan))
    assert store.audit()["hidden/kernel"] == pruned(store, "hidden/kernel").sum(), "NaN is a leak"
    store.enforce()
    assert store.audit() == {"hidden/kernel": 0, "logits/kernel": 0}


def test_slots_are_cleared_at_newly_pruned_positions_only(perceptron, store):
    optimizer = keras.optimizers.Adam(use_ema=True)
    optimizer.build(perceptron.trainable_variables)
    slots = [v for v in optimizer.variables if tuple(v.shape) == (8, 16)]
    assert len(slots) == 3, "two moments and the average"
    for slot in slots:
        slot.assign(np.ones((8, 16)))
    store.replace([store.masks["hidden/kernel"], store.masks["logits/kernel"]], [optimizer])
    for slot in slots:
        np.testing.assert_array_equal(slot.numpy(), store.masks["hidden/kernel"].astype("float32"))


def test_slots_inside_wrapping_optimizers_are_found(perceptron, store):
    adam, sgd = keras.optimizers.Adam(), keras.optimizers.SGD(momentum=0.9)
    multi = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, {".*hidden.*": adam}))
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(momentum=0.9))
    for optimizer, expected in ((multi, 2), (scaled, 1)):
        optimizer.build(perceptron.trainable_variables)
        slots = [v for v in optimizer.variables if tuple(v.shape) == (8, 16)]
        assert len(slots) == expected
        for slot in slots:
            slot.assign(np.ones((8, 16)))
        store.enforce([optimizer])
        for slot in slots:
            np.testing.assert_array_equal(slot.numpy(), store.masks["hidden/kernel"].astype("float32"))


class Drifting(keras.optimizers.SGD):
    """An optimizer that Keras does not know: its slot moves also where the gradient is zero."""

    def build(self, variables):
        super().build(variables)
        self.drift = [self.add_variable_from_reference(v, name="drift") for v in variables]

    def update_step(self, gradient, variable, learning_rate):
        slot = self.drift[self._get_variable_index(variable)]
        slot.assign_add(ops.ones(variable.shape))
        self.assign_sub(variable, slot * 0.01)


def test_slots_of_an_unknown_optimizer_are_held_in_every_update(perceptron, store):
    optimizer = Drifting(0.1)
    with store.enforcing([optimizer]):
        for _ in range(2):
            optimizer.apply([ops.ones(v.shape) for v in perceptron.trainable_variables], perceptron.trainable_variables)
    drift = optimizer.drift[0].numpy()
    np.testing.assert_array_equal(drift, 2 * store.masks["hidden/kernel"].astype("float32"))
    assert store.audit() == {"hidden/kernel": 0, "logits/kernel": 0}


def test_the_optimizer_is_unchanged_outside_the_scope(perceptron, store):
    optimizer = keras.optimizers.SGD(0.1)
    config, attributes, kind = optimizer.get_config(), dict(vars(optimizer)), type(optimizer)
    with store.enforcing([optimizer]):
        assert type(optimizer) is kind
        assert optimizer.get_config() == config
    assert dict(vars(optimizer)) == attributes
    with pytest.raises(KeyboardInterrupt), store.enforcing([optimizer]):
        perceptron.layers[0].kernel.assign(np.ones((8, 16)))
        raise KeyboardInterrupt
    assert "apply" not in vars(optimizer)
    assert store.audit() == {"hidden/kernel": 0, "logits/kernel": 0}, "an interrupted update leaves the model sparse"


def test_an_attribute_the_user_had_put_on_the_optimizer_comes_back(perceptron, store):
    optimizer = keras.optimizers.SGD(0.1)
    calls = []
    original = optimizer.apply

    def own_apply(grads, trainable_variables=None):
        calls.append(len(grads))
        return original(grads, trainable_variables)

    optimizer.apply = own_apply
    with store.enforcing([optimizer]):
        optimizer.apply([ops.ones(v.shape) for v in perceptron.trainable_variables], perceptron.trainable_variables)
    assert calls == [4], "what was there is wrapped, not replaced"
    assert optimizer.apply is own_apply


CLIPPING = {
    "clipvalue": (0.5, lambda gradients: [np.clip(g, -0.5, 0.5) for g in gradients]),
    "clipnorm": (2.0, lambda gradients: [g * min(1, 2.0 / np.linalg.norm(g)) for g in gradients]),
    "global_clipnorm": (
        2.0,
        lambda gradients: [g * min(1, 2.0 / np.sqrt(sum((one**2).sum() for one in gradients))) for g in gradients],
    ),
}


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("kind", CLIPPING)
def test_gradients_are_masked_before_they_are_clipped(kind, dtype):
    model = keras.Sequential([keras.Input((8,), dtype=dtype), keras.layers.Dense(16, dtype=dtype, name="hidden")])
    targets, _ = find_targets(model)
    store = MaskStore(targets, model)
    rng = np.random.default_rng(0)
    mask = rng.random((8, 16)) < 0.3
    store.replace([mask])
    kernel, bias = (np.array(weight, "float64") for weight in model.get_weights())
    # The largest gradients lie where nothing is left to train: unmasked, they alone would fill the norm.
    gradients = [np.where(mask, rng.normal(size=mask.shape), 100.0), rng.normal(size=16)]
    bound, clip = CLIPPING[kind]
    optimizer = keras.optimizers.SGD(1.0, **{kind: bound})
    with store.enforcing([optimizer]):
        optimizer.apply([ops.convert_to_tensor(g, dtype) for g in gradients], model.trainable_variables)
    moved = clip([np.where(mask, gradients[0], 0), gradients[1]])
    # On PyTorch, Keras clips in float32 whatever the weights are.
    exact = dtype == "float64" and BACKEND == "tensorflow"
    tolerance = {"rtol": 1e-12, "atol": 1e-13} if exact else {"rtol": 1e-5, "atol": 1e-6}
    np.testing.assert_allclose(model.get_weights()[0], np.where(mask, kernel - moved[0], 0), **tolerance)
    np.testing.assert_allclose(model.get_weights()[1], bias - moved[1], **tolerance)


def updated(store, model, optimizer, updates=2):
    """The model after some updates by gradients of ones; weights and slots at pruned positions of its first kernel."""
    with store.enforcing([optimizer]):
        for _ in range(updates):
            optimizer.apply([ops.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    held = [model.layers[0].kernel, *optimizer.variables]
    gone = pruned(store, "hidden/kernel")
    return [ops.convert_to_numpy(v)[gone] for v in held if tuple(v.shape) == gone.shape and "mask" not in v.name]


@pytest.mark.parametrize(
    "build",
    [
        # Its update mixes positions: weights that are pruned move, and so do the averages that Keras makes of them.
        lambda: keras.optimizers.Muon(0.1, use_ema=True),
        lambda: keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0),
    ],
    ids=["mixing", "momentum", "drifting"],
)
def test_weights_slots_and_averages_are_zero_at_pruned_positions_after_an_update(perceptron, store, build):
    found = updated(store, perceptron, build())
    assert len(found) >= 2
    assert not any(values.any() for values in found)


def test_the_accumulator_of_ftrl_rests_where_keras_begins_it(perceptron, store):
    optimizer = keras.optimizers.Ftrl(0.1, initial_accumulator_value=0.25)
    weights, *slots = updated(store, perceptron, optimizer)
    assert not weights.any()
    # A later training divides by it.
    assert sorted(float(slot.min()) for slot in slots) == [0.0, 0.25]
    assert sorted(float(slot.max()) for slot in slots) == [0.0, 0.25]


def test_a_constraint_gets_masked_weights_and_is_the_users_own_again(perceptron, store):
    hidden, seen = perceptron.layers[0].kernel, []

    class Looking(keras.constraints.Constraint):
        def __call__(self, w):
            seen.append(ops.convert_to_numpy(ops.stop_gradient(w)))
            return w

    hidden.constraint = constraint = Looking()
    # An update that moves every weight, whatever its gradient.
    updated(store, perceptron, keras.optimizers.Muon(0.1))
    assert len(seen) == 2
    assert not any(value[pruned(store, "hidden/kernel")].any() for value in seen)
    assert hidden.constraint is constraint
