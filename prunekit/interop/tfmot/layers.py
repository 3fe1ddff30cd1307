"""Translates a tf_keras layer to the Keras 3 layer with the same computation; has the table of supported layers."""

import inspect
from collections.abc import Callable
from typing import Any

import keras

# Layers with the same name and meaning in tf_keras and Keras 3.
SUPPORTED = frozenset(
    """
    Activation ActivityRegularization Add AdditiveAttention AlphaDropout Attention Average AveragePooling1D
    AveragePooling2D AveragePooling3D BatchNormalization Bidirectional Concatenate Conv1D Conv1DTranspose Conv2D
    Conv2DTranspose Conv3D Conv3DTranspose ConvLSTM1D ConvLSTM2D ConvLSTM3D Cropping1D Cropping2D Cropping3D Dense
    DepthwiseConv1D DepthwiseConv2D Dot Dropout ELU Embedding Flatten GRU GaussianDropout GaussianNoise
    GlobalAveragePooling1D GlobalAveragePooling2D GlobalAveragePooling3D GlobalMaxPooling1D GlobalMaxPooling2D
    GlobalMaxPooling3D GroupNormalization InputLayer LSTM LayerNormalization LeakyReLU Masking MaxPooling1D
    MaxPooling2D MaxPooling3D Maximum Minimum MultiHeadAttention Multiply Normalization PReLU Permute ReLU
    RepeatVector Rescaling Reshape SeparableConv1D SeparableConv2D SimpleRNN Softmax SpatialDropout1D
    SpatialDropout2D SpatialDropout3D Subtract TimeDistributed UnitNormalization UpSampling1D UpSampling2D
    UpSampling3D ZeroPadding1D ZeroPadding2D ZeroPadding3D
    """.split()
)
ACTIVATIONS = frozenset(
    """
    elu exponential gelu leaky_relu linear log_softmax mish relu selu sigmoid silu softmax softplus softsign swish tanh
    """.split()
)
_REASONS = {
    "ClusterWeightsMHA": "clustered, and more than one matrix",
    "ClusterWeightsRNN": "clustered, and more than one matrix",
    "Lambda": "Python code, which is never run from a file",
    "__lambda__": "Python code, which is never run from a file",
    "TFOpLambda": "a TensorFlow function called on tensors; write it as a layer",
    "SlicingOpLambda": "a slice of a tensor; write it as a layer, such as Cropping1D",
    "TensorFlowOpLayer": "a TensorFlow operation called on tensors; write it as a layer",
    "hard_sigmoid": "Keras 3 computes another function under that name",
}
# Arguments that Keras 3 does not have -> values at which the argument has no effect and is dropped.
_ANY = object()
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "batch_input_shape": (_ANY,),
    "fused": (_ANY,),
    "groups": (1,),
    "implementation": (_ANY,),
    "input_length": (_ANY,),
    # Depthwise and separable convolutions inherit these three, but use others, such as `depthwise_constraint`.
    "kernel_constraint": (None,),
    "kernel_initializer": (_ANY,),
    "kernel_regularizer": (None,),
    "key_shape": (_ANY,),
    "noise_shape": (None,),
    "query_shape": (_ANY,),
    "ragged": (False,),
    "renorm": (False,),
    "softmax_robust_masking": (False,),
    "sparse": (False,),
    "time_major": (False,),
    "trainable": (_ANY,),
    "unroll": (False,),
    "value_shape": (_ANY,),
    "virtual_batch_size": (None,),
}
_RENAMED = {"LeakyReLU": {"alpha": "negative_slope"}}


class NotCarried(ValueError):
    """Raised for a part of a legacy model without an equivalent in Keras 3."""


def reason_against(class_name: str) -> str:
    """Returns the reason why a layer or function of this name cannot be carried; empty if it can."""
    if class_name in SUPPORTED or class_name in ACTIVATIONS:
        return ""
    return _REASONS.get(class_name, "not a class of Keras, or a class without an equivalent in Keras 3")


def translated(layer: Any, bare_activation: Callable[[Any], Any] = lambda activation: activation) -> keras.layers.Layer:
    """Returns a new Keras 3 layer with the same name, type and settings; does not copy the weights.

    Args:
        layer: tf_keras layer, neither a wrapper of tensorflow-model-optimization nor a model.
        bare_activation: Function that returns the original activation of an activation replaced by a wrapper.

    Raises:
        NotCarried: The type or a setting has no equivalent in Keras 3.
    """
    kind = type(layer).__name__
    why = reason_against(kind) or ("" if _is_of_tf_keras(layer) else "a custom layer class")
    if why:
        raise NotCarried(f"{layer.name!r} ({kind}: {why})")
    target = getattr(keras.layers, kind)
    config = _settings(layer, target, bare_activation)
    if kind == "Bidirectional":
        config["layer"] = _direction(layer.forward_layer, "forward_")
        config["backward_layer"] = _direction(layer.backward_layer, "backward_")
    elif kind == "TimeDistributed":
        if hasattr(layer.layer, "layers"):
            raise NotCarried(f"{layer.name!r} (TimeDistributed around a whole model)")
        config["layer"] = translated(layer.layer)
    return target(**config)


