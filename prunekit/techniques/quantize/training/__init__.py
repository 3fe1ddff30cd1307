"""Quantization-aware training.

- `fit_watch`: tells that a `fit` left the grids
- `code_lengths`: bits of entropy-coded weights, as a loss
- `learned_ranges`: ranges that are trained
- `training`: trains a model as its file will compute; the next `fit` reuses the trace

Design

Training on integers. `training` runs a training step inside the simulation (`simulated_calls`), with the rounding of
`learned_ranges`: a scale is its calibrated value times exp(v), and v is trained. All v are entries of one variable,
which is split once in each forward pass: an optimizer takes about 25 operations for a variable, however small, and the
time before the first step of a large model is the number of operations that TensorFlow traces. For the same reason
`fake_quantization` has its gradient written out, and a trace contains a call of one shared function for each rounding
(`shared_in_traces`). The variable is a trainable variable of the model while a step is traced or runs, because every
backend takes gradients with respect to these, and JAX no others; `core/training/joined_variables.py` splits its
gradient off before the user's optimizer clips or counts anything, and gives it to an Adam of its own. Summing gradients
up as a side effect of the backward pass was the alternative; JAX has none. On JAX, `StateOfFit` carries the variables
through the state of `fit`. `ScopedFunction` compiles the train and test functions; a function that was traced inside
fewer scopes than now is traced again, so that pruning, which began alone, does not use its former step. Scales at the
start and zero points are variables, too, so on TensorFlow a trace serves the next callback with the same options on the
same model (`StepFunctions`): it takes over the variables that the trace contains, and a former callback that is still
in use gets others. `operations/quantization_callback.py` and `quantization_training` are the doors. Backups
(`core/training/backup_sync.py`) and the hook that runs after all other callbacks (`core/training/last_callback.py`)
serve both callbacks.
"""
