"""The fields of a recipe, without Keras and NumPy.

- `fields`: fractions, names, paths
- `applications`: models of `keras.applications`
- `compile_fields`: optimizer, losses, metrics
- `data_source`: `data`
- `sources`: `model`
- `timing`: durations and schedules
- `step_settings`: settings of the steps
- `rounds_settings`: of `rounds`
- `shrink_settings`: of `shrink`, `remove_blocks`, `simplify`
- `quantize_settings`: of `quantize`
- `step_kinds`: the registry of steps
- `schema`: the recipe
"""
