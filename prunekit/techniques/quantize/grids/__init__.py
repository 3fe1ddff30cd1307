"""Uniform affine grids, value = scale * (code - zero point), and how their ranges are chosen.

- `grids`: grids, codes, steps
- `fake_quantization`: rounding with gradients
- `ranges`: extremes, percentile, least squared error
- `histogram`: values that arrive in batches
"""
