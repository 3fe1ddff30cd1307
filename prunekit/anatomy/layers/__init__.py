"""The layers of a model and their weights.

- `counting`: multiply-accumulates of one call
- `weight_spec`: role and axes of one weight
- `layer_rows`: rows of the table of layer types
- `keras_hub_layers`: rows of KerasHub's layers, by class name
- `layers`: THE table of layer types
- `model_weights`: all layers and weights, with readable names
- `targets`: the weights that patterns select, and why others are skipped
- `layer_names`: layers by name, path or number of the call
- `fans`: fan in and fan out of the kept weights
- `linear_kinds`: kinds of layers that multiply by a kernel
"""
