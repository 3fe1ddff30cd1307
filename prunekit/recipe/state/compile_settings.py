"""Makes the optimizer, the losses and the metrics that a recipe's compile settings name."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.records.keras_metrics import KERAS_METRICS
from prunekit.delivery.reports.metrics import Metric, inferred, keras_metric, with_main_first
from prunekit.recipe.settings.compile_fields import LOGIT_LOSSES, OPTIMIZERS, Compile, LossFactory, MetricEntry
from prunekit.recipe.settings.fields import nearest
from prunekit.recipe.text.factories import call_factory
from prunekit.recipe.text.loader import RecipeError


def optimizer_from(settings: Compile) -> keras.optimizers.Optimizer:
    """Returns the Keras optimizer that the compile settings describe.

    Raises:
        RecipeError: The installed Keras has no such optimizer, or the optimizer rejects the arguments.
    """
    kind = getattr(keras.optimizers, OPTIMIZERS[settings.optimizer.name], None)
    if kind is None:
        raise RecipeError(f"compile.optimizer: Keras {keras.__version__} has no {OPTIMIZERS[settings.optimizer.name]}.")
    arguments = dict(settings.optimizer.arguments)
    if settings.optimizer.learning_rate is not None:
        arguments["learning_rate"] = settings.optimizer.learning_rate
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"compile.optimizer: {kind.__name__} refuses its arguments: {reason_of(error)}.") from error


# ---- arguments of `model.compile` ------------------------------------------------------------------------------------


def compile_arguments(settings: Compile, outputs: Sequence[str] | None) -> dict[str, Any]:
    """Returns the arguments `loss`, `loss_weights`, `metrics` and `weighted_metrics` of `model.compile`.

    Calls the functions that the settings name; callers must have called `require_trust` before.

    Args:
        settings: Compile settings of the recipe.
        outputs: Names of the outputs; None for a model with one output.

    Raises:
        RecipeError: A function returns no loss or metric, a metric rejects its arguments, or there is no such output.
    """
    losses = {output: _loss(loss, settings) for output, loss in settings.losses()}
    arguments: dict[str, Any] = {"loss": losses[None] if None in losses else losses}
    if outputs is not None:
        _check_outputs("loss", losses, outputs)
        arguments["loss"] = {name: losses.get(name, losses.get(None)) for name in outputs}
        if settings.loss_weights is not None:
            _check_outputs("loss_weights", settings.loss_weights, outputs)
            arguments["loss_weights"] = {name: settings.loss_weights.get(name, 1.0) for name in outputs}
    elif None not in losses or settings.loss_weights is not None:
        raise RecipeError(
            "compile: this model has one output, so 'loss' is one loss, without 'loss_weights'. Received: losses by "
            "the name of the output."
        )
    for what in ("metrics", "weighted_metrics"):
        arguments[what] = [] if outputs is None else {name: [] for name in outputs}
    for output, entry, weighted in settings.entries():
        if output is not None:
            _check_outputs("weighted_metrics" if weighted else "metrics", [output], outputs)
        found = arguments["weighted_metrics" if weighted else "metrics"]
        # Every output needs a metric object of its own.
        for metrics in [found] if outputs is None else [found[output]] if output else found.values():
            metrics.append(_metric(entry))
    return arguments


def are_logits(outputs: Any) -> bool:
    """Returns True if the outputs of some examples are no probabilities: outside of [0, 1]."""
    values = keras.ops.convert_to_numpy(outputs)
    return bool(values.min() < 0 or values.max() > 1)


def _check_outputs(what: str, names: Collection[str | None], outputs: Sequence[str] | None) -> None:
    for name in names:
        if name is not None and name not in (outputs or ()):
            known = nearest(name, outputs) if outputs else " The model has one output: name none."
            raise RecipeError(f"compile.{what}: the model has no output {name!r}.{known}")


def _loss(loss: str | LossFactory, settings: Compile) -> Any:
    if isinstance(loss, LossFactory):
        made = call_factory(loss.factory, loss.arguments, "loss")
        if not callable(made):
            raise RecipeError(
                f"compile.loss: the function {loss.factory!r} returns a keras.losses.Loss, or a function of labels and "
                f"outputs. Received: {type(made).__name__}."
            )
        return made
    if settings.from_logits and loss in LOGIT_LOSSES:
        return getattr(keras.losses, LOGIT_LOSSES[loss])(from_logits=True)
    return keras.losses.get(loss)


def _metric(entry: MetricEntry) -> Any:
    """Returns a new metric, as `compile` takes it."""
    if isinstance(entry, str):
        return entry
    if entry.metric is not None:
        if entry.metric == "accuracy":
            raise RecipeError("compile.metrics: Keras chooses the class of 'accuracy', so it cannot be renamed.")
        kind = getattr(keras.metrics, KERAS_METRICS[entry.metric].kind)
        try:
            return kind(**{"name": entry.name or entry.metric, **entry.arguments})
        except (TypeError, ValueError) as error:
            raise RecipeError(f"compile.metrics: {kind.__name__} refuses its arguments: {reason_of(error)}.") from error
    made = call_factory(str(entry.factory), entry.arguments, "metric")
    if not callable(made):
        raise RecipeError(
            f"compile.metrics: the function {entry.factory!r} returns a keras.metrics.Metric, or a function of labels "
            f"and outputs. Received: {type(made).__name__}."
        )
    if isinstance(made, keras.metrics.Metric):
        if entry.name is not None:
            made.name = entry.name
        return made
    return keras.metrics.MeanMetricWrapper(made, name=entry.name or getattr(made, "__name__", type(made).__name__))


# ---- names and directions --------------------------------------------------------------------------------------------


def metrics_of(settings: Compile, outputs: Sequence[str] | None, model: keras.Model) -> tuple[Metric, ...]:
    """Returns the metrics that a run measures, the main metric first, the loss last unless it is the main one.

    Args:
        settings: Compile settings of the recipe.
        outputs: Names of the outputs; None for a model with one output.
        model: The model, whose own metrics `monitor` may name.

    Raises:
        RecipeError: `monitor` names no metric, or the direction of the main metric is not known.
    """
    found = {metric.name: metric for metric in _named(settings, outputs)}
    monitor = settings.monitor
    main = next(iter(found), "loss") if monitor is None else monitor.name
    found |= {name: inferred(name) for name in _loss_names(settings, outputs)}
    if main not in found:
        # A training step of the model's own has metrics that the settings do not name.
        own = own_metrics(model)
        if main not in own:
            raise RecipeError(f"compile.monitor: no metric {main!r} is measured.{nearest(main, {**found, **own})}")
        found[main] = inferred(main)
    if monitor is not None and monitor.direction is not None:
        if found[main].direction not in (None, monitor.direction):
            raise RecipeError(
                f"compile.monitor: of {main!r}, {found[main].better}. Received: direction: {monitor.direction}. Leave "
                "direction out."
            )
        found[main] = Metric(main, monitor.direction, found[main].fraction)
    if found[main].direction is None:
        raise RecipeError(
            f"compile: whether higher or lower values of {main!r} are better is known only for the metrics of Keras. "
            f"Write monitor: {{name: {main}, direction: max}}, or direction: min."
        )
    return with_main_first(found.values(), main)


def _loss_names(settings: Compile, outputs: Sequence[str] | None) -> list[str]:
    """Returns the names of the losses in the results; Keras measures those of outputs if several outputs have one."""
    losses = dict(settings.losses())
    lossy = [name for name in outputs or () if name in losses or None in losses]
    return [*(f"{name}_loss" for name in lossy if len(lossy) > 1), "loss"]


def measured_metrics(
    expected: Sequence[Metric], measured: Mapping[str, float], model: keras.Model
) -> tuple[Metric, ...]:
    """Returns the metrics that `evaluate` measures: the expected ones, then those of a training step of the model's.

    Args:
        expected: Metrics of the compile settings, the main one first.
        measured: Results of `model.evaluate`.
        model: The model, for the error.

    Raises:
        RecipeError: The main metric is not measured.
    """
    if expected and expected[0].name not in measured:
        raise RecipeError(
            f"compile: {model.name!r} does not measure the main metric {expected[0].name!r}. It measures: "
            f"{', '.join(measured)}. Name one of these with monitor."
        )
    known = [metric for metric in expected if metric.name in measured]
    names = {metric.name for metric in known}
    return (*known, *(inferred(name) for name in measured if name not in names))


def own_metrics(model: keras.Model) -> dict[str, None]:
    """Returns the names of the metrics of a training step of the model's own, as keys in their order."""
    # Keras collects the metrics of `compile` in one object of this name.
    return dict.fromkeys(metric.name for metric in model.metrics if metric.name != "compile_metrics")


