"""Measures how much each optimizer update changes the weights, inside the compiled step."""

import contextlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from keras import ops

from prunekit.anatomy.layers.model_weights import Weight, check_built, weights_in
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.sections import Column, Section
from prunekit.anatomy.records.tables import aligned
from prunekit.core.runtime import backend
from prunekit.core.runtime.optimizers import optimizers_for, optimizers_of
from prunekit.core.statistics.layer_observer import wide
from prunekit.core.training import train_function
from prunekit.core.training.update_observer import UpdateObserver, state_variable


@dataclass(frozen=True)
class WeightChange(Record):
    """How much optimizer updates changed one weight variable.

    Attributes:
        name: Readable path, such as "block/conv_1/kernel".
        updates: Number of measured updates.
        change: L2 norm of an update's change, averaged over the updates; NaN without updates.
        last: L2 norm of the last update's change.
        largest: Largest L2 norm of an update's change.
        norm: L2 norm of the weight before an update, averaged over the updates; NaN without updates.
    """

    derived: ClassVar = ("relative",)

    name: str
    updates: int
    change: float
    last: float
    largest: float
    norm: float

    @property
    def relative(self) -> float:
        """`change` / `norm`; infinite if all entries were zero before the updates and changed, 0 if none changed."""
        if self.norm == 0:
            return float("inf") if self.change else 0.0
        return self.change / self.norm


@dataclass(frozen=True)
class ChangeReport(Displayed):
    """How much optimizer updates changed each weight variable.

    Attributes:
        model_name: Name of the model.
        weights: One row per trainable variable, in the order of the model's layers.
    """

    main_items: ClassVar = "weights"

    model_name: str
    weights: tuple[WeightChange, ...]

    def sections(self) -> tuple[Section, ...]:
        """Returns the table of how far optimizer updates moved each weight."""
        columns = (
            Column("Weight", "name"),
            Column("Updates", "count", keep=3),
            Column("Change", "number", digits=3),
            Column("Last", "number", keep=4, digits=3),
            Column("Largest", "number", keep=4, digits=3),
            Column("Norm", "number", keep=5, digits=3),
            Column("Change / norm", "number", digits=3),
        )
        rows = tuple(
            (row.name, row.updates, row.change, row.last, row.largest, row.norm, row.relative) for row in self.weights
        )
        text = "L2 norms of what an update changes, averaged over the updates, and of the weight before."
        return (Section(f"Weight changes in {self.model_name}", columns, rows, explanation=text),)

    def __str__(self) -> str:
        """Returns the report as a plain-text table."""
        head = ("weight", "updates", "change", "last", "largest", "norm", "change / norm")
        rows = [
            (row.name, f"{row.updates:,}", *(f"{value:.3g}" for value in _figures(row)), f"{row.relative:.2e}")
            for row in self.weights
        ]
        return "\n".join([f"Model {self.model_name!r}: what an update changes", *aligned([head, *rows], left=(0,))])


def _figures(row: WeightChange) -> tuple[float, ...]:
    return row.change, row.last, row.largest, row.norm


