"""Smaller models with the same inputs and outputs.

- `graph`: models as data that can be rewritten and built again
- `channels`: removal of channels
- `layers`: removal of layers and blocks
"""