def _named(settings: Compile, outputs: Sequence[str] | None) -> Iterator[Metric]:
    """Yields the metrics under the names that Keras gives them in the results of `evaluate`."""
    counts: dict[str, int] = {}
    # Keras writes no name of the output for a single output, also if the model returns it by name.
    named = outputs if outputs is not None and len(outputs) > 1 else None
    for entry, prefix, weighted in _in_order(settings, named):
        known = _described(entry)
        key = prefix + known.name
        if key in counts and weighted:
            key = f"{prefix}weighted_{known.name}"
        counts[key] = counts.get(key, -1) + 1
        yield Metric(f"{key}_{counts[key]}" if counts[key] else key, known.direction, known.fraction)


def _in_order(settings: Compile, outputs: Sequence[str] | None) -> Iterator[tuple[MetricEntry, str, bool]]:
    """Yields (metric, prefix of its name, True for a weighted metric), output by output as Keras counts them."""
    for output, entry, weighted in settings.entries():
        for name in [None] if outputs is None else [output] if output else outputs:
            yield entry, "" if name is None else f"{name}_", weighted


def _described(entry: MetricEntry) -> Metric:
    if isinstance(entry, str):
        return keras_metric(entry)
    if entry.metric is not None:
        return keras_metric(entry.metric, entry.name)
    return Metric(_metric(entry).name, entry.direction)


