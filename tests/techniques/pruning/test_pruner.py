"""Pruner in tape loops, train_on_batch loops and loops without a Keras optimizer; one-shot pruning."""

import gc
import weakref

import keras
import numpy as np
import pytest
from backends import BACKEND, PRECISIONS, gradients_of, tensorflow_only, training_step
from keras import ops

from prunekit.operations.prune import prune
from prunekit.sparsity.schedules import ConstantSparsity, OneShot, PolynomialDecay
from prunekit.techniques.pruning.masks.mask_store import LeakError
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

pytestmark = pytest.mark.every_backend


def batches(samples, size=16):
    x, y = samples
    return [(x[i : i + size], y[i : i + size]) for i in range(0, len(x), size)]


cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.mark.parametrize(
    "call",
    [
        lambda model: prune(model, 0.5, patern="2:4", allocation="uniform"),
        lambda model: Pruner(model, OneShot(0.5), patern="2:4", allocation="uniform"),
        lambda model: PruningCallback(OneShot(0.5), patern="2:4", allocation="uniform"),
    ],
    ids=["prune", "Pruner", "PruningCallback"],
)
@pytest.mark.one_backend
def test_a_misspelt_option_is_refused_with_the_valid_ones(call, perceptron):
    with pytest.raises(
        TypeError, match="Received: 'patern'. Valid are: .*criterion, pattern, .*Did you mean 'pattern'"
    ):
        call(perceptron)


@tensorflow_only
@pytest.mark.parametrize("options", [{"allocation": "uniform"}, {"allocation": "global"}, {"policy": "tfmot"}], ids=str)
def test_no_weight_and_no_mask_goes_through_numpy_when_masks_are_chosen(perceptron, samples, monkeypatch, options):
    def refuse(self, dtype=None):
        raise AssertionError(f"{self.path} was copied to NumPy")

    optimizer = keras.optimizers.Adam(0.01)
    step = training_step(perceptron, optimizer, cross_entropy)
    with Pruner(perceptron, PolynomialDecay(0.2, 0.75, 0, 9, frequency=3), optimizer, **options) as pruner:
        monkeypatch.setattr(keras.Variable, "__array__", refuse)
        for x, y in 2 * batches(samples):
            step(x, y)
            pruner.step()
        assert len(pruner.events) > 1
        monkeypatch.undo()


def test_a_loop_of_the_users_prunes_exactly_and_leaves_nothing_behind(perceptron, samples):
    optimizer = keras.optimizers.Adam(0.01)
    step = training_step(perceptron, optimizer, cross_entropy)
    changed = []
    with Pruner(perceptron, PolynomialDecay(0.0, 0.75, 2, 9, frequency=3), optimizer, allocation="uniform") as pruner:
        for _ in range(2):
            for x, y in batches(samples):
                step(x, y)
                changed.append(pruner.step())
                assert pruner.audit() == {"hidden/kernel": 0, "logits/kernel": 0}
    # Updates at 2, 5, 8 by frequency and 9 because the schedule ends there; at 2 nothing is asked for yet, and at 8
    # so nearly everything that no weight is left for 9.
    assert [i + 1 for i, one in enumerate(changed) if one] == [5, 8]
    assert (perceptron.layers[0].kernel.numpy() == 0).sum() == 96
    assert (perceptron.layers[1].kernel.numpy() == 0).sum() == 48
    assert "apply" not in vars(optimizer)
    assert [event.step for event in pruner.events] == [2, 5, 8, 9]
    assert pruner.events[-1].asked == pruner.events[-1].reached == 0.75


