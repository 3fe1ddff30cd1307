"""Pruning of trained models.

- `layer_solver`: the new value of one weight
- `one_shot`: plans masks, then solves layer by layer
- `rounds`: sparsities of rounds, and rewinding
- `sensitivity_scan`: one weight pruned at a time

Design

Rounds with rewinding. `rounds`: a `RewindPoint` holds the values of weights and optimizers; `prune_in_rounds` calls the
user's training function inside `holding`, so no loop needs a callback. The recipe step `rounds`
(`recipe/steps/rounds_step.py`) runs the pruning of `prune` steps between calls of `Workspace.fit`. The rewind point is
part of the checkpoints, and a checkpoint follows each pruning.
"""
