"""Signal propagation through a model: statistics of each layer's outputs (forward) and gradients (backward)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
from keras import ops

from prunekit.anatomy.layers.layers import is_repeater, own_variables, sublayers, weights_of
from prunekit.anatomy.layers.model_weights import check_built, places, weights_in
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.sections import Column, Section
from prunekit.anatomy.records.tables import aligned
from prunekit.core.runtime import backend
from prunekit.core.statistics.layer_observer import (
    LINKS,
    activation_of,
    as_tensors,
    is_float,
    largest,
    observe,
    spread,
    wide,
)

# A signal that grows or shrinks by more than this factor across the model counts as exploding or vanishing: float16
# rounds numbers below 6e-8 to 0, and all layers have the same learning rate.
FAR = 1000.0
# Fraction of exact zeros from which a layer counts as dead; a well-initialized relu layer has 0.5.
DEAD = 0.99
# Fraction of outputs at the activation's bounds from which a layer counts as saturated.
SATURATED = 0.5
# Distance from a bound, as a fraction of the range, within which an output counts as saturated: a sigmoid's slope is
# below 0.01 there, and 0.25 in the middle.
EDGE = 0.01

_BOUNDS = {
    "tanh": (-1.0, 1.0),
    "hard_tanh": (-1.0, 1.0),
    "softsign": (-1.0, 1.0),
    "sigmoid": (0.0, 1.0),
    "hard_sigmoid": (0.0, 1.0),
}
# In descending severity: an earlier status can be the cause of a later status.
STATUSES = ("dead", "exploding", "saturated", "vanishing", "healthy")


@dataclass(frozen=True)
class LayerSignal:
    """One call of one layer on the batch.

    Attributes:
        layer: Readable path; further calls of a shared layer add " (call 2)".
        kind: Name of the layer's class.
        activation: Name of the activation function; "" for no activation or a linear activation.
        shape: Shape of the output, batch included.
        mean: Mean of the output's values, over batch, positions and units.
        std: Standard deviation of the output's values.
        zeros: Fraction of the output's values that is exactly zero.
        saturated: Fraction of the output's values at a bound of the activation function; for a softmax, fraction of
            the examples (and positions) whose largest probability is close to 1; 0 for a function without bounds.
        ratio: `std` divided by the `std` of the first layer with a kernel. For a softmax, the standard deviation of its
            input is used instead of `std`, because softmax outputs shrink with the number of classes.
        gradient_std: Standard deviation of the gradient with respect to the output, or, for the model's final softmax
            or sigmoid, with respect to its input; None if the layer gets no gradient.
        gradient_norm: L2 norm of that gradient per example, root mean square over the examples; None as above. Unlike
            a standard deviation, the norm does not change in layers that only change the number of values.
        gradient_zeros: Fraction of the gradient that is exactly zero; None as above.
        gradient_ratio: `gradient_norm` divided by the `gradient_norm` of the last layer with a gradient; None as above.
        status: "dead", "exploding", "saturated", "vanishing" or "healthy".
    """

    layer: str
    kind: str
    activation: str
    shape: tuple[int, ...]
    mean: float
    std: float
    zeros: float
    saturated: float
    ratio: float
    gradient_std: float | None
    gradient_norm: float | None
    gradient_zeros: float | None
    gradient_ratio: float | None
    status: str


@dataclass(frozen=True)
class SignalReport(Displayed):
    """Statistics of the outputs and gradients of each layer on one batch, in call order.

    Attributes:
        model_name: Name of the model.
        examples: Number of examples in the batch.
        gradient_of: Description of the differentiated function: the loss, or the random direction.
        layers: One row per layer call.
    """

    derived: ClassVar = ("status",)
    main_items: ClassVar = "layers"

    model_name: str
    examples: int
    gradient_of: str
    layers: tuple[LayerSignal, ...]

    @property
    def status(self) -> str:
        """The worst of the layers' statuses, in the order dead, exploding, saturated, vanishing, healthy."""
        return min((row.status for row in self.layers), key=STATUSES.index)

    @property
    def first_trouble(self) -> LayerSignal | None:
        """The first layer with the worst status; None if all layers are healthy."""
        return next((row for row in self.layers if row.status == self.status != "healthy"), None)

    def sections(self) -> tuple[Section, ...]:
        """Returns the table of the outputs and gradients of each layer on one batch."""
        columns = (
            Column("Layer", "name"),
            Column("Kind", under="Layer", keep=2),
            Column("Status", "status"),
            Column("Mean", "number", keep=3),
            Column("Standard deviation", "number", keep=5),
            Column("Of the first", "number", keep=6),
            Column("Zeros", "fraction", keep=4),
            Column("Saturated", "fraction", keep=4),
            Column("Gradient norm", "number", keep=5),
            Column("Of the last", "number", keep=6),
        )
        rows = tuple(
            (
                *(row.layer, f"{row.kind} ({row.activation})" if row.activation else row.kind, row.status),
                *(row.mean, row.std, row.ratio, row.zeros, row.saturated, row.gradient_norm, row.gradient_ratio),
            )
            for row in self.layers
        )
        text = f"{self.examples:,} examples, gradient of {self.gradient_of}. Status: {self.status}."
        return (Section(f"Signals in {self.model_name}", columns, rows, explanation=text),)

    def __str__(self) -> str:
        head = ("layer", "kind", "mean", "std", "/ first", "zeros", "saturated", "gradient", "/ last", "status")
        table = aligned([head, *map(_cells, self.layers)], left=(0, 1, 9))
        worst = self.first_trouble
        end = f"{self.status}, first at {worst.layer}" if worst else self.status
        return "\n".join(
            [f"{self.model_name}: {self.examples} examples, gradient of {self.gradient_of}", *table, f"status: {end}"]
        )


