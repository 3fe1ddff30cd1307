"""What a change of a model did to its metrics and outputs on data, as plain data. Does not import Keras."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.records.keras_metrics import KerasMetric, known_metric
from prunekit.anatomy.records.plain_data import Figure, Record
from prunekit.anatomy.records.sections import Column, Section

# A larger loss is named with what to try next: of a metric in [0, 1] its drop; of others their relative rise; of
# outputs that are classes the share that changed; of others the relative error.
_DROP, _RISE, _OTHER_CLASSES, _ERROR = 0.02, 0.1, 0.05, 0.1


@dataclass(frozen=True)
class OutputChange:
    """The change of one output of a model.

    Attributes:
        name: Name of the output; "" for the only one.
        error: L2 norm of the change over all examples, relative to the L2 norm of the output as it was; NaN where the
            output is not finite.
        agreement: Share of the predictions with the same class; None for an output that is no class.
    """

    name: str
    error: Figure
    agreement: float | None = None

    @property
    def is_large(self) -> bool:
        """True if many predictions changed their class, or, without classes, values changed much."""
        if self.agreement is not None:
            return self.agreement < 1 - _OTHER_CLASSES
        return not self.error <= _ERROR


@dataclass(frozen=True)
class MetricChange:
    """The change of a metric.

    Attributes:
        name: Name in the results of `evaluate`.
        before: Value of the model as it was.
        after: Value of the changed model.
    """

    name: str
    before: Figure
    after: Figure

    @property
    def _known(self) -> KerasMetric | None:
        return known_metric(self.name)

    @property
    def is_loss(self) -> bool:
        """True for the loss, or that of an output."""
        return self.name == "loss" or self.name.endswith("_loss")

    @property
    def decides(self) -> bool:
        """True if it is known whether higher values are better."""
        return self._known is not None

    def is_large(self, error: float) -> bool:
        """Returns True if the metric is much worse.

        Args:
            error: Largest relative error of an output: errors such as a loss near zero rise many times over where the
                outputs hardly change.
        """
        known = self._known
        if known is None:
            return False
        worse = self.before - self.after if known.direction == "max" else self.after - self.before
        if not math.isfinite(worse):
            return True
        if known.fraction:
            return worse > _DROP
        return worse > _RISE * abs(self.before) and not error <= _ERROR / 2


@dataclass(frozen=True)
class Damage(Record):
    """What a change of a model did to its metrics and outputs on data.

    Attributes:
        examples: Number of examples.
        outputs: The change of each output of numbers.
        metrics: The change of the loss and of each compiled metric; empty for a model that is not compiled, and for
            data without labels.
        problem: Why the metrics could not be measured; "" if they were, or were not wanted.
    """

    examples: int
    outputs: tuple[OutputChange, ...]
    metrics: tuple[MetricChange, ...] = ()
    problem: str = ""

    @property
    def error(self) -> float:
        """Largest relative error of an output; NaN if one is not finite."""
        errors = [one.error for one in self.outputs]
        return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)

    @property
    def agreement(self) -> float | None:
        """Least share of an output's predictions with the same class; None without classes."""
        return min((one.agreement for one in self.outputs if one.agreement is not None), default=None)

    @property
    def large(self) -> list[str]:
        """What became much worse, in words: metrics, without these outputs.

        The loss counts where no other metric does.
        """
        told = [one for one in self.metrics if one.decides and not one.is_loss]
        told = told or [one for one in self.metrics if one.decides]
        if told:
            worse = [one for one in told if one.is_large(self.error)]
            return [f"{one.name} {one.before:.4g} -> {one.after:.4g}" for one in worse]
        return [_words(one) for one in self.outputs if one.is_large]

    def remark(self, remedy: str) -> str | None:
        """Returns one sentence that names a large loss and what to try next; None where little was lost.

        Args:
            remedy: What to try next, as a sentence.
        """
        lost = "; ".join(self.large)
        return f"Much was lost on {self.examples:,} examples of the data: {lost}. {remedy}" if lost else None

    def section(self) -> Section:
        """Returns the table of metrics and outputs, before and after."""
        rows: list[tuple[Any, ...]] = [(one.name, one.before, one.after) for one in self.metrics]
        for one in self.outputs:
            of = f" of {one.name}" if one.name else ""
            rows.append((f"relative error{of}", None, one.error))
            if one.agreement is not None:
                rows.append((f"same class{of}", None, one.agreement))
        return Section(
            "On the data",
            (Column("Figure", "label"), Column("Before", "number"), Column("After", "number")),
            tuple(rows),
            explanation=f"On {self.examples:,} examples of the data that the operation was given. Relative error: L2 "
            "norm of the change of the outputs, relative to that of the outputs before. Same class: share of the "
            "predictions with the class that was predicted before.",
            notes=(self.problem,) if self.problem else (),
        )

    def __str__(self) -> str:
        parts = [f"{one.name} {one.before:.4g} -> {one.after:.4g}" for one in self.metrics]
        return "; ".join([*parts, *map(_words, self.outputs)])


def _words(output: OutputChange) -> str:
    of = f" of {output.name}" if output.name else ""
    text = f"relative error{of} {output.error:.3g}"
    return text if output.agreement is None else f"same class{of} {output.agreement:.4f}, {text}"
