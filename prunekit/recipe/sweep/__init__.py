"""A recipe over a grid of values.

- `sweep_process`: one point, in a process of its own
- `workers`: processes, and Ray
- `sweep`: `pk.sweep`

Design

Each point of a sweep is a complete recipe (`recipe/text/grid.py`) that runs in its own process (`sweep_process`). The
process reads a pipe that closes when the sweep ends or is killed, and then ends, too. Finished points are found from
their run directories; the sweep has no state file for this. Ray tasks start the same process.
"""
