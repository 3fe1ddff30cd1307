"""The same training by tensorflow-model-optimization on tf_keras, and by prunekit on Keras 3."""

import warnings

import keras
import numpy as np
import original
import pytest
import tensorflow as tf
import tf_keras
from backends import tensorflow_only
from twins import convolutional, data, dense, masks_of, recorder, trained, twins

import prunekit as pk

theirs = original.sparsity


def momentum(library):
    return library.optimizers.SGD(0.1, momentum=0.9)


def plain(library):
    return library.optimizers.SGD(0.2)


def adam(library):
    return library.optimizers.Adam(0.01)


def fit_both(old, new, callback, times=((3, 16),)):
    """Rows (event, masks, weights) of both trainings; the same data in the same order, one `fit` after the other."""
    x, y = data()
    watch_old, rows_old = recorder(tf_keras, old, lambda: masks_of(old))
    watch_new, rows_new = recorder(keras, new, lambda: list(callback.pruner.masks.values()))
    update = theirs.UpdatePruningStep()
    for epochs, size in times:
        settings = {"batch_size": size, "epochs": epochs, "shuffle": False, "verbose": 0}
        held_out = (x[:20], y[:20])
        history = old.fit(x, y, callbacks=[update, watch_old], validation_data=held_out, **settings).history
        own = new.fit(x, y, callbacks=[callback, watch_new], validation_data=held_out, **settings).history
        np.testing.assert_allclose(own["val_loss"], history["val_loss"], rtol=1e-5)
    return rows_old, rows_new


FAMILY = {
    "convolutions, momentum, a decay that misses its end, two fits": (
        (convolutional, momentum, ("PolynomialDecay", (0.1, 0.8, 2, 9), {"frequency": 3}), {}, {}),
        ((2, 16), (1, 32)),
    ),
    "blocks by maximum with ragged edges": (
        (
            dense,
            plain,
            ("ConstantSparsity", (0.5, 4, 9, 2), {}),
            {"block_size": (8, 2), "block_pooling_type": "MAX"},
            {"pattern": pk.patterns.Block(8, 2, "max")},
        ),
        ((2, 16),),
    ),
    "2 by 4 with a tail": (
        (dense, adam, ("ConstantSparsity", (0.5, 3), {}), {"sparsity_m_by_n": (2, 4)}, {"pattern": "2:4"}),
        ((2, 16),),
    ),
}


