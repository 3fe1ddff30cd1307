"""Time of training on integers and of calibration on the machine's accelerator, on the backend of KERAS_BACKEND.

Run on a machine with a GPU: `PYTHONPATH=.:scripts KERAS_BACKEND=jax python -m studies.integer_steps`. It prints lines
for docs/backends.md.
"""

from statistics import median
from time import perf_counter
from typing import Any

import keras
import numpy as np
from benchmarks.models import MODELS

import prunekit as pk

# (network, title, batch size, steps of an epoch, shape of an image)
TRAINED = (
    ("resnet20", "ResNet-20, 32x32", 256, 20, (32, 32, 3)),
    ("mobilenetv2", "MobileNetV2 0.35, 96x96", 128, 10, (96, 96, 3)),
)
# `freeze_step` of the callback; None = no callback.
WAYS = {"not quantized": None, "on integers": -1, "on integers, batch normalizations frozen": 0}
EPOCHS, IMAGES, BATCH = 6, 256, 32


def finished() -> None:
    """Waits until the GPU has finished, which PyTorch does not do by itself."""
    if keras.backend.backend() == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


class Epochs(keras.callbacks.Callback):
    """Seconds of each epoch; reading the logs at its end waits for the accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._begin = 0.0

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the clock."""
        finished()
        self._begin = perf_counter()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Stops the clock."""
        finished()
        self.seconds.append(perf_counter() - self._begin)


def step(name: str, batch: int, steps: int, shape: tuple[int, ...], freeze_step: int | None) -> float:
    """Seconds of a training step: the median epoch, after two that trace and compile."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(batch * steps, *shape)).astype("float32")
    labels = generator.integers(0, 10, batch * steps)
    keras.utils.set_random_seed(0)
    model = MODELS[name][0](keras)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=name == "resnet20")
    model.compile(keras.optimizers.SGD(1e-3, momentum=0.9), loss)
    epochs = Epochs()
    quantization = [] if freeze_step is None else [pk.QuantizationCallback(images[:64], freeze_step=freeze_step)]
    model.fit(images, labels, batch_size=batch, epochs=EPOCHS, verbose=0, callbacks=[epochs, *quantization])
    return median(epochs.seconds[2:]) / steps


def calibration() -> tuple[float, float]:
    """Seconds of `predict` and of `pk.quantize` for ResNet50 on the same images; medians of calls after the first."""
    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None)
    images = np.random.default_rng(0).normal(size=(IMAGES, 224, 224, 3)).astype("float32")
    runs = (lambda: model.predict(images, batch_size=BATCH, verbose=0), lambda: pk.quantize(model, images))
    found: list[list[float]] = [[], []]
    for _ in range(4):
        for seconds, run in zip(found, runs, strict=True):
            begin = perf_counter()
            run()
            finished()
            seconds.append(perf_counter() - begin)
    return median(found[0][1:]), median(found[1][1:])


def main() -> None:
    """Measures and prints."""
    backend = keras.backend.backend()
    for name, title, *sizes in TRAINED:
        plain = None
        for way, freeze_step in WAYS.items():
            seconds = step(name, *sizes, freeze_step)
            plain = plain or seconds
            print(f"| {backend} | {title}, batch {sizes[0]}: {way} | {seconds * 1e3:.1f} | {seconds / plain:.2f} |")
    predict, quantize = calibration()
    print(f"{backend}: ResNet50, {IMAGES} images: predict {predict:.2f} s, quantize {quantize:.2f} s", flush=True)


if __name__ == "__main__":
    main()
