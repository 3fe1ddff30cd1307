"""Everything that knows tensorflow-model-optimization: its files, its schedules, and its rules of pruning.

The public names are loaded on first use (PEP 562).
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names

if TYPE_CHECKING:
    from prunekit.interop.tfmot.conversion import Converted, convert, read_model

__all__ = ["Converted", "convert", "read_model"]
__getattr__, __dir__ = lazy_names(__name__, dict.fromkeys(__all__, f"{__name__}.conversion"))
