"""prune_in_rounds: prunes and trains in turns, and rewinds weights or learning rate before each training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.display import Displayed
from prunekit.anatomy.inspection import Report, inspect
from prunekit.anatomy.model_weights import check_built
from prunekit.anatomy.sections import Column, Section
from prunekit.anatomy.tables import aligned, plain
from prunekit.core import jax_state
from prunekit.core.arguments import require_positive
from prunekit.core.optimizers import optimizers_for, parts_of
from prunekit.sparsity.arguments import fraction
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.patterns import NM
from prunekit.sparsity.schedules import OneShot
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.choices import chosen_options
from prunekit.techniques.pruning.gradual import Gradual
from prunekit.techniques.pruning.held_masks import holding
from prunekit.techniques.pruning.one_shot import OneShotPruning
from prunekit.techniques.pruning.options import Options, PruningOptions, as_options
from prunekit.techniques.pruning.targeting import resolved_targets

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

    rounds: tuple[Round, ...]
    report: Report

    @property
    def section(self) -> Section:
        """The rounds as a section of a report."""
        return rounds_section(self.rounds)

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


def prune_in_rounds(
    model: Any,
    train: Callable[[Any], Any],
    sparsity: float,
    data: Any = None,
    *,
    rounds: int = 5,
    rewind: str = "weights",
    optimizer: Any = None,
    **options: Unpack[Options],
) -> RoundsReport:
    """Trains, then prunes, rewinds and trains again in each round; changes the model in place.

    Each round prunes the same fraction of the weights that are left, by the criterion's importance after the training
    before it. The rewind point is the state at the call: for late rewinding, train the first steps before. Pruned
    weights are exactly zero from then on, in `fit` and in any loop whose updates pass through a Keras optimizer.

    Args:
        model: A built Keras model.
        train: Trains the model from the rewind point to the end, and may return a metric, or what `fit` returns, whose
            main metric at the last epoch is taken: the first compiled metric, else the loss; on the validation data
            if there are any. Called as train(model), once
            for the dense model and once per round. A `tf.function` of a loop must be created inside.
        sparsity: Final fraction of the targets' entries to remove, in (0, 1).
        data: Calibration data for criteria that read data, as for `pk.prune`.
        rounds: Number of rounds, at least 1.
        rewind: What returns to the rewind point after each pruning. "weights": all weights, moving statistics and the
            optimizer's state with its learning-rate schedule (lottery ticket). "learning_rate": the learning-rate
            schedule; weights and slots stay. "none": nothing (fine-tuning).
        optimizer: Keras optimizer of the loop, or a list of optimizers. None = those of the model.
        **options: Pruning options, see `prunekit.techniques.pruning.options.PruningOptions`.

    Raises:
        ValueError: An argument is out of range, or an option does not go together with rounds; nothing has changed.
            Or `train` compiled the model again; the model is trained and dense then.
        TypeError: `train` is not a function, or an option is unknown.

    Source: Frankle & Carbin 2019, arXiv:1803.03635 (weights, from the start); Frankle et al. 2020, arXiv:1912.05671
        (weights, from an early step); Renda et al. 2020, arXiv:2003.02389 (learning rate).
    """
    settings = _checked(model, train, sparsity, data, rounds, rewind, options)
    optimizers = optimizers_for(model, optimizer)
    if not optimizers:
        raise ValueError("Pruning in rounds needs an optimizer. Compile the model, or pass `optimizer`.")
    before = inspect(model)
    point = RewindPoint(model, optimizers)
    rows, report = [Round(0, 0.0, 0, _metric(train(model), model))], before
    if list(map(id, optimizers_for(model, optimizer))) != list(map(id, optimizers)):
        raise ValueError(
            "Masks are enforced by the optimizers that the model had at the call. Received: `train` compiled the model "
            "again. Compile it before the call only; rewinding returns the optimizer to its state at the call."
        )
    for number, asked in enumerate(round_sparsities(sparsity, rounds), start=1):
        pruning = _pruning_to(asked, model, sparsity, settings, data)
        pruning.run()
        pruner = pruning.pruner
        point.rewind(rewind)
        with holding(model, pruner.masks, optimizers):
            metric = _metric(train(model), model)
        pruned = sum(mask.size - int(np.count_nonzero(mask)) for mask in pruner.masks.values())
        rows.append(Round(number, pruner.sparsity, pruned, metric))
        report = pruner.report(before=before)
    return RoundsReport(tuple(rows), report)


def _metric(value: Any, model: Any) -> float | None:
    """Returns what a training returned as one number: a number, or the main metric of a History or of `evaluate`."""
    found = getattr(value, "history", value)
    if isinstance(found, Mapping):
        names = [*(name for name in _metric_names(model) if name != "loss"), "loss"]
        known = [key for name in names for key in (f"val_{name}", name) if key in found]
        found = found[known[0]] if known else found
        found = found[-1] if isinstance(found, list) and found else found
    try:
        return None if found is None else float(found)
    except (TypeError, ValueError) as error:
        raise TypeError(
            "`train` returns a metric as one number, what `fit` returns, or nothing. Received: "
            f"{type(value).__name__}. The model is trained and dense; return a number, and call prune_in_rounds again."
        ) from error


def _metric_names(model: Any) -> list[str]:
    """Returns the names of the compiled metrics in their order; [] of a model whose metrics were never computed."""
    try:
        return list(model.get_metrics_result())
    except ValueError:
        return []


def _pruning_to(asked: float, model: Any, goal: float, settings: PruningOptions, data: Any) -> OneShotPruning:
    # No repair: the training after it repairs.
    return OneShotPruning(model, RoundPruning(asked, goal=goal), settings, data, repair="none")


def _checked(  # noqa: PLR0913
    model: Any, train: Any, sparsity: float, data: Any, rounds: int, rewind: str, options: Options
) -> PruningOptions:
    """Returns the pruning options, after all refusals that need no training."""
    check_built(model)
    if not callable(train):
        raise TypeError(f"`train` is a function that trains the model. Received: {train!r}.")
    require_positive(rounds=rounds)
    if fraction("sparsity", sparsity) == 0:
        raise ValueError("`sparsity` is greater than 0. Received: 0.")
    if rewind not in REWINDS:
        raise ValueError(f"`rewind` is one of {', '.join(REWINDS)}. Received: {rewind!r}.")
    # No repair between the rounds, so that the data decide nothing.
    settings = chosen_options(as_options(options), model, training=False, data=None)
    check_options_of_rounds(settings)
    resolved_targets(model, OneShot(sparsity=sparsity), settings, training=True)
    _pruning_to(sparsity, model, sparsity, settings, data)
    return settings


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