@pytest.mark.parametrize("setting, times", FAMILY.values(), ids=list(FAMILY))
@pytest.mark.short(cases=2)
def test_tfmot_trains_as_the_original_at_every_step(setting, times):
    build, optimizer, (kind, arguments, options), wrapping, ours = setting
    old, new = twins(build, getattr(theirs, kind)(*arguments, **options), optimizer, **wrapping)
    callback = pk.PruningCallback(getattr(pk.schedules, kind)(*arguments, **options), policy="tfmot", **ours)
    rows_old, rows_new = fit_both(old, new, callback, times)
    assert len(rows_old) == len(rows_new) > 10
    for (event, masks_old, weights_old), (_, masks_new, weights_new) in zip(rows_old, rows_new, strict=True):
        for one, other in zip(masks_old, masks_new, strict=True):
            np.testing.assert_array_equal(one, other, err_msg=event)
        for one, other in zip(weights_old, weights_new, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=event)
    stripped = theirs.strip_pruning(old)
    for one, other in zip(stripped.get_weights(), new.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
        np.testing.assert_array_equal(one == 0, other == 0)


def test_a_kept_count_in_fit_is_the_compiled_one():
    """At step 25 of 50 the eager schedule of the original asks for one weight more of 20,485 than its training step."""
    weight = np.random.default_rng(0).normal(size=(20485, 1)).astype("float32")
    schedule = theirs.PolynomialDecay(0.0, 0.8, 0, 50, frequency=25)
    assert original.Masker(weight, schedule).at(25).sum() == 6146
    old = tf_keras.Sequential([tf_keras.Input((20485,)), tf_keras.layers.Dense(1, use_bias=False)])
    new = keras.Sequential([keras.Input((20485,)), keras.layers.Dense(1, use_bias=False)])
    for model in (old, new):
        model.set_weights([weight])
    old = theirs.prune_low_magnitude(old, schedule)
    old.compile("sgd", "mse")
    new.compile("sgd", "mse")
    x, y = np.zeros((25, 20485), "float32"), np.zeros(25)
    old.fit(x, y, batch_size=1, verbose=0, callbacks=[theirs.UpdatePruningStep()])
    callback = pk.PruningCallback(pk.schedules.PolynomialDecay(0.0, 0.8, 0, 50, frequency=25), policy="tfmot")
    with pytest.warns(UserWarning, match="lands on sparsity 0.8 at step 50"):
        new.fit(x, y, batch_size=1, verbose=0, callbacks=[callback])
    assert int(masks_of(old)[0].sum()) == 6145
    np.testing.assert_array_equal(masks_of(old)[0], next(iter(callback.pruner.masks.values())))


# ---- differences: (tensorflow-model-optimization, policy="tfmot", prunekit's own)


def test_difference_zeros_between_updates_and_slots_of_the_optimizer():
    old, new = twins(dense, theirs.ConstantSparsity(0.5, 1, frequency=1), momentum)
    own = twins(dense, theirs.ConstantSparsity(0.5, 1, frequency=1), momentum)[1]
    x, y = data()
    compat = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, 1, frequency=1), policy="tfmot")
    held = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, 1, frequency=1), allocation="uniform")

    def zeros_per_batch(library, model, callback):
        watch, rows = recorder(library, model, list)
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0, callbacks=[callback, watch])
        return [int((weights[0] == 0).sum()) for _, _, weights in rows]

    assert zeros_per_batch(tf_keras, old, theirs.UpdatePruningStep()) == [0] * 5 + [234]
    assert zeros_per_batch(keras, new, compat) == [0] * 5 + [234]
    assert zeros_per_batch(keras, own, held) == [234] * 6
    slots = {name: model.optimizer.variables for name, model in {"old": old, "new": new, "own": own}.items()}
    found = {
        name: int((next(np.array(slot) for slot in each if tuple(slot.shape) == (36, 13)) == 0).sum())
        for name, each in slots.items()
    }
    assert found == {"old": 0, "new": 0, "own": 234}
    assert compat.pruner.audit() == held.pruner.audit() == {"hidden/kernel": 0, "logits/kernel": 0}


def zeros_in(model):
    """Zeros among the 36 x 13 weights of the first kernel."""
    return int((trained(model)[0] == 0).sum())


def loop(model, optimizer, loss, before=lambda: None, after=lambda: None, passes=1):
    """A loop of one's own over 4 batches, traced once."""
    x, y = data()

    @tf.function
    def train_step(x, y):
        for _ in range(passes - 1):
            model(x, training=True)
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    for start in range(0, 64, 16):
        before()
        train_step(tf.constant(x[start : start + 16]), tf.constant(y[start : start + 16]))
        after()


def looped(old, passes=1):
    update = theirs.UpdatePruningStep()
    update.set_model(old)
    update.on_train_begin()
    loop(old, old.optimizer, old.loss, passes=passes)
    return update


