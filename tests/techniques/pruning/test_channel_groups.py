"""The policy channel_groups: masks of whole channels in every weight, and their removal."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from architectures import ARCHITECTURES, inputs_of
from keras import layers
from removed_channels import arrays, difference

import prunekit as pk
from prunekit.anatomy.channels.channels import find_channels

EXACT = 1e-5
# Two layers that must have the same channels, grouped channels, offsets, gates, heads.
SOME = ["resnet20", "grouped", "densenet", "lstm_stack", "transformer_encoder", "separable"]


def network(seed=0):
    """A residual block with batch normalization, with and without scale, and two dense layers."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(16, 3, padding="same", use_bias=False, name="stem")(inputs)
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x))
    y = layers.BatchNormalization(scale=False, name="inner_norm")(layers.Conv2D(16, 3, padding="same", name="inner")(x))
    x = layers.GlobalAveragePooling2D()(layers.ReLU()(layers.Add()([x, y])))
    x = layers.Dense(24, activation="relu", name="hidden")(x)
    return keras.Model(inputs, layers.Dense(5, activation="softmax", name="out")(x))


def data(count=64):
    rng = np.random.default_rng(0)
    return rng.random((count, 8, 8, 3), "float32"), rng.integers(0, 5, count)


def kept_channels(model, masks):
    """{group: indices of the channels that the masks keep}, from every axis of every weight; all axes must agree."""
    found = {}
    for group in find_channels(model).groups:
        for member in group.members:
            if member.weight in masks and member.channels.ndim == 1:
                mask = np.moveaxis(masks[member.weight], member.axis, 0)
                rows = mask.reshape(len(mask), -1).any(axis=1)
                ours = np.isin(member.channels, group.channels)
                kept = frozenset(member.channels[ours & rows].tolist())
                assert found.setdefault(group.name, kept) == kept, member
    return found


@pytest.mark.every_backend
@pytest.mark.parametrize("allocation", ["uniform", "global"])
def test_a_training_masks_whole_groups_gradually_and_their_removal_is_exact(allocation):
    model = network()
    model.compile("adam", "sparse_categorical_crossentropy")
    schedule = pk.schedules.PolynomialDecay(0.0, 0.6, 0, 12, frequency=3)
    callback = pk.PruningCallback(schedule, policy="channel_groups", allocation=allocation)
    x, y = data()
    model.fit(x, y, batch_size=16, epochs=5, verbose=0, callbacks=[callback])
    assert sum(callback.pruner.audit().values()) == 0
    # One channel of the residual group has 6 % of all entries.
    assert abs(callback.pruner.sparsity - 0.6) < 0.035
    sparsities = [event.reached for event in callback.report.events]
    assert sparsities == sorted(sparsities) and len(set(sparsities)) > 3
    kept = kept_channels(model, callback.pruner.masks)
    smaller, report = pk.shrink(model, channels="nonzero")
    assert {row.name: row.after for row in report.groups} == {name: len(one) for name, one in kept.items()}
    assert report.approximations == ()
    assert difference(arrays(model(x)), arrays(smaller(x))) < EXACT
    assert smaller.count_params() == sum(int(np.count_nonzero(m)) for m in callback.pruner.masks.values()) + 5
    smaller.fit(x, y, batch_size=16, epochs=1, verbose=0)


@pytest.mark.parametrize("name", SOME)
def test_masks_of_channels_in_other_architectures(name):
    model = ARCHITECTURES[name]()
    report = pk.prune(model, 0.4, policy="channel_groups", allocation="uniform")
    assert 0.3 < report.events[-1].reached < 0.5
    smaller, removal = pk.shrink(model, channels="nonzero")
    assert removal.approximations == ()
    x = inputs_of(model)
    assert difference(arrays(model(x)), arrays(smaller(x))) < EXACT
    assert smaller.count_params() < 0.75 * model.count_params()


def test_masked_channels_stay_masked_in_a_second_training():
    model = network()
    model.compile("sgd", "sparse_categorical_crossentropy")
    x, y = data()
    masks = []
    for _ in range(2):
        callback = pk.PruningCallback(
            pk.schedules.ConstantSparsity(0.5, 0, frequency=2), policy="channel_groups", allocation="uniform"
        )
        model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=[callback])
        masks.append(callback.pruner.masks)
    for name, mask in masks[0].items():
        np.testing.assert_array_equal(mask, masks[1][name])


