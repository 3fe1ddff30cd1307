"""One network trained on integers by both libraries: from the same weights, on the same batches, with the same Adam."""

import functools

import keras
import numpy as np
import original
import tf_keras
from rounded_places import theirs
from sklearn.datasets import load_digits

import prunekit as pk

HELD_OUT = 797
_CALIBRATION = 256


@functools.cache
def digits():
    """((images, labels) to train on, (images, labels) held out) of scikit-learn's 1,797 digits of 8 x 8 pixels."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.images[order][..., np.newaxis] / 16).astype("float32"), data.target[order]
    return (x[:-HELD_OUT], y[:-HELD_OUT]), (x[-HELD_OUT:], y[-HELD_OUT:])


def plain(k):
    """A convolution and two Dense layers."""
    layers = k.layers
    conv = layers.Conv2D(8, 3, activation="relu", name="conv"), layers.MaxPooling2D(name="pool")
    dense = layers.Dense(32, activation="relu", name="hidden"), layers.Dense(10, name="logits")
    return k.Sequential([k.Input((8, 8, 1)), *conv, layers.Flatten(name="flat"), *dense])


def mobile(k):
    """Convolution, depthwise convolution and 1x1 convolution, each with batch normalization and ReLU."""
    layers = k.layers
    convolutions = [
        layers.Conv2D(16, 3, use_bias=False, name="conv"),
        layers.DepthwiseConv2D(3, padding="same", use_bias=False, name="depthwise"),
        layers.Conv2D(24, 1, use_bias=False, name="pointwise"),
    ]
    blocks = [
        layer
        for conv in convolutions
        for layer in (conv, layers.BatchNormalization(momentum=0.9, name=f"{conv.name}_norm"), layers.ReLU(6.0))
    ]
    end = layers.MaxPooling2D(name="pool"), layers.Flatten(name="flat"), layers.Dense(10, name="logits")
    return k.Sequential([k.Input((8, 8, 1)), *blocks, *end])


def split(k):
    """Linear convolutions before ReLU layers, and a depthwise one: `tfmot.experimental.combine` accepts them."""
    layers = k.layers
    conv = layers.Conv2D(8, 3, name="conv"), layers.ReLU(name="relu")
    depthwise = layers.DepthwiseConv2D(3, activation="relu", name="depthwise")
    return k.Sequential([k.Input((8, 8, 1)), *conv, depthwise, layers.Flatten(), layers.Dense(10, name="logits")])


def compiled(library, build, weights, rate):
    model = build(library)
    model.set_weights(weights)
    return _compile(library, model, rate)


def _compile(library, model, rate):
    loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(library.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


@functools.cache
def trained(build, seed, epochs=20):
    """Weights after a training in floating point."""
    keras.utils.set_random_seed(seed)
    model = _compile(keras, build(keras), 0.003)
    model.fit(*digits()[0], epochs=epochs, batch_size=32, verbose=0)
    return model.get_weights()


def pruned(build, seed, include=()):
    """Weights of which three quarters are zero, trained on with the zeros held."""
    weights = trained(build, seed)
    # They may come from the cache, which draws no numbers.
    keras.utils.set_random_seed(seed)
    model = compiled(keras, build, weights, 0.003)
    pk.prune(model, 0.75, include=include, allocation="uniform")
    model.fit(*digits()[0], epochs=10, batch_size=32, verbose=0, callbacks=[pk.KeepZeros(include=include)])
    return model.get_weights()


def batches(seed, epochs):
    """Images and labels in the order in which both libraries read them."""
    (x, y), _ = digits()
    rng = np.random.default_rng(seed)
    order = np.concatenate([rng.permutation(len(x)) for _ in range(epochs)])
    return {"x": x[order], "y": y[order], "batch_size": 32, "shuffle": False, "verbose": 0}


def by_original(build, weights, data, rate, scheme=None):
    """The model of tf_keras after a training on integers, which its evaluation simulates."""
    model = build(tf_keras)
    model.set_weights(weights)
    model = theirs.quantize_model(model) if scheme is None else _applied(model, scheme)
    _compile(tf_keras, model, rate).fit(**data)
    return model


def _applied(model, scheme):
    return theirs.quantize_apply(theirs.quantize_annotate_model(model), scheme)


def preserving():
    """The scheme of pruning-preserving quantization-aware training."""
    return original.tfmot.experimental.combine.Default8BitPrunePreserveQuantizeScheme()


def by_prunekit(build, weights, data, rate, *callbacks):
    """What prunekit made of the model: see `pk.QuantizationCallback`."""
    model = compiled(keras, build, weights, rate)
    quantization = pk.QuantizationCallback(digits()[0][0][:_CALIBRATION])
    model.fit(**data, callbacks=[*callbacks, quantization])
    return quantization.report


def scores(old, new):
    """(loss, accuracy) on the held-out images: of the original's model, and of prunekit's simulation."""
    _, (x, y) = digits()
    with new.simulating() as simulated:
        return old.evaluate(x, y, verbose=0), simulated.evaluate(x, y, verbose=0)


def kernels(old):
    """Layer -> the kernel that is trained on, of the original's model."""
    wrapped = [layer for layer in old.layers if layer.trainable_weights]
    return {
        layer.layer.name: next(weight.numpy() for weight in layer.trainable_weights if "kernel" in weight.name)
        for layer in wrapped
    }
