"""prune_in_rounds: prunes and trains in turns, and rewinds weights or learning rate before each training."""

from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.cost.inspection import inspect
from prunekit.core.runtime.arguments import require_positive
from prunekit.core.runtime.optimizers import optimizers_for
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.arguments import fraction
from prunekit.sparsity.schedules import OneShot
from prunekit.techniques.pruning.after_training.one_shot import OneShotPruning
from prunekit.techniques.pruning.after_training.rounds import (
    REWINDS,
    RewindPoint,
    Round,
    RoundPruning,
    RoundsReport,
    check_options_of_rounds,
    round_sparsities,
)
from prunekit.techniques.pruning.masks.options import FORMER, PruningKeywords, PruningOptions
from prunekit.techniques.pruning.policies.choices import chosen_options
from prunekit.techniques.pruning.training.held_masks import holding
from prunekit.techniques.pruning.training.targeting import resolved_targets
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats


@keyword_options(PruningOptions, PruningKeywords, FORMER)
def prune_in_rounds(
    model: Any,
    train: Callable[[Any], Any],
    sparsity: float,
    data: Any = None,
    *,
    rounds: int = 5,
    rewind: str = "weights",
    optimizer: Any = None,
    **options: Unpack[PruningKeywords],
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
        **options: Pruning options, see `pk.PruningOptions`.

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
        report = pruner.report_since(before=before)
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
    model: Any, train: Any, sparsity: float, data: Any, rounds: int, rewind: str, options: PruningKeywords
) -> PruningOptions:
    """Returns the pruning options, after all refusals that need no training."""
    check_computes_in_floats(model)
    if not callable(train):
        raise TypeError(f"`train` is a function that trains the model. Received: {train!r}.")
    require_positive(rounds=rounds)
    if fraction("sparsity", sparsity) == 0:
        raise ValueError("`sparsity` is greater than 0. Received: 0.")
    if rewind not in REWINDS:
        raise ValueError(f"`rewind` is one of {', '.join(REWINDS)}. Received: {rewind!r}.")
    # No repair between the rounds, so that the data decide nothing.
    settings = chosen_options(PruningOptions(**options), model, training=False, data=None)
    check_options_of_rounds(settings)
    resolved_targets(model, OneShot(sparsity=sparsity), settings, training=True)
    _pruning_to(sparsity, model, sparsity, settings, data)
    return settings
