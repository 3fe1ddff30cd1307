"""Errors of prunekit's own; all other errors are Python's."""

from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.recipe.run.runner import ExpectationError
from prunekit.recipe.text.loader import RecipeError
from prunekit.techniques.pruning.masks.mask_store import LeakError

__all__ = [
    "ExpectationError",
    "IntegerExportError",
    "LeakError",
    "RecipeError",
]
