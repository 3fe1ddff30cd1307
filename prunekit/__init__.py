"""Pruning for Keras 3: a pruned weight stays exactly zero, in every training loop and in the exported file.

The public names are loaded on first use (PEP 562): `import prunekit` imports neither Keras nor TensorFlow.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names
from prunekit.version import __version__

if TYPE_CHECKING:
    from prunekit.anatomy.cost.cost import Cost, cost
    from prunekit.anatomy.cost.inspection import Report, inspect
    from prunekit.anatomy.layers.layers import register_layer
    from prunekit.anatomy.layers.weight_spec import WeightSpec
    from prunekit.core.training import distribution
    from prunekit.delivery.integers.integer_report import IntegerExport, IntegerExportError
    from prunekit.delivery.plots.signal_plot import signal_picture
    from prunekit.delivery.reports.sensitivity import SensitivityReport
    from prunekit.delivery.reports.sweeps import SweepReport
    from prunekit.initialization import initializers
    from prunekit.operations.choose_bits import choose_bits
    from prunekit.operations.export import export
    from prunekit.operations.prune import prune
    from prunekit.operations.prune_in_rounds import prune_in_rounds
    from prunekit.operations.quantization_callback import QuantizationCallback
    from prunekit.operations.quantization_training import Quantizer
    from prunekit.operations.quantize import Quantized, quantize
    from prunekit.operations.remove_blocks import remove_blocks
    from prunekit.operations.remove_zero_channels import remove_zero_channels
    from prunekit.operations.sensitivity import sensitivity
    from prunekit.operations.shrink import shrink
    from prunekit.operations.simplify import simplify
    from prunekit.recipe.run.runner import ExpectationFailed, Result, compress
    from prunekit.recipe.settings.schema import Recipe
    from prunekit.recipe.sweep.sweep import sweep
    from prunekit.recipe.sweep.workers import Jobs
    from prunekit.recipe.text.loader import RecipeError, load_recipe
    from prunekit.sparsity.allocation import ERK, LAMP, Global, Uniform
    from prunekit.sparsity.channel_scores import Apoz, BatchNormalizationScale, GeometricMedian, MeanActivation
    from prunekit.sparsity.gradient_scores import Fisher, GraSP, OptimalBrainDamage, Snip, SynFlow, Taylor
    from prunekit.sparsity.patterns import NM, Block, Channel, Unstructured
    from prunekit.sparsity.schedules import (
        ConstantSparsity,
        CosineDecay,
        ExponentialDecay,
        LinearDecay,
        MultiStep,
        OneShot,
        PolynomialDecay,
    )
    from prunekit.sparsity.scores import L2, Custom, Magnitude, Movement, Random, Wanda
    from prunekit.sparsity.sensitivity_allocation import SensitivityAllocation
    from prunekit.techniques.pruning.after_training.rounds import RoundsReport
    from prunekit.techniques.pruning.masks.mask_store import LeakError
    from prunekit.techniques.pruning.policies.layer_error import LayerErrorAllocation
    from prunekit.techniques.pruning.policies.regrow import SET, RigL
    from prunekit.techniques.pruning.policies.sparsegpt import OutputError, SparseGPT
    from prunekit.techniques.pruning.policies.straight_through import StraightThrough
    from prunekit.techniques.pruning.policies.structure_decay import StructureDecay
    from prunekit.techniques.pruning.training.callbacks import PruningCallback
    from prunekit.techniques.pruning.training.keep_zeros import KeepZeros
    from prunekit.techniques.pruning.training.once_sparse import OnceSparse
    from prunekit.techniques.pruning.training.pruner import Pruner
    from prunekit.techniques.quantize.bits.bit_choice import BitChoice
    from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, Percentile
    from prunekit.techniques.quantize.quantization_report import QuantizationReport
    from prunekit.techniques.shrink.channels.channel_penalties import GroupLasso, GrowingRegularization
    from prunekit.techniques.shrink.channels.groups_report import GroupsReport, channel_groups
    from prunekit.techniques.shrink.channels.shrink_report import ShrinkReport
    from prunekit.techniques.shrink.graph.simplify_report import SimplifyReport
    from prunekit.techniques.shrink.layers.block_report import BlocksReport
    from prunekit.training_tools import gradients, loops

__all__ = [
    "Apoz",
    "BatchNormalizationScale",
    "BitChoice",
    "Block",
    "BlocksReport",
    "Channel",
    "ConstantSparsity",
    "CosineDecay",
    "Cost",
    "Custom",
    "ERK",
    "ExpectationFailed",
    "ExponentialDecay",
    "Fisher",
    "GeometricMedian",
    "Global",
    "GraSP",
    "GroupLasso",
    "GroupsReport",
    "GrowingRegularization",
    "IntegerExport",
    "IntegerExportError",
    "Jobs",
    "KeepZeros",
    "L2",
    "LAMP",
    "LayerErrorAllocation",
    "LeakError",
    "LinearDecay",
    "Magnitude",
    "MeanActivation",
    "MeanSquaredError",
    "MinMax",
    "Movement",
    "MultiStep",
    "NM",
    "OnceSparse",
    "OneShot",
    "OptimalBrainDamage",
    "OutputError",
    "Percentile",
    "PolynomialDecay",
    "Pruner",
    "PruningCallback",
    "QuantizationCallback",
    "QuantizationReport",
    "Quantized",
    "Quantizer",
    "Random",
    "Recipe",
    "RecipeError",
    "Report",
    "Result",
    "RigL",
    "RoundsReport",
    "SET",
    "SensitivityAllocation",
    "SensitivityReport",
    "ShrinkReport",
    "SimplifyReport",
    "Snip",
    "SparseGPT",
    "StraightThrough",
    "StructureDecay",
    "SweepReport",
    "SynFlow",
    "Taylor",
    "Uniform",
    "Unstructured",
    "Wanda",
    "WeightSpec",
    "__version__",
    "channel_groups",
    "choose_bits",
    "compress",
    "cost",
    "distribution",
    "export",
    "gradients",
    "initializers",
    "inspect",
    "load_recipe",
    "loops",
    "prune",
    "prune_in_rounds",
    "quantize",
    "register_layer",
    "remove_blocks",
    "remove_zero_channels",
    "sensitivity",
    "shrink",
    "signal_picture",
    "simplify",
    "sweep",
]

_MODULES = {
    "prunekit.anatomy.cost.cost": ("Cost", "cost"),
    "prunekit.anatomy.cost.inspection": ("Report", "inspect"),
    "prunekit.anatomy.layers.layers": ("register_layer",),
    "prunekit.anatomy.layers.weight_spec": ("WeightSpec",),
    "prunekit.core.training": ("distribution",),
    "prunekit.delivery.integers.integer_report": ("IntegerExport", "IntegerExportError"),
    "prunekit.delivery.plots.signal_plot": ("signal_picture",),
    "prunekit.delivery.reports.sensitivity": ("SensitivityReport",),
    "prunekit.delivery.reports.sweeps": ("SweepReport",),
    "prunekit.initialization": ("initializers",),
    "prunekit.operations.choose_bits": ("choose_bits",),
    "prunekit.operations.export": ("export",),
    "prunekit.operations.prune": ("prune",),
    "prunekit.operations.prune_in_rounds": ("prune_in_rounds",),
    "prunekit.operations.quantization_callback": ("QuantizationCallback",),
    "prunekit.operations.quantization_training": ("Quantizer",),
    "prunekit.operations.quantize": ("Quantized", "quantize"),
    "prunekit.operations.remove_blocks": ("remove_blocks",),
    "prunekit.operations.remove_zero_channels": ("remove_zero_channels",),
    "prunekit.operations.sensitivity": ("sensitivity",),
    "prunekit.operations.shrink": ("shrink",),
    "prunekit.operations.simplify": ("simplify",),
    "prunekit.recipe.run.runner": ("ExpectationFailed", "Result", "compress"),
    "prunekit.recipe.settings.schema": ("Recipe",),
    "prunekit.recipe.sweep.sweep": ("sweep",),
    "prunekit.recipe.sweep.workers": ("Jobs",),
    "prunekit.recipe.text.loader": ("RecipeError", "load_recipe"),
    "prunekit.sparsity.allocation": ("ERK", "LAMP", "Global", "Uniform"),
    "prunekit.sparsity.channel_scores": ("Apoz", "BatchNormalizationScale", "GeometricMedian", "MeanActivation"),
    "prunekit.sparsity.gradient_scores": ("Fisher", "GraSP", "OptimalBrainDamage", "Snip", "SynFlow", "Taylor"),
    "prunekit.sparsity.patterns": ("NM", "Block", "Channel", "Unstructured"),
    "prunekit.sparsity.schedules": (
        "ConstantSparsity",
        "CosineDecay",
        "ExponentialDecay",
        "LinearDecay",
        "MultiStep",
        "OneShot",
        "PolynomialDecay",
    ),
    "prunekit.sparsity.scores": ("L2", "Custom", "Magnitude", "Movement", "Random", "Wanda"),
    "prunekit.sparsity.sensitivity_allocation": ("SensitivityAllocation",),
    "prunekit.techniques.pruning.after_training.rounds": ("RoundsReport",),
    "prunekit.techniques.pruning.masks.mask_store": ("LeakError",),
    "prunekit.techniques.pruning.policies.layer_error": ("LayerErrorAllocation",),
    "prunekit.techniques.pruning.policies.regrow": ("SET", "RigL"),
    "prunekit.techniques.pruning.policies.sparsegpt": ("OutputError", "SparseGPT"),
    "prunekit.techniques.pruning.policies.straight_through": ("StraightThrough",),
    "prunekit.techniques.pruning.policies.structure_decay": ("StructureDecay",),
    "prunekit.techniques.pruning.training.callbacks": ("PruningCallback",),
    "prunekit.techniques.pruning.training.keep_zeros": ("KeepZeros",),
    "prunekit.techniques.pruning.training.once_sparse": ("OnceSparse",),
    "prunekit.techniques.pruning.training.pruner": ("Pruner",),
    "prunekit.techniques.quantize.bits.bit_choice": ("BitChoice",),
    "prunekit.techniques.quantize.grids.ranges": ("MeanSquaredError", "MinMax", "Percentile"),
    "prunekit.techniques.quantize.quantization_report": ("QuantizationReport",),
    "prunekit.techniques.shrink.channels.channel_penalties": ("GroupLasso", "GrowingRegularization"),
    "prunekit.techniques.shrink.channels.groups_report": ("GroupsReport", "channel_groups"),
    "prunekit.techniques.shrink.channels.shrink_report": ("ShrinkReport",),
    "prunekit.techniques.shrink.graph.simplify_report": ("SimplifyReport",),
    "prunekit.techniques.shrink.layers.block_report": ("BlocksReport",),
    "prunekit.training_tools": ("gradients", "loops"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
