"""What happens at each tensor and weight: observe, round, mark.

- `gptq`: one input after another, the others make up
- `rate`: likewise, with a price for bits
- `rounding`: the seam: what is done while units run
- `linear_units`: a linear layer with rounded weights
- `lstm_units`: an LSTM as its kernel computes it
- `simulation`: a model as its integer file will compute
- `calibration`: grids of tensors from data
- `weight_rounding`: codes of weights

Design

Simulation. `simulation` replaces the `call` of a model, and of the models nested in it, by an interpreter of the units,
so nothing is wrapped or cloned and `fit`, tape loops and `predict` run it. What is done with a tensor or a weight is
decided by a `Rounding`: calibration observes it, `GridRounding` rounds it, and the export marks it. Patching the `call`
of single layers was the alternative; it cannot round between operations inside a layer, nor tell two calls of a layer
apart. Weights are replaced during a call by `core/runtime/variable_values.py`, which hands what is assigned meanwhile
(moving statistics, seeds) on to the variables. A kernel is rounded before the factor of a folded batch normalization:
each output channel has a scale of its own, so the file's grid is the kernel's, times that factor, and in training the
batch normalization runs on batch statistics as ever.
"""
