"""Gradient tools for unmodified Keras models: per example, products, custom gradients, diagnosis. `pk.gradients`.

The public names are loaded on first use (PEP 562): a module of this folder is imported without the others.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names

if TYPE_CHECKING:
    from prunekit.gradients.black_box_loss import MeasuredLoss
    from prunekit.gradients.custom_gradients import straight_through, with_gradient
    from prunekit.gradients.diagnosis import Diagnosis, WeightGradient, diagnose
    from prunekit.gradients.interception import clipped_by_norm, intercepting
    from prunekit.gradients.jacobian_products import gauss_newton_vp, hvp, jacobian, jvp, vjp
    from prunekit.gradients.partitioned_backward import in_parts
    from prunekit.gradients.per_example_gradients import (
        per_example,
        per_example_norms,
        per_example_square_sums,
        sum_of_squares,
    )
    from prunekit.gradients.rematerialization import recomputing
    from prunekit.gradients.statistics import GradientFigures, GradientStatistics
    from prunekit.gradients.zeroth_order import SPSA, CentralDifferences

__all__ = [
    "CentralDifferences",
    "Diagnosis",
    "GradientFigures",
    "GradientStatistics",
    "MeasuredLoss",
    "SPSA",
    "WeightGradient",
    "clipped_by_norm",
    "diagnose",
    "gauss_newton_vp",
    "hvp",
    "in_parts",
    "intercepting",
    "jacobian",
    "jvp",
    "per_example",
    "per_example_norms",
    "per_example_square_sums",
    "recomputing",
    "straight_through",
    "sum_of_squares",
    "vjp",
    "with_gradient",
]

_MODULES = {
    "prunekit.gradients.black_box_loss": ("MeasuredLoss",),
    "prunekit.gradients.custom_gradients": (
        "straight_through",
        "with_gradient",
    ),
    "prunekit.gradients.diagnosis": (
        "Diagnosis",
        "WeightGradient",
        "diagnose",
    ),
    "prunekit.gradients.interception": (
        "clipped_by_norm",
        "intercepting",
    ),
    "prunekit.gradients.jacobian_products": (
        "gauss_newton_vp",
        "hvp",
        "jacobian",
        "jvp",
        "vjp",
    ),
    "prunekit.gradients.partitioned_backward": ("in_parts",),
    "prunekit.gradients.per_example_gradients": (
        "per_example",
        "per_example_norms",
        "per_example_square_sums",
        "sum_of_squares",
    ),
    "prunekit.gradients.rematerialization": ("recomputing",),
    "prunekit.gradients.statistics": (
        "GradientFigures",
        "GradientStatistics",
    ),
    "prunekit.gradients.zeroth_order": (
        "CentralDifferences",
        "SPSA",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__getattr__, __dir__ = lazy_names(__name__, _HOME)
