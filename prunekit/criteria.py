"""Criteria: the importance of each weight, or of each channel."""

from prunekit.sparsity.channel_scores import APoZ, BatchNormalizationScale, GeometricMedian, MeanActivation
from prunekit.sparsity.gradient_scores import SNIP, Fisher, GraSP, OptimalBrainDamage, SynFlow, Taylor
from prunekit.sparsity.scores import L2, Criterion, Custom, Magnitude, Movement, Random, Wanda
from prunekit.techniques.pruning.policies.sparsegpt import OutputError, SparseGPT

__all__ = [
    "APoZ",
    "BatchNormalizationScale",
    "Criterion",
    "Custom",
    "Fisher",
    "GeometricMedian",
    "GraSP",
    "L2",
    "Magnitude",
    "MeanActivation",
    "Movement",
    "OptimalBrainDamage",
    "OutputError",
    "Random",
    "SNIP",
    "SparseGPT",
    "SynFlow",
    "Taylor",
    "Wanda",
]
