"""The registry of step kinds: plain rows that schema and run-time code read; imports neither Keras nor NumPy."""

from dataclasses import dataclass

from prunekit.recipe.settings.cluster_settings import Cluster
from prunekit.recipe.settings.export_settings import Expect, Export, Pack
from prunekit.recipe.settings.factorize_settings import Factorize
from prunekit.recipe.settings.quantize_settings import Quantize
from prunekit.recipe.settings.rounds_settings import Rounds
from prunekit.recipe.settings.search_settings import Search
from prunekit.recipe.settings.shrink_settings import RemoveBlocks, Shrink, Simplify
from prunekit.recipe.settings.step_base import StepSettings
from prunekit.recipe.settings.step_settings import Prune, Train
from prunekit.registry import Registry, Row


@dataclass(frozen=True)
class StepKind(Row):
    """One kind of step: a row of `STEP_KINDS`.

    `factory` is a subclass of `StepHandler`, or its place as "package.module:Handler", which is imported when a run is
    prepared.

    Attributes:
        settings: Class of the step's settings, which has everything about a step that a recipe alone tells.
    """

    settings: type[StepSettings]


_STEPS = "prunekit.recipe.steps"
STEP_KINDS: Registry[StepKind] = Registry(
    "step kind",
    [
        StepKind("train", f"{_STEPS}.train_step:TrainStep", Train),
        StepKind("prune", f"{_STEPS}.prune_step:PruneStep", Prune),
        StepKind("finetune", f"{_STEPS}.train_step:TrainStep", Train),
        StepKind("export", f"{_STEPS}.export_step:ExportStep", Export),
        StepKind("pack", f"{_STEPS}.pack_step:PackStep", Pack),
        StepKind("expect", f"{_STEPS}.expect_step:ExpectStep", Expect),
        StepKind("rounds", f"{_STEPS}.rounds_step:RoundsStep", Rounds),
        StepKind("shrink", f"{_STEPS}.shrink_step:ShrinkStep", Shrink),
        StepKind("remove_blocks", f"{_STEPS}.layer_steps:RemoveBlocksStep", RemoveBlocks),
        StepKind("simplify", f"{_STEPS}.layer_steps:SimplifyStep", Simplify),
        StepKind("factorize", f"{_STEPS}.factorize_step:FactorizeStep", Factorize),
        StepKind("cluster", f"{_STEPS}.cluster_step:ClusterStep", Cluster),
        StepKind("search", f"{_STEPS}.search_step:SearchStep", Search),
        StepKind("quantize", f"{_STEPS}.quantize_step:QuantizeStep", Quantize),
    ],
)
