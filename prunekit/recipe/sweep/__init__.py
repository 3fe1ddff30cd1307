"""A recipe over a grid of values.

- `sweep_process`: one point, in a process of its own
- `workers`: processes, and Ray
- `sweep`: `pk.sweep`
"""
