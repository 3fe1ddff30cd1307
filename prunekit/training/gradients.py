"""Gradients of any Keras model as it is: by example, products, derivatives, diagnosis. Public as `pk.gradients`."""

from prunekit.training.derivatives import straight_through, with_gradient
from prunekit.training.diagnosis import Diagnosis, WeightGradient, diagnose
from prunekit.training.gradient_estimates import SPSA, CentralDifferences
from prunekit.training.gradient_statistics import GradientFigures, GradientStatistics
from prunekit.training.interception import clipped_by_norm, intercepting
from prunekit.training.measured import MeasuredLoss
from prunekit.training.parts import in_parts
from prunekit.training.per_example import per_example, per_example_norms, per_example_square_sums, sum_of_squares
from prunekit.training.products import gauss_newton_vp, hvp, jacobian, jvp, vjp
from prunekit.training.recomputation import recomputing

__all__ = [
    "SPSA",
    "CentralDifferences",
    "Diagnosis",
    "GradientFigures",
    "GradientStatistics",
    "MeasuredLoss",
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
