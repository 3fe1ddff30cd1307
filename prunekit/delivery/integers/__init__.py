"""Integer files: the converter is given marks, then each operation gets its integer kernel.

- `integer_weights`: constants on grids as integers
- `integer_kernels`: what LiteRT's kernels compute, since which versions
- `integer_units`: finds the layers of a model in its file
- `integer_io`: integer inputs and outputs
- `integer_tensors`: tensors that became integers
- `integer_constants`: weights, biases and operands
- `integer_lstm`: the LSTM of LiteRT
- `integer_file`: float operations -> integer operations
- `integer_sparsity`: sparse kernels
- `integer_products`: products in the form of one operation
- `integer_export`: converts with the scales of a simulation
- `integer_comparison`: every tensor beside the simulation
- `integer_report`: size, differences, tensors
- `integer_writing`: writes, runs, compares
- `keras_integers`: Keras's own int8 and int4 layers

Design

Keras files. `keras_integers` copies the model with the graph builder of `techniques/shrink`, and hands Keras's own int8
layers our codes and scales through its public quantizer; layers inside which Keras would lose them are opened. Its int4
layers with groups take no quantizer: their variables are assigned, with zero points of 0.

Integer files. `integer_export` traces the simulation with a named fake-quantization operation for each rounding, and
has it converted without an order to quantize. The result holds pairs of QUANTIZE and DEQUANTIZE with everything between
them folded and fused; `integer_file` gives the operations between such pairs integers to read and to write
(`integer_tensors`), on the `LiteRTGraph` of `litert_graph`. `integer_products` writes the products of dilated
convolutions and of EinsumDense, and those of a Dense layer with more than two axes, in the forms that LiteRT computes
with one operation, so that no tensor without a range, and no computed shape, lies inside. Transposed convolutions
compute blocks of pixels as channels (`techniques/quantize/placement/subpixels.py`), since TRANSPOSE_CONV wants the
shape of its results, which is not known before a run with an open batch size: with a constant shape, LiteRT's own
kernels refuse other batch sizes than that of the shape, and only XNNPACK computes them. Without padding there are more
blocks than inputs, and a STRIDED_SLICE cuts the last; with stride 1 the result is one convolution. TRANSPOSE_CONV is
left to strides of different lengths, tensors of 16 bits and kernels that would grow by more than 4,096 entries. One
convolution computes all pixels where that is smallest; its kernel has zeros for the pixels that do not read an input, 7
of 16 for windows of 3x3 and stride 2. Elsewhere pixels that read the same inputs have a convolution of their own,
without zeros, and a CONCATENATION joins them: 1.4 kB more of operations and tensors, so the choice is made by counted
bytes. Between 32 and 16 channels and above, several convolutions are also as fast as one or faster, by up to 40 %;
TRANSPOSE_CONV takes 1.4 to 6 times as long as the form taken with a fixed batch size, and 4 to 17 times with an open
one. `integer_constants` gives such convolutions the scales of one kernel. `litert_reshapes` removes reshapes that undo
one another, keeps sequences between convolutions as images of one row, and gives reshapes with an open batch size
constant shapes with -1. `integer_constants` rounds weights, biases and operands. The converter can quantize too, but
refuses a scale for each output of a Dense layer ("mismatched quantized axes"), leaves weights alone in floating point,
and writes a softmax that does not load if its range is not the prescribed one. Scales of weights are found again from
the folded values (`grid_holding`): the weights lie on grids already, and what the converter folds into them multiplies
whole outputs. `integer_weights` stores the constants of float operations as integers with a DEQUANTIZE; codes of groups
with a DEQUANTIZE, a MUL by their scales and a RESHAPE. Every file is run in a process of its own (`tensor_probe`), and
the simulation continues after each tensor with what the file computed (`integer_comparison`): no tensor may be more
than one step apart. Each unit is traced in a scope of names with its number, by which `integer_units` finds the unit of
an operation in the file: its normalizations become depthwise convolutions (`litert_folding`), constants are rounded
where the simulation rounds them, and `skipped` names layers as the report does. Operations that the converter has
merged, such as two equal ReLUs, are split again if their results lie on different grids. The table of an Embedding
needs nothing from the simulation: a rounded row is a row of the rounded table, so a GATHER before a QUANTIZE reads a
table that is stored on the grid of the QUANTIZE. `integer_kernels` is the table of LiteRT's kernels for tensors of 8
and of 16 bits: which operations they compute, the versions by which older runtimes refuse them, and how many steps
kernels of 16 bits may be off, with the derivation. Fake quantization of 16 bits is exactly our grid with
`narrow_range`; the converter writes 8 bits for it, which the rewriter replaces with the grid of the mark.
"""
