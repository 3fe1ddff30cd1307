"""The training core: what runs on the device inside or around a training step, on data, or on each layer.

- `runtime`: backend, compilation, patching, state
- `data`: calibration data, and inputs that stand in for them
- `training`: train functions, counters, replicas, backups
- `outputs`: what a change does to outputs and metrics
- `statistics`: what criteria are told about weights and channels
- `layerwise`: one layer after another, each fitted to its former outputs
"""
