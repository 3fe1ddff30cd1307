"""Pruning: masks, their updates on a schedule, and their enforcement.

- `masks`: the masks, and how they are calculated and kept
- `policies`: how masks change
- `training`: in `fit` and in loops of your own
- `after_training`: at once, layer by layer
"""
