"""Models whose lower part is frozen, of every kind that is cut in two."""

import keras
import numpy as np
from keras import layers
from networks import sequential


def frozen(layer):
    layer.trainable = False
    return layer


def perceptron():
    return sequential(
        (8,),
        frozen(layers.Dense(16, "relu", name="hidden")),
        layers.Dense(6, "tanh", name="middle"),
        layers.Dense(4, name="logits"),
    )


def convolutional():
    return sequential(
        (6, 6, 2),
        frozen(layers.Conv2D(4, 3, name="conv_1")),
        frozen(layers.BatchNormalization(name="norm")),
        layers.ReLU(),
        layers.MaxPooling2D(name="pool"),
        layers.Flatten(name="flat"),
        layers.Dropout(0.3, seed=5, name="drop"),
        layers.Dense(4, name="logits"),
    )


def residual():
    """Three tensors cross the cut: both ends of a block that trains, and the raw input."""
    inputs = keras.Input((8,), name="x")
    low = frozen(layers.Dense(8, "tanh", name="low"))(inputs)
    other = frozen(layers.Dense(8, name="other"))(inputs)
    x = layers.Add(name="sum")([layers.Dense(8, name="block")(low), other])
    return keras.Model(inputs, layers.Dense(4, name="logits")(layers.Concatenate()([x, inputs, low + 1.0])))


def two_ends():
    """Two inputs by name, one of which is only used above; two outputs, one of which is ready below."""
    inputs = {"a": keras.Input((8,), name="a"), "b": keras.Input((3,), name="b")}
    low = frozen(layers.Dense(5, name="low"))(inputs["a"])
    head = layers.Dense(4, name="head")(layers.Concatenate()([low, inputs["b"]]))
    return keras.Model(inputs, {"head": head, "low": low})


def nested():
    """A backbone in a model in a model, of which only the first layer is frozen."""
    core = sequential(
        (8,), frozen(layers.Dense(9, "tanh", name="one")), layers.Dense(7, "tanh", name="two"), name="core"
    )
    inner = keras.Input((8,))
    backbone = keras.Model(inner, layers.Dense(6, name="three")(core(layers.Rescaling(0.5)(inner))), name="backbone")
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(4, name="logits")(backbone(inputs)))


def in_inference():
    """The usual backbone, frozen and called with training=False: Keras drops units in training all the same."""
    inner = keras.Input((8,))
    x = layers.BatchNormalization(name="norm")(layers.Dense(9, name="one")(inner))
    backbone = frozen(keras.Model(inner, layers.Dropout(0.5, seed=6)(x), name="backbone"))
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dense(4, name="logits")(backbone(inputs, training=False)))


def shared():
    """One frozen layer below and above a trainable one."""
    inputs = keras.Input((8,))
    layer = frozen(layers.Dense(8, "tanh", name="shared"))
    return keras.Model(inputs, layers.Dense(4)(layer(layers.Dense(8, name="between")(layer(inputs)))))


def masked():
    return keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            frozen(layers.Embedding(7, 4, mask_zero=True, name="words")),
            frozen(layers.SimpleRNN(5, return_sequences=True, name="below")),
            layers.SimpleRNN(3, name="above"),
            layers.Dense(4, name="logits"),
        ]
    )


def masked_inside():
    """A mask that begins in a nested model and is used there, above the cut."""
    inner = keras.Sequential(
        [
            keras.Input((5,), dtype="int32"),
            frozen(layers.Embedding(7, 4, mask_zero=True, name="words")),
            layers.SimpleRNN(3, name="above"),
        ],
        name="inner",
    )
    inputs = keras.Input((5,), dtype="int32")
    return keras.Model(inputs, layers.Dense(4, name="logits")(inner(inputs)))


CASES = {
    case.__name__: case
    for case in (perceptron, convolutional, residual, two_ends, nested, in_inference, shared, masked, masked_inside)
}
BOUNDARIES = {
    "perceptron": ("hidden",),
    "convolutional": ("flat",),
    "residual": ("x", "low", "other", "add"),
    "two_ends": ("low", "concatenate"),
    "nested": ("backbone/core/one",),
    "in_inference": ("backbone/norm",),
    "shared": ("shared",),
    "masked": ("below",),
    "masked_inside": ("inner/words",),
}


def built(name, seed=1):
    """The same model each time: names, weights, moving averages."""
    policy = keras.config.dtype_policy()
    keras.backend.clear_session(free_memory=False)
    keras.config.set_dtype_policy(policy)
    keras.utils.set_random_seed(seed)
    model = CASES[name]()
    rng = np.random.default_rng(seed)
    for weight in model.weights:
        # Moving variances among them.
        weight.assign(
            np.abs(weight + rng.normal(scale=0.1, size=weight.shape)) if "variance" in weight.path else weight
        )
    return model


def data(model, examples=70):
    """(x, y, sample weights); the last batch of 16 is ragged."""
    rng = np.random.default_rng(3)

    def one(tensor):
        shape = (examples, *tensor.shape[1:])
        if tensor.dtype == "int32":
            return rng.integers(0, 7, shape).astype("int32")
        return rng.normal(size=shape).astype(keras.config.floatx())

    # A Sequential that was never called has no `input`.
    inputs, output = (
        (model.inputs[0], model.outputs[0]) if isinstance(model, keras.Sequential) else (model.input, model.output)
    )
    outputs = output if isinstance(output, dict) else {"": output}
    y = {name: rng.normal(size=(examples, *output.shape[1:])) for name, output in outputs.items()}
    weights = rng.uniform(0.5, 2, examples).astype(keras.config.floatx())
    return keras.tree.map_structure(one, inputs), y.get("", y), weights


def same(one, other):
    return all(map(np.array_equal, keras.tree.flatten(one), keras.tree.flatten(other)))
