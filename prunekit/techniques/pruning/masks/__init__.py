"""The masks of a model: calculated from importances, kept inside every optimizer update.

- `mask_store`: owns the masks, keeps pruned weights at zero
- `dense_store`: masks over values that go on training beside them
- `policy`: the base class of policies
- `options`: the options of a pruning
- `mask_maker`: importance -> units -> exact selection -> mask, of one shape
- `mask_calculator`: the masks of all targets for a sparsity
- `enforcement_check`: detects loops that bypass the masks

Design

Masks are computed by `importance -> pattern.pool -> exact selection -> pattern.expand` (`mask_calculator`,
`mask_maker`) in one of three ways, with equal bits: small weights in the memory of the CPU by NumPy, large weights by
single operations around one compiled selection for all lengths, and patterns or criteria of users by compiled
functions, one trace per layout. Therefore `pk.prune` traces nothing per model. `sparsity/array_ops.py` writes the
arithmetic once for NumPy arrays and tensors, and a test compares the three ways. The k-th largest value is found by
radix selection on the bit pattern (`sparsity/selection.py`): no sort, the same on every device, exact counts, ties
broken by position. Pruned entries have importance -inf and are never kept again, so the set of kept entries never
grows. Weights that are zero when pruning starts count as pruned, so a sparse model never becomes denser.

Steps are counted from the start of pruning, not from the optimizer's first update: a callback on a model that was
trained for 5,000 steps begins its schedule at 0.

Counts are exact with one exception: a weight that would be pruned entirely keeps its best unit (`keep_one`). With a
sparsity per weight, the count of pruned units is reduced. With global ranking, only the result of the selection shows
which weights are entirely pruned. In this case alone, the selection is repeated with the best unit of each weight
ranked first.

Enforcement in `optimizer.apply`. `fit`, `train_on_batch`, custom `train_step`s and tape loops all end in
`optimizer.apply(gradients, variables)`. Inside a scope (`MaskStore.enforcing`) that method is shadowed on the instance:
gradients are masked, the optimizer's own `apply` runs (clipping, momentum, update, weight decay, averages, the user's
constraints), and the weights are masked last. The optimizer's class, config and saved state are untouched. The masking
is traced into the compiled step; masks are variables, so changing them needs no retrace.

The first version used `variable.constraint`. This hook is not sufficient: Keras computes moving averages before
constraints run, and a constraint does not see the gradient, so pruned weights would still contribute to momentum and
clip norms. In `apply`, gradients, averages and constrained weights are all masked at the same place.

Slots. Every per-weight state of the optimizer (moments, averages, accumulated gradients) is cleared at newly pruned
positions when masks change. With zero gradients, the element-wise optimizers of Keras then keep these slots at zero.
For unknown optimizer classes, and for classes whose slots do not start at zero, slots are masked in every update. Ftrl
divides by its accumulator, so pruned entries of the accumulator are set to its initial value and not to zero.

How leaks are detected. A counter on the device counts the enforced updates. `step()` compares the counter with the
updates of the loop. A `tf.function` that was traced too early, or an optimizer that was not passed to the `Pruner`,
raises an error that names the remedy. Before masks change, prunekit checks that pruned positions are zero.
"""
