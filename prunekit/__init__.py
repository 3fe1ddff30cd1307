"""Pruning for Keras 3: a pruned weight stays exactly zero, in every training loop and in the exported file.

The public names are loaded on first use (PEP 562): `import prunekit` imports neither Keras nor TensorFlow.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names
from prunekit.version import __version__

if TYPE_CHECKING:
    from prunekit import gradients, loops
    from prunekit.anatomy.cost import Cost, cost
    from prunekit.anatomy.inspection import Report, inspect
    from prunekit.anatomy.layers import register_layer
    from prunekit.anatomy.weight_spec import WeightSpec
    from prunekit.core import distribution
    from prunekit.delivery.export import export
    from prunekit.delivery.integer_report import IntegerExport, IntegerExportError
    from prunekit.delivery.quantization_callback import QuantizationCallback
    from prunekit.delivery.quantization_training import Quantizer
    from prunekit.delivery.quantizing import Quantized, quantize
    from prunekit.delivery.sensitivity import SensitivityReport
    from prunekit.delivery.shrinking import shrink
    from prunekit.delivery.signal_plot import signal_picture
    from prunekit.delivery.sweeps import SweepReport
    from prunekit.initialization import initializers
    from prunekit.recipe.loader import RecipeError, load_recipe
    from prunekit.recipe.runner import ExpectationFailed, Result, compress
    from prunekit.recipe.schema import Recipe
    from prunekit.recipe.sensitivity import sensitivity
    from prunekit.recipe.sweep import sweep
    from prunekit.recipe.workers import Jobs
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
    from prunekit.techniques.pruning.callbacks import PruningCallback
    from prunekit.techniques.pruning.keep_zeros import KeepZeros
    from prunekit.techniques.pruning.layer_error import LayerErrorAllocation
    from prunekit.techniques.pruning.mask_store import LeakError
    from prunekit.techniques.pruning.once_sparse import OnceSparse
    from prunekit.techniques.pruning.one_shot import prune
    from prunekit.techniques.pruning.pruner import Pruner
    from prunekit.techniques.pruning.regrow import SET, RigL
    from prunekit.techniques.pruning.rounds import RoundsReport, prune_in_rounds
    from prunekit.techniques.pruning.sparsegpt import OutputError, SparseGPT
    from prunekit.techniques.pruning.straight_through import StraightThrough
    from prunekit.techniques.pruning.structure_decay import StructureDecay
    from prunekit.techniques.quantize.bit_choice import BitChoice
    from prunekit.techniques.quantize.bit_search import choose_bits
    from prunekit.techniques.quantize.quantization_report import QuantizationReport
    from prunekit.techniques.quantize.ranges import MeanSquaredError, MinMax, Percentile
    from prunekit.techniques.shrink.block_removal import remove_blocks
    from prunekit.techniques.shrink.block_report import BlocksReport
    from prunekit.techniques.shrink.channel_penalties import GroupLasso, GrowingRegularization
    from prunekit.techniques.shrink.groups_report import GroupsReport, channel_groups
    from prunekit.techniques.shrink.shrink_report import ShrinkReport
    from prunekit.techniques.shrink.shrinking import remove_zero_channels
    from prunekit.techniques.shrink.simplify_report import SimplifyReport
    from prunekit.techniques.shrink.simplifying import simplify

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
    "prunekit": ("gradients", "loops"),
    "prunekit.anatomy.cost": ("Cost", "cost"),
    "prunekit.anatomy.inspection": ("Report", "inspect"),
    "prunekit.anatomy.layers": ("register_layer",),
    "prunekit.anatomy.weight_spec": ("WeightSpec",),
    "prunekit.core": ("distribution",),
    "prunekit.delivery.export": ("export",),
    "prunekit.delivery.integer_report": ("IntegerExport", "IntegerExportError"),
    "prunekit.delivery.quantization_callback": ("QuantizationCallback",),
    "prunekit.delivery.quantization_training": ("Quantizer",),
    "prunekit.delivery.quantizing": ("Quantized", "quantize"),
    "prunekit.delivery.sensitivity": ("SensitivityReport",),
    "prunekit.delivery.shrinking": ("shrink",),
    "prunekit.delivery.signal_plot": ("signal_picture",),
    "prunekit.delivery.sweeps": ("SweepReport",),
    "prunekit.initialization": ("initializers",),
    "prunekit.recipe.loader": ("RecipeError", "load_recipe"),
    "prunekit.recipe.runner": ("ExpectationFailed", "Result", "compress"),
    "prunekit.recipe.schema": ("Recipe",),
    "prunekit.recipe.sensitivity": ("sensitivity",),
    "prunekit.recipe.sweep": ("sweep",),
    "prunekit.recipe.workers": ("Jobs",),
    "prunekit.sparsity.allocation": ("ERK", "Global", "LAMP", "Uniform"),
    "prunekit.sparsity.channel_scores": ("Apoz", "BatchNormalizationScale", "GeometricMedian", "MeanActivation"),
    "prunekit.sparsity.gradient_scores": ("Fisher", "GraSP", "OptimalBrainDamage", "Snip", "SynFlow", "Taylor"),
    "prunekit.sparsity.sensitivity_allocation": ("SensitivityAllocation",),
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
    "prunekit.sparsity.scores": ("Custom", "L2", "Magnitude", "Movement", "Random", "Wanda"),
    "prunekit.techniques.pruning.callbacks": ("PruningCallback",),
    "prunekit.techniques.pruning.keep_zeros": ("KeepZeros",),
    "prunekit.techniques.pruning.layer_error": ("LayerErrorAllocation",),
    "prunekit.techniques.pruning.mask_store": ("LeakError",),
    "prunekit.techniques.pruning.once_sparse": ("OnceSparse",),
    "prunekit.techniques.pruning.one_shot": ("prune",),
    "prunekit.techniques.pruning.pruner": ("Pruner",),
    "prunekit.techniques.pruning.regrow": ("RigL", "SET"),
    "prunekit.techniques.pruning.rounds": ("RoundsReport", "prune_in_rounds"),
    "prunekit.techniques.pruning.sparsegpt": ("OutputError", "SparseGPT"),
    "prunekit.techniques.pruning.straight_through": ("StraightThrough",),
    "prunekit.techniques.pruning.structure_decay": ("StructureDecay",),
    "prunekit.techniques.quantize.bit_choice": ("BitChoice",),
    "prunekit.techniques.quantize.bit_search": ("choose_bits",),
    "prunekit.techniques.quantize.quantization_report": ("QuantizationReport",),
    "prunekit.techniques.quantize.ranges": ("MeanSquaredError", "MinMax", "Percentile"),
    "prunekit.techniques.shrink.channel_penalties": ("GroupLasso", "GrowingRegularization"),
    "prunekit.techniques.shrink.groups_report": ("GroupsReport", "channel_groups"),
    "prunekit.techniques.shrink.block_removal": ("remove_blocks",),
    "prunekit.techniques.shrink.block_report": ("BlocksReport",),
    "prunekit.techniques.shrink.shrink_report": ("ShrinkReport",),
    "prunekit.techniques.shrink.shrinking": ("remove_zero_channels",),
    "prunekit.techniques.shrink.simplify_report": ("SimplifyReport",),
    "prunekit.techniques.shrink.simplifying": ("simplify",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