def test_training_equals_a_plain_numpy_loop_with_masks():
    rng = np.random.default_rng(0)
    dtype = PRECISIONS[-1]
    x, y = rng.normal(size=(40, 6)).astype(dtype), rng.normal(size=(40, 3)).astype(dtype)
    inputs = keras.Input((6,), dtype=dtype)
    model = keras.Model(inputs, keras.layers.Dense(3, use_bias=False, dtype=dtype, name="map")(inputs))
    start = rng.normal(size=(6, 3))
    model.layers[-1].kernel.assign(start)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    schedule = PolynomialDecay(0.0, 0.6, 0, 20, power=3, frequency=4)
    pruner = Pruner(model, schedule, optimizer, allocation="uniform")
    step = training_step(model, optimizer, lambda y, outputs: ops.mean(ops.square(outputs - ops.convert_to_tensor(y))))
    for _ in range(25):
        step(x, y)
        pruner.step()
    pruner.finish()

    weight, velocity, mask = start.copy(), np.zeros((6, 3)), np.ones((6, 3), bool)
    for step in range(1, 26):
        gradient = np.where(mask, 2 * x.T @ (x @ weight - y) / y.size, 0)
        # Keras holds the learning rate and the momentum in float32.
        velocity = float(np.float32(0.9)) * velocity - float(np.float32(0.05)) * gradient
        weight = np.where(mask, weight + velocity, 0)
        if step in (4, 8, 12, 16, 20):
            asked = (0.0 - 0.6) * (1 - step / 20) ** 3 + 0.6
            order = np.argsort(np.where(mask, np.abs(weight), -1).ravel(), kind="stable")
            mask.ravel()[order[: round(asked * 18)]] = False
            weight, velocity = np.where(mask, weight, 0), np.where(mask, velocity, 0)
    np.testing.assert_array_equal(pruner.masks["map/kernel"], mask)
    np.testing.assert_allclose(model.layers[-1].kernel.numpy(), weight, rtol=1e-12 if BACKEND == "tensorflow" else 1e-5)


@pytest.mark.parametrize("compiled_before", [False, True])
def test_train_on_batch_prunes_also_where_its_function_was_traced_before(perceptron, samples, compiled_before):
    perceptron.compile("adam", cross_entropy)
    if compiled_before:
        perceptron.train_on_batch(*batches(samples)[0])
    former = perceptron.train_function
    with Pruner(perceptron, ConstantSparsity(0.5, frequency=1), allocation="uniform") as pruner:
        for x, y in batches(samples):
            perceptron.train_on_batch(x, y)
            pruner.step()
            assert pruner.audit() == {"hidden/kernel": 0, "logits/kernel": 0}
    assert perceptron.train_function is former
    perceptron.train_on_batch(*batches(samples)[0])
    # Hidden units that never fire have no gradient; all others grow back: after finish() the model trains as it did.
    assert (perceptron.layers[0].kernel.numpy() == 0).sum() < 32


