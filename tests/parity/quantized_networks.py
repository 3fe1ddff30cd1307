"""Small networks that `quantize_model` accepts, and where prunekit rounds them in another way, with the reason."""

from rounded_places import PRESCRIBED

# ---- reasons


def per_output(**outputs):
    """Dense kernels have one scale there, and one for each output here, as LiteRT reads them since August 2024."""
    return {f"{name}/kernel": ((1, 1), (1, count)) for name, count in outputs.items()}


def per_channel(**channels):
    """Depthwise kernels have one scale for each multiplier there, and one for each channel here, as LiteRT's kernel."""
    return {f"{name}/kernel": ((1, 1, 1, 1), (1, 1, count, 1)) for name, count in channels.items()}


def transposed(name, filters):
    """Kernels of transposed convolutions have one scale there, and one for each filter here."""
    return {f"{name}/kernel": ((1, 1, 1, 1), (1, 1, filters, 1))}


def unrounded(name, *scales):
    """There, the kernel of a layer before a ReLU layer stays in floating point; in a file it is made of integers."""
    return {f"{name}/kernel": (None, scales)}


def prescribed(*names):
    """Softmax, sigmoid and tanh are rounded here, on the grids that their kernels prescribe; there, they are not."""
    return {name: (None, PRESCRIBED) for name in names}


def joined(name, first, *others):
    """Concatenation copies codes: its inputs are on one grid here. There, its result is rounded once more.

    Inputs that an activation function rounds have grids of their own there; the other inputs are not rounded.
    """
    return {name: (name, None)} | {other: (own, first) for other, own in others}


def pooled(name, before):
    """Average pooling has the grid of its input, as LiteRT's kernel; there, it has a grid of its own."""
    return {name: (name, before)}


def copied(name):
    """Upsampling to the nearest copies codes; there, the copies are rounded again."""
    return {name: (name, None)}


def before_swish(name):
    """A kernel of its own computes swish of integers, which are rounded here; there, only its results are."""
    return {f"{name} (before its activation)": (None, f"{name} (before its activation)")}


def before_relu(name):
    """A batch normalization after a Dense layer is rounded there before its ReLU; here the ReLU is fused."""
    return {name: (name, None)}


# ---- networks


def row(library, shape, *layers):
    return library.Sequential([library.Input(shape, name="image"), *layers])


def perceptron(k):
    layers = k.layers
    return row(k, (12,), layers.Dense(13, activation="relu", name="hidden"), layers.Dense(4, name="logits"))


def normalized(k):
    layers = k.layers
    conv, norm = layers.Conv2D(6, 3, use_bias=False, name="conv"), layers.BatchNormalization(name="norm")
    end = layers.GlobalAveragePooling2D(name="pool"), layers.Dense(4, activation="softmax", name="scores")
    return row(k, (8, 8, 3), conv, norm, layers.ReLU(name="relu"), *end)


def normalized_without_relu(k):
    layers = k.layers
    conv, norm = layers.Conv2D(6, 3, name="conv"), layers.BatchNormalization(name="norm")
    return row(k, (8, 8, 3), conv, norm, layers.Flatten(name="flat"), layers.Dense(4, name="logits"))


def activation_layers(k):
    layers = k.layers
    conv, norm = layers.Conv2D(6, 3, name="conv"), layers.BatchNormalization(name="norm")
    end = layers.Dense(4, name="logits"), layers.Activation("softmax", name="scores")
    relu = layers.Activation("relu", name="relu")
    return row(k, (8, 8, 3), conv, norm, relu, layers.Reshape((216,), name="flat"), *end)


def pooling(k):
    layers = k.layers
    conv = layers.Conv2D(6, 3, activation="relu", name="conv"), layers.MaxPooling2D(name="pool")
    end = layers.Flatten(name="flat"), layers.Dropout(0.5, name="dropout"), layers.Dense(4, name="logits")
    return row(k, (8, 8, 3), *conv, layers.Conv2D(5, 2, name="second"), layers.ReLU(name="relu"), *end)


def average_pooling(k):
    layers = k.layers
    conv = layers.Conv2D(6, 3, activation="relu", name="conv"), layers.AveragePooling2D(2, name="pool")
    return row(k, (8, 8, 3), *conv, layers.Flatten(name="flat"), layers.Dense(4, name="logits"))


def depthwise(k):
    layers = k.layers
    first = layers.DepthwiseConv2D(3, name="depthwise"), layers.BatchNormalization(name="norm")
    second = layers.Conv2D(5, 1, name="pointwise"), layers.BatchNormalization(name="norm_2")
    end = layers.GlobalAveragePooling2D(name="pool"), layers.Dense(4, name="logits")
    relus = [layers.ReLU(6.0, name=name) for name in ("relu6", "relu6_2")]
    return row(k, (8, 8, 3), layers.ZeroPadding2D(1, name="padded"), *first, relus[0], *second, relus[1], *end)


