"""Pruning for Keras 3: a pruned weight stays exactly zero, in every training loop and in the exported file.

The public names are loaded on first use (PEP 562): `import prunekit` imports neither Keras nor TensorFlow.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prunekit.anatomy.cost import Cost, cost
    from prunekit.anatomy.inspection import Report, inspect
    from prunekit.anatomy.layers import WeightSpec, register_layer
    from prunekit.delivery.export import export
    from prunekit.delivery.signal_plot import signal_picture
    from prunekit.delivery.sweeps import SweepReport
    from prunekit.recipe.loader import RecipeError, load_recipe
    from prunekit.recipe.runner import ExpectationFailed, Result, compress
    from prunekit.recipe.schema import Recipe
    from prunekit.recipe.sweep import sweep
    from prunekit.recipe.workers import Jobs
    from prunekit.sparsity.allocation import ERK, Global, Uniform
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
    from prunekit.sparsity.scores import L2, Custom, Magnitude, Movement, Random
    from prunekit.training import distribution, gradients, initializers, loops
    from prunekit.training.callbacks import PruningCallback
    from prunekit.training.masking import LeakError
    from prunekit.training.pruner import Pruner, prune

    __version__: str

__all__ = [
    "Block",
    "Channel",
    "ConstantSparsity",
    "CosineDecay",
    "Cost",
    "Custom",
    "ERK",
    "ExpectationFailed",
    "ExponentialDecay",
    "Global",
    "Jobs",
    "L2",
    "LeakError",
    "LinearDecay",
    "Magnitude",
    "Movement",
    "MultiStep",
    "NM",
    "OneShot",
    "PolynomialDecay",
    "Pruner",
    "PruningCallback",
    "Random",
    "Recipe",
    "RecipeError",
    "Report",
    "Result",
    "SweepReport",
    "Uniform",
    "Unstructured",
    "WeightSpec",
    "__version__",
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
    "register_layer",
    "signal_picture",
    "sweep",
]

_MODULES = {
    "prunekit.anatomy.cost": ("Cost", "cost"),
    "prunekit.anatomy.inspection": ("Report", "inspect"),
    "prunekit.anatomy.layers": ("WeightSpec", "register_layer"),
    "prunekit.delivery.export": ("export",),
    "prunekit.delivery.signal_plot": ("signal_picture",),
    "prunekit.delivery.sweeps": ("SweepReport",),
    "prunekit.recipe.loader": ("RecipeError", "load_recipe"),
    "prunekit.recipe.runner": ("ExpectationFailed", "Result", "compress"),
    "prunekit.recipe.schema": ("Recipe",),
    "prunekit.recipe.sweep": ("sweep",),
    "prunekit.recipe.workers": ("Jobs",),
    "prunekit.sparsity.allocation": ("ERK", "Global", "Uniform"),
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
    "prunekit.sparsity.scores": ("Custom", "L2", "Magnitude", "Movement", "Random"),
    "prunekit.training": ("distribution", "gradients", "initializers", "loops"),
    "prunekit.training.callbacks": ("PruningCallback",),
    "prunekit.training.masking": ("LeakError",),
    "prunekit.training.pruner": ("Pruner", "prune"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _version()
    elif name in _HOME:
        home = importlib.import_module(_HOME[name])
        # A folder's public module is no attribute of it before it is imported.
        value = importlib.import_module(f"{home.__name__}.{name}") if hasattr(home, "__path__") else getattr(home, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(__name__)
    except PackageNotFoundError:
        # A source checkout on sys.path without an installation.
        return "0+unknown"
