"""Patterns: the units that are pruned together."""

from prunekit.sparsity.patterns import NM, Block, Channel, Pattern, Unstructured

__all__ = [
    "Block",
    "Channel",
    "NM",
    "Pattern",
    "Unstructured",
]
