"""Inside `fit` and custom loops.

- `train_function`: the train function, replaced for a while
- `distribution`: training on several replicas: `pk.distribution`
- `update_observer`: weights before and after each update
- `joined_variables`: further variables that train with a model
- `step_counter`: steps of a schedule, from update counts
- `backup_sync`: completes `BackupAndRestore`
- `last_callback`: runs after all other callbacks
- `scoped_callback`: a training inside a scope, in `fit`

Design

Observation of updates. `MaskStore` enforces masks with `patching.around_updates`. The movement criterion
(`techniques/pruning/policies/movement.py`) and `WeightChanges` (`training_tools/loops/weight_changes.py`) use the same
function to read each weight before and after an update. Scopes nest: the pruner enters its own observer last, so that
the observer measures changes after masking. Scopes may be left in any order: `patching.wrapped` keeps one stack per
method, and leaving a scope early discards the traces made in scopes entered after it.
"""
