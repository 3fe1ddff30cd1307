"""Distillation: a model learns from the outputs of a teacher, in the training step that compresses it.

- `labels`: labels and weights of examples, one part for each output
- `losses`: differences between the outputs of teacher and student
- `options`: the options of a distillation
- `output_kinds`: logits, probabilities or values
- `fingerprints`: 128 bits for each example
- `output_cache`: the teacher's outputs for examples that come back
- `feature_maps`: outputs of inner layers, and projections between them
- `teacher`: the teacher inside a training step
- `distill_report`: what was learned
- `training`: adds the distillation loss to training steps
- `distillation_callback`: does so in `fit`

Design

`training` wraps `model.compute_loss`, through which the training steps of Keras pass on every backend, and inside it
the compiled loss. So regularization losses, weights of examples, metrics and a step of the user's own stay as they are,
validation measures the plain loss, and the scopes of pruning, clusters and quantization lie around the same call of the
model: the student is what they make of it. A student is called once in a step, also for the outputs of its layers.

The teacher is another model, so that no scope of the student's reaches it. It runs inside the step: a step of
TensorFlow takes its batches inside the compiled function, where a callback cannot add anything to them. On JAX its
weights are part of the step's state (`core/training/joined_variables.py`), as copies: compiled steps take the memory of
their arguments, and an interrupted one would lose the weights of the user's model.

Kept outputs must be those of the very example. Numbers of examples would do if `fit` told them: it shuffles them, and
data sets have none. Each example is therefore found by a fingerprint of its inputs, 128 bits, which costs some passes
over the batch. The first epoch records; the host sorts the fingerprints at its end, and later steps find their rows by
binary search, in a trace of its own (`variant`). A batch with an example that is not found is computed, in the same
trace. If fewer than half of an epoch's examples are found, as under augmentation, nothing is looked up any more.
Outputs are rounded to float16 in the first epoch too, and the kept ones are saved with the state of a training: so an
interrupted training ends with the weights of an uninterrupted one.
"""
