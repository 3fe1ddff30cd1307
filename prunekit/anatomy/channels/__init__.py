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

Design

Channels. `channels` follows the calls of a model and gives every index of every weight axis that a layer creates a
number; numbers that must be kept or removed together are tied, and what cannot be followed ties them to the channel
that stays (`channel_links`: the store; `channel_layers`, `channel_operations`: one rule for each layer type and
operation, by families: `channel_kernels`, `channel_normalization`, `channel_recurrent`, `channel_attention`,
`channel_blocks`). A channel is a connected component of tied numbers, found at once by NumPy at the end; a group holds
the channels that occur in the same axes. So offsets of concatenations, places of a flattened image and gates of a
recurrent layer are index maps without code of their own, and a wrong rule cannot remove half of a channel. A tensor
also carries whether it is zero at removed channels: sums, norms and products over channels are exact only then. What
happens inside a custom layer or a subclassed model is recorded on symbolic tensors (`recorded_calls`); it is replaced
by the layers inside it only where these do all that it does, in training too.

KerasHub's blocks make masks and positions from the length of the sequence as a number, and keep weights outside of
layers. While such a block is recorded, some of its methods are replaced by functions that compute the same from tensors
(`keras_hub_calls`: a cumulative sum of ones counts the positions; a weight becomes that of an Embedding or EinsumDense
which shares the variable). Blocks are not made again with smaller arguments, because many have no argument for what
shrinks (Llama's width of a head is hidden width / heads), or a config that does not load.
"""
