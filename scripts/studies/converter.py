"""Post-training quantization by LiteRT's converter, which prunekit's files are compared with."""

import tempfile
from pathlib import Path
from typing import Any

from prunekit.delivery.litert.litert import input_specs, trace


def converter_integers(model: Any, samples: Any) -> bytes:
    """Returns the LiteRT file with the converter's own 8-bit weights and activations.

    Args:
        model: A built Keras model with one input.
        samples: Inputs from which the converter chooses ranges, samples along axis 0.
    """
    import tensorflow as tf

    specs = input_specs(model, samples)
    with tempfile.TemporaryDirectory() as folder:
        traced = trace(model, samples, specs, Path(folder))
        converter = tf.lite.TFLiteConverter.from_saved_model(str(traced.saved))
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
        converter.representative_dataset = lambda: ({specs[0].name: one[None]} for one in samples)
        return bytes(converter.convert())
