"""The calls of a model's layers, real and symbolic.

- `model_graph`: the graph of a Sequential or functional model
- `watching`: observes layer calls while a model runs
- `flow`: which tensors get a gradient
- `example_inputs`: symbolic inputs: declared, from arrays, from shapes
- `tracing`: counts of operations and bytes, from recorded shapes or a symbolic pass
"""
