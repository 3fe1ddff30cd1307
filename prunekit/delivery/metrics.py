"""The metrics of Keras by name, and whether higher or lower values are better. Plain data; does not import Keras."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from prunekit.delivery.formatting import MISSING, accuracy, change, is_number, number

Direction: TypeAlias = Literal["min", "max"]


@dataclass(frozen=True)
class KerasMetric:
    """A class of `keras.metrics`.

    Attributes:
        kind: Name of the class.
        direction: "max" if higher values are better, else "min".
        fraction: True if all values are in [0, 1]; shown with four decimals.
        needs: Arguments that the class requires, or without which it has a value for each class.
    """

    kind: str
    direction: Direction
    fraction: bool = False
    needs: tuple[str, ...] = ()


# Name that `keras.metrics.get` reads -> class. `Mean`, `Sum` and `MeanMetricWrapper` aggregate values and are not here.
KERAS_METRICS: dict[str, KerasMetric] = {
    # Keras chooses the class of "accuracy" by the shapes of labels and outputs.
    "accuracy": KerasMetric("Accuracy", "max", True),
    "auc": KerasMetric("AUC", "max", True),
    "binary_accuracy": KerasMetric("BinaryAccuracy", "max", True),
    "binary_crossentropy": KerasMetric("BinaryCrossentropy", "min"),
    "binary_io_u": KerasMetric("BinaryIoU", "max", True),
    "categorical_accuracy": KerasMetric("CategoricalAccuracy", "max", True),
    "categorical_crossentropy": KerasMetric("CategoricalCrossentropy", "min"),
    "categorical_hinge": KerasMetric("CategoricalHinge", "min"),
    "concordance_correlation": KerasMetric("ConcordanceCorrelation", "max"),
    "cosine_similarity": KerasMetric("CosineSimilarity", "max"),
    "f1_score": KerasMetric("F1Score", "max", True, ("average",)),
    "f_beta_score": KerasMetric("FBetaScore", "max", True, ("average",)),
    "false_negatives": KerasMetric("FalseNegatives", "min"),
    "false_positives": KerasMetric("FalsePositives", "min"),
    "hinge": KerasMetric("Hinge", "min"),
    "io_u": KerasMetric("IoU", "max", True, ("num_classes", "target_class_ids")),
    "kl_divergence": KerasMetric("KLDivergence", "min"),
    "log_cosh_error": KerasMetric("LogCoshError", "min"),
    "mae": KerasMetric("MeanAbsoluteError", "min"),
    "mape": KerasMetric("MeanAbsolutePercentageError", "min"),
    "mean_absolute_error": KerasMetric("MeanAbsoluteError", "min"),
    "mean_absolute_percentage_error": KerasMetric("MeanAbsolutePercentageError", "min"),
    "mean_io_u": KerasMetric("MeanIoU", "max", True, ("num_classes",)),
    "mean_squared_error": KerasMetric("MeanSquaredError", "min"),
    "mean_squared_logarithmic_error": KerasMetric("MeanSquaredLogarithmicError", "min"),
    "mse": KerasMetric("MeanSquaredError", "min"),
    "msle": KerasMetric("MeanSquaredLogarithmicError", "min"),
    "one_hot_io_u": KerasMetric("OneHotIoU", "max", True, ("num_classes", "target_class_ids")),
    "one_hot_mean_io_u": KerasMetric("OneHotMeanIoU", "max", True, ("num_classes",)),
    "pearson_correlation": KerasMetric("PearsonCorrelation", "max"),
    "poisson": KerasMetric("Poisson", "min"),
    "precision": KerasMetric("Precision", "max", True),
    "precision_at_recall": KerasMetric("PrecisionAtRecall", "max", True, ("recall",)),
    "r2_score": KerasMetric("R2Score", "max"),
    "recall": KerasMetric("Recall", "max", True),
    "recall_at_precision": KerasMetric("RecallAtPrecision", "max", True, ("precision",)),
    "root_mean_squared_error": KerasMetric("RootMeanSquaredError", "min"),
    "sensitivity_at_specificity": KerasMetric("SensitivityAtSpecificity", "max", True, ("specificity",)),
    "sparse_categorical_accuracy": KerasMetric("SparseCategoricalAccuracy", "max", True),
    "sparse_categorical_crossentropy": KerasMetric("SparseCategoricalCrossentropy", "min"),
    "sparse_top_k_categorical_accuracy": KerasMetric("SparseTopKCategoricalAccuracy", "max", True),
    "specificity_at_sensitivity": KerasMetric("SpecificityAtSensitivity", "max", True, ("sensitivity",)),
    "squared_hinge": KerasMetric("SquaredHinge", "min"),
    "top_k_categorical_accuracy": KerasMetric("TopKCategoricalAccuracy", "max", True),
    "true_negatives": KerasMetric("TrueNegatives", "max"),
    "true_positives": KerasMetric("TruePositives", "max"),
}


_ABBREVIATIONS = ("auc", "f1", "kl", "mae", "mape", "mse", "msle")


@dataclass(frozen=True)
class Metric:
    """A metric of a run, or its loss.

    Attributes:
        name: Name in the results of `model.evaluate`, such as "mae", or "left_mae" for the output "left".
        direction: "max" if higher values are better, "min" if lower values are; None if not known.
        fraction: True if all values are in [0, 1].
    """

    name: str
    direction: Direction | None = None
    fraction: bool = False

    @property
    def title(self) -> str:
        """The name in readable form: "mean absolute error", "left MAE"."""
        return " ".join(word.upper() if word in _ABBREVIATIONS else word for word in self.name.split("_"))

    @property
    def heading(self) -> str:
        """The name as a heading: "Mean absolute error"."""
        return self.title[:1].upper() + self.title[1:]

    @property
    def better(self) -> str:
        """The direction in words: "higher is better"; "" if not known."""
        return {"max": "higher is better", "min": "lower is better"}.get(self.direction or "", "")

    @property
    def column(self) -> str:
        """Kind of a column of a report's section that holds values of the metric."""
        return "fraction" if self.fraction else "number"

    def text(self, value: Any) -> str:
        """Formats a value of the metric."""
        return accuracy(value) if self.fraction else number(value)

    def change_text(self, before: Any, after: Any) -> str:
        """Formats the change of the value: a signed difference, and for values beyond [0, 1] a percentage."""
        if self.fraction:
            return change(before, after)
        if not (is_number(before) and is_number(after)):
            return MISSING
        difference = after - before
        text = f"{difference:+.4g}".replace("-", "−") if difference else "±0"
        relative = relative_change(before, after)
        return text if relative is None or not difference else f"{text}, {100 * relative:+.1f} %".replace("-", "−")

    def drop(self, before: float, after: float) -> float:
        """Returns by how much `after` is worse than `before`; negative if it is better.

        Raises:
            ValueError: The direction is not known.
        """
        if self.direction is None:
            raise ValueError(f"A drop of {self.name!r} needs its direction, which is not known.")
        return before - after if self.direction == "max" else after - before

    def is_better(self, value: float, than: float) -> bool:
        """Returns True if `value` is better than the value `than`; with an unknown direction, if it is lower."""
        return value > than if self.direction == "max" else value < than


