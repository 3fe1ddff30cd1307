"""Models that get their weights in `fit`, or that stay unbuilt for Keras although their layers have weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from networks import sequential

TENSORFLOW, JAX, TORCH = "tensorflow", "jax", "torch"
BACKEND = keras.backend.backend()
EXAMPLES, FEATURES, CLASSES, LATENT = 48, 8, 4, 6


def features(seed=0, size=FEATURES):
    return np.random.default_rng(seed).normal(size=(EXAMPLES, size)).astype("float32")


def labels():
    return np.arange(EXAMPLES) % CLASSES


def logits_loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def update(optimizer, loss: Callable[[], Any], *owners: Any) -> Any:
    """One update of the owners' weights, as a custom training step makes it on TensorFlow and on PyTorch; the loss."""
    if BACKEND == TENSORFLOW:
        import tensorflow as tf

        with tf.GradientTape() as tape:
            value = loss()
        weights = [weight for owner in owners for weight in owner.trainable_weights]
        optimizer.apply_gradients(zip(tape.gradient(value, weights), weights, strict=True))
        return value
    import torch

    weights = [weight for owner in owners for weight in owner.trainable_weights]
    for weight in weights:
        weight.value.grad = None
    value = loss()
    value.backward()
    with torch.no_grad():
        optimizer.apply([weight.value.grad for weight in weights], weights)
    return value


@keras.saving.register_keras_serializable("fit_built")
class Subclassed(keras.Model):
    """Layers as attributes, no `build`, a branch in `call` that differs in training."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.hidden = layers.Dense(16, "relu", name="hidden")
        self.drop = layers.Dropout(0.2)
        self.norm = layers.BatchNormalization(name="norm")
        self.logits = layers.Dense(CLASSES, name="logits")

    def call(self, inputs, training=False):
        return self.logits(self.drop(self.norm(self.hidden(inputs), training=training), training=training))


class Block(layers.Layer):
    """Makes its sublayer in `build`, as many published models do."""

    def build(self, shape):
        self.inner = layers.Dense(shape[-1], "relu", name="inner")
        self.inner.build(shape)

    def call(self, inputs):
        return inputs + self.inner(inputs)


class Nested(keras.Model):
    def __init__(self):
        super().__init__()
        self.blocks = [Block(name=f"block_{i}") for i in range(2)]
        self.head = keras.Sequential(
            [layers.Dense(8, "relu", name="wide"), layers.Dense(CLASSES, name="out")], name="head"
        )

    def call(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.head(inputs)


class DictInputs(keras.Model):
    """Takes a dictionary, as data of tables do."""

    def __init__(self):
        super().__init__()
        self.left, self.right = layers.Dense(8, name="left"), layers.Dense(8, name="right")
        self.logits = layers.Dense(CLASSES, name="logits")

    def call(self, inputs):
        return self.logits(ops.relu(self.left(inputs["a"]) + self.right(inputs["b"])))


class Bag(keras.Model):
    """Multiple-instance learning: a list of inputs that share an encoder, weighted by attention."""

    def __init__(self):
        super().__init__()
        self.encoder, self.attention = layers.Dense(8, "relu", name="encoder"), layers.Dense(1, name="attention")
        self.logits = layers.Dense(CLASSES, name="logits")

    def call(self, bag):
        found = ops.stack([self.encoder(one) for one in bag], axis=1)
        return self.logits(ops.sum(found * ops.softmax(self.attention(found), axis=1), axis=1))


class Activity(keras.Model):
    """Adds a loss of its own in `call`."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, "relu", name="hidden", activity_regularizer=keras.regularizers.L2(1e-3))
        self.logits = layers.Dense(CLASSES, name="logits")

    def call(self, inputs):
        hidden = self.hidden(inputs)
        self.add_loss(1e-3 * ops.mean(ops.abs(hidden)))
        return self.logits(hidden)


class Sampling(layers.Layer):
    """Draws a latent vector; has no weights and no `build`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seeds = keras.random.SeedGenerator(7)

    def call(self, mean, spread):
        return mean + ops.exp(0.5 * spread) * keras.random.normal(ops.shape(mean), seed=self.seeds)


class Autoencoder(keras.Model):
    """A VAE as in Keras's examples: encoder and decoder as attributes, a `train_step` and no `call`."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(16, "relu", name="enc")], name="encoder")
        self.mean, self.spread = layers.Dense(LATENT, name="mean"), layers.Dense(LATENT, name="spread")
        self.sampling = Sampling()
        self.decoder = sequential(
            (LATENT,), layers.Dense(16, "relu", name="dec"), layers.Dense(FEATURES, name="pixels"), name="decoder"
        )
        self.tracker = keras.metrics.Mean(name="loss")
        if BACKEND != TENSORFLOW:
            # Keras asks for it there: it builds what has a `call`.
            self.built = True
            for layer, size in ((self.encoder, FEATURES), (self.mean, 16), (self.spread, 16)):
                layer.build((None, size))
            self.sampling.built = True

    @property
    def metrics(self):
        return [self.tracker]

    def elbo(self, inputs):
        hidden = self.encoder(inputs)
        mean, spread = self.mean(hidden), self.spread(hidden)
        rebuilt = self.decoder(self.sampling(mean, spread))
        divergence = -0.5 * ops.mean(1 + spread - ops.square(mean) - ops.exp(spread))
        return ops.mean(ops.square(rebuilt - inputs)) + 0.01 * divergence

    def train_step(self, data):
        inputs = data[0] if isinstance(data, tuple) else data
        loss = update(self.optimizer, lambda: self.elbo(inputs), self)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


