"""What optimizer updates did to the weights, measured inside the compiled step: the change itself, not the gradient."""

import contextlib
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from keras import ops

from prunekit.anatomy.tables import aligned
from prunekit.anatomy.targets import check_built, weights_in
from prunekit.core import backend, train_function
from prunekit.core.layer_observer import wide
from prunekit.core.optimizers import optimizers_for, optimizers_of
from prunekit.core.update_observer import UpdateObserver, state_variable


@dataclass(frozen=True)
class WeightChange:
    """What updates did to one weight variable.

    Attributes:
        name: Readable path, such as "block/conv_1/kernel".
        updates: How many updates were measured.
        change: L2 norm of the change that an update made, averaged over them; NaN without updates.
        last: The same of the last update.
        largest: The largest of them.
        norm: L2 norm of the weight before an update, averaged over them; NaN without updates.
    """

    name: str
    updates: int
    change: float
    last: float
    largest: float
    norm: float

    @property
    def relative(self) -> float:
        """`change` / `norm`; infinite for a weight that was zero throughout before its changes."""
        if self.norm == 0:
            return float("inf") if self.change else 0.0
        return self.change / self.norm


@dataclass(frozen=True)
class ChangeReport:
    """What updates did to each weight variable.

    Attributes:
        model: Name of the model.
        weights: One row per trainable variable, in the order of the model's layers.
    """

    model: str
    weights: tuple[WeightChange, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {"model": self.model, "weights": [asdict(row) | {"relative": row.relative} for row in self.weights]}

    def __str__(self) -> str:
        """A table as plain text."""
        head = ("weight", "updates", "change", "last", "largest", "norm", "change / norm")
        rows = [
            (row.name, f"{row.updates:,}", *(f"{value:.3g}" for value in _figures(row)), f"{row.relative:.2e}")
            for row in self.weights
        ]
        return "\n".join([f"Model {self.model!r}: what an update changes", *aligned([head, *rows], left=(0,))])


def _figures(row: WeightChange) -> tuple[float, ...]:
    return row.change, row.last, row.largest, row.norm


class WeightChanges(UpdateObserver):
    """Measures, inside every update of a training, how far it moved each weight; a context manager.

    The gradient does not say that: momentum, adaptive rates, clipping, weight decay, constraints and averages come
    after it. Inside the `with` block, `fit`, `TapeLoop` and tape loops of the user's are measured; a `tf.function` of
    the user's is to be traced inside. At its end model and optimizer are as they were. Nothing leaves the device before
    `report()`. An update that only accumulates gradients counts as none.

    Args:
        model: A built Keras model; its trainable weights are measured.
        optimizer: The Keras optimizer, or several, that the loop updates with. None takes the one the model was
            compiled with.

    Raises:
        RuntimeError: Keras does not run on TensorFlow; it is entered inside itself.
        TypeError: It is no Keras 3 model, or no Keras optimizer.
        ValueError: The model is not built, or has neither trainable weights nor an optimizer.
    """

    def __init__(self, model: Any, optimizer: Any = None):
        check_built(model)
        self._weights = [weight for weight in weights_in(model) if weight.variable.trainable]
        super().__init__([weight.variable for weight in self._weights])
        self.model = model
        self.optimizers = optimizers_for(model, optimizer)
        if not self._weights or not self.optimizers:
            missing = "trainable weights" if not self._weights else "an optimizer"
            raise ValueError(
                f"Changes are those that an optimizer makes in trainable weights. Received: {model.name!r} without "
                f"{missing}. " + ("" if not self._weights else "Compile it, or pass the loop's `optimizer`.")
            )
        with backend.variable_scope(model):
            # Rows: updates, and over them the sum of changes, the last and the largest one, the sum of norms.
            self._figures = state_variable(np.zeros((5, len(self._weights))), "float64", "changes")
        self._attached: contextlib.ExitStack | None = None
        self._entered = False
        self._begun = self._iterations()

    def __enter__(self) -> "WeightChanges":
        if self._attached is not None:
            raise RuntimeError("This WeightChanges measures already. Make a second one for a part of the training.")
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
        """Forgets what was measured so far."""
        self._figures.assign(np.zeros((5, len(self._weights))))
        self._begun = self._iterations()

    @property
    def figures(self) -> np.ndarray:
        """What is measured so far, for `restore`: float64, shape (5, weights)."""
        return np.array(self._figures.numpy())

    def restore(self, figures: Any) -> None:
        """Goes on from the figures of an earlier training of the same model."""
        self._figures.assign(figures)

    def report(self) -> ChangeReport:
        """What updates did to each weight since the beginning, or since `reset()`.

        Zeros that a change of masks makes between updates are not counted. `weights` has one row per trainable
        variable: `name`, `updates`, the L2 norm of an update's change (`change` its mean, `last`, `largest`), the
        weight's own (`norm`), and `relative`, which is `change` / `norm`.

        Raises:
            RuntimeError: The `with` block was never entered; the optimizers made updates, and none was measured.
        """
        figures = np.asarray(self._figures.numpy())
        made = self._iterations() - self._begun
        if not self._entered:
            raise RuntimeError("Nothing was measured yet. Train inside `with WeightChanges(model) as changes:`.")
        if made and not figures[0].any():
            raise RuntimeError(
                f"The optimizer made {made} updates, and none of them was measured: the compiled step was traced "
                "before WeightChanges was entered, or the model was compiled with another optimizer since. Enter it "
                "first, or make the tf.function anew; make it after compiling."
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
        """Adds the norms of changes and weights."""
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
        # With those that the model has been compiled with since.
        known = {id(optimizer): optimizer for optimizer in [*self.optimizers, *optimizers_of(self.model)]}
        return sum(int(optimizer.iterations.numpy()) for optimizer in known.values())


def _norm(value: Any) -> Any:
    """The L2 norm, a float64 scalar."""
    import tensorflow as tf

    # One pass, and no square of the whole array in memory.
    return tf.sqrt(2.0 * tf.cast(tf.nn.l2_loss(wide(value)), tf.float64))
