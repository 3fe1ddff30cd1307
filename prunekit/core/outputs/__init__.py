"""Runs a model, or the end of it, and measures what a change does.

- `output_error`: the distance of outputs as one number
- `output_metrics`: compiled metrics, from outputs computed elsewhere
- `graph_steps`: a forward pass as a list of steps
- `suffix_runs`: the end of a model, many times
- `weight_scan`: one weight changed at a time
- `baseline`: metrics and outputs before and after
"""
