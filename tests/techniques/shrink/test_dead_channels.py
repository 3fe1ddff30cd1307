"""Channels whose kernels are zero: pk.remove_zero_channels, and constants folded into the layers that read them."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize
from keras import layers
from removed_channels import arrays, difference

import prunekit as pk
from prunekit.anatomy.channels.channels import find_channels
from prunekit.anatomy.layers.targets import find_targets
from prunekit.techniques.shrink.channels.selection import zero_channels

EXACT = 1e-5


def silence(model, share=0.5, seed=0):
    """Sets the kernels that compute a share of each group's channels to zero; all other weights stay."""
    channels = find_channels(model)
    rng = np.random.default_rng(seed)
    chosen = []
    for group in channels.groups:
        for part in group.channels.reshape(group.parts, -1):
            chosen += rng.permutation(part)[: int(part.size * share)].tolist()
    outputs = {target.name: target for target in find_targets(model)[0]}
    for group in channels.groups:
        for member in group.members:
            target = outputs.get(member.weight)
            if target is not None and member.axis in target.out_axes:
                value = np.array(target.variable)
                np.moveaxis(value, member.axis, 0)[np.isin(member.channels, chosen)] = 0
                target.variable.assign(value)
    return np.array(sorted(chosen))


def functional(body, shape=(10, 10, 3)):
    inputs = keras.Input(shape)
    return randomize(keras.Model(inputs, body(inputs)))


def same_outputs(model, smaller, data=None):
    x = inputs_of(model) if data is None else data
    return difference(arrays(model(x)), arrays(smaller(x)))


def cnn(x):
    """Convolutions without padding with and without a bias, batch normalization, pooling, Flatten."""
    x = layers.Conv2D(8, 3, use_bias=False, name="one")(x)
    x = layers.ReLU()(layers.BatchNormalization(name="norm_one")(x))
    x = layers.Conv2D(10, 3, use_bias=False, name="two")(x)
    x = layers.Activation("tanh")(layers.BatchNormalization(name="norm_two")(x))
    x = layers.MaxPooling2D()(x)
    x = layers.Conv2D(6, 1, activation="elu", name="three")(x)
    x = layers.Flatten()(x)
    x = layers.Dense(12, activation="sigmoid", use_bias=False, name="hidden")(x)
    return layers.Dense(4, use_bias=False, name="logits")(x)


@pytest.mark.every_backend
def test_constants_of_zero_channels_are_folded_exactly():
    model = functional(cnn)
    silence(model)
    smaller, report = pk.shrink(model, channels="nonzero")
    assert report.channels == (36, 18)
    assert same_outputs(model, smaller) < EXACT
    assert report.approximations == ()
    changes = {one.place: one.change for one in report.adjustments}
    assert changes == {
        "two/kernel": "4 constant inputs folded into the moving mean of norm_two",
        "three/kernel": "5 constant inputs folded into the bias",
        "hidden/kernel": "27 constant inputs folded into a new bias",
        "logits/kernel": "6 constant inputs folded into a new bias",
    }
    assert smaller.get_layer("two").bias is None
    assert report.parameters == (model.count_params(), smaller.count_params())


def test_the_given_model_is_not_changed_and_the_smaller_one_loads(tmp_path):
    model = functional(cnn)
    silence(model)
    before = model.get_weights()
    smaller, _ = pk.shrink(model, channels="nonzero")
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    smaller.save(tmp_path / "small.keras")
    assert same_outputs(model, keras.models.load_model(tmp_path / "small.keras")) < EXACT


def test_without_constants_nothing_is_adjusted():
    model = functional(lambda x: layers.Dense(3)(layers.Dense(8, activation="relu", use_bias=False)(x)), (6,))
    silence(model)
    smaller, report = pk.shrink(model, channels="nonzero")
    assert report.adjustments == () and report.channels == (8, 4)
    assert smaller.layers[-1].get_config() == model.layers[-1].get_config()


def test_a_shrink_that_removes_no_zero_channels_observes_nothing(monkeypatch):
    import prunekit.techniques.shrink.channels.shrinking as shrinking

    monkeypatch.delattr(shrinking, "fold_constants")
    _, report = pk.shrink(functional(cnn), channels=0.5)
    assert report.adjustments == ()


