"""What happens at each tensor and weight: observe, round, mark.

- `gptq`: one input after another, the others make up
- `rounding`: the seam: what is done while units run
- `linear_units`: a linear layer with rounded weights
- `lstm_units`: an LSTM as its kernel computes it
- `simulation`: a model as its integer file will compute
- `calibration`: grids of tensors from data
- `weight_rounding`: codes of weights
"""