def test_a_loop_without_a_keras_optimizer_masks_gradients_and_steps(perceptron, samples):
    pruner = Pruner(perceptron, PolynomialDecay(0.0, 0.5, 0, 4, frequency=1), allocation="uniform")
    for x, y in batches(samples):
        gradients = pruner.mask_gradients(gradients_of(perceptron, cross_entropy, x, y))
        for variable, gradient in zip(perceptron.trainable_variables, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
        pruner.step()
        assert pruner.audit() == {"hidden/kernel": 0, "logits/kernel": 0}
    pruner.finish()
    assert pruner.sparsity == 0.5


def test_gradients_that_are_not_of_the_variables_are_refused(perceptron):
    with Pruner(perceptron, ConstantSparsity(0.5), allocation="uniform") as pruner:
        given = [keras.ops.ones(variable.shape) for variable in perceptron.trainable_variables]
        for wrong in (None, "four", {}):
            with pytest.raises(
                TypeError, match=rf"list aligned with the 4 trainable.* Received: {type(wrong).__name__}"
            ):
                pruner.mask_gradients(wrong)
        with pytest.raises(ValueError, match="list aligned with the 4 trainable variables. Received: 3"):
            pruner.mask_gradients(given[:3])
        for wrong in (keras.ops.ones((1, 1)), keras.ops.ones(()), keras.ops.transpose(given[0])):
            with pytest.raises(ValueError, match="A gradient must have the shape of its variable. Received"):
                pruner.mask_gradients([wrong, *given[1:]])


@tensorflow_only
def test_a_function_traced_before_the_pruner_is_detected(perceptron, samples):
    optimizer = keras.optimizers.SGD(0.1)
    step = training_step(perceptron, optimizer, cross_entropy)
    x, y = batches(samples)[0]
    step(x, y)
    with Pruner(perceptron, ConstantSparsity(0.5), optimizer, allocation="uniform") as pruner:
        step(x, y)
        with pytest.raises(LeakError, match="build the Pruner before your tf.function is first called"):
            pruner.step()
        assert pruner.audit() == {"hidden/kernel": 0, "logits/kernel": 0}


def test_weights_written_past_the_optimizer_are_detected_at_the_next_update(perceptron, samples):
    optimizer = keras.optimizers.SGD(0.1)
    step = training_step(perceptron, optimizer, cross_entropy)
    x, y = batches(samples)[0]
    with Pruner(perceptron, ConstantSparsity(0.5, frequency=1), optimizer, allocation="uniform") as pruner:
        step(x, y)
        perceptron.layers[1].kernel.assign(np.ones((16, 4)))
        with pytest.raises(LeakError, match=r"logits/kernel \(32\).*call pruner.enforce\(\) after writing"):
            pruner.step()


def test_weights_written_long_after_the_last_change_of_masks_are_detected_as_well(perceptron):
    optimizer = keras.optimizers.SGD(0.1)
    with Pruner(perceptron, OneShot(0.5), optimizer, allocation="uniform") as pruner:
        with pytest.raises(LeakError, match="hidden/kernel"):
            for step in range(150):
                optimizer.apply(
                    [ops.zeros(v.shape) for v in perceptron.trainable_variables], perceptron.trainable_variables
                )
                if step > 20:
                    perceptron.layers[0].kernel.assign(np.ones((8, 16)))
                pruner.step()


def test_a_pruner_without_references_continues_to_enforce(perceptron, samples):
    perceptron.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    Pruner(perceptron, ConstantSparsity(0.5, begin_step=0), allocation="uniform")
    gc.collect()
    perceptron.train_on_batch(*samples)
    assert [np.mean(layer.kernel.numpy() == 0) for layer in perceptron.layers] == [0.5, 0.5]


def test_a_pruner_that_is_collected_as_garbage_touches_no_weight(perceptron):
    weights, optimizer = perceptron.get_weights(), keras.optimizers.SGD()
    pruner = Pruner(perceptron, ConstantSparsity(0.5, begin_step=0), optimizer, allocation="uniform")
    collected = weakref.ref(pruner)
    perceptron.set_weights(weights)
    del pruner, optimizer
    gc.collect()
    assert collected() is None
    for now, before in zip(perceptron.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(now, before)


@tensorflow_only
def test_step_inside_a_graph_is_refused(perceptron):
    import tensorflow as tf

    pruner = Pruner(perceptron, ConstantSparsity(0.5), allocation="uniform")

    @tf.function
    def step():
        pruner.step()

    with pytest.raises(RuntimeError, match="Call it in Python, after the compiled training step returns"):
        step()


def test_finish_is_idempotent_and_step_after_it_is_refused(perceptron):
    pruner = Pruner(perceptron, OneShot(0.5), allocation="uniform")
    pruner.finish()
    pruner.finish()
    with pytest.raises(RuntimeError, match=r"after finish\(\)"):
        pruner.step()
    assert (perceptron.layers[0].kernel.numpy() == 0).sum() == 64


def test_a_schedule_one_step_short_of_its_end_lands(perceptron):
    pruner = Pruner(perceptron, PolynomialDecay(0.0, 0.8, 0, 10, frequency=10), allocation="uniform")
    for _ in range(9):
        pruner.step()
    assert pruner.sparsity == 0.0
    pruner.finish()
    assert (perceptron.layers[0].kernel.numpy() == 0).sum() == round(0.8 * 128)


@pytest.mark.one_backend
def test_the_first_argument_names_a_schedule(perceptron):
    with pytest.raises(TypeError, match="pk.schedules.PolynomialDecay.*Received: '0.8'"):
        Pruner(perceptron, "0.8", allocation="uniform")
    with pytest.raises(ValueError, match=r"length of the training, .*final_sparsity=0.8, end_step=STEPS"):
        Pruner(perceptron, 0.8, allocation="uniform")
    with pytest.raises(TypeError, match="`optimizer` must be a Keras optimizer.*Received: 'adam'"):
        Pruner(perceptron, OneShot(0.5), "adam", allocation="uniform")
    with pytest.raises(TypeError, match=r"`optimizer` must be a Keras optimizer or a list of.*Received: \[\]"):
        Pruner(perceptron, OneShot(0.5), [], allocation="uniform")
    with pytest.raises(TypeError, match="criterium"):
        Pruner(perceptron, OneShot(0.5), criterium="l1", allocation="uniform")


# One shot: no training in between


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.77, 0.98])
def test_one_shot_pruning_removes_exactly_the_asked_fraction_of_each_weight(perceptron, sparsity):
    report = prune(perceptron, sparsity, allocation="uniform", repair="none")
    for layer in perceptron.layers:
        kernel = layer.kernel.numpy()
        assert (kernel == 0).sum() == round(sparsity * kernel.size)
    assert report.before.zeros - sum((layer.bias.numpy() == 0).sum() for layer in perceptron.layers) == 0
    assert report.targets == ("hidden/kernel", "logits/kernel")