def accuracy_name(metrics: Sequence[Metric]) -> str | None:
    """Returns the name of the metric that is reported as the accuracy; None without an accuracy metric."""
    named = [one.name for one in metrics if one.name.endswith("accuracy") and "top_k" not in one.name]
    return "accuracy" if "accuracy" in named else next(iter(named), None)


# ---- outputs ---------------------------------------------------------------------------------------------------------


def output_names(model: keras.Model, outputs: Any) -> tuple[str, ...] | None:
    """Returns the names of a model's outputs; None if it has one output that is no mapping.

    Args:
        model: The model.
        outputs: What a call of the model returned.

    Raises:
        RecipeError: Several outputs have no names.
    """
    if hasattr(outputs, "shape"):
        return None
    if isinstance(outputs, Mapping):
        return tuple(outputs)
    names = getattr(model, "output_names", None) or ()
    if isinstance(outputs, (list, tuple)) and len(names) == len(outputs):
        return tuple(names)
    raise RecipeError(
        f"a model with several outputs returns them by name. Received: {model.name!r}, which returns a "
        f"{type(outputs).__name__}. Return a dictionary, such as {{'left': ..., 'right': ...}}."
    )


class OutputMetrics:
    """Measures the metrics and the loss of outputs that something else than the model calculated.

    Args:
        settings: Compile settings of the recipe.
        names: Names of the outputs; None for one output.
    """

    def __init__(self, settings: Compile, names: Sequence[str] | None):
        self._settings, self._names = settings, names
        self._identity: keras.Model | None = None

    def __call__(self, outputs: Sequence[np.ndarray], labels: Any) -> dict[str, float]:
        """Returns the metrics and the loss by name.

        Args:
            outputs: Array of shape (examples, ...) for each output, in the order of the names.
            labels: Labels of the same examples: one array, or arrays in a list or by the name of the output.
        """
        names = self._names or ("output",)
        if self._identity is None:
            # A model that returns its inputs: Keras chooses and calculates the metrics as it does for the model itself.
            made = [keras.Input(array.shape[1:], dtype=array.dtype.name) for array in outputs]
            copies = {name: keras.ops.copy(tensor) for name, tensor in zip(names, made, strict=True)}
            self._identity = keras.Model(made, copies["output"] if self._names is None else copies)
            self._identity.compile(**compile_arguments(self._settings, self._names))
        if self._names is not None and not isinstance(labels, Mapping):
            labels = dict(zip(names, labels, strict=True))
        return as_floats(self._identity.evaluate(list(outputs), labels, batch_size=256, verbose=0, return_dict=True))


def as_floats(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns the results of `model.evaluate` as Python numbers.

    Raises:
        RecipeError: A metric has several values, such as one for each class.
    """
    for name, value in results.items():
        if np.ndim(value):
            raise RecipeError(
                f"compile.metrics: a metric is one number. Received: {name!r} with values of shape {np.shape(value)}. "
                f"For an average over the classes: {{metric: {name}, arguments: {{average: macro}}}}."
            )
    return {name: float(value) for name, value in results.items()}


def reason_of(error: BaseException) -> str:
    """Returns the line of an error's text that states the reason."""
    # Keras writes "Exception encountered when calling X.", a blank line and a bold escape before the reason. TensorFlow
    # writes the node and the Python frames that created the node.
    before = ("Exception encountered", "Graph execution error", "Detected at node", "File ")
    # Keras also writes the values of the input, over several lines.
    text = re.sub(r" for input \[.*?\](?= with name)", "", str(error), flags=re.DOTALL)
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "").strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(before)]
    return (lines or [type(error).__name__])[0].rstrip(".")