class Adversarial(keras.Model):
    """A GAN as in Keras's examples: two optimizers as attributes, the discriminator updated first."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [layers.Dense(16, "relu", name="g"), layers.Dense(FEATURES, name="pixels")], name="generator"
        )
        self.discriminator = keras.Sequential(
            [layers.Dense(16, "relu", name="d"), layers.Dense(1, name="real")], name="discriminator"
        )
        self.seeds = keras.random.SeedGenerator(3)
        if BACKEND != TENSORFLOW:
            self.generator.build((None, LATENT))
            self.discriminator.build((None, FEATURES))
            self.built = True

    def compile(self, d_optimizer, g_optimizer):
        super().compile()
        self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

    def _noise(self, inputs):
        return keras.random.normal((ops.shape(inputs)[0], LATENT), seed=self.seeds)

    def train_step(self, data):
        inputs = data[0] if isinstance(data, tuple) else data
        d_loss = update(self.d_optimizer, lambda: self._d_loss(inputs), self.discriminator)
        g_loss = update(self.g_optimizer, lambda: self._g_loss(inputs), self.generator)
        return {"d_loss": d_loss, "g_loss": g_loss}

    def _d_loss(self, inputs):
        fake = self.generator(self._noise(inputs))
        return ops.mean(ops.softplus(self.discriminator(fake)) + ops.softplus(-self.discriminator(inputs)))

    def _g_loss(self, inputs):
        return ops.mean(ops.softplus(-self.discriminator(self.generator(self._noise(inputs)))))


class Trainer(keras.Model):
    """Holds a functional model, and trains it with a step of its own."""

    def __init__(self):
        super().__init__()
        self.network = sequential(
            (FEATURES,), layers.Dense(16, "relu", name="hidden"), layers.Dense(CLASSES, name="logits"), name="network"
        )
        if BACKEND != TENSORFLOW:
            self.built = True

    def train_step(self, *state_and_data):
        if BACKEND == JAX:
            return self._pure_step(*state_and_data)
        inputs, targets = state_and_data[0][:2]
        loss = update(self.optimizer, lambda: logits_loss()(targets, self.network(inputs)), self.network)
        return {"loss": loss}

    def _pure_step(self, state, data):
        import jax

        inputs, targets = data
        trainable, others, own, metrics = state

        def loss_of(values):
            outputs, _ = self.network.stateless_call(values, others, inputs)
            return logits_loss()(targets, outputs)

        loss, found = jax.value_and_grad(loss_of)(trainable)
        trainable, own = self.optimizer.stateless_apply(own, found, trainable)
        return {"loss": loss}, (trainable, others, own, metrics)


class TwoViews(keras.Model):
    """Contrastive learning: one encoder and a projection head see two noisy views of each example."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([layers.Dense(16, "relu", name="enc")], name="encoder")
        self.head = keras.Sequential([layers.Dense(8, name="projection")], name="head")
        self.noise = layers.GaussianNoise(0.1, seed=1)
        if BACKEND != TENSORFLOW:
            self.encoder.build((None, FEATURES))
            self.head.build((None, 16))
            self.built = True

    def _contrast(self, inputs):
        one, two = (self.head(self.encoder(self.noise(inputs, training=True))) for _ in range(2))
        similarities = ops.matmul(one, ops.transpose(two))
        return logits_loss()(ops.arange(ops.shape(one)[0]), similarities)

    def train_step(self, data):
        inputs = data[0] if isinstance(data, tuple) else data
        return {"loss": update(self.optimizer, lambda: self._contrast(inputs), self.encoder, self.head)}


class RawVariables(keras.Model):
    """Holds variables of the backend that Keras does not know, beside a layer that it does."""

    def __init__(self):
        super().__init__()
        self.hidden = layers.Dense(16, "relu", name="hidden")
        self.logits = layers.Dense(CLASSES, name="logits")
        if BACKEND == TENSORFLOW:
            import tensorflow as tf

            self.scale = tf.Variable(np.ones(16, "float32"), name="scale")
            self.tables = {"shift": tf.Variable(np.zeros(16, "float32"))}
            self.module = tf.Module()
            self.module.gain = tf.Variable(1.0, name="gain")
        else:
            import torch

            self.scale = torch.nn.Parameter(torch.ones(16))

    def call(self, inputs):
        return self.logits(self.hidden(inputs) * ops.convert_to_tensor(self.scale))


