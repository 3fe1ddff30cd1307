"""The words that options take, and registries of criteria, allocations, policies and statistics; imports no Keras.

A package outside prunekit adds a row, such as `CRITERIA.add(CriterionRow("fisher", "my_package:Fisher",
needs=("fisher",)))`; options and recipes then accept the name.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from prunekit.registry import Registry, Row

# The words that options take, for Python's types, the settings of recipes and the choices of commands.
Misfits = Literal["error", "skip"]
Repair = Literal["none", "outputs", "weights"]
Reduction = Literal["mean", "sum", "max"]
ChannelAllocation = Literal["uniform", "per_kind", "global"]
Rounding = Literal["auto", "nearest", "gptq", "awq"]
ActivationBits = Literal[8, 16, "float"]
Ranges = Literal["minmax", "mse", "percentile:0.9999"]
Approximation = Literal["layer_normalization"]
ExportFormat = Literal[
    "keras", "litert", "litert-sparse", "litert-float16", "litert-float16-sparse", "litert-dynamic-int8"
]
# Where a model will run.
Goal = Literal["phone", "microcontroller", "server"]
Clustering = Literal["auto", "kmeans", "gptq"]
Granularity = Literal["tensor", "channel"]
Centroids = Literal["auto", "optimum", "quantile"]
# How entries take values in training, and what of their gradients a centroid receives.
Assignment = Literal["nearest", "soft"]
CentroidGradients = Literal["average", "sum"]
# What a student learns from the outputs of its teacher.
DistillationLoss = Literal["auto", "kl", "dist", "dkd", "mse"]
# Forms of convolutions of low rank.
LowRankForm = Literal["auto", "channels", "separable", "tucker"]
# The files that a search counts, what it minimises within a drop, who measures for it, and what it may choose.
SearchTarget = Literal["litert", "packed", "microcontroller"]
SearchProfile = Literal["small", "balanced", "fast"]
SearchWorkers = Literal["ray"]
SearchTechnique = Literal["shrink", "factorize", "quantize", "prune"]
# Sizes of a model that are calculated, and those that are measured on LiteRT files.
CALCULATED, MEASURED = ("channels", "parameters", "macs"), ("bytes", "latency")
MEASURES = (*CALCULATED, *MEASURED)
# What says how small layers of low rank become.
TARGETS = (*MEASURES[1:], "rank", "energy")
# In place of a share of the channels: those are removed whose kernels are zero.
NONZERO = "nonzero"
# Names of extensions, for type checkers and editors; the registries below are what counts.
CriterionName = Literal[
    "auto", "magnitude", "l1", "l2", "movement", "random", "wanda", "output_error", "sparsegpt", "snip", "grasp",
    "synflow", "taylor", "fisher", "optimal_brain_damage", "batch_normalization_scale", "geometric_median", "apoz",
    "mean_activation",
]  # fmt: skip
AllocationName = Literal["auto", "uniform", "global", "erk", "lamp", "layer_error", "sensitivity"]
PolicyName = Literal[
    "gradual", "tfmot", "rigl", "set", "ac_dc", "straight_through", "channel_groups", "structure_decay"
]  # fmt: skip
# And "block:8x1", "1:4" and the like.
PatternName = Literal["unstructured", "2:4", "4:8", "block:4x1", "channel"] | str


class PathOption(str):
    """Type of an option that is the path of a file; recipes resolve it against their own folder."""


@dataclass(frozen=True)
class ConfiguredRow(Row):
    """A row whose factory takes keyword options.

    Attributes:
        options: Option -> (type, default), as recipes accept them: `criterion: {type: NAME, OPTION: value}`. An option
            "seed" with the default None is given the recipe's seed.
    """

    options: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class CriterionRow(ConfiguredRow):
    """A criterion; its factory returns a `prunekit.sparsity.scores.Criterion`.

    Attributes:
        needs: Names of the statistics that the criterion needs.
    """

    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class AllocationRow(ConfiguredRow):
    """An allocation; its factory returns a `prunekit.sparsity.allocation.Allocation`.

    Attributes:
        needs: Names of the statistics that the allocation needs besides those of the criterion.
    """

    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class PolicyRow(ConfiguredRow):
    """A mask policy; its factory returns a `prunekit.techniques.pruning.masks.policy.MaskPolicy`.

    Attributes:
        needs: Names of the statistics that the policy needs besides those of the criterion.
    """

    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class StatisticRow(Row):
    """A statistic; its factory returns a `prunekit.core.statistics.statistics.Collector` for (model, targets).

    Attributes:
        source: "training" if optimizer updates provide the statistic, "data" if a pass over data does, "model" if the
            model itself does.
        backends: Keras backends on which the statistic exists; empty = all.
    """

    source: Literal["training", "data", "model"] = "data"
    backends: tuple[str, ...] = ()


def sources_of(needs: Iterable[str]) -> set[str]:
    """Returns the sources of the statistics `needs`: any of "training", "data" and "model".

    Raises:
        ValueError: A statistic is not registered.
    """
    return {STATISTICS.named(name).source for name in needs}


CRITERIA: Registry[CriterionRow] = Registry(
    "criterion",
    [
        CriterionRow("auto", "prunekit.sparsity.automatic:AutomaticCriterion"),
        CriterionRow("magnitude", "prunekit.sparsity.scores:Magnitude"),
        CriterionRow("l1", "prunekit.sparsity.scores:Magnitude"),
        CriterionRow("l2", "prunekit.sparsity.scores:L2"),
        CriterionRow("movement", "prunekit.sparsity.scores:Movement", needs=("movement",)),
        CriterionRow("random", "prunekit.sparsity.scores:Random", options={"seed": (int | None, None)}),
        CriterionRow(
            "wanda", "prunekit.sparsity.scores:Wanda", options={"per_output": (bool, True)}, needs=("input_norm",)
        ),
        CriterionRow(
            "output_error",
            "prunekit.techniques.pruning.policies.sparsegpt:OutputError",
            options={"refits": (int, 16)},
            needs=("hessian",),
        ),
        CriterionRow(
            "sparsegpt",
            "prunekit.techniques.pruning.policies.sparsegpt:SparseGPT",
            options={"damping": (float, 0.01), "run": (int, 128)},
            needs=("hessian",),
        ),
        CriterionRow("snip", "prunekit.sparsity.gradient_scores:SNIP", needs=("gradient",)),
        CriterionRow("grasp", "prunekit.sparsity.gradient_scores:GraSP", needs=("gradient_flow",)),
        CriterionRow(
            "synflow", "prunekit.sparsity.gradient_scores:SynFlow", needs=("synflow",), options={"rounds": (int, 100)}
        ),
        CriterionRow("taylor", "prunekit.sparsity.gradient_scores:Taylor", needs=("square_batch_gradient",)),
        CriterionRow("fisher", "prunekit.sparsity.gradient_scores:Fisher", needs=("square_gradient",)),
        CriterionRow(
            "optimal_brain_damage", "prunekit.sparsity.gradient_scores:OptimalBrainDamage", needs=("gauss_newton",)
        ),
        CriterionRow(
            "batch_normalization_scale",
            "prunekit.sparsity.channel_scores:BatchNormalizationScale",
            needs=("batch_normalization_scale",),
        ),
        CriterionRow("geometric_median", "prunekit.sparsity.channel_scores:GeometricMedian"),
        CriterionRow("apoz", "prunekit.sparsity.channel_scores:APoZ", needs=("zero_share",)),
        CriterionRow("mean_activation", "prunekit.sparsity.channel_scores:MeanActivation", needs=("mean_activation",)),
    ],
)
ALLOCATIONS: Registry[AllocationRow] = Registry(
    "allocation",
    [
        AllocationRow("auto", "prunekit.sparsity.automatic:AutomaticAllocation"),
        AllocationRow("uniform", "prunekit.sparsity.allocation:Uniform"),
        AllocationRow(
            "global",
            "prunekit.sparsity.allocation:Global",
            options={"normalization": (Literal["none", "mean", "l2"], "none")},
        ),
        AllocationRow("erk", "prunekit.sparsity.allocation:ERK"),
        AllocationRow("lamp", "prunekit.sparsity.allocation:LAMP"),
        AllocationRow(
            "layer_error",
            "prunekit.techniques.pruning.policies.layer_error:LayerErrorAllocation",
            options={"objective": (Literal["product", "equal"], "product")},
            needs=("hessian",),
        ),
        AllocationRow(
            "sensitivity",
            "prunekit.sparsity.sensitivity_allocation:SensitivityAllocation",
            options={"file": (PathOption, ""), "damage": (str, "output_error")},
        ),
    ],
)
POLICIES: Registry[PolicyRow] = Registry(
    "policy",
    [
        PolicyRow("gradual", "prunekit.techniques.pruning.policies.gradual:Gradual"),
        PolicyRow("tfmot", "prunekit.interop.tfmot.policy:TfmotPolicy"),
        PolicyRow(
            "rigl",
            "prunekit.techniques.pruning.policies.regrow:RigL",
            options={"exchanged": (float, 0.3)},
            needs=("gradient",),
        ),
        PolicyRow(
            "set",
            "prunekit.techniques.pruning.policies.regrow:SET",
            options={"exchanged": (float, 0.3), "seed": (int | None, None)},
        ),
        PolicyRow("ac_dc", "prunekit.techniques.pruning.policies.alternating:ACDC"),
        PolicyRow(
            "straight_through",
            "prunekit.techniques.pruning.policies.straight_through:StraightThrough",
            options={"decay": (float, 0.0)},
        ),
        PolicyRow(
            "channel_groups",
            "prunekit.techniques.pruning.policies.channel_groups:ChannelGroups",
            options={"reduction": (Reduction, "mean"), "normalize": (bool, True)},
        ),
        PolicyRow("structure_decay", "prunekit.techniques.pruning.policies.structure_decay:StructureDecay"),
    ],
)
STATISTICS: Registry[StatisticRow] = Registry(
    "statistic",
    [
        StatisticRow(
            "movement",
            "prunekit.techniques.pruning.policies.movement:Movements",
            source="training",
            backends=("tensorflow",),
        ),
        StatisticRow("input_norm", "prunekit.core.statistics.input_statistics:InputNorms"),
        StatisticRow("hessian", "prunekit.core.statistics.input_statistics:Hessians"),
        StatisticRow("gradient", "prunekit.training_tools.gradients.score_statistics:Gradient"),
        StatisticRow("square_batch_gradient", "prunekit.training_tools.gradients.score_statistics:SquareBatchGradient"),
        StatisticRow("gradient_flow", "prunekit.training_tools.gradients.score_statistics:GradientFlow"),
        StatisticRow("synflow", "prunekit.training_tools.gradients.score_statistics:SynapticFlow", source="model"),
        StatisticRow(
            "square_gradient",
            "prunekit.training_tools.gradients.example_statistics:SquareGradient",
            backends=("tensorflow",),
        ),
        StatisticRow(
            "gauss_newton", "prunekit.training_tools.gradients.example_statistics:GaussNewton", backends=("tensorflow",)
        ),
        StatisticRow(
            "batch_normalization_scale",
            "prunekit.core.statistics.channel_statistics:BatchNormalizationScales",
            source="model",
        ),
        StatisticRow("zero_share", "prunekit.core.statistics.channel_statistics:ZeroShare"),
        StatisticRow("mean_activation", "prunekit.core.statistics.channel_statistics:ActivationMean"),
    ],
)
# Packages whose schedules are accepted: the factory converts an instance of one of their classes.
SCHEDULE_SOURCES: Registry[Row] = Registry(
    "source of schedules",
    [Row("tensorflow_model_optimization", "prunekit.interop.tfmot.schedule_adoption:adopted")],
)
PATTERNS = (
    "unstructured, channel, n:m such as 2:4 (2 of every 4 kept), block:INPUTSxOUTPUTS such as block:4x1, or "
    "block:4x1:max for maximum pooling"
)
_NUMBERED = re.compile(
    r"(?P<n>[0-9]{1,9}):(?P<m>[0-9]{1,9})"
    r"|block:(?P<inputs>[0-9]{1,9})x(?P<outputs>[0-9]{1,9})(:(?P<pooling>average|max))?"
)


class ParsedPattern(NamedTuple):
    """The parts of a pattern's name.

    Attributes:
        kind: "unstructured", "channel", "nm" or "block".
        numbers: (n, m) or (inputs, outputs), unchecked; empty for the other kinds.
        pooling: "average" or "max" if the name of a block contains it, else None.
    """

    kind: str
    numbers: tuple[int, ...] = ()
    pooling: str | None = None


def parse_pattern(text: str) -> ParsedPattern | None:
    """Returns the parts of a pattern's name, or None if `text` is not the name of a pattern.

    >>> parse_pattern("block:4x1:max")
    ParsedPattern(kind='block', numbers=(4, 1), pooling='max')
    """
    if text in ("unstructured", "channel"):
        return ParsedPattern(text)
    match = _NUMBERED.fullmatch(text)
    if match is None:
        return None
    if match["n"] is not None:
        return ParsedPattern("nm", (int(match["n"]), int(match["m"])))
    return ParsedPattern("block", (int(match["inputs"]), int(match["outputs"])), match["pooling"])


def readers_of(statistic: str) -> str:
    """Returns which options need a statistic, with the verb: 'criterion="snip" or policy="regrow" needs'."""
    options: dict[str, Registry[Any]] = {"criterion": CRITERIA, "allocation": ALLOCATIONS, "policy": POLICIES}
    found = [f'{one}="{name}"' for one, rows in options.items() for name in rows if statistic in rows[name].needs]
    return f"{' or '.join(found) or 'The criterion'} needs"
