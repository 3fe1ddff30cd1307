"""What a file is judged by: a metric on labels, or agreement with the model, on examples for this alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from prunekit.core.data.calibration import example_count, most_examples, weighted_batches_of
from prunekit.core.outputs.baseline import class_agreement, loss_names
from prunekit.core.outputs.output_error import output_error
from prunekit.core.outputs.output_metrics import Batch, OutputMetrics, compiled_metrics
from prunekit.core.runtime.model_function import ModelFunction
from prunekit.delivery.reports.metrics import Metric, inferred
from prunekit.sparsity.array_ops import array_of

# Most examples to which layers are fitted, on which errors are compared, by which files are chosen, and on which the
# chosen one is judged; and the least number of all.
FITTED, MEASURED, CHOOSING, JUDGING = 256, 256, 4096, 4096
LEAST = 128
# Most examples to which the layers of files are fitted: those above, and more where so many are left to choose and to
# judge by.
CALIBRATION, _LEFT = 1024, 2048
# What is measured without labels.
AGREEMENT, OUTPUT_ERROR = "agreement", "output_error"
# Examples that are read, of which these are drawn.
READ = 4 * (FITTED + MEASURED + CHOOSING + JUDGING)
# Examples of a batch to which layers are fitted, and of one whose outputs are judged.
_BATCH, _JUDGED = 32, 128
# Share of the examples that judge that may be among the others without a note; and values of each that are compared.
_REPEATED, _COMPARED = 0.01, 1024
# Step of the probabilities in an integer file.
_STEP = 1 / 256
# Most examples that are kept for a training.
_TRAINED = 200_000


class SearchData:
    """The examples of a search in four parts, drawn at random: from all of arrays, from the first ones of a stream.

    Args:
        data: As for `pk.search`.
        seed: Seed of the draw.
        everything: True reads more examples, for a training; the parts are the same.

    Attributes:
        fitted: Inputs to which layers are fitted.
        measured: Inputs on which outputs are compared.
        calibration: Inputs to which the layers of files are fitted: those of both parts before, and others.
        held_out: Inputs of both remaining parts, those for the choice first.
        labels: Labels of these, or None.
        choosing: Number of examples for the choice.
        trained: (inputs, labels or None) of the examples that neither choose nor judge.
        notes: That examples which judge are found among the others, too; that not all of a stream was read.

    Raises:
        ValueError: There are too few examples.
    """

    def __init__(self, data: Any, seed: int, *, everything: bool = False):
        self.notes: list[str] = []
        inputs, labels, order, others = _drawn(data, _TRAINED if everything else READ, seed, self.notes)
        count = len(order)
        if count < LEAST:
            raise ValueError(
                f"A search fits, chooses and judges on different examples: {LEAST} at least, better some thousands. "
                f"Received: {count}."
            )
        quarter = count // 4
        fitted, measured = min(FITTED, quarter), min(MEASURED, quarter)
        rest = order[fitted + measured :]
        more = max(0, min(CALIBRATION - fitted - measured, len(rest) - 2 * _LEFT))
        self.calibration = _rows(inputs, order[: fitted + measured + more])
        rest = rest[more:]
        self.choosing = min(CHOOSING, len(rest) // 2)
        self.fitted = _rows(inputs, np.sort(order[:fitted]))
        self.measured = _rows(inputs, np.sort(order[fitted : fitted + measured]))
        last = self.choosing + min(JUDGING, len(rest) - self.choosing)
        taught = np.concatenate([order[: fitted + measured + more], rest[last:], others]) if everything else order[:0]
        self.trained = _rows(inputs, taught), None if labels is None else _rows(labels, taught)
        rest = rest[:last]
        self.held_out = _rows(inputs, rest)
        self.labels = None if labels is None else _rows(labels, rest)
        _check_numbers(labels)
        self._note_repeated(inputs, [self.calibration, _rows(inputs, rest[: self.choosing])], rest[self.choosing :])

    def _note_repeated(self, inputs: Any, others: Sequence[Any], judging: np.ndarray) -> None:
        """Adds a note where examples that judge are found among those that fit and choose."""
        known = {value for part in others for value in _digests(part)}
        repeated = sum(value in known for value in _digests(_rows(inputs, judging)))
        if repeated > _REPEATED * len(judging):
            self.notes.append(
                f"{repeated:,} of the {len(judging):,} examples that judge are also among those that fit and choose: "
                "the drop may be larger on others. Pass each example once."
            )

    @property
    def judging(self) -> int:
        """Number of examples on which the chosen file is judged."""
        return len(keras.tree.flatten(self.held_out)[0]) - self.choosing


def _drawn(data: Any, most: int, seed: int, notes: list[str]) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Returns inputs and labels of about so many examples, and the rows of parts in their order, and of others."""
    total, random = example_count(data), np.random.default_rng(seed)
    most = int(min(most, most_examples(data)))
    order = None if total is None else random.permutation(total)[:most]
    chosen = None if order is None else np.sort(order)
    batches: list[tuple[Any, Any]] = []
    count, drawn, end = 0, 0, 0
    for inputs, labels, _ in weighted_batches_of(data):
        begin, end = end, end + len(keras.tree.flatten(inputs)[0])
        if chosen is not None:
            rows = chosen[slice(*np.searchsorted(chosen, (begin, end)))] - begin
            if not len(rows):
                continue
            inputs, labels = (None if one is None else _rows(_arrays(one), rows) for one in (inputs, labels))
        batches.append((inputs, labels))
        _check_same_shapes(batches[0][0], inputs)
        count = end if chosen is None else count + len(rows)
        drawn = drawn or (count if count >= READ else 0)
        if count >= most:
            break
    if chosen is None and count >= most:
        notes.append(f"The first {count:,} examples were read: shuffle the data if they have an order.")
    labelled = all(labels is not None for _, labels in batches)

    def joined(index: int) -> Any:
        return keras.tree.map_structure(
            lambda *leaves: np.concatenate(leaves), *(_arrays(batch[index]) for batch in batches)
        )

    if order is None or chosen is None:
        places, order = np.arange(count), random.permutation(drawn or count)
        others = places[len(order) :]
    else:
        places = np.searchsorted(chosen, order)
        order, others = places[:READ], places[READ:]
    return joined(0), joined(1) if labelled else None, order, others


