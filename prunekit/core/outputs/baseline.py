"""Measures what a change of a model does to its metrics and outputs on data."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.records.damage import Damage, MetricChange, OutputChange
from prunekit.core.data.batch_parts import in_parts
from prunekit.core.data.calibration import weighted_batches_of
from prunekit.core.outputs.output_error import output_error
from prunekit.core.outputs.output_metrics import Batch, OutputMetrics
from prunekit.core.runtime import jax_state
from prunekit.core.runtime.model_function import ModelFunction

# Most examples that are compared, and most values of outputs that are kept of them: 256 MB.
EXAMPLES, _VALUES = 512, 1 << 26
# Inputs of fewer values run through the model sooner than it is traced.
_EAGER = 1 << 18
# Bytes of the largest output of a layer that is in memory at once.
_AT_ONCE = 1 << 25


Reported = TypeVar("Reported", bound=Any)


class Baseline:
    """The metrics and outputs of a model on data, kept while the model is changed.

    The metrics are those that the model was compiled with, on data with labels. Labels that do not fit the loss are no
    error: then the outputs alone are compared, and `Damage.problem` says why.

    Args:
        model: A built model, before the change.
        data: As for `batches_of`; the first 512 examples are read, fewer if the outputs are large.
        with_metrics: False compares the outputs alone.

    Attributes:
        batches: The examples: (inputs, labels, sample weights).
        outputs: The outputs of each batch, in the model's output structure, as NumPy arrays.
        changed: Those of the changed model, from `damage` on.

    Raises:
        TypeError, ValueError: As for `batches_of`.
    """

    def __init__(self, model: Any, data: Any, *, with_metrics: bool = True):
        jax_state.sync_model_state(model)
        self._model = model
        self.batches = _examples_of(data)
        self._run = _runner(model, self.batches)
        self.outputs = self._kept()
        self.changed: list[Any] = []
        self._metrics: OutputMetrics | None = None
        self._before: dict[str, float] = {}
        self._problem = ""
        if with_metrics and model.compiled:
            self._begin_metrics()

    def _kept(self) -> list[Any]:
        """Returns the outputs of the model; leaves out the examples for which they would need too much memory."""
        found: list[Any] = []
        values = 0
        for inputs, _, _ in self.batches:
            found.append(self._run(inputs))
            values += sum(one.size for one in keras.tree.flatten(found[-1]))
            if values > _VALUES:
                break
        self.batches = self.batches[: len(found)]
        return found

    def _begin_metrics(self) -> None:
        try:
            self._metrics = OutputMetrics(self._model, self.batches)
            self._before = self._metrics(map(_tensors, self.outputs))
        except Exception as error:  # noqa: BLE001 each backend has its own exceptions for labels that do not fit
            self._metrics = None
            self._problem = f"Metrics are not measured: {str(error).strip().splitlines()[0]}"

    def damage(self, model: Any = None) -> Damage:
        """Returns the change of metrics and outputs.

        Args:
            model: The changed model, with the same inputs and outputs; None = the model itself, which was changed in
                place.
        """
        changed = self._model if model is None else model
        # Traced anew: the layers may compute otherwise than before, as those of a quantized model do.
        self.changed = self._outputs(changed, _runner(changed, self.batches))
        return Damage(
            sum(map(_count, self.batches)),
            self._output_changes(self.changed),
            self._metric_changes(changed, self.changed),
            self._problem,
        )

    def with_damage(self, report: Reported, remedy: str, model: Any = None) -> Reported:
        """Returns a report with the change of metrics and outputs, and a remark where much was lost.

        Args:
            report: A frozen report with `damage` and `notes`.
            remedy: What to try next, as a sentence.
            model: As for `damage`.
        """
        damage = self.damage(model)
        remark = damage.remark(remedy)
        notes = (*report.notes, *([] if remark is None else [remark]))
        return replace(report, damage=damage, notes=notes)

    def error(self) -> float:
        """Returns the error of the outputs of the model with other values of its variables; see `output_error`."""
        return output_error(*map(_joined, (self.outputs, self._outputs(self._model, self._run))))

    def _outputs(self, model: Any, run: Callable[[Any], Any]) -> list[Any]:
        jax_state.sync_model_state(model)
        return [run(inputs) for inputs, _, _ in self.batches]

    def _metric_changes(self, changed: Any, found: Sequence[Any]) -> tuple[MetricChange, ...]:
        metrics = self._metrics
        if metrics is None or not metrics.needed:
            return ()
        if metrics.whole and changed is not self._model:
            if not changed.compiled:
                return ()
            metrics = OutputMetrics(changed, self.batches)
        after = metrics(map(_tensors, found))
        metrics.end()
        names = [*(name for name in self._before if name != "loss"), "loss"]
        return tuple(
            MetricChange(one, self._before[one], after[one]) for one in names if one in self._before and one in after
        )

    def _output_changes(self, found: Sequence[Any]) -> tuple[OutputChange, ...]:
        before, after = _joined(self.outputs), _joined(found)
        kinds, names = loss_names(self._model, len(before)), _names(self._model, len(before))
        return tuple(
            OutputChange(name, _relative_error(one, other), class_agreement(one, other, kind))
            for one, other, kind, name in zip(before, after, kinds, names, strict=True)
            if one.dtype.kind in "fiu"
        )


def _examples_of(data: Any) -> list[Batch]:
    """Returns the batches with the first examples."""
    found: list[Batch] = []
    for batch in weighted_batches_of(data):
        found.append(batch)
        if sum(map(_count, found)) >= EXAMPLES:
            break
    return found


def _runner(model: Any, batches: Sequence[Batch]) -> Callable[[Any], Any]:
    """Returns a function of a batch of inputs; compiled, unless running the model is faster than compiling it."""

    def run(inputs: Any) -> Any:
        return model(inputs, training=False)

    leaves = [leaf for inputs, _, _ in batches for leaf in keras.tree.flatten(inputs) if leaf is not None]
    size = sum(math.prod(length or 1 for length in leaf.shape) for leaf in leaves)
    function = run if size < _EAGER else ModelFunction(model, run)

    def whole(inputs: Any) -> Any:
        parts = [_arrays(function(_tensors(part))) for part in in_parts(model, [inputs], _AT_ONCE)]
        return parts[0] if len(parts) == 1 else keras.tree.map_structure(lambda *some: np.concatenate(some), *parts)

    return whole


def _joined(batches: Sequence[Any]) -> list[np.ndarray]:
    """Returns each output over all batches."""
    return [np.concatenate(parts) for parts in zip(*map(keras.tree.flatten, batches), strict=True)]


def _count(batch: Batch) -> int:
    return next(len(leaf) for leaf in keras.tree.flatten(batch[0]) if leaf is not None)


def _tensors(structure: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else ops.convert_to_tensor(leaf), structure)


def _arrays(structure: Any) -> Any:
    """Returns outputs as NumPy arrays, at least of float32 where they are floats."""

    def array(leaf: Any) -> np.ndarray:
        found = np.asarray(ops.convert_to_numpy(leaf))
        return found.astype("float32") if "float" in found.dtype.name and found.dtype.itemsize < 4 else found

    return keras.tree.map_structure(array, structure)


def _names(model: Any, count: int) -> list[str]:
    if count == 1:
        return [""]
    names = list(getattr(model, "output_names", None) or ())
    return names if len(names) == count else [f"output {place}" for place in range(1, count + 1)]


def _relative_error(before: np.ndarray, after: np.ndarray) -> float:
    if before.dtype.kind != "f":
        before, after = before.astype("float64"), after.astype("float64")
    # Outputs that are infinite in both, such as masked logits, did not change.
    change = np.subtract(after, before, out=np.zeros_like(before), where=after != before)
    size = float(np.linalg.norm(np.where(np.isfinite(before), before, 0.0)))
    error = float(np.linalg.norm(change))
    return error / size if size else (math.inf if error else 0.0)


def class_agreement(before: np.ndarray, after: np.ndarray, loss: str | None) -> float | None:
    """Returns the share of the predictions with the same class; None for an output that is no class.

    Args:
        before: The output as it was.
        after: The output of the changed model.
        loss: Name of the loss that the output is trained with; None if it is not known.
    """
    if before.dtype.kind != "f":
        return float((before == after).mean())
    if loss is not None and "binary" in loss:
        bound = 0.5 if before.min(initial=0.0) >= 0.0 and before.max(initial=0.0) <= 1.0 else 0.0
        return float(((before > bound) == (after > bound)).mean())
    if before.ndim < 2 or before.shape[-1] < 2:
        return None
    # Without a loss, several values of an example may as well be a regression: only probabilities are classes.
    if (loss is not None and "categorical" in loss) or _are_probabilities(before):
        return float((before.argmax(-1) == after.argmax(-1)).mean())
    return None


def _are_probabilities(values: np.ndarray) -> bool:
    return bool(values.min(initial=0.0) >= 0.0 and np.allclose(values.sum(axis=-1), 1.0, atol=1e-2))


def loss_names(model: Any, count: int) -> list[str | None]:
    """Returns the name of the loss of each output; None where it is not known."""
    losses = keras.tree.flatten(getattr(model, "loss", None)) if model.compiled else []
    known = [_name_of(loss) for loss in losses]
    if len(known) == 1:
        return known * count
    return known if len(known) == count else [None] * count


def _name_of(loss: Any) -> str | None:
    """Returns the name of a loss in lower case; None for an output without one."""
    if loss is None:
        return None
    return str(loss if isinstance(loss, str) else getattr(loss, "name", None) or getattr(loss, "__name__", "")).lower()
