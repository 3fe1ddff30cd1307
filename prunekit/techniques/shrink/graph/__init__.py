"""A model as plain data: changed, cut, and built again.

- `simplify_report`: what was rewritten, what was left and why
- `layer_copies`: layers again from their configs
- `layer_graph`: graphs of calls, and changes of layers
- `graph_builder`: Keras models from such graphs
- `linear_layers`: scales and shifts written into weights
- `folding`: batch normalization into its neighbours
- `adjustments`: constants in other places, approximations
- `constants`: constants of removed channels, into biases
- `kept_statistics`: normalizations over the kept channels
- `rebuild`: a model with fewer channels
"""