def _arrays(structure: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: np.asarray(keras.ops.convert_to_numpy(leaf)), structure)


def _digests(inputs: Any) -> list[bytes]:
    """Returns some of the bytes of each example, which tell unequal ones apart."""
    found = []
    for leaf in keras.tree.flatten(inputs):
        values = np.asarray(leaf).reshape(len(leaf), -1)
        found.append(values[:, :: 1 + values.shape[1] // _COMPARED])
    return [b"".join(row.tobytes() for row in rows) for rows in zip(*found, strict=True)]


def _check_numbers(labels: Any) -> None:
    for leaf in keras.tree.flatten(labels):
        if leaf is not None and leaf.dtype.kind not in "biuf":
            raise ValueError(
                f"Labels are numbers. Received: {str(leaf.reshape(-1)[0])!r}. Number the classes as in training, for "
                "example by np.unique(labels, return_inverse=True)[1]."
            )


def _check_same_shapes(first: Any, other: Any) -> None:
    for one, another in zip(keras.tree.flatten(first), keras.tree.flatten(other), strict=True):
        if one.shape[1:] != another.shape[1:]:
            raise ValueError(
                "A LiteRT file reads examples of one shape. Received: batches with examples of "
                f"{tuple(one.shape[1:])} and {tuple(another.shape[1:])}. Pad them to one length."
            )


def batched(inputs: Any, size: int = _BATCH) -> list[Any]:
    """Returns inputs in batches."""
    count = len(keras.tree.flatten(inputs)[0])
    return [_rows(inputs, slice(start, start + size)) for start in range(0, count, size)]


def first_rows(inputs: Any, count: int) -> Any:
    """Returns the first of some inputs."""
    return _rows(inputs, slice(count))


def _rows(structure: Any, at: np.ndarray | slice) -> Any:
    return keras.tree.map_structure(lambda leaf: leaf[at], structure)


class Judge:
    """Measures outputs: a compiled metric, the accuracy of classes, or the loss; without labels agreement.

    Args:
        model: The model as it is.
        data: The examples.
        metric: The metric in which the drop is measured; None takes the first one that says which direction is better.

    Attributes:
        metric: The metric.
        outputs: What the model computes for the held-out examples, one array for each output.
        before: The metric of the model, on the examples for the choice and on those that judge.
        notes: Metrics that the model is compiled with and that cannot be the measure.

    Raises:
        ValueError: Nothing says how outputs are compared with labels; the metric of the model is not finite.
    """

    def __init__(self, model: Any, data: SearchData, metric: Metric | None = None):
        self._model, self._data = model, data
        self.notes = list(data.notes)
        run = ModelFunction(model, lambda inputs: model(inputs, training=False))
        found = [
            run(keras.tree.map_structure(keras.ops.convert_to_tensor, one)) for one in batched(data.held_out, _JUDGED)
        ]
        self._structure = keras.tree.map_structure(lambda leaf: None, found[0])
        parts = zip(*map(keras.tree.flatten, found), strict=True)
        self.outputs = [np.concatenate([array_of(leaf).astype("float32") for leaf in leaves]) for leaves in parts]
        self._losses = loss_names(model, len(self.outputs))
        self._parts = slice(0, data.choosing), slice(data.choosing, None)
        parts_with_labels = self._parts if data.labels is not None else ()
        self._measures = [OutputMetrics(model, self._batches(part), of_outputs=True) for part in parts_with_labels]
        self.metric = self._metric() if metric is None or data.labels is None else self._checked(metric)
        if len(self.outputs) > 1 and data.labels is not None and self.metric.name != "loss":
            self.notes.append(f"The drop is that of the {self.metric.title}: other outputs are not judged.")
        self.before = self.values(self.outputs)
        wrong = next((value for value in self.before if not math.isfinite(value)), None)
        if wrong is not None:
            raise ValueError(
                f"A drop needs the {self.metric.title} of the model as it is. Received: {wrong:g} on these examples. "
                "Look for nan in labels, inputs and weights."
            )

    def _metric(self) -> Metric:
        if self._data.labels is None:
            same = self._agreement(self.outputs, slice(None))
            return Metric(OUTPUT_ERROR, "min") if same is None else Metric(AGREEMENT, "max", fraction=True)
        names = self._measured(self.outputs, 0)
        compiled = compiled_metrics(self._model)
        known = [inferred(name, compiled.get(name)) for name in names if name != "loss"]
        chosen = next((one for one in known if one.direction is not None), None)
        if chosen is None and self._classes() is not None:
            chosen = Metric("accuracy", "max", fraction=True)
        elif chosen is None and "loss" in names:
            chosen = Metric("loss", "min")
        if chosen is not None:
            unknown = [one.name for one in known[: known.index(chosen) if chosen in known else None]]
            if unknown:
                self.notes.append(
                    f"The drop is that of the {chosen.title}: whether higher or lower values of {', '.join(unknown)} "
                    "are better is known only for the metrics of Keras."
                )
            return chosen
        lacks = "without a metric, whose loss its outputs do not tell," if self._model.compiled else "not compiled,"
        raise ValueError(
            f"With labels, the drop is that of a metric. Received: a model that is {lacks} and labels that are no "
            "classes of its outputs. Compile it with a metric, or pass inputs alone."
        )

    def _checked(self, metric: Metric) -> Metric:
        """Returns a metric that outputs tell."""
        known = self._measured(self.outputs, 0)
        if metric.name in known or (metric.name == "accuracy" and self._classes() is not None):
            return metric
        raise ValueError(
            f"The drop is that of a metric of outputs: {', '.join(known) or 'none is known'}. Received: {metric.name}, "
            "which the model computes by itself. Compile it with another metric."
        )

    def _classes(self) -> np.ndarray | None:
        """Returns the class of each held-out example; None if the labels are none."""
        labels, outputs = self._data.labels, self.outputs
        leaf = keras.tree.flatten(labels)[0]
        if len(outputs) != 1 or outputs[0].ndim != 2 or outputs[0].shape[1] < 2:
            return None
        (loss,) = self._losses
        if loss is not None and "categorical" not in loss:
            return None
        if leaf.shape == outputs[0].shape:
            return np.asarray(leaf.argmax(-1))
        return leaf.reshape(-1) if leaf.size == len(leaf) and np.asarray(leaf).dtype.kind in "iu" else None

    def values(self, outputs: Sequence[np.ndarray]) -> tuple[float, float]:
        """Returns the metric of outputs for the held-out examples, of both parts."""
        return self._value(outputs, 0), self._value(outputs, 1)

    def _value(self, outputs: Sequence[np.ndarray], number: int) -> float:
        name, part = self.metric.name, self._parts[number]
        if self._data.labels is None:
            if name == OUTPUT_ERROR:
                return output_error([one[part] for one in self.outputs], [one[part] for one in outputs])
            return float(self._agreement(outputs, part))  # type: ignore[arg-type]
        found = self._measured(outputs, number)
        if name in found:
            return found[name]
        classes = self._classes()
        return float((outputs[0][part].argmax(-1) == classes[part]).mean())  # type: ignore[index]

    def _agreement(self, outputs: Sequence[np.ndarray], part: slice) -> float | None:
        """Returns the least agreement of an output that is classes; None if none is."""
        rows = zip(self.outputs, outputs, self._losses, strict=True)
        found = [class_agreement(before[part], after[part], loss) for before, after, loss in rows]
        return min((one for one in found if one is not None), default=None)

    def _batches(self, part: slice) -> list[Batch]:
        return [(*one, None) for one in batched(_rows((self._data.held_out, self._data.labels), part), _JUDGED)]

    def _measured(self, outputs: Sequence[np.ndarray], number: int) -> dict[str, float]:
        """Returns what the model is compiled with, by name, of outputs for a part; {} if there is nothing."""
        batches = batched([one[self._parts[number]] for one in outputs], _JUDGED)
        tensors = (keras.tree.map_structure(keras.ops.convert_to_tensor, one) for one in batches)
        measure = self._measures[number]
        found = measure(keras.tree.pack_sequence_as(self._structure, one) for one in tensors)
        measure.end()
        return found

    def drops(self, outputs: Sequence[np.ndarray]) -> tuple[float, float]:
        """Returns by how much the metric of outputs is worse than that of the model, on both parts."""
        rows = zip(self.before, self.values(outputs), strict=True)
        first, second = (self.metric.drop(before, after) for before, after in rows)
        return first, second

    def error(self, outputs: Sequence[np.ndarray]) -> float:
        """Returns the squared error of outputs on the examples for the choice, as the table has it.

        Probabilities are compared as far as a file of 8-bit outputs tells them apart.
        """
        part = slice(0, self._data.choosing)
        return output_error([one[part] for one in self.outputs], [one[part] for one in outputs], least=_STEP) ** 2
