"""The fields of a recipe, without Keras and NumPy.

- `fields`: fractions, names, paths
- `applications`: models of `keras.applications`
- `compile_fields`: optimizer, losses, metrics
- `data_source`: `data`
- `sources`: `model`
- `timing`: durations and schedules
- `step_base`: the base class of the settings of steps; bounds
- `distill_settings`: `distill` of steps that train
- `shrink_settings`: of `shrink`, `remove_blocks`, `simplify`
- `factorize_settings`: of `factorize`
- `step_settings`: of `train`, `finetune`, `prune`
- `rounds_settings`: of `rounds`
- `cluster_settings`: of `cluster`
- `quantize_settings`: of `quantize`
- `search_settings`: of `search`
- `export_settings`: of `export`, `expect`
- `step_kinds`: the registry of steps
- `schema`: the recipe

Options of operations are fields again here, and not made from the options classes: a field takes the plain values of a
document and refuses them at their place in the file, an option takes objects, too, so that name and default are all
that they share, and these are held equal by `tests/test_vocabulary.py`.
"""
