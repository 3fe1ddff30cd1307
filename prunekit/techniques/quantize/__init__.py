"""Integers: weights and tensors on grids, after training and in training.

- `grids`: grids and ranges
- `placement`: which tensors are rounded
- `rescaling`: channels multiplied by factors
- `rounding`: codes of weights, simulation, calibration
- `options`: the options of a quantization
- `targeting`: the weights and layers that patterns select
- `report_pictures`: pictures of a report, by reference
- `quantization_report`: bits, ranges, what stays in floating point
- `quantization_state`: a model on its grids
- `preparation`: model, placement and arithmetic of a quantization
- `after_training`: ranges, rescaling and rounding of a trained model
- `bits`: bits for each weight
- `training`: quantization-aware training

Design

After training. `after_training` selects (`targeting`), places, equalizes (`equalization` on the channels that
`rescaling` finds, with the arithmetic of `channel_scaling`), scales by activations (`activation_scaling`, the same
channels and other factors), rounds and calibrates, in this order; values are assigned at the end of each part and taken
back if a later part fails. Neither kind of factors divides a weight that lies on its grid: rounding moves ranges, so a
second equalization would find other factors. GPTQ is the arithmetic of SparseGPT with a rounding in the place of the
zero (`reconstruct` in `sparsity/reconstruction.py`, `gptq`), and `WeightRounder` is one more solver of
`core/layerwise/layerwise.py`, which walks the model and corrects biases and moving statistics. With `sparsity`,
`OneShotPruning` runs before everything else; the rounding keeps its zeros. `operations/quantize.py` is the door: it
adds the file, and keeps what the simulation computed for the report, so that the export compares the file with it as
long as no weight changes.

What the data say. Calibration also keeps the extremes of each tensor by what computes it (`spans`): one value, or few
steps of a grid that larger tensors share. `core/statistics/input_scale.py` compares the data with the statistics of the
first batch normalization and with preprocessing layers, before weights change. Without data,
`core/data/synthetic_inputs.py` makes inputs for `OneShotPruning`, the repair of a removal, the rounding of weights
alone and the comparison of exported files; `core/data/moving_statistics.py` lets batch normalizations normalize them
where they would not. The doors measure the damage on `core/outputs/baseline.py`, in the simulation. `fit_watch` shadows
`fit` on the instance until the next training: Keras has no hook at the end of a `fit` without callbacks.
"""