def _cells(row: LayerSignal) -> tuple[str, ...]:
    def number(value: float | None) -> str:
        return "-" if value is None else f"{value:.3g}"

    kind = f"{row.kind} ({row.activation})" if row.activation else row.kind
    values = (row.mean, row.std, row.ratio)
    gradient = (row.gradient_norm, row.gradient_ratio)
    fractions = (f"{row.zeros:.2f}", f"{row.saturated:.2f}")
    return (row.layer, kind, *map(number, values), *fractions, *map(number, gradient), row.status)


# ---------------------------------------------------------------- the report


def signal_report(
    model: Any, x: Any, *, y: Any = None, loss: Any = None, seed: int = 0, training: bool = True
) -> SignalReport:
    """Measures each layer's outputs and gradients on one batch, and returns a status per layer.

    Weights, moving averages and random seeds do not change. A layer's status is the first that holds of:
    "exploding" - a value is not finite; "dead" - at least 0.99 of the outputs are exactly zero; "saturated" - at least
    half of the outputs are within 1 % of a bound of the layer's activation function; "exploding" - `ratio` or
    `gradient_ratio` is above 1000; "vanishing" - one of them is below 1/1000, or all outputs are equal; else "healthy".
    The ratios of layers before the first layer with a kernel are ignored, because such layers rescale data on purpose.
    After a normalisation layer, which resets the scale, layers are judged by the ratio to that layer's outputs.

    Args:
        model: A built Keras model or layer.
        x: One batch of inputs, an array or the structure of arrays that the model takes.
        y: Targets of that batch, with `loss`.
        loss: A Keras loss, its name, or a function (y, outputs) -> values, to differentiate. None: the gradient starts
            as a random direction (normal numbers, norm 1 for each example) at the model's outputs, or at the input of
            the final softmax or sigmoid.
        seed: Seed of the random direction.
        training: Whether layers behave as in training (batch statistics, dropout) or as in inference.

    Raises:
        TypeError: `model` is not a Keras 3 model.
        ValueError: `model` is not built; only one of `y` and `loss` is given; no layer has floating-point outputs.
        RuntimeError: The Keras backend is not TensorFlow.
    """
    check_built(model)
    backend.require_tensorflow("signal_report")
    _require_both_or_neither(y, loss)
    import tensorflow as tf

    calls: list[_Call] = []
    inputs = as_tensors(x)
    with tf.GradientTape() as tape:

        def see(layer: Any, before: Any, after: Any) -> None:
            if _has_a_row(layer):
                # Explicit watch: in a frozen model no trainable weight precedes the tensor.
                tape.watch(after)
                calls.append(_Call(layer, before, after))

        outputs = observe(model, inputs, see, training=training)
        starts = _starts(calls, outputs)
        scalar = _directed([start for start, _ in starts], seed) if loss is None else _loss(loss, y, outputs)
    if not calls:
        raise ValueError(
            f"No layer of the model {model.name!r} has floating-point outputs, so there is no spread to report."
        )
    linked = {id(call): start for start, call in starts if call is not None}
    gradients = tape.gradient(scalar, [linked.get(id(call), call.after) for call in calls])
    rows = [_measured(call, gradient) for call, gradient in zip(calls, gradients, strict=True)]
    layers = [call.layer for call in calls]
    return SignalReport(
        model_name=model.name,
        examples=int(keras.tree.flatten(inputs)[0].shape[0]),
        gradient_of="a random direction of its outputs" if loss is None else f"the loss {_name_of(loss)}",
        layers=_judged(_names(model, layers), layers, rows),
    )