@pytest.mark.every_backend
def test_a_constant_before_padding_is_an_approximation_with_its_error():
    def body(x):
        x = layers.Conv2D(8, 3, padding="same", activation="sigmoid", name="one")(x)
        x = layers.Conv2D(6, 3, padding="same", name="two")(x)
        return layers.Dense(3)(layers.GlobalAveragePooling2D()(layers.ReLU()(x)))

    model = functional(body)
    silence(model)
    smaller, report = pk.shrink(model, channels="nonzero")
    two, outputs = report.approximations
    assert two.place == "two/kernel" and "mean of 4 constant inputs folded into the bias" in two.change
    assert 0.01 < two.error < 1 and outputs.place == "outputs" and 0 < outputs.error < two.error
    assert "approximate, error" in str(report)
    (exact,) = [one for one in report.adjustments if one.error is None]
    assert exact.change == "3 constant inputs folded into the bias"
    (kept,) = [group.kept for group in report.groups if group.name == "two"]
    x = inputs_of(model)
    wanted, found = output_of(model, "two", x)[..., kept], output_of(smaller, "two", x)
    smaller.get_layer("two").bias.assign(np.array(model.get_layer("two").bias)[list(kept)])
    dropped = output_of(smaller, "two", x)
    assert np.square(wanted - found).sum() < np.square(wanted - dropped).sum()


def output_of(model, name, x):
    return arrays(keras.Model(model.input, model.get_layer(name).output)(x))[0]


@pytest.mark.parametrize("padding", [layers.ZeroPadding2D(), layers.ZeroPadding2D(((0, 1), (0, 0)))])
def test_a_zero_padding_between_is_an_approximation_too(padding):
    def body(x):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(8, 3, use_bias=False)(x)))
        return layers.Dense(3)(layers.GlobalMaxPooling2D()(layers.Conv2D(6, 3, name="two")(padding(x))))

    model = functional(body)
    silence(model)
    _, report = pk.shrink(model, channels="nonzero")
    assert [one.place for one in report.approximations] == ["two/kernel", "outputs"]


def test_a_residual_group_loses_only_channels_that_all_its_layers_leave_zero():
    def body(x):
        x = first = layers.Conv2D(8, 1, name="first")(x)
        x = layers.Add()([first, layers.Conv2D(8, 1, name="second")(layers.ReLU()(x))])
        return layers.Conv2D(3, 1, name="last")(x)

    model = functional(body)
    for name, channels in (("first", [1, 2, 5]), ("second", [2, 5, 6])):
        kernel = np.array(model.get_layer(name).kernel)
        kernel[..., channels] = 0
        model.get_layer(name).kernel.assign(kernel)
    smaller, report = pk.shrink(model, channels="nonzero")
    assert report.groups[0].kept == (0, 1, 3, 4, 6, 7)
    assert same_outputs(model, smaller) < EXACT and report.approximations == ()


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("name", sorted(set(ARCHITECTURES) - {"layer_norm_mlp"}))
def test_outputs_of_every_architecture_are_equal_or_the_error_is_reported(name):
    model = randomize(ARCHITECTURES[name]())
    silence(model)
    assert zero_channels(find_channels(model)).size
    smaller, report = pk.shrink(model, channels="nonzero")
    assert report.channels[1] < report.channels[0]
    assert smaller.count_params() == report.parameters[1]
    error = same_outputs(model, smaller)
    if not report.approximations:
        assert error < 1e-4


@pytest.mark.every_backend
@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "sgd"])
def test_the_training_goes_on_with_the_state_of_the_optimizer_and_of_a_new_bias(optimizer):
    model = functional(cnn)
    model.compile(optimizer, "mse")
    x, y = np.array(inputs_of(model)), np.zeros((3, 4), "float32")
    model.fit(x, y, verbose=0)
    silence(model)
    smaller, report = pk.shrink(model, channels="nonzero")
    assert same_outputs(model, smaller) < EXACT
    assert int(smaller.optimizer.iterations) == int(model.optimizer.iterations) == 1
    if optimizer == "adam":
        assert report.notes == ()
        kept = np.ix_(*[report.kept["hidden/kernel"][axis] for axis in (0, 1)])
        for one, other in ((model, smaller), (smaller, model)):
            assert len(one.optimizer._momentums) == len(one.trainable_variables), other.name
        places = [[v.path for v in one.trainable_variables] for one in (model, smaller)]
        former, now = (
            np.array(one.optimizer._momentums[paths.index("hidden/kernel")])
            for one, paths in zip((model, smaller), places, strict=True)
        )
        assert former.any()
        np.testing.assert_array_equal(former[kept], now)
    smaller.fit(x, y, verbose=0)
    assert np.isfinite(smaller.predict(x, verbose=0)).all()
    assert int(smaller.optimizer.iterations) == 2


