"""Schedules: the sparsity of each optimizer step."""

from prunekit.sparsity.schedules import (
    ConstantSparsity,
    CosineDecay,
    ExponentialDecay,
    LinearDecay,
    MultiStep,
    OneShot,
    PolynomialDecay,
    Schedule,
)

__all__ = [
    "ConstantSparsity",
    "CosineDecay",
    "ExponentialDecay",
    "LinearDecay",
    "MultiStep",
    "OneShot",
    "PolynomialDecay",
    "Schedule",
]
