"""Allocations: one overall sparsity, distributed over the weights."""

from prunekit.sparsity.allocation import ERK, LAMP, Allocation, Global, Uniform
from prunekit.sparsity.sensitivity_allocation import SensitivityAllocation
from prunekit.techniques.pruning.policies.layer_error import LayerErrorAllocation

__all__ = [
    "Allocation",
    "ERK",
    "Global",
    "LAMP",
    "LayerErrorAllocation",
    "SensitivityAllocation",
    "Uniform",
]
