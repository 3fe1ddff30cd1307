"""The masks of a model: calculated from importances, kept inside every optimizer update.

- `mask_store`: owns the masks, keeps pruned weights at zero
- `dense_store`: masks over values that go on training beside them
- `policy`: the base class of policies
- `options`: the options of a pruning
- `mask_maker`: importance -> units -> exact selection -> mask, of one shape
- `unit_exchange`: masks with a given number of units
- `mask_calculator`: the masks of all targets for a sparsity
- `enforcement_check`: detects loops that bypass the masks
"""
