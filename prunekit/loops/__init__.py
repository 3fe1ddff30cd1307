"""Compiled training loops and tools for custom loops. Public as `pk.loops`.

The public names are loaded on first use (PEP 562), so importing one module of this folder does not import the others.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names

if TYPE_CHECKING:
    from prunekit.loops.cached_prefix import CachedPrefix
    from prunekit.loops.gradient_accumulator import GradientAccumulator
    from prunekit.loops.levenberg_marquardt import LevenbergMarquardt
    from prunekit.loops.tape_loop import TapeLoop
    from prunekit.loops.weight_changes import WeightChanges

__all__ = [
    "CachedPrefix",
    "GradientAccumulator",
    "LevenbergMarquardt",
    "TapeLoop",
    "WeightChanges",
]

_MODULES = {
    "prunekit.loops.cached_prefix": ("CachedPrefix",),
    "prunekit.loops.gradient_accumulator": ("GradientAccumulator",),
    "prunekit.loops.levenberg_marquardt": ("LevenbergMarquardt",),
    "prunekit.loops.tape_loop": ("TapeLoop",),
    "prunekit.loops.weight_changes": ("WeightChanges",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
