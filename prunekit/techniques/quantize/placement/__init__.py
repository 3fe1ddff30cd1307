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
"""
