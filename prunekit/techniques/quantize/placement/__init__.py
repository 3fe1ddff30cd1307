"""Which tensors of a model are rounded, as in LiteRT's integer files.

- `text_inputs`: lookups of texts stay outside
- `rules`: how LiteRT's integer kernels round
- `form_operations`: operations that Keras does not have
- `recurrent_forms`: recurrent layers as integer operations
- `integer_forms`: other layers as operations that each have a kernel
- `units`: calls that one kernel computes
- `placement`: rounded tensors, and which share a grid
- `subpixels`: transposed convolutions as convolutions
- `spans`: tensors that span few steps of a shared grid
- `stored_bytes`: bytes of weights in a file

Design

Where tensors are rounded. `units` groups the calls of a model's graph into units, each of which one integer kernel of
LiteRT computes: a layer, the batch normalization folded into it, a ReLU. `placement` walks the units and gives every
tensor between them a `SharedGrid`: one of its own, one that it shares with the inputs (pooling, concatenation,
padding), one that the kernel prescribes (softmax), or none, where there is no integer kernel. `rules` is the only table
of these rules. Layers without a rule are opened, as for the removal of channels, unless a mask of Keras passes through
them. With `full_integer`, `integer_forms` writes layers that are known to have no kernel, and attention, as operations
that have one; placement, simulation, training and files then treat these as those of the user. A form raises
`NoIntegerForm` for a way of calling that it does not cover, and the reason is that of the refusal. After training,
`gamma_migration` moves factors and offsets of normalizations into the products that read them, on the tensors that
`rescaling` finds, and the model is placed again without them; a training keeps them, since it moves them.
`recurrent_forms` writes recurrent layers so: one `FusedLstm`, or the operations of each step, whose results share a
`SharedGrid` because the steps call the same operation objects. A step of a loop in the file would be smaller, but no
kernel that LiteRT hands to XNNPACK runs inside of a loop. `lstm_units` simulates the fused kernel; the export converts
a product of the same shape in its place, and `integer_lstm` writes the operation of LiteRT there, with operations that
clear the states which the kernel keeps between calls.
"""
