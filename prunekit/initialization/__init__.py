"""Initial weights, and how signals spread through a model.

- `signal_report`: outputs and gradients of each layer
- `sampling`: draws values, with fans of the kept weights
- `lsuv`: kernels scaled until outputs have unit variance
- `initializers`: initializers, and reinitialization under masks
"""