@tensorflow_only
def test_difference_a_loop_of_ones_own_ends_dense_unless_the_epoch_is_ended():
    schedule = {"target_sparsity": 0.5, "begin_step": 1, "frequency": 1}
    old, new = twins(dense, theirs.ConstantSparsity(**schedule), momentum)
    own = twins(dense, theirs.ConstantSparsity(**schedule), momentum)[1]
    update = looped(old)
    assert zeros_in(theirs.strip_pruning(old)) == 0

    pruner = pk.Pruner(new, pk.schedules.ConstantSparsity(**schedule), policy="tfmot")
    loop(new, new.optimizer, new.loss, before=pruner.step)
    for one, other in zip(trained(old), trained(new), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    for one, other in zip(masks_of(old), pruner.masks.values(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert pruner.audit()["hidden/kernel"] == 234
    with pytest.warns(UserWarning, match=r"299 weights that the masks prune are not zero.*call pruner\.enforce\(\)"):
        pruner.finish()
    assert zeros_in(new) == 0
    update.on_epoch_end(0)
    pruner.enforce()
    assert zeros_in(old) == zeros_in(new) == 234

    with pk.Pruner(own, pk.schedules.ConstantSparsity(**schedule), allocation="uniform") as pruner:
        loop(own, own.optimizer, own.loss, after=pruner.step)
    assert zeros_in(own) == 234


@tensorflow_only
def test_difference_what_a_step_is():
    """Two forward passes in one update: two steps there; one here, unless `step` is called for each."""
    schedule = {"target_sparsity": 0.5, "begin_step": 6, "frequency": 1}
    old, new = twins(dense, theirs.ConstantSparsity(**schedule), plain)
    own = twins(dense, theirs.ConstantSparsity(**schedule), plain)[1]
    looped(old, passes=2)
    assert int(old.layers[1].pruning_step.numpy()) == 8
    assert [int(mask.sum()) for mask in masks_of(old)] == [234, 65]

    pruner = pk.Pruner(new, pk.schedules.ConstantSparsity(**schedule), policy="tfmot")

    def two_passes():
        pruner.step()
        pruner.step()

    loop(new, new.optimizer, new.loss, before=two_passes, passes=2)
    assert pruner.step_count == 8
    assert [int(mask.sum()) for mask in pruner.masks.values()] == [234, 65]

    pruner = pk.Pruner(own, pk.schedules.ConstantSparsity(**schedule), allocation="uniform")
    loop(own, own.optimizer, own.loss, after=pruner.step, passes=2)
    assert pruner.step_count == 4
    assert pruner.sparsity == 0.0


@tensorflow_only
def test_difference_predict_changes_weights():
    x, _ = data()
    schedule = {"target_sparsity": 0.5, "begin_step": 1, "frequency": 1}
    old, new = twins(dense, theirs.ConstantSparsity(**schedule), plain)
    looped(old)
    pruner = pk.Pruner(new, pk.schedules.ConstantSparsity(**schedule), policy="tfmot")
    loop(new, new.optimizer, new.loss, before=pruner.step)
    before = [trained(model)[0] for model in (old, new)]
    old.predict(x, verbose=0)
    new.predict(x, verbose=0)
    assert (before[0] == 0).sum() == 0 and zeros_in(old) == 234
    np.testing.assert_array_equal(trained(new)[0], before[1])  # not reproduced: the model is a plain one


def test_difference_wrapped_layers_and_a_plain_model():
    old, new = twins(dense, theirs.ConstantSparsity(0.5, 0), plain)
    assert [type(layer).__name__ for layer in old.layers] == ["PruneLowMagnitude"] * 3
    assert len(old.weights) > len(new.weights) == 4
    pruner = pk.Pruner(new, pk.schedules.ConstantSparsity(0.5, 0), policy="tfmot")
    assert [type(layer).__name__ for layer in new.layers] == ["Flatten", "Dense", "Dense"]
    assert len(new.weights) == 4
    with pytest.warns(UserWarning, match=r"step\(\) was never called, so .*: the sparsity is 0.0000"):
        pruner.finish()


def test_difference_m_by_n_is_lost_when_a_model_is_saved(tmp_path):
    old, _ = twins(dense, theirs.ConstantSparsity(0.5, 1, frequency=1), momentum, sparsity_m_by_n=(2, 4))
    x, y = data()
    fit = {"x": x, "y": y, "batch_size": 16, "shuffle": False, "verbose": 0}

    def most_of_4(array):
        return int((array != 0).reshape(9, 4, 13).sum(axis=1).max())

    old.fit(callbacks=[theirs.UpdatePruningStep()], **fit)
    assert most_of_4(trained(old)[0]) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of tf_keras, about its own file format
        old.save(tmp_path / "old.h5")
    with theirs.prune_scope():
        old = tf_keras.models.load_model(tmp_path / "old.h5")
    old.fit(callbacks=[theirs.UpdatePruningStep()], **fit)
    assert most_of_4(trained(old)[0]) > 2
    # 5 steps are done when training goes on: by the optimizer, or by forward passes.
    for policy, origin in (("tfmot", -5), ("gradual", 0)):
        model = twins(dense, theirs.ConstantSparsity(0.5, 1), momentum)[1]
        settings = {"pattern": "2:4", "include": "hidden", "policy": policy}
        model.fit(callbacks=[pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, 1, frequency=1), **settings)], **fit)
        model.save(tmp_path / "new.keras")
        model = keras.models.load_model(tmp_path / "new.keras")
        again = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, 1, frequency=1), origin=origin, **settings)
        model.fit(callbacks=[again], **fit)
        assert again.pruner.step_count == 10
        assert most_of_4(trained(model)[0]) == most_of_4(again.pruner.masks["hidden/kernel"]) == 2


