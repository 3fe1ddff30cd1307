"""First recipes, and models and data that a command names.

- `starting_steps`: steps that pay where a model will run
- `starting_recipe`: a commented recipe: `prunekit init`
- `named_scan`: `prunekit sensitivity`
- `named_evaluation`: `prunekit evaluate`
- `named_export`: `prunekit export`
"""
