"""prune: prunes a trained model at once, without training."""

from typing import Any, Unpack

from prunekit.anatomy.inspection import Report, inspect
from prunekit.sparsity.schedules import OneShot
from prunekit.sparsity.scores import get_criterion
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.options import Options, as_options
from prunekit.techniques.pruning.pruner import Pruner
from prunekit.techniques.pruning.pruning_notes import LATER_TRAINING


def prune(model, sparsity: float, data: Any = None, **options: Unpack[Options]) -> Report:
    """Prunes a trained model once, in place, without training; returns a `Report`.

    Training afterwards lets the zeros grow back, unless it has `pk.KeepZeros`.

    Args:
        model: A built Keras model.
        sparsity: Fraction of the targets' entries to remove, in [0, 1).
        data: Calibration data for a criterion that needs them: inputs, a pair (inputs, labels), or a dataset or list
            of such batches. Must be None for a criterion that reads weights only.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`, `origin`,
            `overrides`, `policy`, `compat`, as `prunekit.techniques.pruning.options.PruningOptions` describes them.

    Raises:
        ValueError: As for `Pruner`; `data` are not needed; the criterion needs a training ("movement").
        TypeError: An option is unknown.
    """
    settings = as_options(options)
    criterion, sources = get_criterion(settings.criterion), sources_of(settings.needs)
    if "training" in sources:
        raise ValueError(
            f"The criterion {criterion} needs a training, and pk.prune does not train. Train "
            "with PruningCallback or Pruner, or choose another criterion."
        )
    if data is not None and "data" not in sources:
        raise ValueError(f"The criterion {criterion} reads weights only. Received: data. Leave `data` out.")
    before = inspect(model)
    pruner = Pruner.detached(model, OneShot(sparsity=sparsity), settings, training=False, data=data)
    pruner.begin()
    pruner.finish()
    notes = [LATER_TRAINING] if pruner.sparsity else []
    return pruner.report(before=before, notes=notes, only_pruned=True)