@tensorflow_only
def test_difference_several_steps_in_one_execution():
    old, new = twins(dense, theirs.ConstantSparsity(0.5, 2, frequency=1), plain)
    own = twins(dense, theirs.ConstantSparsity(0.5, 2, frequency=1), plain)[1]
    x, y = data()
    for library, model in ((tf_keras, old), (keras, new), (keras, own)):
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(plain(library), loss, steps_per_execution=2)
    settings = {"batch_size": 16, "shuffle": False, "verbose": 0}
    old.fit(x[:64], y[:64], callbacks=[theirs.UpdatePruningStep()], **settings)
    assert int(old.layers[1].pruning_step.numpy()) == 4
    assert zeros_in(old) == 234
    with pytest.raises(
        ValueError, match=r"one batch at a time\. Received: a model compiled with steps_per_execution=2"
    ):
        compat = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, 2, frequency=1), policy="tfmot")
        new.fit(x[:64], y[:64], callbacks=[compat], **settings)
    held = pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, 2, frequency=1), allocation="uniform")
    own.fit(x[:64], y[:64], callbacks=[held], **settings)
    assert held.pruner.step_count == 4
    assert zeros_in(own) == 234


@tensorflow_only
def test_difference_before_or_after_the_update_of_a_step():
    """One step that moves weights far: masks are of the weights before it there, of those after it here."""
    schedule = {"target_sparsity": 0.5, "begin_step": 1, "frequency": 1}
    far = lambda library: library.optimizers.SGD(30.0)  # noqa: E731
    old, new = twins(dense, theirs.ConstantSparsity(**schedule), far)
    own = twins(dense, theirs.ConstantSparsity(**schedule), far)[1]
    before = trained(new)[0]
    x, y = data()
    old.fit(x[:16], y[:16], batch_size=16, verbose=0, callbacks=[theirs.UpdatePruningStep()])
    compat = pk.PruningCallback(pk.schedules.ConstantSparsity(**schedule), policy="tfmot")
    new.fit(x[:16], y[:16], batch_size=16, verbose=0, callbacks=[compat])
    held = pk.PruningCallback(pk.schedules.ConstantSparsity(**schedule), allocation="uniform")
    own.fit(x[:16], y[:16], batch_size=16, verbose=0, callbacks=[held])

    # The same update, of the dense model, without anything of prunekit.
    dense_model = twins(dense, theirs.ConstantSparsity(**schedule), far)[1]
    dense_model.fit(x[:16], y[:16], batch_size=16, verbose=0)
    after = trained(dense_model)[0]

    def larger_half(weight):
        return np.abs(weight) > np.median(np.abs(weight))

    assert (larger_half(before) != larger_half(after)).sum() > 20
    np.testing.assert_array_equal(masks_of(old)[0], larger_half(before))
    np.testing.assert_array_equal(compat.pruner.masks["hidden/kernel"], larger_half(before))
    np.testing.assert_array_equal(held.pruner.masks["hidden/kernel"], larger_half(after))
