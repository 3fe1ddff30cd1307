"""Factors between layers that change no output and make rounding finer.

- `channel_scaling`: multiplies the channels of a tensor
- `rescaling`: finds the tensors where that is possible
- `gamma_migration`: factors of normalizations into their readers
- `equalization`: cross-layer equalization
- `awq`: activation-aware factors of input channels
- `activation_scaling`: AWQ for a whole model
"""