def test_the_smallest_weights_go(perceptron):
    kernel = perceptron.layers[0].kernel
    before = np.abs(kernel.numpy())
    prune(perceptron, 0.5, criterion="magnitude", allocation="uniform")
    gone = kernel.numpy() == 0
    assert before[gone].max() <= before[~gone].min()


def test_pruning_again_never_densifies(perceptron):
    prune(perceptron, 0.8, allocation="uniform")
    zeros = perceptron.layers[0].kernel.numpy() == 0
    prune(perceptron, 0.5, allocation="uniform")
    np.testing.assert_array_equal(perceptron.layers[0].kernel.numpy() == 0, zeros)
    prune(perceptron, 0.9, allocation="uniform")
    assert (perceptron.layers[0].kernel.numpy() == 0)[zeros].all()
    assert (perceptron.layers[0].kernel.numpy() == 0).sum() == round(0.9 * 128)


def test_zeros_that_were_there_stay_through_training_unless_asked_otherwise(perceptron, samples):
    hidden = perceptron.layers[0].kernel
    hidden.assign(np.where(np.random.default_rng(0).random((8, 16)) < 0.7, 0, hidden.numpy()))
    zeros = hidden.numpy() == 0
    optimizer = keras.optimizers.SGD(0.1)
    step = training_step(perceptron, optimizer, cross_entropy)
    with Pruner(perceptron, ConstantSparsity(0.5, frequency=1), optimizer, allocation="uniform") as pruner:
        for x, y in batches(samples):
            step(x, y)
            pruner.step()
    np.testing.assert_array_equal(hidden.numpy() == 0, zeros)

    fresh = training_step(perceptron, optimizer, cross_entropy)
    with Pruner(
        perceptron, ConstantSparsity(0.5, begin_step=2), optimizer, keep_zeros=False, allocation="uniform"
    ) as pruner:
        fresh(*batches(samples)[0])
        pruner.step()
    assert (hidden.numpy()[zeros] != 0).any()


def test_a_weight_that_is_zero_throughout_is_not_taken_for_pruned():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6, kernel_initializer="zeros", name="out")])
    pruner = Pruner(model, OneShot(0.5), allocation="uniform")
    assert pruner.masks["out/kernel"].sum() == 12, "half of it, by position"


@pytest.mark.parametrize(
    ("allocation", "zeros"), [("uniform", [96, 48]), ("global", [None, None]), ("erk", [None, None])]
)
def test_every_allocation_meets_the_total(perceptron, allocation, zeros):
    prune(perceptron, 0.75, criterion="magnitude", allocation=allocation)
    found = [int((layer.kernel.numpy() == 0).sum()) for layer in perceptron.layers]
    assert abs(sum(found) - 144) <= (0 if allocation != "erk" else 1)
    assert all(want is None or want == got for want, got in zip(zeros, found, strict=True))


