"""Rounds of pruning and training: their sparsities, the point to which a rewind returns, and their report."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, ClassVar

import numpy as np

from prunekit.anatomy.cost.inspection import SparsityReport
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.sections import Column, Section
from prunekit.anatomy.records.tables import aligned, plain
from prunekit.core.runtime import jax_state
from prunekit.core.runtime.optimizers import parts_of
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.patterns import NM
from prunekit.sparsity.schedules import OneShot
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.policies.gradual import Gradual

REWINDS = ("weights", "learning_rate", "none")


@dataclass(frozen=True)
class Round:
    """One round: a training, after the pruning of its masks.

    Attributes:
        number: 0 for the training of the dense model, then 1, 2, and so on.
        sparsity: Fraction of the targets' entries that are pruned during the training.
        pruned: Number of these entries.
        metric: What the training returned; None if it returned nothing.
    """

    number: int
    sparsity: float
    pruned: int
    metric: float | None


@dataclass(frozen=True, eq=False)
class RoundsReport(Displayed):
    """Result of `prune_in_rounds`: one row per round, and the report of the last pruning.

    Attributes:
        rounds: One row per training, that of the dense model first.
        report: Report of the weights after the last training, compared with those before the first.
    """

    main_items: ClassVar = "rounds"

    rounds: tuple[Round, ...]
    report: SparsityReport

    def sections(self) -> tuple[Section, ...]:
        """Returns the table of the rounds."""
        return (rounds_section(self.rounds),)

    def verdict(self) -> str:
        """Returns one sentence: rounds, and what the last pruning left."""
        return f"{len(self.rounds) - 1} rounds of pruning and training: {self.report.verdict()}"

    def __str__(self) -> str:
        rows = [tuple(map(plain, astuple(row))) for row in self.rounds]
        return "\n".join(aligned([("round", "sparsity", "pruned", "metric"), *rows], left=()))


def rounds_section(rounds: Sequence[Round], metric: str = "Metric") -> Section:
    """Returns the table of the rounds, one row per training.

    Args:
        rounds: The rounds.
        metric: Heading of the metric's column.
    """
    columns = (Column("Round", "count"), Column("Sparsity", "sparsity"), Column("Pruned", "count"))
    return Section("Rounds", (*columns, Column(metric, "number")), tuple(map(astuple, rounds)))


@dataclass(frozen=True)
class RoundPruning(OneShot):
    """The pruning of one round: `sparsity` at once, on the way to `goal`.

    Args:
        sparsity: Sparsity after the pruning, in [0, 1).
        step: 0.
        goal: Sparsity after the last round. Overrides and minima of single weights are given for it; before, they are
            multiplied by sparsity / goal.
    """

    goal: float = 0.5

    @property
    def final_sparsity(self) -> float:
        """`goal`, which a later round reaches."""
        return self.goal

    def __call__(self, step: int) -> float:
        """`sparsity` at every step."""
        return self.sparsity


def round_sparsities(sparsity: float, rounds: int) -> list[float]:
    """Returns the sparsity after each round; each round prunes the same fraction of the weights that are left.

    The sparsity after round i of n is 1 - (1 - sparsity)^(i / n), and exactly `sparsity` after the last.

    Args:
        sparsity: Final sparsity, in (0, 1).
        rounds: Number of rounds, at least 1.

    Source: Frankle & Carbin 2019, arXiv:1803.03635, section 2.

    >>> round_sparsities(0.75, 2)
    [0.5, 0.75]
    """
    return [1.0 - (1.0 - sparsity) ** (i / rounds) for i in range(1, rounds)] + [sparsity]


class RewindPoint:
    """The values of a model's weights and optimizers at the moment of its creation, to which `rewind` returns.

    Args:
        model: A built Keras model.
        optimizers: Its optimizers; a single one is built if necessary.
        arrays: Values that `arrays` returned; None takes the present values.

    Raises:
        ValueError: One of several optimizers is not built.
    """

    def __init__(self, model: Any, optimizers: Sequence[Any], arrays: Sequence[np.ndarray] | None = None):
        for optimizer in optimizers:
            if not optimizer.built and len(optimizers) > 1:
                raise ValueError(
                    f"Rewinding needs the state of each optimizer. Received: {len(optimizers)} optimizers, of which "
                    f"{optimizer.name!r} is not built. Call its `build` with the variables that it updates."
                )
            if not optimizer.built:
                optimizer.build(model.trainable_variables)
        jax_state.sync_model_state(model)
        self._model, self._optimizers = model, optimizers
        slots = [slot for optimizer in optimizers for slot in jax_state.own_variables(optimizer)]
        self._variables = [*model.weights, *slots]
        now = arrays if arrays is not None else [array_of(variable) for variable in self._variables]
        self.arrays = [np.array(array) for array in now]

    def rewind(self, what: str) -> None:
        """Assigns the values of the rewind point; the caller imposes its masks afterwards.

        Args:
            what: "weights": all weights, moving statistics and the state of the optimizers. "learning_rate": the
                optimizers' iterations and learning rates, so that learning-rate schedules start from the rewind point.
                "none": nothing.
        """
        jax_state.sync_model_state(self._model)
        counted = {id(variable) for optimizer in self._optimizers for variable in _schedule_state(optimizer)}
        for variable, array in zip(self._variables, self.arrays, strict=True):
            if what == "weights" or (what == "learning_rate" and id(variable) in counted):
                variable.assign(array)


def _schedule_state(optimizer: Any) -> list[Any]:
    """Returns the variables on which the learning rate depends: iterations and learning rate of each part."""
    parts = {id(part): part for part in (optimizer, *parts_of(optimizer))}.values()
    named = [getattr(part, name, None) for part in parts for name in ("_iterations", "_learning_rate")]
    return [variable for variable in named if variable is not None]


def check_options_of_rounds(settings: PruningOptions) -> None:
    """Checks that pruning options go together with rounds.

    Raises:
        ValueError: An option contradicts masks that shrink from round to round.
    """
    if isinstance(settings.pattern, NM):
        raise ValueError(
            f"Each round has another sparsity, and {settings.pattern} has one. Prune gradually with a schedule, or "
            "choose another pattern."
        )
    if "training" in sources_of(settings.needs):
        raise ValueError(
            f"Rounds prune between trainings, and the criterion {settings.criterion} observes updates. Choose another "
            "criterion, or prune with PruningCallback."
        )
    if type(settings.policy) is not Gradual or not settings.keep_zeros:
        raise ValueError(
            f"In rounds, pruned weights stay pruned. Received: policy={settings.policy}, "
            f"keep_zeros={settings.keep_zeros}. Leave both options out."
        )
