"""Diagnosis of weights with missing, zero, NaN or badly scaled gradients, and of the layer that causes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import keras
import numpy as np

from prunekit.anatomy.graph.watching import watching
from prunekit.anatomy.layers.model_weights import Weight, check_built, places, weights_in
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.sections import Column, Section
from prunekit.core.runtime import backend
from prunekit.core.runtime.arguments import examples_in
from prunekit.core.runtime.losses import loss_of
from prunekit.training_tools.gradients.layer_capture import is_differentiable, own_tensors, tensors

# Explanation of each status; "{layer}" is the layer that causes the problem.
_MEANING = {
    "ok": "",
    "frozen": "not trainable: no gradient is asked for",
    "unused": "its layer is not called in a pass of the model",
    "none": "no gradient: the chain from the loss breaks at {layer}",
    "zero": "every entry is zero: nothing passes back through {layer}",
    "idle": "every entry is zero although gradients reach {layer}: its activation passes none on, its inputs are zero, "
    "or it does not use the weight",
    "nan": "NaN or infinite: it becomes so at {layer}",
    "large": "{ratio:.1e} times that of the layer nearest the loss; the greatest change of scale is at {layer}",
    "small": "{ratio:.1e} times that of the layer nearest the loss; the greatest change of scale is at {layer}",
}


@dataclass(frozen=True)
class WeightGradient:
    """The status on one weight's gradient.

    Attributes:
        name: The weight.
        status: "ok", "frozen", "unused", "none", "zero", "idle" (the weight's gradient is zero, but its layer's
            outputs get a gradient), "nan", "large" or "small".
        rms: Root mean square of the gradient's entries; None if there is no gradient.
        culprit: Path of the layer at which the gradient breaks off, or at which its scale changes most; or "the loss";
            or "".
        explanation: One line; "" for the status "ok".
    """

    name: str
    status: str
    rms: float | None
    culprit: str = ""
    explanation: str = ""


@dataclass(frozen=True)
class Diagnosis(Displayed):
    """The result of `diagnose`.

    Attributes:
        loss: The differentiated loss.
        weights: One row per weight of the model, in the order of its layers.
    """

    main_items: ClassVar = "weights"

    loss: float
    weights: tuple[WeightGradient, ...]

    @property
    def problems(self) -> tuple[WeightGradient, ...]:
        """The rows whose status is neither "ok" nor "frozen"."""
        return tuple(row for row in self.weights if row.status not in ("ok", "frozen"))

    @property
    def ok(self) -> bool:
        """Whether every trainable weight gets a finite gradient of normal scale."""
        return not self.problems

    def sections(self) -> tuple[Section, ...]:
        """Returns the table of the statuses on the weights' gradients."""
        columns = (
            Column("Weight", "name"),
            Column("Status", "status"),
            Column("Root mean square", "number", digits=3),
            Column("Layer", "name", keep=5),
            Column("Explanation", "text", keep=6),
        )
        rows = tuple((row.name, row.status, row.rms, row.culprit, row.explanation) for row in self.weights)
        text = f"Loss {self.loss:.6g}; {len(self.problems)} of {len(self.weights)} weights have a problem."
        return (Section("Gradients of the weights", columns, rows, explanation=text),)

    def __str__(self) -> str:
        width = max((len(row.name) for row in self.weights), default=0)
        lines = [f"loss {self.loss:.6g}; {len(self.problems)} of {len(self.weights)} weights have a problem"]
        for row in self.weights:
            size = "-" if row.rms is None else f"{row.rms:.3g}"
            lines.append(f"{row.name:<{width}}  {row.status:<6}  {size:>9}  {row.explanation}".rstrip())
        return "\n".join(lines)


