"""What criteria and policies are told about weights, from training or from data.

- `statistics`: collectors, and who needs which
- `layer_observer`: each layer's output in one pass
- `layer_calls`: layer calls in one pass, and the outputs they lead to
- `channel_statistics`: scales and activations of output units
- `layer_products`: the matrix product behind a kernel
- `layer_inputs`: sums of products of a layer's inputs
- `input_statistics`: norms and Hessians of inputs
- `input_scale`: data that are scaled otherwise than a model expects
- `channel_importance`: importances of whole channels

Design

A criterion (`sparsity/gradient_scores.py`, `channel_scores`) is a few lines of arithmetic on statistics. Derivatives of
the loss are collected by `training_tools/gradients/score_statistics.py` on every backend
(`core/runtime/differentiation.py`: the gradient of a scalar function of tensors), those of single examples by
`training_tools/gradients/example_statistics.py` from the per-example pass. The values to differentiate at are passed to
the model through a `keras.StatelessScope`, so no collector writes a weight. `core/runtime/model_function.py` compiles
these passes once for a training, and again after `compile` or a change of `trainable`. `layer_calls` follows a layer's
output by the identity of tensors to its batch normalisation and activation function.

The matrix product of a layer. `layer_products` states what each kernel multiplies: rows of inputs times a matrix, per
group, for every layer type in one place; its test compares rows times matrix with the layer's own output.
`layer_inputs` observes the inputs of a pass and sums their products (recurrent layers run step by step then, so that
their cells are seen), `input_statistics` makes the statistics "input_norm" and "hessian" of them, and
`sparsity/reconstruction.py` holds the arithmetic (NumPy: one factorization, then matrix products, for all groups of a
layer at once; float32 where only errors are wanted). Of a layer with many outputs, XᵀY is (XᵀX) W, with X before and
after the changes: two products of the rows serve all outputs. Quantization reads the same Hessians.
"""
