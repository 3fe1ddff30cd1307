"""Changes a model layer by layer, each fitted to the outputs that it had.

- `calibration_walk`: a model twice over the data: as it was, and as it is
- `inner_inputs`: inputs of layers inside one call
- `layer_fit`: the fit of one layer
- `layerwise`: the walk over all layers
- `trials`: several ways tried, the nearest outputs taken

Design

Pruning without training. `calibration_walk` runs a model call by call over all calibration batches, as it was and as it
is; the new values are read through a `keras.StatelessScope` and not written before the end. The columns of tensors are
kept, or computed again whenever they are read: outputs that would exceed `memory`, and are larger than what they
replace, are not kept. `inner_inputs` observes the layers inside one call, for the model as it was in one pass.
`layerwise` solves one weight after another on that walk, by a solver that a technique brings
(`techniques/pruning/after_training/layer_solver.py`: mask, fit, bias; `techniques/shrink/channels/repair.py`), with the
fit of `layer_fit`, and moves batch-normalisation statistics. It runs inside a policy, so that masks, counts, reports
and checks are those of every pruning. `layer_error` shares the sparsity by the errors that the Hessians predict.
"""
