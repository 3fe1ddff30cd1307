"""The calls of a model's layers, real and symbolic.

- `model_graph`: the graph of a Sequential or functional model
- `watching`: observes layer calls while a model runs
- `flow`: which tensors get a gradient
- `example_inputs`: symbolic inputs: declared, from arrays, from shapes
- `recorded_graph`: shapes that Keras recorded when the model was made
- `tracing`: a symbolic pass that counts operations and bytes
"""