class WeightChanges(UpdateObserver):
    """Context manager that measures how much each optimizer update changes each trainable weight.

    The gradient alone does not determine the change: momentum, adaptive rates, clipping, weight decay, constraints and
    weight averages act after it. The `with` block measures `fit`, `TapeLoop` and custom tape loops; trace a custom
    `tf.function` inside the block. Leaving the block restores model and optimizer. The measurements stay on the device
    until `report()` reads them. A batch that only accumulates gradients is not counted as an update.

    Args:
        model: A built Keras model; its trainable weights are measured.
        optimizer: Keras optimizer of the loop, or a list of optimizers. None uses the compiled model's optimizer.

    Raises:
        RuntimeError: Keras does not run on TensorFlow; the `with` block is entered again before it was left.
        TypeError: `model` is not a Keras 3 model; `optimizer` is not a Keras optimizer.
        ValueError: The model is not built, or has neither trainable weights nor an optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None):
        check_built(model)
        self._weights = _measured(model)
        super().__init__([weight.variable for weight in self._weights])
        self.model = model
        self.optimizers = optimizers_for(model, optimizer)
        if not self._weights or not self.optimizers:
            missing = "trainable weights" if not self._weights else "an optimizer"
            raise ValueError(
                f"WeightChanges measures the changes that an optimizer makes in trainable weights. Received: "
                f"{model.name!r} without "
                f"{missing}. " + ("" if not self._weights else "Compile it, or pass the loop's `optimizer`.")
            )
        with backend.variable_scope(model):
            # Rows: number of updates, sum of change norms, last change norm, largest change norm, sum of weight norms.
            self._figures = state_variable(np.zeros((5, len(self._weights))), "float64", "changes")
        self._attached: contextlib.ExitStack | None = None
        self._entered = False
        self._begun = self._iterations()

    @staticmethod
    def keys_of(model: Any) -> list[tuple[str, tuple[int, ...]]]:
        """Returns name and shape of each measured weight of a model, in the order of the columns of `figures`."""
        return [(weight.name, weight.shape) for weight in _measured(model)]

    def __enter__(self) -> "WeightChanges":
        if self._attached is not None:
            raise RuntimeError(
                "This WeightChanges is already active. Use a second WeightChanges for a part of the training."
            )
        self._begun, self._entered = self._iterations(), True
        with contextlib.ExitStack() as undo:
            undo.enter_context(train_function.fresh_functions(self.model))
            undo.enter_context(self.observing(self.optimizers))
            self._attached = undo.pop_all()
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._attached is not None:
            attached, self._attached = self._attached, None
            attached.close()

    def reset(self) -> None:
        """Discards all measurements so far."""
        self._figures.assign(np.zeros((5, len(self._weights))))
        self._begun = self._iterations()

    @property
    def figures(self) -> np.ndarray:
        """Measurements so far, as `restore` takes them: float64 array of shape (5, weights)."""
        return np.array(self._figures.numpy())

    def restore(self, figures: Any) -> None:
        """Continues from the `figures` of an earlier training of the same model."""
        self._figures.assign(figures)

    @property
    def report(self) -> ChangeReport:
        """The change of each weight per update, measured since the beginning or since `reset()`.

        Weights that a mask change sets to zero between updates are not counted as changes. `weights` has one row per
        trainable variable: `name`, `updates`, the L2 norm of an update's change (mean `change`, `last`, `largest`), the
        mean L2 norm of the weight (`norm`), and `relative`, which is `change` / `norm`.

        Raises:
            RuntimeError: The `with` block was never entered; the optimizers made updates, but none was measured.
        """
        figures = np.asarray(self._figures.numpy())
        made = self._iterations() - self._begun
        if not self._entered:
            raise RuntimeError("Nothing was measured yet. Train inside `with WeightChanges(model) as changes:`.")
        if made and not figures[0].any():
            raise RuntimeError(
                f"The optimizer made {made} updates, and none of them was measured: the compiled step was traced "
                "before WeightChanges was entered, or the model was compiled with another optimizer since. Enter it "
                "first, or create the tf.function again, after compiling."
            )
        rows = [
            WeightChange(
                name=weight.name,
                updates=int(updates),
                change=total / updates if updates else float("nan"),
                last=last,
                largest=largest,
                norm=norms / updates if updates else float("nan"),
            )
            for weight, (updates, total, last, largest, norms) in zip(self._weights, figures.T.tolist(), strict=True)
        ]
        return ChangeReport(self.model.name, tuple(rows))

    def add(self, updates: Any, seen: dict[int, tuple[Any, Any]]) -> None:
        """Adds the norms of one update's changes and of the weights before it."""
        nothing = ops.zeros((), "float64")
        did = ops.cast(updates, "float64")
        order = range(len(self._weights))
        changes = ops.stack([_norm(seen[i][1] - seen[i][0]) if i in seen else nothing for i in order])
        norms = ops.stack([_norm(seen[i][0]) * did if i in seen else nothing for i in order])
        counts = ops.stack([did if i in seen else nothing for i in order])
        former, total, last, largest, weights = ops.unstack(ops.convert_to_tensor(self._figures))
        self._figures.assign(
            ops.stack(
                [
                    former + counts,
                    total + changes,
                    ops.where(counts > 0, changes, last),
                    ops.maximum(largest, changes),
                    weights + norms,
                ]
            )
        )

    def _iterations(self) -> int:
        # The model may have been compiled with another optimizer since: its updates count too.
        known = {id(optimizer): optimizer for optimizer in [*self.optimizers, *optimizers_of(self.model)]}
        return sum(int(optimizer.iterations.numpy()) for optimizer in known.values())


def _measured(model: Any) -> list[Weight]:
    return [weight for weight in weights_in(model) if weight.variable.trainable]


def _norm(value: Any) -> Any:
    """Returns the L2 norm as a float64 scalar."""
    import tensorflow as tf

    # l2_loss makes one pass and allocates no squared copy of the array.
    return tf.sqrt(2.0 * tf.cast(tf.nn.l2_loss(wide(value)), tf.float64))