@keras.saving.register_keras_serializable("fit_built")
class Endpoint(layers.Layer):
    """Takes the labels as an input and adds the loss, as an endpoint layer does."""

    def build(self, outputs_shape, targets_shape):
        self.temper = self.add_weight(shape=(outputs_shape[-1],), initializer="ones", name="temper")

    def call(self, outputs, targets):
        self.add_loss(ops.mean(keras.losses.sparse_categorical_crossentropy(targets, outputs * self.temper, True)))
        return ops.softmax(outputs)


def endpoint():
    inputs, targets = keras.Input((FEATURES,), name="inputs"), keras.Input((), dtype="int32", name="targets")
    hidden = layers.Dense(16, "relu", name="hidden")(inputs)
    outputs = Endpoint(name="endpoint")(layers.Dense(CLASSES, name="logits")(hidden), targets)
    return keras.Model({"inputs": inputs, "targets": targets}, outputs)


@dataclass(frozen=True)
class Kind:
    """One way in which models come to `fit`.

    Attributes:
        make: The model, not compiled.
        arguments: What `fit` takes.
        pruned: Names of the weights pruned by default.
        compile: Arguments of `compile`.
        on: Backends on which Keras trains such a model.
        waits: Whether the model lacks weights when `fit` begins on TensorFlow.
    """

    make: Callable[[], keras.Model]
    arguments: Callable[[], dict[str, Any]]
    pruned: tuple[str, ...]
    compile: Callable[[], dict[str, Any]] = lambda: {"optimizer": keras.optimizers.Adam(0.01), "loss": logits_loss()}
    on: tuple[str, ...] = (TENSORFLOW, JAX, TORCH)
    waits: bool = True


def _alone():
    return {"optimizer": keras.optimizers.Adam(0.01)}


def _two():
    return {"d_optimizer": keras.optimizers.Adam(0.01), "g_optimizer": keras.optimizers.SGD(0.01, momentum=0.9)}


def _classes():
    return {"x": features(), "y": labels()}


_BOTH = ("hidden/kernel", "logits/kernel")
KINDS = {
    "subclassed": Kind(Subclassed, _classes, _BOTH),
    "sublayers made in build": Kind(
        Nested, _classes, ("block_0/inner/kernel", "block_1/inner/kernel", "head/wide/kernel", "head/out/kernel")
    ),
    "dictionary of inputs": Kind(
        DictInputs,
        lambda: {"x": {"a": features(1), "b": features(2, 5)}, "y": labels()},
        ("left/kernel", "right/kernel", "logits/kernel"),
    ),
    "bag of inputs": Kind(
        Bag,
        lambda: {"x": [features(seed) for seed in range(3)], "y": labels()},
        ("encoder/kernel", "attention/kernel", "logits/kernel"),
    ),
    "add_loss": Kind(Activity, _classes, _BOTH),
    "endpoint that takes the labels": Kind(
        endpoint,
        lambda: {"x": {"inputs": features(), "targets": labels().astype("int32")}},
        _BOTH,
        _alone,
        waits=False,
    ),
    "autoencoder": Kind(
        Autoencoder,
        lambda: {"x": features()},
        ("encoder/enc/kernel", "mean/kernel", "spread/kernel", "decoder/dec/kernel", "decoder/pixels/kernel"),
        _alone,
        on=(TENSORFLOW, TORCH),
    ),
    "two optimizers": Kind(
        Adversarial,
        lambda: {"x": features()},
        ("generator/g/kernel", "generator/pixels/kernel", "discriminator/d/kernel", "discriminator/real/kernel"),
        _two,
        on=(TENSORFLOW, TORCH),
    ),
    "trainer of a functional model": Kind(
        Trainer, _classes, ("network/hidden/kernel", "network/logits/kernel"), _alone, waits=False
    ),
    "two views": Kind(
        TwoViews,
        lambda: {"x": features()},
        ("encoder/enc/kernel", "head/projection/kernel"),
        _alone,
        on=(TENSORFLOW, TORCH),
    ),
    "raw variables": Kind(RawVariables, _classes, _BOTH, on=(TENSORFLOW, TORCH)),
}


def compiled(name: str, **options: Any) -> keras.Model:
    """A model of that kind, compiled; always with the same initial weights."""
    keras.utils.set_random_seed(5)
    model = KINDS[name].make()
    model.compile(**KINDS[name].compile())
    for option, value in options.items():
        setattr(model, option, value)
    return model
