"""Inside `fit` and custom loops.

- `step_state`: variables that Keras makes while it traces a step
- `train_function`: the train function, replaced for a while
- `distribution`: training on several replicas: `pk.distribution`
- `update_observer`: weights before and after each update
- `joined_variables`: further variables that train with a model
- `step_counter`: steps of a schedule, from update counts
- `backup_sync`: completes `BackupAndRestore`
- `last_callback`: runs after all other callbacks
"""
