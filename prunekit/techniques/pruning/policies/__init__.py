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

Design

Gradual N:M. `structure_decay`: a policy whose calculator has one `MaskCalculator` per pattern k:M between M:M and N:M,
and whose schedule is rounded down to the sparsities of these patterns.

Masks that move. `regrow`: each update prunes as "gradual" does and then exchanges units (`ArrayMaskMaker`). RigL's
gradient is a statistic from calibration data, so that an ordinary step pays nothing and every backend has it; the
current batch's gradient inside the compiled step would need a copy of all gradients, or a branch, in each step.
`alternating` (AC/DC) only turns a schedule into phases. `straight_through` brings its own store of masks
(`MaskPolicy.store`): `dense_store` holds the values of pruned weights and exchanges them with the model's around each
update, so that everything else, leak checks included, sees a sparse model.
"""