def _require_both_or_neither(y: Any, loss: Any) -> None:
    if (y is None) != (loss is None):
        given, missing = ("loss", "y") if y is None else ("y", "loss")
        raise ValueError(
            f"The gradient of a loss needs both `y` and `loss`. Received: {given} without {missing}. Give both, or "
            "neither for a random direction at the outputs."
        )


def _has_a_row(layer: Any) -> bool:
    whole = is_repeater(layer) or not sublayers(layer) or bool(own_variables(layer))
    return whole and not isinstance(layer, keras.layers.InputLayer)


@dataclass(frozen=True, eq=False)
class _Call:
    """One layer call: the layer, the tensor before its activation function, and its output."""

    layer: Any
    before: Any
    after: Any


def _starts(calls: list[_Call], outputs: Any) -> list[tuple[Any, _Call | None]]:
    """(tensor, call or None) pairs where gradients start: the outputs, or the inputs of a final softmax or sigmoid.

    A random direction must not pass a softmax: over 1000 classes its slope is 1/1000, which a loss would compensate.
    """
    ends = {id(call.after): call for call in calls if activation_of(call.layer) in LINKS}
    found = [(output, ends.get(id(output))) for output in keras.tree.flatten(outputs) if is_float(output)]
    return [(output if call is None else call.before, call) for output, call in found]


def _directed(starts: list[Any], seed: int) -> Any:
    """A scalar whose gradient with respect to `starts` has norm 1 for each example."""
    total = 0.0
    for index, output in enumerate(starts):
        output = wide(output)
        direction = keras.random.normal(output.shape, dtype=output.dtype, seed=seed + index)
        axes = tuple(range(1, len(output.shape)))
        norm = ops.sqrt(ops.sum(ops.square(direction), axis=axes, keepdims=True)) if axes else ops.absolute(direction)
        total += ops.cast(ops.sum(output * direction / norm), "float32")
    return total


def _loss(loss: Any, y: Any, outputs: Any) -> Any:
    return ops.mean(keras.losses.get(loss)(as_tensors(y), outputs))


def _name_of(loss: Any) -> str:
    return loss if isinstance(loss, str) else str(getattr(loss, "name", getattr(loss, "__name__", loss)))


def _names(model: Any, layers: list[Any]) -> list[str]:
    paths: dict[int, str] = {}
    for place in places(model):
        paths.setdefault(id(place.layer), place.path or place.layer.name)
    names, seen = [], dict[int, int]()
    for layer in layers:
        count = seen[id(layer)] = seen.get(id(layer), 0) + 1
        names.append(paths.get(id(layer), layer.name) + (f" (call {count})" if count > 1 else ""))
    return names


