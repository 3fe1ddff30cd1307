"""Quantization-aware training.

- `fit_watch`: tells that a `fit` left the grids
- `learned_ranges`: ranges that are trained
- `training`: trains a model as its file will compute
- `step_functions`: the next `fit` reuses the trace
"""
