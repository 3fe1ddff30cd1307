"""Channels: which axes of which weights must shrink together, found by following every call.

- `channel_axes`: channels as numbers, and sizes that depend on them
- `channel_links`: collects which axes belong together
- `channel_calls`: a call whose tensors are described by their axes
- `channel_kernels`: rules of dense layers, convolutions, embeddings
- `channel_normalization`: rules of normalizations
- `channel_recurrent`: rules of recurrent layers and wrappers
- `channel_attention`: rules of attention
- `channel_layers`: rules of the other layers, and the table of all rules
- `channel_blocks`: rules of blocks of pixels
- `channel_operations`: rules of `keras.ops`
- `keras_hub_calls`: what KerasHub's layers call inside
- `recorded_calls`: what happens inside a layer without a graph
- `graph_calls`: calls as plain data that can be rewritten
- `graph_reader`: reads a model as such data
- `channels`: the groups of channels of a model
- `weight_entries`: the entries of a weight that belong to channels
- `channel_order`: the order in which channels are removed
"""
