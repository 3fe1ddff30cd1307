"""Pruning while a model trains.

- `targeting`: what will be pruned, by which masks
- `mask_updater`: applies a policy's updates
- `pruner_state`: what an interrupted pruning continues from
- `pruning_notes`: messages at the end of a training
- `held_masks`: given masks in any loop, without a schedule
- `attached_pruners`: no weight is pruned by two Pruners
- `pruner_run`: `PrunerRun`, the state of a pruning, and the reuse of a traced step by the next one
- `pruner`: `Pruner`, for any loop
- `saved_files`: the sparsity of files that `ModelCheckpoint` writes
- `callbacks`: `PruningCallback`
- `keep_zeros`: `KeepZeros`
- `at_final_sparsity`: `AtFinalSparsity`

Design

`KeepZeros` (`keep_zeros`) is a `PruningCallback` with a schedule of sparsity 0 and `keep_zeros`: the zeros at the start
are its masks. So it has the enforcement, the reuse of traces, the checks and the report of the callback, on every
backend. As a context manager it enters `held_masks.holding`. `AtFinalSparsity` passes the ends of epochs to a callback
once `PruningCallback.at_final_sparsity` is True for all of the list.

A second train function in `fit`. `fit` builds its train function before any callback runs, and for a model that was
fitted before, this function is already traced, so changes that a callback makes in `on_train_begin` have no effect. The
callback therefore compiles a train function of its own (`core/training/train_function.py`, `ScopedFunction`), installs
it on the model just before each batch, and removes it when its call begins. A second `fit` of the same model reuses it.
On TensorFlow the function is kept on Keras's own train function, together with the masks that it contains, so a new
callback on the same weights needs no trace (`take_over_trace`); `compile` discards both. A step that changed in any
other way (layers, optimizers, constraints, `trainable`) is traced again. On TensorFlow, Keras creates the optimizer's
slots and the variables of metrics while it traces the first step, and a `tf.function` that creates variables is traced
twice. Before its first call, this function therefore creates them (`train_function.create_step_state`), and is traced
once. This halves the time before the first step of a large model. Between batches the model is unmodified: other
callbacks can save, evaluate, raise or be interrupted, and no clean-up is needed after an exception.

Building a model by a trace. On TensorFlow, `fit` calls its callbacks before an unbuilt model has weights. In this case
the callback also replaces the train function for the first call (`train_function.prepare_next_call`). It traces the
model's `train_step` on the specification of the batches (`core/data/model_building.py`), with optimizers that update
nothing, and then creates its `Pruner`. This trace costs a quarter to a third of tracing the whole step. Masks are not
created inside the first trace of the step itself: at the first update of a GAN's step the weights of the other half do
not exist yet, so names could not be checked before an update. A step that runs eagerly and cannot be traced is run on
the first batch inside a `keras.StatelessScope`, and the batch is put back.

Enforcement after other callbacks. Callbacks listed after `PruningCallback` may write weights in `on_train_end`
(`EarlyStopping` restores the best weights). Keras does not tell a callback which list contains it. `PruningCallback`
finds the list that is calling it, and appends a small callback, which runs last at the start of a batch and in
`on_train_end`.

Sparsity in the logs. One callback at the head of the list, shared by all pruning callbacks of a `fit`, writes
`sparsity` into the logs before any callback reads them. `saved_files` compares the state of `ModelCheckpoint`'s files
on disk before and after each epoch, and so knows the sparsity of the last saved file without patching a Keras class.
`AtFinalSparsity` wraps a callback and passes on the hooks of epochs at the final sparsity; it decides about a batch
when the batch begins, so the order of the callbacks makes no difference. It is added by a new list object, since Keras
iterates over the old list while `set_model` runs.

One pruner for a weight. `attached_pruners` holds weak references to the Pruners that are not finished. A new Pruner of
one of their weights is refused when it is created, and the callbacks check again when training and when each epoch
begins. With two optimizers or two policies, each pruner would otherwise let weights of the other grow back.

`PrunerRun` owns the state of a pruning; `Pruner` is its user interface, and `PruningCallback` tells it of the events of
`fit`. `StepCounter` counts steps from the optimizers' counts, `EnforcementCheck` detects loops that bypass the masks,
`MaskUpdater` applies a policy's updates, `Collectors` collects the statistics that criterion and policy need, and
`PrunerState` is all that an interrupted pruning continues from. A policy defines the schedules and options that it
accepts, the calculator, when an update is due, the update, the scope of a training step, and the end of a training.
Whether a step is an optimizer update or a forward pass is data of the policy (`counts_forward_passes`).
"""
