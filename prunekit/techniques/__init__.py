"""Compression techniques, in this order; one imports at most from those before it.

- `pruning`: masks
- `shrink`: removal of channels and layers
- `quantize`: integers
- `cluster`: few values, shared by many weights
- `factorize`: layers of low rank in the place of one
- `distill`: a teacher's outputs as a loss
"""
