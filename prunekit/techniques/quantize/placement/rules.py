"""How the integer kernels of LiteRT round what layers and operations compute.

Source: the 8-bit quantization specification of LiteRT, https://ai.google.dev/edge/litert/models/quantization_spec
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np

from prunekit.anatomy.layers.layers import is_repeater, sublayers
from prunekit.anatomy.layers.linear_kinds import is_fixed_normalization, is_linear_kind, is_normalization, unusual_state
from prunekit.techniques.quantize.grids.grids import PER_TENSOR, Grid, IntegerFormat

Output = Literal["own", "shared", "fixed", "float"]


@dataclass(frozen=True)
class RoundingRule:
    """How the results of a layer or operation are rounded.

    Attributes:
        output: "own": on a grid of their own. "shared": on one grid with the tensors that the operation reads. "fixed":
            on the grid that the kernel prescribes. "float": the operation computes in floating point.
        moves: True if each result is an entry of what is read, or zero: nothing is rounded again.
        signed: For "fixed": True if the results lie between -1 and 1, False between 0 and 1.
        fuses_relu: True if the kernel applies a ReLU to its results before they are rounded.
        reason: For "float": why.
        looks_up: For "float": True if each result is a row of a table, which a file may store on the grid on which
            other layers read it.
    """

    output: Output
    moves: bool = False
    signed: bool = False
    fuses_relu: bool = False
    reason: str = ""
    looks_up: bool = False


OWN, FUSING = RoundingRule("own"), RoundingRule("own", fuses_relu=True)
MOVES, SHARED = RoundingRule("shared", moves=True), RoundingRule("shared")


def fixed_grid(signed: bool, form: IntegerFormat, highest: float = 1.0) -> Grid:
    """Returns the grid that kernels prescribe for results between 0 and 1, or, if signed, between -1 and 1.

    Args:
        signed: Whether results may be negative.
        form: The codes.
        highest: Another upper end than 1.
    """
    centred = signed or form.symmetric
    scale = np.float32(highest * 2.0 ** -(form.bits - centred))
    return Grid(form, PER_TENSOR, np.asarray(scale), np.asarray(0 if centred else form.lowest, "int32"))


def _table(rule: RoundingRule, names: str) -> dict[str, RoundingRule]:
    return dict.fromkeys(names.split(), rule)


# Functions in `keras.activations` and layers and operations of the same meaning have one row.
_ACTIVATIONS = {
    **_table(MOVES, "linear"),
    **_table(OWN, "relu relu6"),
    **_table(RoundingRule("fixed"), "softmax sigmoid"),
    **_table(RoundingRule("fixed", signed=True), "tanh"),
    **_table(OWN, "silu leaky_relu prelu elu gelu hard_silu hard_sigmoid"),
}
# Names of these activations as functions, layers and operations.
_ACTIVATION_NAMES = {
    "Relu": "relu",
    "Relu6": "relu6",
    "Softmax": "softmax",
    "Sigmoid": "sigmoid",
    "Tanh": "tanh",
    "Silu": "silu",
    "LeakyRelu": "leaky_relu",
    "LeakyReLU": "leaky_relu",
    "PReLU": "prelu",
    "Elu": "elu",
    "ELU": "elu",
    "Gelu": "gelu",
    "HardSilu": "hard_silu",
    "HardSigmoid": "hard_sigmoid",
}

_LAYERS = {
    **_table(FUSING, "Subtract Rescaling"),
    **_table(OWN, "GlobalAveragePooling1D GlobalAveragePooling2D"),
    **_table(
        MOVES,
        "Flatten Reshape Permute RepeatVector ZeroPadding1D ZeroPadding2D Cropping1D Cropping2D UpSampling1D "
        "MaxPooling1D MaxPooling2D GlobalMaxPooling1D GlobalMaxPooling2D Concatenate Maximum Minimum "
        "Dropout SpatialDropout1D SpatialDropout2D SpatialDropout3D GaussianNoise GaussianDropout AlphaDropout "
        "ActivityRegularization Identity",
    ),
    **_table(SHARED, "AveragePooling1D AveragePooling2D"),
}
# Layers that kernels compute two tensors at a time, with a rounding between.
_PAIRWISE = ("Add", "Multiply", "Average")
_OPERATIONS = {
    **_table(FUSING, "Add Subtract Multiply Negative Square"),
    # Without Sum: LiteRT's reference kernel adds codes without regard to their zero points.
    **_table(OWN, "Mean Matmul Einsum Abs Absolute Exp Rsqrt"),
    **_table(
        MOVES,
        "Reshape Transpose Squeeze ExpandDims Swapaxes Moveaxis Flip Concatenate Stack Split Unstack GetItem Slice "
        "Tile Repeat BroadcastTo Maximum Minimum Max Min MaxPool Where Identity Copy StopGradient Pad DepthToSpace "
        "SpaceToDepth",
    ),
    **_table(SHARED, "AveragePool"),
}
# The kernels of these layers compute in floating point alone.
_WITHOUT_KERNEL = (keras.layers.Conv3D, keras.layers.Conv3DTranspose)
_EMBEDDING = RoundingRule("float", looks_up=True, reason="not all layers that read it compute with integers")
# Operations of LiteRT with an integer kernel for tensors of 8 bits and none for 16 bits that files can use -> why.
ONLY_8_BITS = {
    **{
        kind: f"LiteRT has no {kind} of 16 bits"
        for kind in ("PRELU", "ELU", "HARD_SWISH", "ABS", "EXP", "RELU_N1_TO_1")
    },
    # It has no version by which older runtimes refuse it, and a table of one entry for 128 codes.
    "GELU": "LiteRT's GELU of 16 bits is wrong for some scales",
    # It is exact to a step with 8 bits; that of 16 bits was not compared.
    "RSQRT": "LiteRT's RSQRT of 16 bits is not known to be exact",
}
# Most entries of a softmax whose kernel of 16 bits is precise enough: it is off by 66 steps, half a step of 8 bits.
SOFTMAX_ENTRIES = 32
# Name of an activation or operation -> operation of LiteRT, for those of ONLY_8_BITS.
_KERNELS = {
    **{"prelu": "PRELU", "elu": "ELU", "hard_silu": "HARD_SWISH", "gelu": "GELU"},
    **{"Abs": "ABS", "Absolute": "ABS", "Exp": "EXP", "Rsqrt": "RSQRT"},
}
# Operations that move blocks of pixels to channels or back.
_BLOCKS = ("DepthToSpace", "SpaceToDepth")
# Interpolations of resizing layers, with the rules of the kernels.
_INTERPOLATIONS = {"nearest": MOVES, "bilinear": SHARED}


def activation_name(function: Any) -> str:
    """Returns the name of an activation function, layer or operation in the table of rules; "" if it has none.

    Args:
        function: A function of `keras.activations`, a layer or an operation.
    """
    if isinstance(function, keras.layers.Activation):
        return activation_name(function.activation)
    if isinstance(function, keras.Operation):
        kind = type(function).__name__ if _is_kerases(function) else ""
        if kind == "Clip":
            return "relu6" if _ends(function) == (0.0, 6.0) else ""
        # The layer, and the operation that `keras.activations.relu` makes of a symbolic tensor.
        return _relu_name(function) if kind == "ReLU" else _ACTIVATION_NAMES.get(kind, "")
    name = str(getattr(function, "__name__", ""))
    return name if getattr(keras.activations, name, None) is function and name in _ACTIVATIONS else ""


def _relu_name(relu: Any) -> str:
    if relu.threshold or (relu.max_value is not None and (relu.max_value != 6.0 or relu.negative_slope)):
        return ""
    if relu.negative_slope:
        return "leaky_relu"
    return "relu" if relu.max_value is None else "relu6"


def _ends(clip: Any) -> tuple[float, float] | None:
    """Returns the lowest and the highest result of `ops.clip`; None if these are arrays."""
    ends = clip.x_min, clip.x_max
    return None if any(np.ndim(one) for one in ends) else (float(ends[0]), float(ends[1]))


def is_relu(function: Any) -> bool:
    """Returns True for an activation that kernels apply to their results before these are rounded."""
    return activation_name(function) in ("relu", "relu6")


def activation_rule(function: Any) -> RoundingRule:
    """Returns the rule of an activation function, layer or operation."""
    found = _ACTIVATIONS.get(activation_name(function))
    if found is not None:
        return found
    inner = function.activation if isinstance(function, keras.layers.Activation) else function
    shown = getattr(inner, "__name__", type(inner).__name__)
    return RoundingRule("float", reason=f"the activation {shown} has no integer kernel")


def without_16_bits(function: Any, shape: Sequence[int | None]) -> str:
    """Returns why no kernel computes a layer, an operation or an activation with tensors of 16 bits; "" if one does.

    Args:
        function: One that has a kernel for 8 bits.
        shape: Shape of its results.
    """
    name = activation_name(function)
    if name == "softmax":
        inner = function.activation if isinstance(function, keras.layers.Activation) else function
        axis = getattr(inner, "axis", -1)
        entries = shape[axis] if isinstance(axis, int) else None
        if entries is not None and entries <= SOFTMAX_ENTRIES:
            return ""
        return f"the softmax of 16 bits is precise for up to {SOFTMAX_ENTRIES} entries"
    kind = type(function).__name__ if isinstance(function, keras.Operation) else ""
    if kind in _BLOCKS and None in shape[1:]:
        return "LiteRT moves blocks of 16 bits as reshapes, which needs the lengths of all axes"
    kernel = "RELU_N1_TO_1" if kind == "Clip" and _ends(function) == (-1.0, 1.0) else _KERNELS.get(name or kind, "")
    return ONLY_8_BITS.get(kernel, "")


def rule_of(operation: Any, tensors: int = 1) -> RoundingRule | None:
    """Returns the rule of a layer or operation; None if there is none, so that the calls inside it decide.

    The rule of a layer with weights is that of its results before its activation.

    Args:
        operation: The layer or operation.
        tensors: How many tensors it reads.
    """
    if is_linear_kind(operation):
        state = unusual_state(operation)
        if state:
            return RoundingRule("float", reason=f"it {state}")
        return _without_kernel(operation) if isinstance(operation, _WITHOUT_KERNEL) else FUSING
    if is_normalization(operation) or is_fixed_normalization(operation):
        return FUSING
    if not _is_kerases(operation):
        return None
    if isinstance(operation, keras.layers.Activation) or activation_name(operation):
        return activation_rule(operation)
    return _resizing_rule(operation) or _rule_of_kerases(operation, tensors)


def _rule_of_kerases(operation: Any, tensors: int) -> RoundingRule | None:
    kind = type(operation).__name__
    if isinstance(operation, keras.layers.Embedding):
        return _EMBEDDING
    if isinstance(operation, keras.layers.Layer):
        if kind in _PAIRWISE:
            return None if tensors > 2 or kind == "Average" else FUSING
        return _LAYERS.get(kind) or (None if _is_made_of_layers(operation) else _without_kernel(operation))
    if kind == "Clip":
        # Other ends are computed by two kernels, whose results lie on the grid of what they read.
        return OWN if _ends(operation) == (-1.0, 1.0) else MOVES
    return _OPERATIONS.get(kind) or _without_kernel(operation)


def _resizing_rule(operation: Any) -> RoundingRule | None:
    """Returns the rule of a layer or operation that resizes images; None for another one."""
    layers = keras.layers.UpSampling2D, keras.layers.Resizing
    if not isinstance(operation, layers) and type(operation).__name__ != "Resize":
        return None
    others = any(getattr(operation, name, False) for name in ("antialias", "pad_to_aspect_ratio"))
    return (None if others else _INTERPOLATIONS.get(operation.interpolation)) or _without_kernel(operation)


def _without_kernel(operation: Any) -> RoundingRule:
    return RoundingRule("float", reason=f"{type(operation).__name__} has no integer kernel")


def _is_made_of_layers(layer: Any) -> bool:
    """Returns True for a layer that calls others, which may have rules; but not for each step in a loop."""
    return bool(sublayers(layer)) and not is_repeater(layer)


def _is_kerases(operation: Any) -> bool:
    """Returns True for a layer or operation whose class is defined in Keras itself."""
    return type(operation).__module__.partition(".")[0] == "keras"
