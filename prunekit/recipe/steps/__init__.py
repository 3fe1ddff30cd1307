"""Handlers: prepare, plan and run the steps of one kind.

- `step_handler`: the base class
- `planned_counts`: counts of final masks, for a plan
- `distillation`: `distill` of steps that train
- `prune_step`: `prune`
- `cluster_step`: `cluster`
- `train_step`: `train`, `finetune`
- `rounds_step`: `rounds`
- `shrink_step`: `shrink`
- `layer_steps`: `remove_blocks`, `simplify`
- `factorize_step`: `factorize`
- `export_step`: `export`
- `integer_files`: integer files that steps write, and their metrics
- `quantize_step`: `quantize`
- `search_step`: `search`
- `expectations`: bounds beside measured values
- `pack_step`: `pack`
- `expect_step`: `expect`

Design

Steps that return another model. `layer_steps` calls `pk.remove_blocks` and `pk.simplify`: names and shapes of the kept
weights stay, so masks are kept by name.

Shrink steps. `shrink_step` calls `pk.shrink` in each round and replaces the workspace's model inside the step, before
the checkpoint of the round; the rows in `RunState.rounds` tell a resumed step whether its round has removed its
channels. Masks are cut with the `cut` that weights are cut with (`techniques/shrink/graph/rebuild.py`), since a report
names neither the inputs of grouped convolutions nor new names of weights. The stand-in comes from the same rounds on
the present magnitudes.

A kind of recipe step is a row of `STEP_KINDS` (`recipe/settings/step_kinds.py`) with a settings class and the place of
a `StepHandler`. `prepare` refuses what cannot run and may return a stand-in for the model that the step will return, so
later steps are prepared on it; `run` works on the `Workspace` (`recipe/state/workspace.py`) and returns a `StepResult`:
model, masks, history, sections. `recipe/run/execution.py` is a loop over handlers. The state that outlives a step,
masks included, is in `RunState`, which a checkpoint saves whole; after a step that replaced the model, the checkpoint
also holds the model's architecture. Masks are held between prune steps by `held_masks.holding`, which needs no
`Pruner`.
"""
