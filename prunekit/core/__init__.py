"""The training core: what runs on the device inside or around a training step, on data, or on each layer.

- `runtime`: backend, compilation, patching, state
- `data`: calibration data, and inputs that stand in for them
- `training`: train functions, counters, replicas, backups
- `outputs`: what a change does to outputs and metrics
- `statistics`: what criteria are told about weights and channels
- `layerwise`: one layer after another, each fitted to its former outputs

Design

`core/runtime/backend.py` holds the training operations that differ between backends. `core/runtime/compilation.py`
compiles functions for the backend, `core/runtime/patching.py` shadows and wraps methods of single objects,
`core/runtime/optimizers.py` finds optimizers in models and in other optimizers, and `core/runtime/environment.py`
describes the machine (`prunekit doctor` prints this). A training step is an `OpenFunction`, which has one trace for all
batch sizes: masks, steps and counters are variables, and nothing is read back to the host inside. `TapeLoop`,
`GradientAccumulator` and `LevenbergMarquardt` (`pk.loops`) use `OpenFunction`. A `TapeLoop` runs the operations of
Keras's train step in the same order, so that the weights are bit-identical. It uses the same `Pruner` as a user's own
loop.
"""
