"""Models of tf_keras and tensorflow-model-optimization, made and saved as their users do, for the tests of interop."""

import contextlib
import warnings

import keras
import numpy as np

from prunekit.interop.tfmot import legacy

keras2 = legacy.tf_keras()
tfmot = legacy.tfmot()
L = keras2.layers
FORMATS = {"h5": "model.h5", "keras": "model.keras", "savedmodel": "model"}


@contextlib.contextmanager
def their_noise():
    """Inside, what tf_keras says about its own file formats is not an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def saved(model, folder, name):
    """The model in a file or folder `name`; returns the path."""
    with their_noise():
        model.save(folder / name)
    return folder / name


def images_and_labels(count=32, seed=5):
    generator = np.random.default_rng(seed)
    return generator.normal(size=(count, 8, 8, 1)).astype("float32"), generator.integers(0, 6, count)


def small_network():
    """A functional network with a branch, for images of 8 x 8."""
    inputs = keras2.Input((8, 8, 1), name="image")
    x = L.Conv2D(4, 3, name="conv")(inputs)
    x = L.BatchNormalization(name="bn")(x)
    x = L.ReLU(name="relu")(x)
    x = L.DepthwiseConv2D(3, activation="relu", name="depthwise")(x)
    y = L.Conv2D(4, 1, name="pointwise")(x)
    x = L.Add(name="add")([x, y])
    x = L.Flatten(name="flatten")(x)
    return keras2.Model(inputs, L.Dense(6, activation="softmax", name="classes")(x), name="small")


def dense_network():
    """Two dense layers, for the same images."""
    layers = [L.Flatten(name="flatten"), L.Dense(8, "relu", name="hidden"), L.Dense(6, "softmax", name="classes")]
    return keras2.Sequential([keras2.Input((8, 8, 1)), *layers], name="dense")


def trained(model, callbacks=(), epochs=1, optimizer="adam"):
    """The model after `epochs` of 8 batches."""
    x, y = images_and_labels()
    with their_noise():
        model.compile(optimizer, "sparse_categorical_crossentropy")
        model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))
    return model


def wrapped_for_pruning(model, **options):
    options.setdefault("pruning_schedule", tfmot.sparsity.keras.PolynomialDecay(0.2, 0.8, 0, 20, frequency=5))
    with their_noise():
        return tfmot.sparsity.keras.prune_low_magnitude(model, **options)


def pruned_halfway(network=small_network, optimizer="adam"):
    """A network wrapped by prune_low_magnitude and trained for 8 of the 20 steps of its schedule."""
    update = tfmot.sparsity.keras.UpdatePruningStep()
    return trained(wrapped_for_pruning(network()), [update], optimizer=optimizer)


def saved_halfway(folder):
    """That network, and its three files."""
    model = pruned_halfway()
    return model, {kind: saved(model, folder, name) for kind, name in FORMATS.items()}


def pruning_state(model):
    """Weight name as in prunekit -> (weight, mask, threshold), and the steps, read off the wrappers."""
    found, steps = {}, set()
    for layer in model.layers:
        if hasattr(layer, "pruning_vars"):
            steps.add(int(layer.pruning_step.numpy()))
            for weight, mask, threshold in layer.pruning_vars:
                name = "/".join(weight.name.split(":")[0].split("/")[-2:])
                found[name] = (weight.numpy(), mask.numpy().astype(bool), float(threshold.numpy()))
    return found, steps


def answers(model):
    """What a model of either Keras answers to the images."""
    x, _ = images_and_labels()
    return np.asarray(keras.ops.convert_to_numpy(model(x, training=False)))
