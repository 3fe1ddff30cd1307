"""The option `approximate`: normalizations over removed channels, whose errors are measured and reported."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize
from keras import layers
from removed_channels import arrays, difference, outputs_with, zeroed

import prunekit as pk
from prunekit.techniques.shrink.channels import shrinking
from prunekit.techniques.shrink.channels.options import ShrinkOptions, SizeTarget
from prunekit.techniques.shrink.graph import kept_statistics as kept_statistics_module

HALF = SizeTarget("channels", 0.5)
LAYER_NORM = "layer_normalization"


def walled(norm, activation="relu"):
    keras.utils.set_random_seed(3)
    inputs = keras.Input((7, 6))
    x = layers.Dense(12, activation=activation, name="first")(inputs)
    x = layers.Dense(5, activation="relu", name="second")(norm(x))
    return randomize(keras.Model(inputs, layers.Dense(3, name="last")(x)))


NORMS = {
    "layer": lambda: layers.LayerNormalization(name="norm"),
    "layer without scale": lambda: layers.LayerNormalization(name="norm", scale=False),
    "layer without center": lambda: layers.LayerNormalization(name="norm", center=False),
    "group": lambda: layers.GroupNormalization(groups=1, name="norm"),
}


@pytest.mark.every_backend
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_a_normalization_is_a_wall_by_default_and_approximated_on_demand(norm):
    model = walled(norm())
    assert [group.name for group in pk.channel_groups(model).groups] == ["second"]
    assert [group.name for group in pk.channel_groups(model, LAYER_NORM).groups] == ["first", "second"]
    smaller, report = pk.shrink(model, channels=0.5, approximate=LAYER_NORM, allocation="uniform")
    assert smaller.get_layer("first").units == 6
    layer, outputs = report.approximations
    assert layer.place == "norm" and layer.change == "mean and variance of 6 of 12 channels in the place of all"
    assert 0.01 < layer.error < 10 and outputs.place == "outputs"
    found = shrinking.remove_channels(model, HALF, ShrinkOptions(approximate=LAYER_NORM, repair="none"))
    x = inputs_of(model)
    masked = outputs_with(model, zeroed(found.channels, found.removed), x)
    assert 0.1 < difference(masked, arrays(smaller(x))) / outputs.error < 10


@pytest.mark.every_backend
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_smaller_model_computes_the_statistics_of_the_kept_channels(norm):
    model = walled(norm())
    found = shrinking.remove_channels(model, HALF, ShrinkOptions(approximate=LAYER_NORM, repair="none"))
    kept = found.channels.kept_numbers(found.removed)
    x = inputs_of(model)
    with kept_statistics_module.kept_statistics(found.channels, kept):
        masked = outputs_with(model, zeroed(found.channels, found.removed), x)
    assert difference(masked, arrays(found.model(x))) < 1e-5


def test_equal_channels_have_the_statistics_of_all_channels():
    model = walled(layers.LayerNormalization(name="norm"))
    first = model.get_layer("first")
    kernel, bias = (np.array(one) for one in first.weights)
    first.kernel.assign(np.concatenate([kernel[:, :6]] * 2, 1))
    first.bias.assign(np.concatenate([bias[:6]] * 2))
    _, report = pk.shrink(model, channels=0.5, approximate=[LAYER_NORM], include="second")
    assert report.adjustments == ()


def transformer(post_norm):
    """Two encoder blocks, the normalization before or after each sublayer."""
    inputs = keras.Input((10,), dtype="int32")
    x = layers.Embedding(30, 16, name="token")(inputs)
    for block in range(2):
        norms = [layers.LayerNormalization(name=f"norm{block}_{i}") for i in range(2)]
        attention = layers.MultiHeadAttention(4, 5, name=f"attention{block}")
        up, down = layers.Dense(22, activation="gelu", name=f"up{block}"), layers.Dense(16, name=f"down{block}")
        if post_norm:
            x = norms[0](x + attention(x, x))
            x = norms[1](x + down(up(x)))
        else:
            y = norms[0](x)
            x = x + attention(y, y)
            x = x + down(up(norms[1](x)))
    return randomize(keras.Model(inputs, layers.Dense(5, name="head")(layers.GlobalAveragePooling1D()(x))))


@pytest.mark.every_backend
@pytest.mark.parametrize("post_norm", [False, True])
def test_a_transformer_shrinks_in_its_hidden_width_too(post_norm):
    model = transformer(post_norm)
    names, more = ({group.name for group in pk.channel_groups(model, given).groups} for given in ((), LAYER_NORM))
    assert "token" in more - names
    smaller, report = pk.shrink(model, channels=0.5, approximate=LAYER_NORM, criterion="l2", allocation="uniform")
    norms = [layer for layer in smaller.layers if isinstance(layer, layers.LayerNormalization)]
    assert [norm.gamma.shape[0] for norm in norms] == [8] * 4
    assert smaller.get_layer("token").output_dim == 8
    assert [one.place for one in report.approximations] == [*(norm.name for norm in norms), "outputs"]
    assert all(np.isfinite(one.error) and one.error > 0 for one in report.approximations)


@pytest.mark.parametrize("repair", ["outputs", "weights"])
def test_a_repair_reads_the_statistics_of_the_kept_channels(repair):
    model = walled(layers.LayerNormalization(name="norm"), "gelu")
    data = np.random.default_rng(0).normal(size=(256, 7, 6)).astype("float32")
    smaller, report = pk.shrink(model, channels=0.5, data=data, repair=repair, approximate=LAYER_NORM)
    wanted, found = (one.predict(data, verbose=0).astype("float64") for one in (model, smaller))
    error = np.square(found - wanted).sum() / np.square(wanted - np.array(model.get_layer("last").bias)).sum()
    reported = {one.weight: one.after for one in report.errors}["last/kernel"]
    np.testing.assert_allclose(error, reported, rtol=1e-3)


def test_unknown_approximations_are_refused():
    with pytest.raises(ValueError, match="takes names of layer_normalization. Received: 'batch'"):
        pk.shrink(walled(layers.LayerNormalization()), channels=0.5, approximate="batch")
    with pytest.raises(ValueError, match="Received: 'l'"):
        pk.channel_groups(walled(layers.LayerNormalization()), ["l"])


def test_a_wrong_smaller_model_is_still_found(monkeypatch):
    model = walled(layers.LayerNormalization(name="norm"))
    original = shrinking.without_channels

    def broken(channels, removed, *others):
        smaller, variables = original(channels, removed, *others)
        smaller.get_layer("norm").beta.assign(np.array(smaller.get_layer("norm").beta) + 1)
        return smaller, variables

    monkeypatch.setattr(shrinking, "without_channels", broken)
    with pytest.raises(ValueError, match="is a fault of prunekit"):
        pk.shrink(model, channels=0.5, approximate=LAYER_NORM, allocation="uniform")