def diagnose(model: Any, loss: Any, x: Any, y: Any, *, scale: float = 1e4) -> Diagnosis:
    """Finds weights whose gradient is None, all zero, NaN, or out of scale, and the layer that causes the problem.

    Runs one forward and one backward pass in training mode. Weights, optimizer and layer state do not change.

    Args:
        model: A built Keras model.
        loss: A Keras loss, its name, or a function (y_true, y_pred), as in `pk.loops.TapeLoop`.
        x: Inputs, of shape (batch, ...), or a structure of such arrays.
        y: Targets of the loss.
        scale: A gradient is out of scale if its root mean square differs by more than this factor from the root mean
            square of the gradients nearest the loss, which no other layer has rescaled. Above 1.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        ValueError: The model is not built; `scale` is not above 1.
    """
    backend.require_tensorflow("diagnose")
    check_built(model)
    if not scale > 1:
        raise ValueError(
            f"`scale` is the factor above or below which values are reported, so it is above 1. Received: "
            f"scale={scale!r}."
        )
    examples_in(x=x, y=y)
    import tensorflow as tf

    passed = _Pass(model)
    with tf.GradientTape() as tape:
        value = passed.loss(tape, loss, x, y)
    weights = weights_in(model)
    found = tape.gradient(value, {"weights": [backend.native(w.variable) for w in weights], "outputs": passed.watched})
    sizes = [_rms(gradient) for gradient in found["weights"]]
    blame = _Blame(passed, found["outputs"], float(value))
    usual = blame.nearest_the_loss(weights, sizes)
    rows = (blame.row(*pair, usual, scale) for pair in zip(weights, sizes, strict=True))
    return Diagnosis(float(value), tuple(rows))


