"""Pruning while a model trains.

- `mask_updater`: applies a policy's updates
- `pruner_state`: what an interrupted pruning continues from
- `pruning_notes`: messages at the end of a training
- `held_masks`: given masks in any loop, without a schedule
- `targeting`: what will be pruned, by which masks
- `attached_pruners`: no weight is pruned by two Pruners
- `pruner`: `Pruner`, for any loop
- `trace_reuse`: the next callback reuses the traced step
- `saved_files`: the sparsity of files that `ModelCheckpoint` writes
- `callbacks`: `PruningCallback`
- `keep_zeros`: `KeepZeros`
- `once_sparse`: `OnceSparse`
"""
