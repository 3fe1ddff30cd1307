"""Calibration data and their substitutes.

- `batch_parts`: batches in parts of bounded size
- `moving_statistics`: statistics of batch normalizations on stand-in inputs
- `synthetic_inputs`: random inputs that stand in for data
- `calibration`: batches of inputs and labels, from any form of data
- `model_building`: layers that `fit` builds from the first batch
"""