class _Pass:
    """One forward pass: the floating-point outputs of each innermost layer's calls, and the calls that use them."""

    def __init__(self, model: Any):
        self._model = model
        self._paths = {id(place.layer): place.path or model.name for place in reversed(list(places(model)))}
        self.layers: list[Any] = []
        self.inputs: list[set[int]] = []
        self.outputs: list[list[Any]] = []
        self.finite: list[bool] = []

    @property
    def watched(self) -> list[list[Any]]:
        return self.outputs

    def path(self, call: int) -> str:
        return self._paths.get(id(self.layers[call]), self.layers[call].name)

    def calls_of(self, layer: Any) -> list[int]:
        """The calls of the layer, or of the layers inside it."""
        inside = {id(place.layer) for place in places(layer)}
        return [number for number, each in enumerate(self.layers) if id(each) in inside]

    def after(self, call: int) -> list[int]:
        """The calls that use the outputs of `call`, directly or indirectly, in call order.

        Returns all later calls if an operation outside a layer (in a custom `call`) uses the outputs.
        """
        reached, found = set(map(id, self.outputs[call])), []
        for number in range(call + 1, len(self.layers)):
            if reached & self.inputs[number]:
                found.append(number)
                reached |= set(map(id, self.outputs[number]))
        return found or list(range(call + 1, len(self.layers)))

    def loss(self, tape: Any, loss: Any, x: Any, y: Any) -> Any:
        import tensorflow as tf

        depth: list[int] = []

        def see(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
            depth.append(0)
            outputs = original(layer, *args, **kwargs)
            inner = depth.pop()
            if depth:
                depth[-1] += 1
            if inner or not tf.executing_eagerly() or id(layer) not in self._paths:
                return outputs
            outputs = own_tensors(outputs)
            kept = [leaf for leaf in keras.tree.flatten(outputs) if is_differentiable(leaf)]
            tape.watch(kept)
            self.layers.append(layer)
            self.inputs.append({id(leaf) for leaf in keras.tree.flatten((args, kwargs))})
            self.outputs.append(kept)
            self.finite.append(all(bool(tf.reduce_all(tf.math.is_finite(leaf))) for leaf in kept))
            return outputs

        inputs = tensors(self._model, x)
        with keras.StatelessScope(), watching(see):
            prediction = self._model(inputs, training=True)
        return loss_of(loss, y, prediction) + sum(self._model.losses)


def _rms(gradient: Any) -> float | None:
    """Root mean square over all entries of the weight; rows missing from a sparse gradient count as zeros."""
    import tensorflow as tf

    if gradient is None:
        return None
    values = np.asarray(tf.convert_to_tensor(gradient), "float64")
    return float(np.sqrt(np.mean(values**2))) if values.size else 0.0


class _Blame:
    """Finds the layer at which gradients vanish or become NaN."""

    def __init__(self, passed: _Pass, gradients: list[list[Any]], loss: float):
        self._pass = passed
        self._states = [_state(parts) for parts in gradients]
        self._sizes = [max((_rms(one) or 0.0 for one in parts), default=0.0) for parts in gradients]
        self._loss = loss

    def nearest_the_loss(self, weights: list[Weight], sizes: list[float | None]) -> float | None:
        """The largest root mean square of a gradient among the weights of the last layer with a gradient."""
        for layer in reversed(self._pass.layers):
            found = [size for weight, size in zip(weights, sizes, strict=True) if weight.layer is layer and size]
            if found and np.isfinite(found).all():
                return max(found)
        return None

    def row(self, weight: Weight, rms: float | None, usual: float | None, scale: float) -> WeightGradient:
        calls = self._pass.calls_of(weight.layer)
        status, culprit = self._status(weight, rms, calls, usual, scale)
        ratio = rms / usual if rms and usual else 0.0
        explanation = _MEANING[status].format(layer=culprit, ratio=ratio)
        return WeightGradient(weight.name, status, rms, culprit, explanation)

    def _status(self, weight: Weight, rms: float | None, calls: list[int], usual: float | None, scale: float):
        if not weight.variable.trainable:
            return "frozen", ""
        if rms is None or rms == 0:
            if rms is None and not calls:
                return "unused", ""
            kind, weak = ("none", {"none"}) if rms is None else ("zero", {"none", "zero"})
            own = [call for call in calls if self._states[call] not in weak]
            if own:
                return "idle" if kind == "zero" else kind, self._pass.path(own[0])
            return kind, self._break(calls, weak)
        if not np.isfinite(rms):
            return "nan", self._source_of_nan(calls)
        if usual is None or usual / scale <= rms <= usual * scale:
            return "ok", ""
        return "large" if rms > usual else "small", self._greatest_change()

    def _break(self, calls: list[int], weak: set[str]) -> str:
        """The path of the first call after `calls` whose output gradient is in no state of `weak`; else "the loss"."""
        for call in calls:
            for later in self._pass.after(call):
                if self._states[later] not in weak:
                    return self._pass.path(later)
        return "the loss"

    def _greatest_change(self) -> str:
        """The path of the layer call across which the gradient's scale changes most."""
        changes = {
            later: abs(np.log(self._sizes[call] / self._sizes[later]))
            for call in range(len(self._sizes))
            for later in self._pass.after(call)[:1]
            if self._sizes[call] and self._sizes[later]
        }
        return self._pass.path(max(changes, key=lambda call: changes[call])) if changes else "the loss"

    def _source_of_nan(self, calls: list[int]) -> str:
        for call, finite in enumerate(self._pass.finite):
            if not finite:
                return f"{self._pass.path(call)}, in the forward pass"
        if not np.isfinite(self._loss):
            return "the loss"
        for call in calls:
            if self._states[call] != "nan":
                return self._pass.path(call)
            for later in self._pass.after(call):
                if self._states[later] != "nan":
                    return self._pass.path(later)
        return "the loss"


def _state(gradients: list[Any]) -> str:
    """The kind of gradient at the outputs of one call: "none", "nan", "zero" or "some"."""
    import tensorflow as tf

    values = [np.asarray(tf.convert_to_tensor(one), "float64") for one in gradients if one is not None]
    if not values:
        return "none"
    if not all(np.isfinite(one).all() for one in values):
        return "nan"
    return "some" if any(one.any() for one in values) else "zero"
