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
"""