def separable(k):
    layers = k.layers
    end = layers.GlobalAveragePooling2D(name="pool"), layers.Dense(4, name="logits")
    return row(k, (8, 8, 3), layers.SeparableConv2D(6, 3, activation="relu", name="separable"), *end)


def residual(k):
    layers = k.layers
    image = k.Input((8, 8, 3), name="image")
    first = layers.Conv2D(6, 3, padding="same", activation="relu", name="first")(image)
    second = layers.Conv2D(6, 3, padding="same", use_bias=False, name="second")(first)
    summed = layers.Add(name="sum")([first, layers.BatchNormalization(name="norm")(second)])
    flat = layers.Flatten(name="flat")(layers.ReLU(name="relu")(summed))
    return k.Model(image, layers.Dense(4, name="logits")(flat))


def residual_without_relu(k):
    layers = k.layers
    image = k.Input((8, 8, 3), name="image")
    first = layers.Conv2D(6, 3, padding="same", activation="relu", name="first")(image)
    summed = layers.Add(name="sum")([first, layers.Conv2D(6, 3, padding="same", name="second")(first)])
    return k.Model(image, layers.GlobalAveragePooling2D(name="pool")(summed))


def branches(k):
    layers = k.layers
    image = k.Input((8, 8, 3), name="image")
    left = layers.Conv2D(6, 3, activation="relu", name="left")(image)
    right = layers.Conv2D(5, 3, name="right")(image)
    return k.Model(image, layers.MaxPooling2D(name="pool")(layers.Concatenate(name="both")([left, right])))


def normalized_branches(k):
    layers = k.layers
    image = k.Input((8, 8, 3), name="image")
    ends = []
    for side, filters in (("left", 6), ("right", 5)):
        norm = layers.BatchNormalization(name=f"{side}_norm")(layers.Conv2D(filters, 3, name=side)(image))
        ends.append(layers.ReLU(name=f"{side}_relu")(norm))
    return k.Model(image, layers.MaxPooling2D(name="pool")(layers.Concatenate(name="both")(ends)))


def two_inputs(k):
    layers = k.layers
    inputs = [k.Input((8,), name="one"), k.Input((8,), name="two")]
    return k.Model(inputs, layers.Dense(4, name="logits")(layers.Concatenate(name="both")(inputs)))


def upsampling(k):
    layers = k.layers
    first = layers.Conv2DTranspose(6, 3, activation="relu", name="transposed"), layers.UpSampling2D(name="larger")
    return row(k, (4, 4, 3), *first, layers.Cropping2D(1, name="cropped"), layers.Conv2D(4, 3, name="conv"))


def other_activations(k):
    layers = k.layers
    names = ("sigmoid", "tanh", "swish")
    dense = [layers.Dense(6, activation=name, name=name) for name in names]
    return row(k, (8,), *dense, layers.Dense(6, name="last"), layers.LeakyReLU(name="leaky"))


def normalized_dense(k):
    layers = k.layers
    hidden = layers.Dense(6, name="hidden"), layers.BatchNormalization(name="norm"), layers.ReLU(name="relu")
    return row(k, (8,), *hidden, layers.Dense(5, name="second"), layers.Activation("relu", name="relu_2"))


# name -> (network, what differs)
NETWORKS = {
    "perceptron": (perceptron, [per_output(hidden=13, logits=4)]),
    "convolution, normalization, ReLU": (normalized, [per_output(scores=4), prescribed("scores")]),
    "convolution, normalization": (normalized_without_relu, [per_output(logits=4)]),
    "activation layers": (activation_layers, [per_output(logits=4), prescribed("scores")]),
    "max pooling, ReLU layer": (pooling, [per_output(logits=4), unrounded("second", 1, 1, 1, 5)]),
    "average pooling": (average_pooling, [per_output(logits=4), pooled("pool", "conv")]),
    "depthwise, ReLU6": (depthwise, [per_output(logits=4), per_channel(depthwise=3)]),
    "separable": (separable, [per_output(logits=4), per_channel(**{"separable (inside)": 3})]),
    "residual": (residual, [per_output(logits=4)]),
    "residual without ReLU": (residual_without_relu, []),
    "branches": (branches, [joined("both", "left", ("right", "right"))]),
    "normalized branches": (
        normalized_branches,
        [joined("both", "right_relu", ("left_relu", None), ("right_relu", None))],
    ),
    "two inputs": (two_inputs, [per_output(logits=4), joined("both", "one", ("one", None), ("two", None))]),
    "transposed, upsampling": (upsampling, [transposed("transposed", 6), copied("larger")]),
    "other activations": (
        other_activations,
        [per_output(sigmoid=6, tanh=6, swish=6, last=6), prescribed("sigmoid", "tanh"), before_swish("swish")],
    ),
    "normalized Dense": (normalized_dense, [per_output(hidden=6), before_relu("norm"), unrounded("second", 1, 5)]),
}
