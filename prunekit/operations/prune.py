"""prune: prunes a trained model at once, in place, without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from prunekit.anatomy.cost.inspection import SparsityReport, inspect
from prunekit.anatomy.records.damage import Damage
from prunekit.anatomy.records.reports import LayerError
from prunekit.core.data.calibration import CheckedData
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.outputs.baseline import Baseline
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.arguments import MEMORY, check_functions
from prunekit.sparsity.schedules import OneShot
from prunekit.sparsity.shorthands import Repair
from prunekit.techniques.pruning.after_training.one_shot import OneShotPruning
from prunekit.techniques.pruning.masks.options import FORMER, PruningKeywords, PruningOptions
from prunekit.techniques.pruning.training.pruning_notes import LATER_TRAINING
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats


@keyword_options(PruningOptions, PruningKeywords, FORMER)
def prune(
    model,
    sparsity: float,
    data: Any = None,
    *,
    repair: Repair | None = None,
    memory: float | str = MEMORY,
    progress: Progress | None = None,
    **options: Unpack[PruningKeywords],
) -> SparsityReport:
    """Prunes a trained model once, in place, without training; returns a `SparsityReport`.

    Layers are pruned in the order in which the model calls them, and each is repaired so that it gives its former
    outputs, on calibration data or synthetic inputs, from what the pruned layers before it produce. The report then has
    the error of each layer's outputs. The model changes only at the end: an interruption leaves it as it was.

    Training afterwards lets the zeros grow back, unless it has `pk.KeepZeros`.

    Args:
        model: A built Keras model.
        sparsity: Fraction of the targets' entries to remove, in [0, 1).
        data: Calibration data: inputs, a pair (inputs, labels), or a dataset or list of such batches; some hundred
            examples of the training data. With labels, and a compiled model, the report has the metrics before and
            after. None = synthetic inputs (random signals), which lose more than data, and far less than no repair;
            a criterion that is named prunes by the weights alone.
        repair: What makes up for pruned weights. "weights": the kept weights of each layer are fitted to its former
            outputs (least squares). "outputs": each output's scale and bias are. "none": nothing. "weights" and
            "outputs" also correct biases by the mean error and update the moving statistics of batch normalizations.
            None = "weights" with data or criterion="auto", except for layers where that is impossible, which the
            report names, for models of more than 50 million weights without data, and for criteria of untrained
            models (SNIP, GraSP, SynFlow).
        memory: Largest number of bytes of activations that are kept between layers; with less, those of wide layers are
            computed again, which takes time and changes no result.
        progress: Called as progress(done, total, name) after each weight that was pruned layer by layer, and before, as
            progress(done, total, "examples read"), while statistics of layer inputs are formed.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`, `origin`,
            `overrides`, `bounds`, `policy`, `misfits`: see `pk.PruningOptions`.

    Raises:
        ValueError: As for `Pruner`; criterion or repair need data and there are none, or the criterion needs a training
            ("movement").
        TypeError: An option is unknown.
    """
    check_functions(progress=progress)
    check_computes_in_floats(model)
    before = inspect(model)
    checked = None if data is None else CheckedData(model, data)
    pruning = OneShotPruning(
        model,
        OneShot(sparsity=sparsity),
        PruningOptions(**options),
        checked,
        repair=repair,
        memory=memory,
        progress=progress,
    )
    baseline = None if checked is None else Baseline(model, checked)
    errors = pruning.run()
    pruner = pruning.pruner
    damage = None if baseline is None else baseline.damage()
    notes = [*pruning.notes, *_remarks(damage, errors), *([LATER_TRAINING] if pruner.sparsity else [])]
    report = pruner.report_since(before=before, notes=notes, only_pruned=not errors)
    return replace(report, layer_errors=errors, damage=damage)


def _remarks(damage: Damage | None, errors: Sequence[LayerError]) -> list[str]:
    """Returns a sentence that names a large loss and what to try next; [] where little was lost."""
    if damage is None:
        return []
    worst = max(errors, key=lambda row: row.error, default=None)
    spare = f", spare the layer with the largest error (exclude={worst.name!r})" if worst is not None else ""
    remark = damage.remark(f"Ask for less sparsity{spare}, or prune while training: pk.PruningCallback.")
    return [] if remark is None else [remark]
