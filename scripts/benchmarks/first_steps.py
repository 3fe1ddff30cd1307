"""Time of `fit` calls of one step, and of the time before the end of this step."""

import time
from collections.abc import Callable
from typing import Any


def fits_of_one_step(model: Any, callbacks: Callable[[], list[Any]], batch: int, classes: int) -> list[dict[str, Any]]:
    """Returns seconds of the first and the second `fit` of one step of a model, each with new callbacks.

    Another model is trained first, so that the start of TensorFlow is not measured.

    Args:
        model: A model that is not compiled; it is compiled with Adam and Keras's defaults.
        callbacks: Returns the callbacks of one `fit`.
        batch: Examples of the step.
        classes: Number of classes, which is the number of outputs.

    Returns:
        For each `fit` {"step": seconds to the end of the first batch, "fit": seconds of the whole call}.
    """
    import keras
    import numpy as np

    warm = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    warm.compile("adam", "mse")
    warm.fit(np.zeros((2, 4)), np.zeros((2, 2)), verbose=0)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy())
    generator = np.random.default_rng(0)
    x = generator.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    y = generator.integers(0, classes, batch)
    rows, ends = [], []
    stepped = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs=None: ends.append(_now()))
    for _ in range(2):
        began, given = _now(), callbacks()
        model.fit(x, y, batch, verbose=0, callbacks=[*given, stepped])
        rows.append({"step": ends[-1] - began, "fit": _now() - began})
    return rows


_now = time.perf_counter
