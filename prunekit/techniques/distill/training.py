"""Adds the distillation loss to the training steps of a model."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend import get_keras_mask
from keras.src.losses.loss import reduce_weighted_values

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import patching
from prunekit.core.runtime.optimizers import optimizers_of
from prunekit.core.runtime.snapshot import Snapshot, lacking
from prunekit.core.runtime.variable_values import weights_digest
from prunekit.core.training.joined_variables import in_model_state, joined
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.distill import losses
from prunekit.techniques.distill.distill_report import DistilledOutput, DistillReport
from prunekit.techniques.distill.feature_maps import FeaturePairs, Seen, named_layer, recorded
from prunekit.techniques.distill.labels import for_each_output, measuring, one_hot, position_weights
from prunekit.techniques.distill.options import DistillationOptions
from prunekit.techniques.distill.output_cache import OFF, READING, RECORDING, OutputCache
from prunekit.techniques.distill.output_kinds import OutputKind, keys_of, logits_of, output_kinds
from prunekit.techniques.distill.teacher import Teacher, check_shapes, check_teacher, copy_of

_TWO = 2
_VARIANTS = {OFF: "distillation", RECORDING: "distillation, recorded", READING: "distillation, read"}


class DistillationTraining:
    """Trains a model on the outputs of a teacher, beside the labels.

    `model.compute_loss` is wrapped while a training step is traced or runs, and the compiled loss inside it is mixed
    with the distillation loss; whatever else the step does, such as regularization losses, weights of examples and
    metrics, stays as it is.

    Args:
        model: A built, compiled model.
        teacher: The teacher; None = a copy of the model as it is now.
        options: What is learned.

    Attributes:
        applied: Whether a step was traced, or ran, with the distillation loss.

    Raises:
        TypeError, ValueError: As for `pk.distilling`.
    """

    kind = "distillation"
    variants = tuple(_VARIANTS.values())

    def __init__(self, model: Any, teacher: Any, options: DistillationOptions):
        check_built(model)
        self.model, self._options = model, options
        if teacher is None or teacher is model:
            teacher = copy_of(model)
        check_teacher(teacher, model)
        for name in options.layers:
            named_layer(model, name, "student")
        # A model without a compiled loss does not say whether its outputs are logits; its teacher may.
        told = getattr(model, "loss", None) is not None
        self.kinds = output_kinds(model, like=None if told else output_kinds(teacher))
        check_loss(options, self.kinds)
        self._losses = losses_of(options, self.kinds, model)
        several = getattr(model, "_distribute_strategy", None) is not None
        self.teacher = Teacher(teacher, self.kinds, list(options.layers.values()), cached=options.cache and not several)
        self._cache = OutputCache(self.teacher.row, float(options.memory))
        self._pairs: FeaturePairs | None = None
        if options.layers:
            self._pairs = FeaturePairs(model, teacher, options.layers, self.optimizers)
        self._digest = weights_digest(teacher)
        self._seen: Seen | None = None
        self.applied = False
        self.begun = False

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers whose updates train the weights."""
        return optimizers_of(self.model)

    @property
    def variant(self) -> str:
        """Name of what a trace of a training step contains now."""
        return _VARIANTS[self._cache.mode]

    @property
    def cached_examples(self) -> int:
        """Number of examples whose outputs are kept."""
        return self._cache.examples

    def begin(self) -> None:
        """Begins; a teacher that was trained since the last time gives other outputs, which are recorded anew."""
        self.begun = True
        digest = weights_digest(self.teacher.model)
        if digest == self._digest:
            return
        self._digest = digest
        for copy, one in zip(self.teacher.variables, self.teacher.model.variables, strict=False):
            copy.assign(array_of(one))
        if self._cache.mode != OFF:
            self._cache.record()

    # ---- the training step -------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def updating(self) -> Iterator[None]:
        """Inside the scope, the loss of training steps contains the distillation loss."""
        state = [*self.teacher.variables, *self._cache.variables]
        with in_model_state(self.model, state), self.with_loss():
            yield

    @contextlib.contextmanager
    def with_loss(self) -> Iterator[None]:
        """Likewise, and the model has no further variables but those of projections: on JAX the teacher is constant."""
        layers = [] if self._pairs is None else self._pairs.layers
        with contextlib.ExitStack() as stack:
            self._seen = seen = stack.enter_context(recorded(layers))
            if self._pairs is not None and self._pairs.variables:
                extra = self._pairs.variables, self._pairs.trainer
                stack.enter_context(joined(self.model, self.optimizers, *extra))
            wrap = functools.partial(self._computing_loss, seen)
            stack.enter_context(patching.wrapped(self.model, "compute_loss", wrap))
            wrap = functools.partial(measuring, self.model)
            stack.enter_context(patching.wrapped(self.model, "compute_metrics", wrap))
            yield

    def testing(self) -> contextlib.AbstractContextManager[None]:
        """Returns a scope that changes nothing: validation measures the compiled loss."""
        return contextlib.nullcontext()

    def _computing_loss(self, seen: Seen, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def compute_loss(
            x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            if not (args[0] if args else kwargs.get("training", True)):
                return method(x, y, y_pred, sample_weight, *args, **kwargs)
            self.applied = True
            wanted, extra = self.losses(x, y, y_pred, sample_weight, seen)
            mixed = _Mixed(self.model._compile_loss, wanted, self._options.weight)
            with patching.shadowed(self.model, "_compile_loss", mixed):
                total = method(x, y, y_pred, sample_weight, *args, **kwargs)
            if not mixed.used:
                raise ValueError(
                    "The distillation loss is mixed with the compiled loss. Received: the model "
                    f"{self.model.name!r}, whose own `compute_loss` does not use the compiled loss. Call "
                    "super().compute_loss(...) in it, or add distillation.loss(x, y_pred) of pk.distilling to your "
                    "loss."
                )
            return total if extra is None else total + ops.cast(extra, total.dtype)

        return compute_loss

    def part_of_loss(self, x: Any, y_pred: Any, y: Any, sample_weight: Any) -> Any:
        """Returns weight * distillation loss + feature_weight * feature loss of a batch, inside `updating`."""
        wanted, extra = self.losses(x, y, y_pred, sample_weight, self._seen)
        part = self._options.weight * wanted
        return part if extra is None else part + extra

    def losses(self, x: Any, y: Any, y_pred: Any, sample_weight: Any, seen: Seen | None) -> tuple[Any, Any]:
        """Returns the distillation loss of a batch, and the weighted loss of the layers or None; scalars.

        Args:
            x: Inputs.
            y: Labels, which "dkd" reads.
            y_pred: Outputs of the model.
            sample_weight: Weights of the examples, in the structure of the outputs or one for all, or None.
            seen: Outputs of the layers of `features`, or None without any.
        """
        features: list[Any] = []

        def compute() -> list[Any]:
            outputs, maps = self.teacher.outputs(x)
            features[:] = maps
            return outputs

        teacher = self._cache.outputs(x, compute)
        student = keras.tree.flatten(y_pred)
        check_shapes(*([tuple(one.shape)[1:] for one in given] for given in (self._plain(teacher), student)))
        names = keys_of(y_pred) or getattr(self.model, "output_names", [])
        weights, labels = (for_each_output(one, names, len(student)) for one in (sample_weight, y))
        terms = [
            _reduced(self._term(place, one, two, labels[place], weights[place]), two, weights[place])
            for place, (one, two) in enumerate(zip(teacher, student, strict=True))
        ]
        total = sum(terms[1:], terms[0])
        if self._pairs is None or seen is None:
            return total, None
        errors = self._pairs.error(features, seen.outputs())
        weight = None if len(student) > 1 and keras.tree.is_nested(sample_weight) else weights[0]
        return total, _reduced(errors, errors, weight) * self._options.feature_weight

    def _plain(self, teacher: Sequence[Any]) -> list[Any]:
        """Returns the teacher's logits of yes or no without the last axis, which the outputs do not have."""
        kinds = self.teacher.kinds
        return [one[..., 0] if kind.tells_yes_no else one for kind, one in zip(kinds, teacher, strict=True)]

    def _term(self, place: int, teacher: Any, output: Any, labels: Any, weights: Any) -> Any:
        """Returns the distillation loss of one output for each example."""
        kind, options = self.kinds[place], self._options
        teacher, student = ops.stop_gradient(ops.cast(teacher, "float32")), logits_of(kind, output)
        loss = self._losses[place]
        if loss == "mse":
            return losses.squared_error(teacher, student)
        if loss == "dist":
            return losses.relations(teacher, student, options.temperature, position_weights(weights, output, student))
        if loss == "dkd":
            return losses.decoupled(teacher, student, one_hot(labels, student), options.temperature)
        return losses.divergence(teacher, student, options.temperature)

    # ---- between steps -----------------------------------------------------------------------------------------------

    def after_batch(self) -> None:
        """Takes what a step recorded."""
        self._cache.after_batch()

    def after_epoch(self, *, whole: bool) -> None:
        """Reads from now on what the epoch recorded; after part of an epoch, records the next one."""
        if whole:
            self._cache.after_epoch()
        elif self._cache.mode == RECORDING:
            self._cache.record()

    def in_traces(self) -> Any:
        """Returns what a trace of a step contains beside the model: the cache makes a new list for new variables."""
        return self._cache.variables

    def take_over(self, traced: Any) -> bool:
        """Returns True if a trace has the present variables."""
        return traced is self._cache.variables

    def values(self) -> list[np.ndarray]:
        """Returns []: what is trained beside the weights does not outlive the training."""
        return []

    def assign(self, values: Sequence[np.ndarray]) -> None:
        """Sets nothing."""

    def finish(self, notes: Sequence[str] = ()) -> DistillReport:
        """Returns the report; the model is as it was, with trained weights."""
        used = [
            DistilledOutput(place, kind.value, loss)
            for place, (kind, loss) in enumerate(zip(self.kinds, self._losses, strict=True))
        ]
        return DistillReport(
            self.model.name, self.teacher.model.name, tuple(used), dict(self._options.layers), self._cache.examples,
            self._cache.bytes, tuple(notes),
        )  # fmt: skip

    # ---- what an interrupted training goes on from -------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Returns everything besides weights and optimizer that `restore` continues from."""
        kept = self._cache.snapshot()
        arrays = {f"cache/{name}": one for name, one in kept.arrays.items()}
        if self._pairs is not None and self._pairs.variables:
            for name, variables in (("kernel", self._pairs.variables), ("trainer", self._pairs.trainer.variables)):
                arrays |= {f"{name}/{place}": np.array(array_of(one)) for place, one in enumerate(variables)}
        return Snapshot({"begun": self.begun, "teacher": self._digest, "cache": kept.values}, arrays)

    def restore(self, snapshot: Snapshot) -> None:
        """Takes up a state, instead of `begin`; weights and optimizer must already be restored.

        Raises:
            ValueError: The state is of another teacher, or incomplete.
        """
        wrong = lacking(snapshot.values, {"begun": bool, "teacher": int, "cache": dict})
        if wrong is not None:
            raise ValueError(f"The saved state of a distillation lacks {wrong}, or another version wrote it.")
        if snapshot.values["teacher"] != self._digest:
            raise ValueError(
                "A resumed training has the teacher of the first run. Received: a teacher with other weights. Pass "
                "the same teacher, or begin in another folder."
            )
        arrays, self.begun = snapshot.arrays, snapshot.values["begun"]
        kept = {name.removeprefix("cache/"): one for name, one in arrays.items() if name.startswith("cache/")}
        self._cache.restore(Snapshot(snapshot.values["cache"], kept))
        if self._pairs is not None and self._pairs.variables:
            for name, variables in (("kernel", self._pairs.variables), ("trainer", self._pairs.trainer.variables)):
                for place, variable in enumerate(variables):
                    variable.assign(np.array(arrays[f"{name}/{place}"]))


class _Mixed:
    """Replaces the compiled loss: mixes it with the distillation loss.

    Attributes:
        used: Whether it was called.
    """

    def __init__(self, compiled: Any, wanted: Any, weight: float):
        self._compiled, self._wanted, self._weight, self.used = compiled, wanted, weight, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.used = True
        part = self._weight * self._wanted
        without_labels = (args[0] if args else kwargs.get("y_true")) is None
        of_labels = None if self._compiled is None or without_labels else self._compiled(*args, **kwargs)
        if of_labels is None:
            return part
        return (1.0 - self._weight) * of_labels + ops.cast(part, of_labels.dtype)


def check_loss(options: DistillationOptions, kinds: Sequence[OutputKind]) -> None:
    """Raises if a loss of classes is asked for, and no output is of classes.

    Raises:
        ValueError: There is no such output.
    """
    suitable = {
        "dist": any(kind.tells_classes for kind in kinds),
        "dkd": any(kind.tells_classes for kind in kinds),
        "kl": any(kind is not OutputKind.VALUES for kind in kinds),
    }
    if not suitable.get(options.loss, True):
        found = ", ".join(dict.fromkeys(kind.value for kind in kinds))
        raise ValueError(
            f'loss="{options.loss}" compares classes. Received: a model whose outputs are {found}. Take loss="auto"; '
            "if the outputs are logits, compile the model with a loss that says so (from_logits=True)."
        )


def losses_of(options: DistillationOptions, kinds: Sequence[OutputKind], model: Any) -> list[str]:
    """Returns the loss of each output: "kl", "dist", "dkd" or "mse".

    "auto" is "dist" for three classes or more: of two, the correlation within an example is always 1 or -1.

    Args:
        options: What is learned.
        kinds: Kinds of the outputs.
        model: The student.
    """
    ends = keras.tree.flatten(getattr(model, "outputs", None) or [])
    found = []
    for place, kind in enumerate(kinds):
        classes = ends[place].shape[-1] if place < len(ends) else None
        if kind is OutputKind.VALUES or options.loss == "mse":
            found.append("mse")
        elif kind.tells_yes_no or (options.loss == "auto" and classes == _TWO):
            found.append("kl")
        else:
            found.append("dist" if options.loss == "auto" else options.loss)
    return found


def _reduced(values: Any, output: Any, weights: Any) -> Any:
    """Returns the weighted mean over a batch, as Keras reduces a loss: masked positions do not count."""
    return reduce_weighted_values(values, weights, get_keras_mask(output), "sum_over_batch_size", "float32")
