"""Runs a model, or the end of it, and measures what a change does.

- `output_error`: the distance of outputs as one number
- `output_metrics`: compiled metrics, from outputs computed elsewhere
- `graph_steps`: a forward pass as a list of steps
- `suffix_runs`: the end of a model, many times
- `weight_scan`: one weight changed at a time
- `baseline`: metrics and outputs before and after

Design

Sensitivity. `graph_steps` flattens a model's graph into calls, `suffix_runs` compiles them in segments between the
weights of a scan, two dozen at most, and keeps the tensors before the present one, `output_metrics` measures loss and
metrics from outputs, `weight_scan` varies one weight at a time. Each technique has a scan that gives it values:
`techniques/pruning/after_training/sensitivity_scan.py` sparsities, `techniques/quantize/bits/bit_scan.py` bits.
`operations/sensitivity.py` owns the folder and its resumption; `sparsity/sensitivity_table.py` reads the rows for those
that choose by them. `sparsity/convex_shares.py` is the least total that the allocations `layer_error` and `sensitivity`
share.

Damage. `baseline` keeps what a model computes on data while an operation changes it; `Baseline.damage()` returns the
change of metrics and outputs as plain data (`anatomy/records/damage.py`), which also decides what is a large loss;
`Baseline.error()` is one number to choose by. The loss and the compiled metrics are measured from the same outputs, so
that each model runs once.
"""
