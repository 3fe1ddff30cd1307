"""Policies, the criteria and allocations that read data, and the choice for "auto".

- `movement`: the movement of weights in training
- `sparsegpt`: criteria from Hessians: SparseGPT, output error
- `layer_error`: allocation by the errors of layers' outputs
- `gradual`: masks that only shrink
- `choices`: criterion and allocation for "auto"
- `channel_groups`: whole channels, in every weight
- `structure_decay`: N:M by way of (M-1):M
- `regrow`: RigL and SET
- `alternating`: AC/DC
- `straight_through`: pruned weights that go on training
"""
