"""Compiled training loops and tools for custom loops: `pk.loops`.

- `weight_changes`: how much updates change weights
- `gradient_accumulator`: averages of micro-batches
- `levenberg_marquardt`: second-order steps
- `activation_cache`: arrays by key, in memory or files
- `graph_split`: a graph, cut at its frozen part
- `cached_prefix`: activations of the frozen part
- `tape_loop`: a compiled step on `tf.GradientTape`

The public names are loaded on first use (PEP 562): a module of this folder is imported without the others.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names

if TYPE_CHECKING:
    from prunekit.training_tools.loops.cached_prefix import CachedPrefix as CachedPrefix
    from prunekit.training_tools.loops.gradient_accumulator import GradientAccumulator as GradientAccumulator
    from prunekit.training_tools.loops.levenberg_marquardt import LevenbergMarquardt as LevenbergMarquardt
    from prunekit.training_tools.loops.tape_loop import TapeLoop as TapeLoop
    from prunekit.training_tools.loops.weight_changes import WeightChanges as WeightChanges


_MODULES = {
    "prunekit.training_tools.loops.cached_prefix": ("CachedPrefix",),
    "prunekit.training_tools.loops.gradient_accumulator": ("GradientAccumulator",),
    "prunekit.training_tools.loops.levenberg_marquardt": ("LevenbergMarquardt",),
    "prunekit.training_tools.loops.tape_loop": ("TapeLoop",),
    "prunekit.training_tools.loops.weight_changes": ("WeightChanges",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
