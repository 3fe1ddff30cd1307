"""Pruning of trained models.

- `layer_solver`: the new value of one weight
- `one_shot`: plans masks, then solves layer by layer
- `rounds`: sparsities of rounds, and rewinding
- `sensitivity_scan`: one weight pruned at a time
"""
