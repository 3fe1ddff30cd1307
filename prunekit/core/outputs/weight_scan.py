"""Measures a model with one weight changed at a time, from activations that are computed once."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.core.outputs.output_metrics import Batch, OutputMetrics
from prunekit.core.outputs.suffix_runs import SuffixRuns
from prunekit.core.runtime import backend, jax_state


@dataclass(frozen=True)
class Effect:
    """What the change of one weight does to a model.

    Attributes:
        metrics: Metrics and loss by name.
        output_error: L2 norm of the change of the model's outputs over all examples, relative to the L2 norm of the
            outputs.
    """

    metrics: Mapping[str, float]
    output_error: float


@dataclass(frozen=True)
class Measured:
    """The model with one weight changed.

    Attributes:
        level: What the technique varies: a sparsity, or a number of bits.
        entries: Number of entries of the weight that the technique changed.
        effect: What this does to the model.
    """

    level: float
    entries: int
    effect: Effect


class WeightScan:
    """Changes one weight at a time, measures the model, and restores the weight.

    Args:
        model: A built Keras model.
        batches: The data. Without labels, or with a model that is not compiled, only output errors are measured.
        variables: The weights that will change.
        memory: Largest number of bytes of activations to keep; see `SuffixRuns`.

    Attributes:
        dense: Metrics and loss of the model as it is.
        runs: The cached activations.
        metrics: Measures metrics and loss.

    Memory: the data, the kept activations, and the model's outputs.
    """

    def __init__(self, model: Any, batches: Sequence[Batch], variables: Sequence[Any], memory: float):
        jax_state.sync_model_state(model)
        self.runs = SuffixRuns(model, [batch[0] for batch in batches], variables, memory)
        self.metrics = OutputMetrics(model, batches)
        self._outputs: list[np.ndarray] = []
        self.dense = self.metrics(self._noting(self.runs.outputs()))
        self._energy = sum(_square(outputs[np.isfinite(outputs)]) for outputs in self._outputs)

    def measure(self, variable: Any, changed: Callable[[Any], Iterable[Any]]) -> list[Effect]:
        """Returns what each of several values of a weight does.

        The weight has its own value again when this returns or raises.

        Args:
            variable: The weight; weights are taken in the order of their `runs.position`.
            changed: Returns the values, from the weight's own value as a tensor.
        """
        self.runs.advance(self.runs.position(variable) or 0)
        found = []
        with _varied(variable) as own:
            for new in changed(own):
                variable.assign(new)
                squares: list[float] = []
                metrics = self.metrics(self._comparing(self.runs.outputs(), squares))
                error = sum(squares) / self._energy if self._energy else float(bool(sum(squares)))
                found.append(Effect(metrics, float(np.sqrt(error))))
        return found

    def end(self) -> None:
        """Resets the model's metrics."""
        self.metrics.end()

    def _noting(self, batches: Iterator[Any]) -> Iterator[Any]:
        for outputs in batches:
            self._outputs.append(_flat(outputs))
            yield outputs

    def _comparing(self, batches: Iterator[Any], squares: list[float]) -> Iterator[Any]:
        for outputs, dense in zip(batches, self._outputs, strict=True):
            found = _flat(outputs).astype("float64")
            # The difference of two infinities is NaN: outputs that are the same, such as masked logits, changed by 0.
            squares.append(_square(np.subtract(found, dense, out=np.zeros_like(found), where=found != dense)))
            yield outputs


@contextmanager
def _varied(variable: Any) -> Iterator[Any]:
    """Context manager in which a weight may be assigned; yields its value, which it has again afterwards."""
    value = backend.value_now(variable)
    if keras.backend.backend() == "torch":
        value = value.detach().clone()
    try:
        yield value
    finally:
        variable.assign(value)


def _flat(outputs: Any) -> np.ndarray:
    """Returns all outputs of a batch as one array, at least float32."""
    arrays = [np.ravel(ops.convert_to_numpy(leaf)) for leaf in keras.tree.flatten(outputs)]
    return np.concatenate([array.astype(np.promote_types(array.dtype, "float32")) for array in arrays])


def _square(values: np.ndarray) -> float:
    return float(np.sum(np.square(values, dtype="float64")))
