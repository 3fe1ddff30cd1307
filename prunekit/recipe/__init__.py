"""Recipes: from text to a run.

- `settings`: the fields of a recipe
- `text`: files, positions, grids
- `datasets`: the data of a run
- `state`: model, data and checkpoints of a run
- `steps`: one handler for each kind of step
- `run`: checks, plans, runs
- `start`: first recipes, and models and data that a command names
- `sweep`: a recipe over a grid
"""