def relative_change(before: float, after: float) -> float | None:
    """Returns (after - before) / |before|; None if `before` is zero."""
    return (after - before) / abs(before) if before else None


def keras_metric(name: str, key: str | None = None) -> Metric:
    """Returns the metric that Keras knows as `name`; `key` is its name in the results, if that differs."""
    found = KERAS_METRICS[name]
    return Metric(key or name, found.direction, found.fraction)


def inferred(key: str) -> Metric:
    """Returns the metric of a key in the results of `evaluate` of which nothing else is known.

    "mae" and "loss" are Keras's own names; "left_loss" is the loss of an output, "kl_loss" that of a training step.
    """
    if key in KERAS_METRICS:
        return keras_metric(key)
    return Metric(key, "min" if key == "loss" or key.endswith("_loss") else None)


def measured_in(metrics: Mapping[str, Any]) -> tuple[Metric, ...]:
    """Returns the metrics of a report of an older version, which names none; accuracy first.

    Args:
        metrics: Figures such as accuracy_before and accuracy_after.
    """
    keys = [key.removesuffix("_after") for key in metrics if key.endswith("_after")]
    return tuple(inferred(key) for key in sorted(keys, key=lambda key: key != "accuracy"))


def with_main_first(metrics: Iterable[Metric], main: str) -> tuple[Metric, ...]:
    """Returns the metrics with the one named `main` at the front; the others keep their order."""
    return tuple(sorted(metrics, key=lambda metric: metric.name != main))
