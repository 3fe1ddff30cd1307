"""Chooses criterion and allocation where they are "auto", by what was best in docs/measured/defaults.md."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from prunekit.anatomy.layers.targets import Target
from prunekit.anatomy.records.reports import Choice
from prunekit.core.layerwise.trials import LARGEST
from prunekit.core.statistics.layer_products import product_of, unfitted
from prunekit.sparsity.allocation import get_allocation
from prunekit.sparsity.automatic import AutomaticAllocation, AutomaticCriterion
from prunekit.sparsity.patterns import Channel, Unstructured
from prunekit.sparsity.scores import L2, Criterion, Magnitude, get_criterion
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import get_policy
from prunekit.techniques.pruning.policies.sparsegpt import HessianCriterion

# Most bytes of what an allocation holds of all layers at once: Hessians for layer_error, importances for lamp in a
# training; and bytes for each entry of a Hessian.
_MOST_AT_ONCE, _KEPT = 2 << 30, 12
# Reason of a choice that follows from calibration data.
GIVEN = "since data were given"


def chosen_options(options: PruningOptions, model: Any, *, training: bool, data: str | None) -> PruningOptions:
    """Returns the options with a criterion and an allocation in the place of "auto", and why in `choices`.

    Args:
        options: Pruning options.
        model: A built Keras model.
        training: Whether the masks change, or are trained with, in a training.
        data: Which calibration data there are: `GIVEN`, or `synthetic_inputs.SYNTHETIC`; or None.

    Raises:
        ValueError: As for `find_targets`.
    """
    criterion, allocation = get_criterion(options.criterion), get_allocation(options.allocation)
    if criterion != AutomaticCriterion() and allocation != AutomaticAllocation():
        return options
    made = list(options.choices)
    if criterion == AutomaticCriterion():
        made.append(Choice("criterion", *_criterion(options, training=training, data=data)))
        criterion = get_criterion(made[-1].value)
    # Data repair, whatever the criterion reads, unless the network is untrained.
    if allocation == AutomaticAllocation():
        entries = isinstance(options.pattern, Unstructured)
        if data and entries and not training and not criterion.before_training:
            targets, _ = get_policy(options.policy).select(model, options, training=False)
            found = _allocation_for_data(targets, data)
        else:
            found = _allocation(options, criterion, model, training=training)
        made.append(Choice("allocation", *found))
        allocation = get_allocation(made[-1].value)
    return replace(options, criterion=criterion, allocation=allocation, choices=tuple(made))


def tried_allocations(options: PruningOptions, model: Any, chosen: PruningOptions) -> tuple[str, ...]:
    """Returns the allocations that are tried, of which the one with the nearest outputs is taken; () without a trial.

    Args:
        options: Pruning options as they were given.
        model: A built Keras model.
        chosen: What `chosen_options` returned for them.
    """
    automatic = get_allocation(options.allocation) == AutomaticAllocation()
    by_error = chosen.allocation == get_allocation("layer_error") and isinstance(chosen.criterion, HessianCriterion)
    if not (automatic and by_error) or model.count_params() > LARGEST:
        return ()
    return "layer_error", "lamp"


def _criterion(options: PruningOptions, *, training: bool, data: str | None) -> tuple[str, str]:
    if training:
        return "magnitude", "since the weights are trained"
    if isinstance(options.pattern, Channel):
        return "magnitude", "since whole channels are pruned"
    if data:
        return "output_error", data
    return "magnitude", "since no data were given; with some hundred examples, output_error would lose less"


def _allocation(options: PruningOptions, criterion: Criterion, model: Any, *, training: bool) -> tuple[str, str]:
    if criterion.before_training:
        return "global", f"with the criterion {criterion}"
    if not isinstance(options.pattern, Unstructured):
        return "erk", f"with the pattern {options.pattern}"
    if type(criterion) not in (Magnitude, L2):
        return "erk", f"with the criterion {criterion}"
    if not training:
        return "lamp", "since no data were given"
    size = 4 * sum(math.prod(weight.shape) for weight in model.trainable_variables)
    if size > _MOST_AT_ONCE:
        return "erk", f"since the importances of all weights have {size / 2**30:.1f} GiB"
    return "lamp", "since the weights are trained"


def _allocation_for_data(targets: Sequence[Target], data: str) -> tuple[str, str]:
    lacking = unfitted(targets)
    if lacking:
        name, reason = next(iter(lacking.items()))
        return "erk", f"since the error of {name} cannot be calculated: {reason}"
    products = [product_of(target) for target in targets]
    size = sum(_KEPT * one.groups * one.inputs ** (1 if one.diagonal else 2) for one in products)
    if size > _MOST_AT_ONCE:
        return "erk", f"since the Hessians of all layers have {size / 2**30:.1f} GiB"
    return "layer_error", data