def _measured(call: _Call, gradient: Any) -> dict[str, Any]:
    """The fields of a row that need no other row, and `spread`, the numerator of `ratio`."""
    activation = activation_of(call.layer)
    values = wide(call.after)
    row = {
        "activation": "" if activation == "linear" or not hasattr(call.layer, "activation") else activation,
        "mean": float(ops.mean(values / largest(values)) * largest(values)),
        "std": float(spread(values)),
        "zeros": _fraction(values == 0),
        "saturated": _saturated(values, activation),
        "shape": tuple(int(length) for length in values.shape),
    }
    row["spread"] = float(spread(call.before)) if activation == "softmax" else row["std"]
    row |= dict.fromkeys(("gradient_std", "gradient_norm", "gradient_zeros"))
    if gradient is not None:
        slopes = wide(ops.convert_to_tensor(gradient))
        scale = largest(slopes)
        examples = max(1, int(slopes.shape[0])) if len(slopes.shape) else 1
        row["gradient_std"] = float(spread(slopes))
        row["gradient_norm"] = float(scale * ops.sqrt(ops.sum(ops.square(slopes / scale)) / examples))
        row["gradient_zeros"] = _fraction(slopes == 0)
    return row


def _fraction(condition: Any) -> float:
    return float(ops.mean(ops.cast(condition, "float32")))


def _saturated(values: Any, activation: str) -> float:
    if activation == "softmax" and len(values.shape):
        return _fraction(ops.max(values, axis=-1) > 1 - EDGE)
    if activation not in _BOUNDS:
        return 0.0
    low, high = _BOUNDS[activation]
    edge = EDGE * (high - low)
    return _fraction(ops.logical_or(values < low + edge, values > high - edge))


def _judged(names: list[str], layers: list[Any], rows: list[dict[str, Any]]) -> tuple[LayerSignal, ...]:
    """The rows with their ratios and statuses."""
    first = next((index for index, layer in enumerate(layers) if _has_kernel(layer)), 0)
    last = next((row["gradient_norm"] for row in reversed(rows) if row["gradient_norm"] is not None), None)
    start = scale = rows[first]["spread"]
    found = []
    for index, (name, layer, row) in enumerate(zip(names, layers, rows, strict=True)):
        if index > first and _normalises(layer):
            scale = row["spread"]
        size = row.pop("spread")
        row["ratio"] = _over(size, start)
        norm = row["gradient_norm"]
        row["gradient_ratio"] = None if norm is None or last is None else _over(norm, last)
        ratios = [_over(size, scale)]
        ratios += [] if row["gradient_ratio"] is None else [row["gradient_ratio"]]
        status = _status(row, ratios if index >= first else [])
        found.append(LayerSignal(layer=name, kind=type(layer).__name__, status=status, **row))
    return tuple(found)


def _has_kernel(layer: Any) -> bool:
    return any(weight.spec.prunable or weight.spec.role == "depthwise_kernel" for weight in weights_in(layer))


def _normalises(layer: Any) -> bool:
    return any(spec.role == "normalization" for _, _, spec in weights_of(layer))


def _over(value: float, reference: float) -> float:
    if reference:
        return value / reference
    return math.inf if value else 1.0


def _status(row: dict[str, Any], ratios: list[float]) -> str:
    spreads = [row["mean"], row["std"], *([] if row["gradient_norm"] is None else [row["gradient_norm"]])]
    if not all(map(math.isfinite, spreads)):
        return "exploding"
    if row["zeros"] >= DEAD:
        return "dead"
    if row["saturated"] >= SATURATED:
        return "saturated"
    if any(ratio > FAR for ratio in ratios):
        return "exploding"
    return "vanishing" if row["std"] == 0 or any(ratio < 1 / FAR for ratio in ratios) else "healthy"
