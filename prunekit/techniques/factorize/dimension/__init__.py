"""One dimension of a tensor becomes shorter: (batch, windows, features) -> (batch, windows, fewer).

- `modes`: the principal directions of one dimension
- `dimension_options`: which dimension, and how many entries are left
- `dimension_report`: size, and the error of every size
- `dimension_layers`: the layer that reduces a dimension, and the one that restores it
- `reducing`: directions from data, alone or inside a model, and the model with the layers

Design

The directions are one factor of a higher-order singular value decomposition of the tensor about its means: the other
dimensions stay, so that no window is mixed with another. The mean becomes a bias, so that constant parts cost no
direction.
"""
