"""Integers: weights and tensors on grids, after training and in training.

- `grids`: grids and ranges
- `placement`: which tensors are rounded
- `rescaling`: channels multiplied by factors
- `rounding`: codes of weights, simulation, calibration
- `options`: the options of a quantization
- `targeting`: the weights and layers that patterns select
- `report_pictures`: pictures of a report, by reference
- `quantization_report`: bits, ranges, what stays in floating point
- `quantized_model`: a model on its grids
- `preparation`: model, placement and arithmetic of a quantization
- `after_training`: ranges, rescaling and rounding of a trained model
- `bits`: bits for each weight
- `training`: quantization-aware training
"""