@pytest.mark.every_backend
def test_masked_channels_stay_masked_whatever_their_importance():
    """A random criterion ranks anew at each update."""
    model, seen = network(), []
    model.compile("sgd", "sparse_categorical_crossentropy")
    schedule = pk.schedules.LinearDecay(0.1, 0.6, 0, 4, frequency=1)
    callback = pk.PruningCallback(schedule, criterion="random", policy="channel_groups", allocation="uniform")
    masks = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(
            {name: np.array(mask) for name, mask in callback.pruner.masks.items()}
        )
    )
    model.fit(*data(), batch_size=8, verbose=0, callbacks=[callback, masks])
    for former, masks in zip(seen, seen[1:], strict=False):
        assert not any(np.any(masks[name] & ~mask) for name, mask in former.items())
    kept = [sum(int(mask.sum()) for mask in masks.values()) for masks in seen]
    assert len(set(kept)) > 3


def test_the_least_important_channels_are_masked():
    model = network()
    kernel = np.array(model.get_layer("hidden").kernel)
    kernel[:, 7:] *= 1e-3
    model.get_layer("hidden").kernel.assign(kernel)
    out = np.array(model.get_layer("out").kernel)
    out[7:] *= 1e-3
    model.get_layer("out").kernel.assign(out)
    pk.prune(model, 0.5, policy="channel_groups", include=["hidden"], allocation="uniform")
    gone = np.flatnonzero(~np.array(model.get_layer("hidden").kernel).any(axis=0))
    assert gone.size and gone.min() >= 7
    assert np.array(model.get_layer("stem").kernel).all()


def test_a_group_that_is_zero_throughout_keeps_a_channel():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(8, name="one"), layers.Dense(8, name="two")])
    model.add(layers.Dense(3, name="out"))
    for name in ("one", "two"):
        model.get_layer(name).kernel.assign(np.zeros_like(model.get_layer(name).kernel))
    pruner = pk.Pruner(
        model,
        pk.schedules.ConstantSparsity(0.3, 0),
        keras.optimizers.SGD(),
        policy="channel_groups",
        allocation="uniform",
    )
    kept = kept_channels(model, pruner.masks)
    pruner.finish()
    assert len(kept["one"]) == 1 and len(kept["two"]) > 1


def test_a_tape_loop_masks_groups():
    model, optimizer = network(), keras.optimizers.Adam(1e-3)
    x, y = data()
    schedule = pk.schedules.PolynomialDecay(0.0, 0.5, 0, 6, frequency=2)
    with pk.Pruner(model, schedule, optimizer, policy="channel_groups", allocation="uniform") as pruner:
        for _ in range(8):
            with tf.GradientTape() as tape:
                loss = keras.losses.sparse_categorical_crossentropy(y, model(x, training=True))
            variables = model.trainable_variables
            optimizer.apply_gradients(
                zip(pruner.mask_gradients(tape.gradient(loss, variables)), variables, strict=True)
            )
            pruner.step()
    assert sum(pruner.audit().values()) == 0
    smaller, _ = pk.shrink(model, channels="nonzero")
    assert difference(arrays(model(x)), arrays(smaller(x))) < EXACT


def test_frozen_and_excluded_channels_stay():
    model = network()
    model.get_layer("stem").trainable = False
    report = pk.prune(model, 0.2, policy="channel_groups", exclude=(), allocation="uniform")
    assert np.array(model.get_layer("inner").kernel).all()
    assert any("frozen" in one.reason for one in report.skipped)
    with pytest.raises(ValueError, match="no channels that can be removed"):
        pk.prune(model, 0.2, policy="channel_groups", exclude=["hidden"], allocation="uniform")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"pattern": "channel"}, "pattern=channel"),
        ({"allocation": "erk"}, "allocation="),
        ({"criterion": "movement"}, "criterion="),
        ({"overrides": {"hidden": 0.5}}, "overrides"),
        ({"keep_one": False}, "keep_one=False"),
    ],
)
def test_options_of_single_weights_are_refused(options, named):
    with pytest.raises(ValueError, match="masks whole channels") as error:
        pk.PruningCallback(pk.schedules.ConstantSparsity(0.5), policy="channel_groups", **options)
    assert named in str(error.value)


def test_a_sparsity_out_of_reach_is_refused_with_the_largest_one():
    with pytest.raises(ValueError, match=r"up to a sparsity of 0\.9\d\d, where one of each group is left"):
        pk.prune(network(), 0.999, policy="channel_groups", allocation="uniform")