def test_a_constant_folded_into_a_moving_mean_changes_nothing_in_training():
    model = functional(
        lambda x: layers.Dense(2)(
            layers.BatchNormalization()(layers.Dense(5, use_bias=False)(layers.Dense(8, name="first")(x)))
        ),
        (6,),
    )
    silence(model)
    smaller, report = pk.shrink(model, channels="nonzero", include="first")
    assert "moving mean" in report.adjustments[0].change
    x = inputs_of(model)
    assert difference(arrays(model(x, training=True)), arrays(smaller(x, training=True))) < EXACT


@pytest.mark.every_backend
def test_whole_channels_are_pruned_while_training_and_then_removed():
    keras.utils.set_random_seed(0)
    model = functional(cnn)
    model.compile("adam", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 10, 10, 3)).astype("float32"), rng.normal(size=(64, 4)).astype("float32")
    pruning = pk.PruningCallback(
        pk.schedules.ConstantSparsity(0.5), pattern="channel", exclude="logits", allocation="uniform"
    )
    model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[pruning])
    smaller, report = pk.shrink(model, channels="nonzero")
    assert [group.after for group in report.groups] == [4, 5, 3, 6]
    assert same_outputs(model, smaller, x) < EXACT and report.approximations == ()
    smaller.fit(x, y, batch_size=16, verbose=0)


def test_pruned_once_without_training_then_removed():
    model = functional(cnn)
    pk.prune(model, 0.5, pattern="channel", exclude="logits", allocation="uniform")
    smaller, report = pk.shrink(model, channels="nonzero")
    assert report.channels == (36, 18) and same_outputs(model, smaller) < EXACT


def test_each_group_keeps_the_minimum_the_multiple_and_excluded_layers():
    model = functional(cnn)
    silence(model, share=1.0)
    smaller, report = pk.shrink(model, channels="nonzero", exclude="hidden")
    assert [group.after for group in report.groups] == [1, 1, 1, 12]
    assert same_outputs(model, smaller) < EXACT
    _, report = pk.shrink(model, channels="nonzero", minimum=3, multiple=4)
    assert [group.after for group in report.groups] == [4, 4, 4, 4]


def test_a_model_without_zero_channels_stays_as_it_is():
    model = functional(cnn)
    smaller, report = pk.shrink(model, channels="nonzero")
    assert report.channels == (36, 36) and smaller.count_params() == model.count_params()
    assert same_outputs(model, smaller) == 0 and report.adjustments == ()


def test_shrink_folds_the_constants_of_the_zero_channels_that_it_removes():
    model = functional(cnn)
    chosen = silence(model)
    smaller, report = pk.shrink(model, channels=0.5, reduction="max", allocation="uniform", repair="none")
    removed = 36 - sum(group.after for group in report.groups)
    assert removed == 18 and chosen.size == 18
    assert any("folded" in one.change for one in report.adjustments)


def test_with_a_repair_the_constants_are_left_to_the_repair():
    model = functional(cnn)
    silence(model)
    data = np.random.default_rng(0).normal(size=(64, 10, 10, 3)).astype("float32")
    _, report = pk.shrink(model, channels=0.5, data=data, repair="outputs")
    assert report.adjustments == () and report.errors


def test_constants_that_are_not_folded_are_named():
    inputs = keras.Input((6,), dtype="string")
    hidden = layers.Dense(8, name="first")(
        layers.Embedding(4, 5)(layers.StringLookup(vocabulary=["a", "b", "c"])(inputs))
    )
    model = randomize(keras.Model(inputs, layers.Dense(3)(hidden)))
    silence(model)
    _, report = pk.shrink(model, channels="nonzero", include="first")
    assert any("The constants of 4 removed channels" in note for note in report.notes)
