"""One model in both libraries, from the same numbers, and what each training step made of them."""

import keras
import numpy as np
import original
import tf_keras


def data():
    """70 images of 6 x 6 and labels of 4 classes: the last batch of 16 is ragged."""
    rng = np.random.default_rng(5)
    return rng.normal(size=(70, 6, 6, 1)).astype("float32"), rng.integers(0, 4, 70)


def convolutional(library):
    """A small convolutional classifier."""
    layers = library.layers
    hidden = [layers.Conv2D(6, 3, activation="relu"), layers.Flatten(), layers.Dense(13, activation="relu")]
    return library.Sequential([library.Input((6, 6, 1)), *hidden, layers.Dense(4)])


def dense(library):
    """A perceptron with kernels of 36 x 13 and 13 x 10."""
    layers = library.layers
    # tanh, and ten outputs: behind a unit that is off, or that nothing reads, zeros would stay zeros by themselves.
    hidden = [layers.Flatten(), layers.Dense(13, activation="tanh", name="hidden")]
    return library.Sequential([library.Input((6, 6, 1)), *hidden, layers.Dense(10, name="logits")])


def twins(build, schedule, optimizer, **wrapping):
    """(wrapped tf_keras model, Keras 3 model) with the same weights, compiled with the same optimizer.

    Args:
        build: Library -> model.
        schedule: Of tensorflow-model-optimization.
        optimizer: Library -> optimizer.
        **wrapping: For `prune_low_magnitude`.
    """
    old, new = build(tf_keras), build(keras)
    rng = np.random.default_rng(1)
    weights = [0.3 * rng.normal(size=weight.shape).astype("float32") for weight in new.weights]
    old.set_weights(weights)
    new.set_weights(weights)
    old = original.sparsity.prune_low_magnitude(old, schedule, **wrapping)
    for library, model in ((tf_keras, old), (keras, new)):
        loss = library.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(library), loss)
    return old, new


def masks_of(old):
    """The masks of a wrapped model, in the order of its layers, True = kept."""
    pairs = [mask for layer in old.layers for _, mask, _ in getattr(layer, "pruning_vars", [])]
    return [mask.numpy().astype(bool) for mask in pairs]


def trained(model):
    """The trainable weights."""
    getattr(model, "jax_state_sync", lambda: None)()
    return [np.array(weight) for weight in model.trainable_weights]


def recorder(library, model, masks):
    """(callback, list it fills): masks and weights after each batch and each epoch."""
    rows = []

    class Recorder(library.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            rows.append((f"batch {batch}", masks(), trained(model)))

        def on_epoch_end(self, epoch, logs=None):
            rows.append((f"epoch {epoch}", masks(), trained(model)))

    return Recorder(), rows
