"""The metrics of Keras by name, and whether higher or lower values are better. Plain data; does not import Keras."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

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


# Keras chooses the class of these by the shapes of labels and outputs.
_BY_SHAPES = {
    "acc": KERAS_METRICS["accuracy"],
    "ce": KERAS_METRICS["categorical_crossentropy"],
    "crossentropy": KERAS_METRICS["categorical_crossentropy"],
    "loss": KerasMetric("Mean", "min"),
}


def known_metric(key: str) -> KerasMetric | None:
    """Returns the metric of a key in the results of `evaluate`; None for a name that is not Keras's own.

    Args:
        key: Such as "mae"; "left_mae" for the output "left".
    """
    table = KERAS_METRICS | _BY_SHAPES
    parts = key.split("_")
    ends = ("_".join(parts[start:]) for start in range(len(parts)))
    return next((table[end] for end in ends if end in table), None)
