"""Fashion-MNIST and three networks for it, with the same weights and batches for Keras 3 and for tf_keras."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path("/usr/share/datasets/fashion-mnist")
TRAINED = Path(".study") / "dense"
BATCH, EPOCHS = 128, 6
# The last images of an epoch that fill no batch are left out: they are others in each epoch.
STEPS = 60_000 // BATCH
# Begin, end and frequency of the gradual schedule, in steps: epochs 2 to 5, with the last update at the end.
SCHEDULE = (STEPS, 5 * STEPS, 104)


def images(part: str) -> tuple[Any, Any]:
    """Images of shape (examples, 28, 28, 1) with values in [0, 1], and labels; `part`: train or t10k."""

    def read(kind: str, offset: int) -> Any:
        return np.frombuffer(
            gzip.decompress((FOLDER / f"{part}-{kind}-ubyte.gz").read_bytes()), np.uint8, offset=offset
        )

    pixels = read("images-idx3", 16).reshape(-1, 28, 28, 1).astype("float32") / 255
    return pixels, read("labels-idx1", 8).astype("int32")


def batches(data: tuple[Any, Any], seed: int) -> Any:
    """A tf.data set of all batches of a training: each epoch in an order of its own, drawn by the seed."""
    import tensorflow as tf

    generator = np.random.default_rng(seed)
    orders = np.stack([generator.permutation(len(data[1]))[: STEPS * BATCH] for _ in range(EPOCHS)])
    inputs, labels = (tf.constant(array) for array in data)
    rows = tf.data.Dataset.from_tensor_slices(orders.reshape(-1, BATCH).astype("int32"))
    return rows.map(lambda row: (tf.gather(inputs, row), tf.gather(labels, row))).prefetch(2)


def mlp(keras: Any) -> Any:
    """The perceptron with 300 and 100 hidden units of LeCun et al. 1998: 266,200 weights."""
    dense = keras.layers.Dense
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Flatten(),
            dense(300, activation="relu", name="hidden_1"),
            dense(100, activation="relu", name="hidden_2"),
            dense(10, name="logits"),
        ]
    )


def cnn(keras: Any) -> Any:
    """Two convolutions of 32 and 64 channels with pooling, 128 units: 421,408 weights."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv_1"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu", name="conv_2"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="hidden"),
            layers.Dense(10, name="logits"),
        ]
    )


def resnet8(keras: Any) -> Any:
    """ResNet-8: a stem and three residual blocks of 16, 32 and 64 channels with batch normalisation, 77,072 weights."""
    layers = keras.layers

    def convolution(x: Any, filters: int, size: int, stride: int, name: str) -> Any:
        x = layers.Conv2D(filters, size, strides=stride, padding="same", use_bias=False, name=name)(x)
        return layers.BatchNormalization(name=f"{name}_norm", momentum=0.9)(x)

    inputs = keras.Input((28, 28, 1))
    x = layers.Activation("relu")(convolution(inputs, 16, 3, 1, "stem"))
    for filters in (16, 32, 64):
        name, stride = f"block_{filters}", 1 if filters == 16 else 2
        y = layers.Activation("relu")(convolution(x, filters, 3, stride, f"{name}_a"))
        y = convolution(y, filters, 3, 1, f"{name}_b")
        if stride > 1:
            x = convolution(x, filters, 1, stride, f"{name}_shortcut")
        x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x))


def mobilenet(keras: Any) -> Any:
    """Inverted residuals as in MobileNetV2: a stem, five blocks that expand by 6, 16 to 32 channels, 46,832 weights."""
    layers = keras.layers

    def normalized(x: Any, layer: Any, active: bool = True) -> Any:
        x = layers.BatchNormalization(name=f"{layer.name}_norm", momentum=0.9)(layer(x))
        return layers.ReLU(6.0)(x) if active else x

    def convolution(filters: int, size: int, name: str) -> Any:
        return layers.Conv2D(filters, size, padding="same", use_bias=False, name=name)

    inputs = keras.Input((28, 28, 1))
    x = normalized(inputs, convolution(16, 3, "stem"))
    for index, (filters, stride) in enumerate(((16, 1), (24, 2), (24, 1), (32, 2), (32, 1))):
        name, channels = f"block_{index}", x.shape[-1]
        y = normalized(x, convolution(6 * channels, 1, f"{name}_expand"))
        depthwise = layers.DepthwiseConv2D(3, strides=stride, padding="same", use_bias=False, name=f"{name}_depthwise")
        y = normalized(normalized(y, depthwise), convolution(filters, 1, f"{name}_project"), active=False)
        x = layers.Add()([x, y]) if y.shape == x.shape else y
    x = layers.GlobalAveragePooling2D()(normalized(x, convolution(128, 1, "head")))
    return keras.Model(inputs, layers.Dense(10, name="logits")(x))


