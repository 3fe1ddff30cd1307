"""The metrics of a run: their directions, titles and changes. Plain data; does not import Keras."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.records.keras_metrics import KERAS_METRICS, Direction
from prunekit.delivery.reports.formatting import MISSING, accuracy, change, is_number, number

_BY_KIND = {one.kind: one for one in KERAS_METRICS.values()}
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


def inferred(key: str, compiled: Any = None) -> Metric:
    """Returns the metric of a key in the results of `evaluate`.

    "mae" and "loss" are Keras's own names; "left_loss" is the loss of an output, "kl_loss" that of a training step.

    Args:
        key: The key.
        compiled: The Keras metric behind it, whose class tells more than a name that a user gave it; None = not known.
    """
    kinds = [kind.__name__ for kind in type(compiled).__mro__ if kind.__module__.startswith("keras.")]
    found = next((_BY_KIND[kind] for kind in kinds if kind in _BY_KIND), None)
    found = found or KERAS_METRICS.get(getattr(compiled, "name", key))
    if found is not None:
        return Metric(key, found.direction, found.fraction)
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
