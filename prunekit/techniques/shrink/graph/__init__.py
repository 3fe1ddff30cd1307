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

Design

Smaller models. `layer_graph` holds a model as plain data: calls (`anatomy/channels/graph_calls.py`: operation,
arguments, outputs), and for changed layers the entries of the config and the weights that differ.
`anatomy/channels/graph_reader.py` reads the calls, with those inside a layer in the place of the layer where a removal
asks for that; `graph_builder` makes the new model, each layer from its config (`layer_copies`). All removals go this
way: cutting variables in place would leave configs that do not load. `rebuild` changes the sizes that the rules of
channels stated; weights and optimizer slots are cut by the same index maps. Every smaller model is compared with the
model that has zeros in the removed channels before weights are repaired (`verification`;
`anatomy/channels/weight_entries.py` cuts entries and sets them to zero). Of channels whose kernels are zero
(`zero_channels`) the constants are folded into the readers (`constants`). They are not derived from the graph but
observed: the model runs on two inputs, and the product of each reader's rows (`core/statistics/layer_inputs.py`) with
the constant channels is either the same in all rows, hence exact, or an approximation with a known error, whatever lies
in between. An approximated normalization computes with the kept channels during the comparison and the repair, too
(`kept_statistics`), so that a fault is still found. The repair (`repair`) runs on the former model with these zeros, by
`core/layerwise/layerwise.py`, and its values are cut like all others.
"""
