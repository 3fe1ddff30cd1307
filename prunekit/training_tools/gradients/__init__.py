"""Gradient tools for unmodified Keras models: per example, products, custom gradients, diagnosis. `pk.gradients`.

- `layer_capture`: a model from or to a layer's activations
- `statistics`: gradients over a training, on the device
- `interception`: gradients at layers' outputs, changed
- `zeroth_order`: estimates from function values
- `black_box_loss`: losses of programs and devices
- `gradient_factors`: factored gradients of one weight
- `layer_formulas`: formulas of linear layers
- `per_example_pass`: one pass that records what they need
- `per_example_gradients`: gradients, norms, squares per example
- `score_statistics`: gradients and Hessian products of criteria
- `example_statistics`: Fisher and Gauss-Newton diagonals
- `jacobian_products`: products with Jacobians and Hessians
- `repeated_run`: a part of a model, twice
- `rematerialization`: layers that run again backward
- `partitioned_backward`: a gradient, part by part
- `custom_gradients`: gradients for functions without one
- `diagnosis`: missing, zero, NaN and badly scaled gradients

The public names are loaded on first use (PEP 562): a module of this folder is imported without the others.
"""

from typing import TYPE_CHECKING

from prunekit.lazy_names import lazy_names

if TYPE_CHECKING:
    from prunekit.training_tools.gradients.black_box_loss import MeasuredLoss as MeasuredLoss
    from prunekit.training_tools.gradients.custom_gradients import (
        straight_through as straight_through,
        with_gradient as with_gradient,
    )
    from prunekit.training_tools.gradients.diagnosis import (
        Diagnosis as Diagnosis,
        WeightGradient as WeightGradient,
        diagnose as diagnose,
    )
    from prunekit.training_tools.gradients.interception import (
        clipped_by_norm as clipped_by_norm,
        intercepting as intercepting,
    )
    from prunekit.training_tools.gradients.jacobian_products import (
        gauss_newton_vp as gauss_newton_vp,
        hvp as hvp,
        jacobian as jacobian,
        jvp as jvp,
        vjp as vjp,
    )
    from prunekit.training_tools.gradients.partitioned_backward import in_parts as in_parts
    from prunekit.training_tools.gradients.per_example_gradients import (
        per_example as per_example,
        per_example_norms as per_example_norms,
        per_example_square_sums as per_example_square_sums,
        sum_of_squares as sum_of_squares,
    )
    from prunekit.training_tools.gradients.rematerialization import recomputing as recomputing
    from prunekit.training_tools.gradients.statistics import (
        GradientFigures as GradientFigures,
        GradientStatistics as GradientStatistics,
    )
    from prunekit.training_tools.gradients.zeroth_order import SPSA as SPSA, CentralDifferences as CentralDifferences


_MODULES = {
    "prunekit.training_tools.gradients.black_box_loss": ("MeasuredLoss",),
    "prunekit.training_tools.gradients.custom_gradients": (
        "straight_through",
        "with_gradient",
    ),
    "prunekit.training_tools.gradients.diagnosis": (
        "Diagnosis",
        "WeightGradient",
        "diagnose",
    ),
    "prunekit.training_tools.gradients.interception": (
        "clipped_by_norm",
        "intercepting",
    ),
    "prunekit.training_tools.gradients.jacobian_products": (
        "gauss_newton_vp",
        "hvp",
        "jacobian",
        "jvp",
        "vjp",
    ),
    "prunekit.training_tools.gradients.partitioned_backward": ("in_parts",),
    "prunekit.training_tools.gradients.per_example_gradients": (
        "per_example",
        "per_example_norms",
        "per_example_square_sums",
        "sum_of_squares",
    ),
    "prunekit.training_tools.gradients.rematerialization": ("recomputing",),
    "prunekit.training_tools.gradients.statistics": (
        "GradientFigures",
        "GradientStatistics",
    ),
    "prunekit.training_tools.gradients.zeroth_order": (
        "CentralDifferences",
        "SPSA",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}
__all__ = sorted(_HOME)
__getattr__, __dir__ = lazy_names(__name__, _HOME)
