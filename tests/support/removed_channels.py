"""The reference of structured pruning: a model in which all weight entries of some channels are zero."""

import keras
import numpy as np
from keras import layers
from networks import sequential


def small_cnn(width=24):
    """Two convolutions of `width` and `width + 8` filters, a hidden layer of 40 units and 5 classes."""
    return sequential(
        (12, 12, 3),
        layers.Conv2D(width, 3, activation="relu", name="one"),
        layers.Conv2D(width + 8, 3, activation="relu", name="two"),
        layers.GlobalAveragePooling2D(),
        layers.Dense(40, activation="relu", name="hidden"),
        layers.Dense(5, name="logits"),
    )


def drawn(channels, seed, share=0.5):
    """Random channels to remove: `share` of each group, as many in each part of a grouped convolution."""
    rng = np.random.default_rng(seed)
    found = []
    for group in channels.groups:
        for part in group.channels.reshape(group.parts, -1):
            found += rng.permutation(part)[: int(part.size * share)].tolist()
    return np.array(found, int)


def zeroed(channels, removed):
    """{id of a variable: values} of the model's weights with zeros at all entries of the removed channels."""
    gone = np.isin(channels.channel_of, removed)
    values = {}
    for axes in channels.links.weights.values():
        value = np.array(axes.variable)
        for axis, numbers in axes.channels.items():
            if numbers.ndim == 1:
                value[(slice(None),) * axis + (gone[numbers],)] = 0
                continue
            # One row of channels for each group of output units, which are the last axis.
            outputs = value.shape[-1] // len(numbers)
            for group, row in enumerate(numbers):
                units = slice(group * outputs, (group + 1) * outputs)
                value[(slice(None),) * axis + (gone[row], units)] = 0
        values[id(axes.variable)] = value
    return values


def outputs_with(model, values, inputs):
    """The model's outputs, as arrays, with some weights replaced; the model is left as it was."""
    before = model.get_weights()
    for variable in model.weights:
        if id(variable) in values:
            variable.assign(values[id(variable)])
    found = arrays(model(inputs))
    model.set_weights(before)
    return found


def arrays(outputs):
    """The leaves of a structure of tensors as arrays."""
    return [keras.ops.convert_to_numpy(leaf) for leaf in keras.tree.flatten(outputs)]


def difference(wanted, found):
    """The largest difference of two lists of arrays, relative to the largest entry of each."""
    pairs = zip(wanted, found, strict=True)
    return max(float(np.abs(one - other).max() / np.abs(one).max()) for one, other in pairs)
