"""Imports tf_keras and tensorflow-model-optimization at first use, in the same process as Keras 3."""

import contextlib
import importlib
import os
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

_SWITCH = "TF_USE_LEGACY_KERAS"


def tf_keras() -> ModuleType:
    """Returns the package tf_keras.

    Raises:
        ImportError: tf_keras is not installed.
    """
    return _imported("tf_keras")


def tfmot() -> ModuleType:
    """Returns the package tensorflow_model_optimization; does not change `tf.keras` or the environment.

    Raises:
        ImportError: tensorflow_model_optimization or tf_keras is not installed.
    """
    tf_keras()
    import tensorflow as tf

    # tensorflow_model_optimization sets TF_USE_LEGACY_KERAS and then accesses tf.keras, which selects the Keras version
    # at the first access. Access tf.keras here first, before the variable is set.
    _ = tf.keras.layers
    with _environment_kept():
        return _imported("tensorflow_model_optimization")


def wrapper_classes() -> dict[str, Any]:
    """Returns {class name: class} of the classes that tensorflow-model-optimization writes into model configs."""
    core = f"{tfmot().__name__}.python.core"
    places = {
        "sparsity.keras.pruning_wrapper": ("PruneLowMagnitude",),
        "sparsity.keras.pruning_schedule": ("ConstantSparsity", "PolynomialDecay"),
        "clustering.keras.cluster_wrapper": ("ClusterWeights",),
        "quantization.keras.quantize_aware_activation": ("NoOpActivation", "QuantizeAwareActivation"),
        "quantization.keras.quantize_config": ("FixedQuantizeConfig", "OutputOnlyConfig"),
        "quantization.keras.quantize_layer": ("QuantizeLayer",),
        "quantization.keras.quantize_wrapper": ("QuantizeWrapper", "QuantizeWrapperV2"),
    }
    found = {
        name: getattr(importlib.import_module(f"{core}.{place}"), name)
        for place, names in places.items()
        for name in names
    }
    for place in (
        "quantizers",
        "default_8bit.default_8bit_quantizers",
        "default_8bit.default_8bit_quantize_registry",
        "default_8bit.default_8bit_quantize_configs",
    ):
        module = importlib.import_module(f"{core}.quantization.keras.{place}")
        for name, value in vars(module).items():
            if isinstance(value, type) and name.endswith(("QuantizeConfig", "QuantizeConfigRNN", "Quantizer")):
                found.setdefault(name, value)
    found["PruneLowMagnitude"] = _building_attention(found["PruneLowMagnitude"])
    return found


def _building_attention(wrapper: Any) -> Any:
    """Returns a subclass of the pruning wrapper that can be loaded around a MultiHeadAttention.

    The original wrapper fails, because it needs the layer's kernels, which exist only once its parts are built.
    """

    def from_config(cls, config):
        made = wrapper.from_config.__func__(cls, config)
        layer = made.layer
        if type(layer).__name__ == "MultiHeadAttention" and layer._built_from_signature:
            *rest, _ = layer._query_shape
            layer._query_dense.build(layer._query_shape)
            layer._key_dense.build(layer._key_shape)
            layer._value_dense.build(layer._value_shape)
            layer._output_dense.build((*rest, layer._num_heads, layer._value_dim))
        return made

    # Keep the class name: the wrapper derives its layer name from the class.
    return type(wrapper.__name__, (wrapper,), {"from_config": classmethod(from_config)})


def _imported(name: str) -> ModuleType:
    try:
        with warnings.catch_warnings():
            # The packages import deprecated modules; a user who reads a file cannot act on these warnings.
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"Models of tf_keras and tensorflow-model-optimization are read with both packages. Received: no {name} "
            f"here ({error}). Install them: pip install 'prunekit[legacy]'."
        ) from error


@contextlib.contextmanager
def _environment_kept() -> Iterator[None]:
    """Context manager that restores the environment variable TF_USE_LEGACY_KERAS on exit."""
    former = os.environ.get(_SWITCH)
    try:
        yield
    finally:
        if former is None:
            os.environ.pop(_SWITCH, None)
        else:
            os.environ[_SWITCH] = former
