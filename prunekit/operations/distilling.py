"""Distillation in `fit` and in loops of your own: `pk.distilling`."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Unpack

import keras

from prunekit.core.runtime.patching import wrapped
from prunekit.core.training.train_function import fresh_train_function
from prunekit.keyword_options import keyword_options
from prunekit.techniques.distill.distill_report import DistillReport
from prunekit.techniques.distill.distillation_callback import DistillationCallback
from prunekit.techniques.distill.options import DistillationKeywords, DistillationOptions
from prunekit.techniques.distill.training import DistillationTraining


class Distillation:
    """What `with pk.distilling(...) as distillation` gives: the loss for loops of your own, and the report.

    Args:
        model: The student.
        teacher: The teacher, or None.
        options: What is learned.
    """

    def __init__(self, model: Any, teacher: Any, options: DistillationOptions):
        # Only `fit` tells where an epoch ends, and so what comes back.
        self._loop = DistillationTraining(model, teacher, replace(options, cache=False))
        self._callback = DistillationCallback(self._loop.teacher.model, **_keywords(options))
        self._model = model
        self._attached = contextlib.ExitStack()

    @property
    def report(self) -> DistillReport:
        """The `DistillReport` of the last `fit`; RuntimeError before its end."""
        return self._callback.report

    def loss(self, x: Any, y_pred: Any, y: Any = None, sample_weight: Any = None) -> Any:
        """Returns weight * distillation loss (+ feature_weight * feature loss) of a batch, a scalar tensor.

        For a loop that calculates its loss by itself: add it to (1 - weight) times your own loss. A loop that calls
        `model.compute_loss(x, y, y_pred)` needs nothing. Call the model inside the scope, before this.

        Args:
            x: Inputs, as the teacher takes them.
            y_pred: What the model returned for them.
            y: Labels, for loss="dkd".
            sample_weight: Weights of the examples.
        """
        return self._loop.part_of_loss(x, y_pred, y, sample_weight)

    def attach(self) -> None:
        """Makes steps outside `fit` learn from the teacher, too."""
        with contextlib.ExitStack() as undo:
            undo.enter_context(fresh_train_function(self._model))
            undo.enter_context(self._loop.with_loss())
            self._attached = undo.pop_all()

    def detach(self) -> None:
        """Gives the model back as it was."""
        self._attached.close()

    def fitting(self, fit: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the replacement of the model's `fit`, with a `DistillationCallback` among its callbacks."""

        @functools.wraps(fit)
        def run(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(fit).bind_partial(*args, **kwargs)
            callbacks = given.arguments.get("callbacks")
            if isinstance(callbacks, keras.callbacks.CallbackList):
                callbacks = callbacks.callbacks
            listed = [callbacks] if isinstance(callbacks, keras.callbacks.Callback) else list(callbacks or ())
            if not any(isinstance(one, DistillationCallback) for one in listed):
                given.arguments["callbacks"] = [*listed, self._callback]
            self.detach()
            try:
                return fit(*given.args, **given.kwargs)
            finally:
                self.attach()

        return run


def _keywords(options: DistillationOptions) -> DistillationKeywords:
    return {name: getattr(options, name) for name in DistillationKeywords.__annotations__}  # type: ignore[return-value]


@keyword_options(DistillationOptions, DistillationKeywords)
@contextlib.contextmanager
def distilling(model: Any, teacher: Any = None, **options: Unpack[DistillationKeywords]) -> Iterator[Distillation]:
    """Context manager in which a model learns from the outputs of a teacher, beside the labels.

    Inside the scope, `model.fit`, `model.train_on_batch` and every step that calls `model.compute_loss(x, y, y_pred)`
    have the loss (1 - weight) * compiled loss + weight * distillation loss + regularization losses. `evaluate` and
    `predict` compute as always. For `fit` it is the same as a `DistillationCallback`, which keeps the teacher's
    outputs; elsewhere the teacher computes in each step. A function of your own that was traced before has to be traced
    again.

    Example:
        with pk.distilling(model, teacher):
            model.fit(x, y, callbacks=[pk.PruningCallback(0.98)])

    Args:
        model: A built, compiled Keras model.
        teacher: A built Keras model with outputs of the same shapes. None = a copy of `model` as it is now: the model
            before its compression.
        **options: `loss`, `weight`, `temperature`, `features`, `feature_weight`, `cache`, `memory`: see
            `pk.DistillationOptions`.

    Yields:
        An object with `loss(x, y_pred)` for loops that call no `compute_loss`, and the `report` of the last `fit`.

    Raises:
        ValueError: An option has a wrong value; the model is not built, or cannot be copied; the teacher shares weights
            with it, or has other outputs; a layer of `features` does not exist.
        TypeError: An option is unknown, or the teacher is not a Keras 3 model.
    """
    distillation = Distillation(model, teacher, DistillationOptions(**options))
    distillation.attach()
    try:
        with wrapped(model, "fit", distillation.fitting):
            yield distillation
    finally:
        distillation.detach()