def paired(layer: Any, new: keras.layers.Layer, variables: Any = None) -> list[tuple[Any, keras.Variable]]:
    """Returns (legacy variable, Keras 3 variable) for every weight of a layer, matched by name, order and shape.

    Args:
        layer: tf_keras layer.
        new: Built Keras 3 translation of `layer`.
        variables: Variables to match instead of `layer.weights` if a wrapper has the weights; may contain others too.

    Raises:
        NotCarried: A weight has no match.
    """
    pool = list(layer.weights if variables is None else variables)
    pairs = []
    for variable in new.weights:
        name, shape = _last_name(variable.path), tuple(variable.shape)
        found = next((one for one in pool if _legacy_name(one, layer) == name and tuple(one.shape) == shape), None)
        if found is None:
            raise NotCarried(f"{layer.name!r} (no weight {name!r} of shape {shape} in it)")
        pool = [one for one in pool if one is not found]
        pairs.append((found, variable))
    if pool and variables is None:
        raise NotCarried(f"{layer.name!r} (Keras 3 has no weights for {', '.join(one.name for one in pool)})")
    return pairs


def _is_of_tf_keras(layer: Any) -> bool:
    return type(layer).__module__.split(".")[0] in ("tf_keras", "keras")


def _settings(layer: Any, target: type, bare_activation: Callable[[Any], Any]) -> dict[str, Any]:
    known = _arguments(target)
    renamed = _RENAMED.get(target.__name__, {})
    settings = {}
    for key, value in layer.get_config().items():
        key = renamed.get(key, key)
        if key in ("layer", "backward_layer"):
            continue
        if key not in known:
            harmless = _WITHOUT_EFFECT.get(key, ())
            if _ANY not in harmless and value not in harmless:
                raise NotCarried(f"{layer.name!r} ({target.__name__}: Keras 3 has no {key}={value!r})")
            continue
        if key.endswith("activation") and hasattr(layer, key):
            value = _activation(layer, bare_activation(getattr(layer, key)))
        settings[key] = _setting(layer, key, value)
    return settings


def _arguments(target: type) -> set[str]:
    known = set(inspect.signature(target.__init__).parameters)  # type: ignore[misc]
    if "kwargs" in known:
        known |= {"name", "trainable", "dtype", "activity_regularizer"}
        known |= {"zero_output_for_mask"} if issubclass(target, keras.layers.RNN) else set()
    return known


def _setting(layer: Any, key: str, value: Any) -> Any:
    if key == "name":
        return value.replace("/", "_")
    if key == "dtype":
        return policy(layer)
    if key == "axis" and type(layer).__name__ == "BatchNormalization" and not isinstance(value, int):
        if len(value) != 1:
            raise NotCarried(f"{layer.name!r} (BatchNormalization over several axes: {list(value)})")
        return int(value[0])
    for ending in ("initializer", "regularizer", "constraint"):
        if key.endswith(ending) and value is not None:
            return _object(layer, f"{ending}s", value)
    return value


def policy(layer: Any) -> str:
    """Returns the name of a layer's dtype policy; Keras 3 accepts the same names."""
    return layer.dtype_policy.name if hasattr(layer, "dtype_policy") else layer._dtype_policy.name


def _object(layer: Any, home: str, value: Any) -> Any:
    """Returns a Keras 3 initializer, regularizer or constraint with the same class and settings."""
    name = value.get("class_name") if isinstance(value, dict) else value
    found = getattr(getattr(keras, home), str(name), None)
    if found is None:
        raise NotCarried(f"{layer.name!r} ({home[:-1]} {name!r}: not in Keras 3)")
    return found(**value["config"]) if isinstance(value, dict) else found


def _activation(layer: Any, activation: Any) -> str:
    name = getattr(activation, "__name__", type(activation).__name__).removesuffix("_v2")
    module = getattr(activation, "__module__", "")
    # Some activations of tf_keras are TensorFlow functions, with a TensorFlow module name.
    known = module.split(".")[0] in ("tf_keras", "keras", "tensorflow")
    why = reason_against(name) or ("" if known else "a custom function")
    if why:
        raise NotCarried(f"{layer.name!r} (activation {name}: {why})")
    return name


def _direction(layer: Any, prefix: str) -> keras.layers.Layer:
    new = translated(layer)
    # Keras adds the prefix to the name again.
    new.name = new.name.removeprefix(prefix)
    return new


def _last_name(path: str) -> str:
    return path.split("/")[-1].split(":")[0]


def _legacy_name(variable: Any, layer: Any) -> str:
    name = _last_name(variable.name)
    depthwise = type(layer).__name__.startswith("DepthwiseConv") and name == "depthwise_kernel"
    return "kernel" if depthwise else name
