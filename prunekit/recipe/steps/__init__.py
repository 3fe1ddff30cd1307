"""Handlers: prepare, plan and run the steps of one kind.

- `step_handler`: the base class
- `train_step`: `train`, `finetune`
- `planned_counts`: counts of final masks, for a plan
- `prune_step`: `prune`
- `rounds_step`: `rounds`
- `shrink_step`: `shrink`
- `layer_steps`: `remove_blocks`, `simplify`
- `export_step`: `export`
- `quantize_step`: `quantize`
- `expectations`: bounds beside measured values
- `expect_step`: `expect`
"""
