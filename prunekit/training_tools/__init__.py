"""What serves training and no compression: `pk.gradients` and `pk.loops`.

- `gradients`: gradients of unmodified models
- `loops`: training loops, caches, accumulation

Design

`CachedPrefix` cuts the graph at the end of the frozen layers (`training_tools/loops/graph_split.py`) by calling the
layers above on new inputs: layers are shared, not copied. Stored activations
(`training_tools/loops/activation_cache.py`) have as key a hash of all inputs of their computation, so entries never
become invalid: a changed weight gives another key. Files are checked before they are used, and opened before other
processes can remove them.

`anatomy/graph/watching.py` passes the layer calls of one thread through a function, inside a `with` block. `pk.cost`
counts calls this way, and `training_tools/gradients/layer_capture.py` reads or replaces the output of a layer in a
pass.

Interception, recomputation and measured changes must also act during training. They shadow `call` on the layer
instance, or `apply` on the optimizer instance, because Keras looks up both methods there in every thread and trace.
Functions traced inside such a scope are used only there (`train_function.fresh_functions`): the model gets new compiled
functions, and each `OpenFunction` makes separate traces.

For recomputation, part of a model runs a second time (`training_tools/gradients/repeated_run.py`). A scope records
which variables the first run reads and writes; the second run reads the old values and writes nothing. In a graph each
variable is read once for both runs. TensorFlow's graph optimizer was seen to reorder an update and a second read, which
gave wrong gradients in some traces. The first read comes before every update by data flow, since the loss depends on it
(a test checks the optimised graph). `in_parts` (`training_tools/gradients/partitioned_backward.py`) groups a graph's
calls by the boundary layers that they feed. In a graph, control dependencies run the parts one after the other. XLA
ignores control dependencies, so under XLA an optimization barrier separates the two runs.

A measured loss leaves the graph only through `tf.numpy_function`; its arithmetic is NumPy
(`training_tools/gradients/zeroth_order.py`), and its state (counter of seeds, surrogate, evaluations) belongs to the
loss object.

Per-example gradients (`training_tools/gradients/per_example_pass.py`) need one forward pass. While it runs, layers that
own weights read them as constants (a `keras.StatelessScope` per call), and inputs and outputs of each call are kept.
One backward pass then gives the output gradients. The formulas of `training_tools/gradients/layer_formulas.py` give the
weight gradients as factors (`training_tools/gradients/gradient_factors.py`), whose norm is computed without multiplying
them out. Two calls of a shared layer are treated as one call with twice the uses, so cross terms need no extra code.

Three cases need special handling. If a gradient still reaches a weight, the weight is used outside its layer's call (a
tied matrix): the whole model is then differentiated one example at a time for that weight. A layer called on positions,
with as many positions as examples, looks like a layer called on examples: a first pass with another number of examples
distinguishes the two. Keras's cross-entropies look up the logits behind a softmax, so the loss is computed inside the
watched pass.

A layer without a formula is differentiated alone, one example at a time: inside a `tf.function` by `tf.vectorized_map`
(ten times faster for an LSTM), otherwise by a loop in a graph, because vectorising takes seconds and would be repeated
in every call.
"""