def attention(keras: Any) -> Any:
    """Two blocks of attention with four heads on 49 patches of 32 values, 18,346 weights."""
    layers = keras.layers
    inputs = keras.Input((28, 28, 1))
    x = layers.Conv2D(32, 4, strides=4, name="patches")(inputs)
    # Says where a patch is.
    x = layers.Add()([x, layers.DepthwiseConv2D(3, padding="same", name="places")(x)])
    x = layers.Reshape((49, 32))(x)
    for index in range(2):
        y = layers.LayerNormalization(name=f"before_attention_{index}")(x)
        x = layers.Add()([x, layers.MultiHeadAttention(4, 8, name=f"attention_{index}")(y, y)])
        y = layers.LayerNormalization(name=f"before_mlp_{index}")(x)
        y = layers.Dense(64, activation="relu", name=f"mlp_{index}_a")(y)
        x = layers.Add()([x, layers.Dense(32, name=f"mlp_{index}_b")(y)])
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization(name="last")(x))
    return keras.Model(inputs, layers.Dense(10, name="logits")(x))


NETWORKS = {"mlp": mlp, "cnn": cnn, "resnet8": resnet8, "mobilenet": mobilenet, "attention": attention}
# The networks of the study of pruning during training.
PRUNED = ("mlp", "cnn", "resnet8")


def network(keras: Any, name: str, seed: int) -> Any:
    """Returns a compiled network, its kernels drawn by the seed from Glorot's uniform distribution.

    Args:
        keras: The module keras or tf_keras.
        name: A key of `NETWORKS`.
        seed: The seed.
    """
    model = NETWORKS[name](keras)
    for index, layer in enumerate(sorted(kernel_layers(model), key=lambda layer: layer.name)):
        shape = tuple(layer.kernel.shape)
        field = int(np.prod(shape[:-2]))
        limit = (6 / (field * (shape[-2] + shape[-1]))) ** 0.5
        layer.kernel.assign(np.random.default_rng((seed, index)).uniform(-limit, limit, shape).astype("float32"))
    compile_network(keras, model)
    return model


def trained(keras: Any, name: str, train: tuple[Any, Any]) -> Any:
    """Returns the network of seed 0 after all epochs; its weights are kept in .study, and trained once.

    Args:
        keras: The module keras.
        name: A key of `NETWORKS`.
        train: The training images and labels.
    """
    keras.utils.set_random_seed(0)
    model = network(keras, name, 0)
    path = TRAINED / f"{name}-0.weights.h5"
    if path.exists():
        model.load_weights(path)
    else:
        model.fit(batches(train, 0), epochs=EPOCHS, steps_per_epoch=STEPS, verbose=2)
        path.parent.mkdir(parents=True, exist_ok=True)
        model.save_weights(path)
    return model


def compile_network(keras: Any, model: Any) -> None:
    """Compiles with Adam (0.001) and the cross-entropy of logits."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.001), loss, jit_compile=False)


def compile_falling(keras: Any, model: Any, rate: float, steps: int) -> None:
    """Compiles with Adam, whose learning rate falls to 0 by half a cosine in so many steps, likewise."""
    falling = keras.optimizers.schedules.CosineDecay(rate, steps)
    model.compile(keras.optimizers.Adam(falling), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def slow_last_epoch(keras: Any) -> Any:
    """A callback that divides the learning rate by 5 for the last epoch."""
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 5 if epoch == EPOCHS - 1 else rate)


def kernel_layers(model: Any) -> list[Any]:
    """The layers that have a kernel."""
    return [layer for layer in model.layers if hasattr(layer, "kernel")]


def measured(model: Any, test: tuple[Any, Any]) -> dict[str, float]:
    """The accuracy on the test images, and the share of zeros among the weights of all kernels."""
    inputs, labels = test
    accuracy = float(np.mean(model.predict(inputs, batch_size=500, verbose=0).argmax(axis=1) == labels))
    kernels = [np.asarray(layer.kernel) for layer in kernel_layers(model)]
    zeros = sum(int(np.sum(kernel == 0)) for kernel in kernels) / sum(kernel.size for kernel in kernels)
    return {"accuracy": round(accuracy, 4), "sparsity": round(zeros, 6)}