def test_global_allocation_removes_the_smallest_weights_of_all(perceptron):
    before = np.concatenate([np.abs(layer.kernel.numpy()).ravel() for layer in perceptron.layers])
    prune(perceptron, 0.6, criterion="magnitude", allocation="global")
    after = np.concatenate([layer.kernel.numpy().ravel() for layer in perceptron.layers])
    np.testing.assert_array_equal(
        np.sort(np.argsort(before, kind="stable")[: round(0.6 * 192)]), np.flatnonzero(after == 0)
    )


def test_2_4_leaves_two_of_every_four_along_the_inputs(perceptron):
    prune(perceptron, 0.5, pattern="2:4", allocation="uniform")
    for layer in perceptron.layers:
        kernel = layer.kernel.numpy()
        assert ((kernel.reshape(-1, 4, kernel.shape[1]) != 0).sum(axis=1) == 2).all()


def test_n_of_m_gives_nothing_back_to_a_group_that_has_fewer_than_n_left(perceptron):
    hidden = perceptron.layers[0].kernel
    hidden.assign(np.where(np.arange(8)[:, None] < 3, 0.0, 1.0 + np.arange(128).reshape(8, 16)))
    with Pruner(perceptron, OneShot(sparsity=0.5), pattern="2:4", include=["hidden"], allocation="uniform") as pruner:
        mask = pruner.masks["hidden/kernel"]
    assert not mask[:3].any() and mask[3].all()
    assert (mask[4:].sum(axis=0) == 2).all()


@pytest.mark.one_backend
def test_n_of_m_with_a_global_allocation_is_refused():
    with pytest.raises(ValueError, match='allocation="uniform"'):
        PruningOptions(pattern="2:4", allocation="global")
    with pytest.raises(ValueError, match="2:4 removes the same fraction of every weight.* allocation LAMP"):
        PruningOptions(pattern="2:4", allocation="lamp")


@pytest.mark.one_backend
def test_n_of_m_with_another_sparsity_is_refused_before_a_weight_moves(perceptron):
    before = [w.copy() for w in perceptron.get_weights()]
    with pytest.raises(ValueError, match="0.5"):
        prune(perceptron, 0.8, pattern="2:4", allocation="uniform")
    for old, new in zip(before, perceptron.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_function_of_the_users_ranks_the_weights(perceptron):
    kernel = perceptron.layers[0].kernel
    largest = np.sort(np.abs(kernel.numpy()).ravel())[-64:]
    prune(perceptron, 0.5, criterion=lambda weight: -abs(weight), allocation="uniform")
    assert (kernel.numpy() == 0).sum() == 64
    assert not np.isin(np.abs(kernel.numpy()), largest).any()


@pytest.mark.parametrize("pattern", ["unstructured", "block:4x1", "block:4x1:max", "channel", "2:4"])
def test_weights_that_a_function_ranks_at_minus_infinity_go_first_and_the_count_is_exact(perceptron, pattern):
    kernel = perceptron.layers[1].kernel
    kernel.assign(np.arange(1.0, 65).reshape(16, 4))
    prune(
        perceptron,
        0.5,
        criterion=lambda w: keras.ops.where(w <= 48, -np.inf, w),
        pattern=pattern,
        include="logits",
        allocation="uniform",
    )
    assert (kernel.numpy() == 0).sum() == 32
    if pattern not in ("channel", "2:4"):
        assert kernel.numpy()[12:].all(), "the only weights above -inf"


def test_a_criterion_of_the_wrong_shape_is_refused(perceptron):
    with pytest.raises(ValueError, match="one importance per entry"):
        prune(perceptron, 0.5, criterion=lambda weight: weight[0], allocation="uniform")


def test_nan_weights_are_named_and_nothing_moves(perceptron):
    kernel = perceptron.layers[1].kernel
    kernel.assign(np.where(np.arange(64).reshape(16, 4) < 3, np.nan, 1.0))
    hidden = perceptron.layers[0].kernel.numpy()
    with pytest.raises(ValueError, match=r"NaN for: logits/kernel \(3\)"):
        prune(perceptron, 0.5, allocation="uniform")
    np.testing.assert_array_equal(perceptron.layers[0].kernel.numpy(), hidden)
