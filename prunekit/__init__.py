"""Pruning for Keras 3: a pruned weight stays exactly zero, in every training loop and in the exported file.

The public names are loaded on first use (PEP 562): `import prunekit` imports neither Keras nor TensorFlow.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names
from prunekit.version import __version__

# For type checkers and editors; the table below is for Python.
if TYPE_CHECKING:
    from prunekit import (
        allocations as allocations,
        criteria as criteria,
        errors as errors,
        patterns as patterns,
        penalties as penalties,
        policies as policies,
        ranges as ranges,
        reports as reports,
        schedules as schedules,
    )
    from prunekit.anatomy.cost.cost import cost as cost
    from prunekit.anatomy.cost.inspection import inspect as inspect
    from prunekit.anatomy.layers.layers import register_layer as register_layer
    from prunekit.anatomy.layers.weight_spec import WeightSpec as WeightSpec
    from prunekit.core.training import distribution as distribution
    from prunekit.initialization import initializers as initializers
    from prunekit.operations.choose_bits import choose_bits as choose_bits
    from prunekit.operations.cluster import cluster as cluster
    from prunekit.operations.distilling import distilling as distilling
    from prunekit.operations.export import export as export
    from prunekit.operations.factorize import factorize as factorize
    from prunekit.operations.pack import pack as pack, unpack as unpack
    from prunekit.operations.prune import prune as prune
    from prunekit.operations.prune_in_rounds import prune_in_rounds as prune_in_rounds
    from prunekit.operations.quantization_callback import QuantizationCallback as QuantizationCallback
    from prunekit.operations.quantization_training import Quantizer as Quantizer
    from prunekit.operations.quantize import quantize as quantize
    from prunekit.operations.reduce_dimension import reduce_dimension as reduce_dimension
    from prunekit.operations.remove_blocks import remove_blocks as remove_blocks
    from prunekit.operations.search import search as search
    from prunekit.operations.sensitivity import sensitivity as sensitivity
    from prunekit.operations.shrink import shrink as shrink
    from prunekit.operations.simplify import simplify as simplify
    from prunekit.recipe.run.runner import compress as compress
    from prunekit.recipe.settings.schema import Recipe as Recipe
    from prunekit.recipe.sweep.sweep import sweep as sweep
    from prunekit.recipe.sweep.workers import Jobs as Jobs
    from prunekit.recipe.text.loader import load_recipe as load_recipe
    from prunekit.techniques.cluster.cluster_callback import ClusterCallback as ClusterCallback
    from prunekit.techniques.cluster.options import ClusterOptions as ClusterOptions
    from prunekit.techniques.distill.distillation_callback import DistillationCallback as DistillationCallback
    from prunekit.techniques.distill.options import DistillationOptions as DistillationOptions
    from prunekit.techniques.pruning.masks.options import PruningOptions as PruningOptions
    from prunekit.techniques.pruning.training.at_final_sparsity import AtFinalSparsity as AtFinalSparsity
    from prunekit.techniques.pruning.training.callbacks import PruningCallback as PruningCallback
    from prunekit.techniques.pruning.training.keep_zeros import KeepZeros as KeepZeros
    from prunekit.techniques.pruning.training.pruner import Pruner as Pruner
    from prunekit.techniques.quantize.options import QuantizationOptions as QuantizationOptions
    from prunekit.techniques.shrink.channels.groups_report import channel_groups as channel_groups
    from prunekit.techniques.shrink.channels.options import ShrinkOptions as ShrinkOptions
    from prunekit.training_tools import gradients as gradients, loops as loops

_MODULES = {
    "prunekit": (
        "allocations",
        "criteria",
        "errors",
        "patterns",
        "penalties",
        "policies",
        "ranges",
        "reports",
        "schedules",
    ),
    "prunekit.anatomy.cost.cost": ("cost",),
    "prunekit.anatomy.cost.inspection": ("inspect",),
    "prunekit.anatomy.layers.layers": ("register_layer",),
    "prunekit.anatomy.layers.weight_spec": ("WeightSpec",),
    "prunekit.core.training": ("distribution",),
    "prunekit.initialization": ("initializers",),
    "prunekit.operations.choose_bits": ("choose_bits",),
    "prunekit.operations.cluster": ("cluster",),
    "prunekit.operations.distilling": ("distilling",),
    "prunekit.operations.export": ("export",),
    "prunekit.operations.factorize": ("factorize",),
    "prunekit.operations.pack": ("pack", "unpack"),
    "prunekit.operations.prune": ("prune",),
    "prunekit.operations.prune_in_rounds": ("prune_in_rounds",),
    "prunekit.operations.quantization_callback": ("QuantizationCallback",),
    "prunekit.operations.quantization_training": ("Quantizer",),
    "prunekit.operations.quantize": ("quantize",),
    "prunekit.operations.reduce_dimension": ("reduce_dimension",),
    "prunekit.operations.remove_blocks": ("remove_blocks",),
    "prunekit.operations.search": ("search",),
    "prunekit.operations.sensitivity": ("sensitivity",),
    "prunekit.operations.shrink": ("shrink",),
    "prunekit.operations.simplify": ("simplify",),
    "prunekit.recipe.run.runner": ("compress",),
    "prunekit.recipe.settings.schema": ("Recipe",),
    "prunekit.recipe.sweep.sweep": ("sweep",),
    "prunekit.recipe.sweep.workers": ("Jobs",),
    "prunekit.recipe.text.loader": ("load_recipe",),
    "prunekit.techniques.cluster.cluster_callback": ("ClusterCallback",),
    "prunekit.techniques.cluster.options": ("ClusterOptions",),
    "prunekit.techniques.distill.distillation_callback": ("DistillationCallback",),
    "prunekit.techniques.distill.options": ("DistillationOptions",),
    "prunekit.techniques.pruning.masks.options": ("PruningOptions",),
    "prunekit.techniques.pruning.training.callbacks": ("PruningCallback",),
    "prunekit.techniques.pruning.training.keep_zeros": ("KeepZeros",),
    "prunekit.techniques.pruning.training.at_final_sparsity": ("AtFinalSparsity",),
    "prunekit.techniques.pruning.training.pruner": ("Pruner",),
    "prunekit.techniques.quantize.options": ("QuantizationOptions",),
    "prunekit.techniques.shrink.channels.groups_report": ("channel_groups",),
    "prunekit.techniques.shrink.channels.options": ("ShrinkOptions",),
    "prunekit.training_tools": ("gradients", "loops"),
}
# Former names, which still work, with a warning.
_MOVED = {"PolynomialDecay": "schedules.PolynomialDecay"}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = [*sorted(_HOME), "__version__"]
__getattr__, __dir__ = lazy_names(__name__, _HOME, _MOVED)
