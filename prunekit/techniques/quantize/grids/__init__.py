"""Uniform affine grids, value = scale * (code - zero point), and how their ranges are chosen.

- `grids`: grids, codes, steps
- `fake_quantization`: rounding with gradients
- `ranges`: extremes, percentile, least squared error
- `histogram`: values that arrive in batches

Design

Integers. `grids`: a grid always has zero as a value, so pruned weights and padding stay exact. `ranges` chooses ranges
from a `Sample`, which is a weight with one row for each scale, or the bins of `histogram`, into which activations are
counted batch by batch. Ranges are calculated in NumPy, because they are wanted once; codes and `fake_quantization` work
on tensors of every backend. Arithmetic is written with `where` in the place of `clip`, whose gradient JAX and PyTorch
halve at the ends of a range.

Groups of inputs. A `Granularity` names the axes whose indices have scales of their own, and the size of groups among
the entries that these axes leave together, in the order of the array. For every kernel this is the order of the rows of
its matrix product (`core/statistics/layer_products.py`; a test compares them), so GPTQ and AWQ need no second
definition. `units` decides per weight, and everything else (simulation, trained scales, report, bytes, files) reads the
granularity of the weight.
"""
