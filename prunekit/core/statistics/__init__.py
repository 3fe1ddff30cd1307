"""What criteria and policies are told about weights, from training or from data.

- `statistics`: collectors, and who needs which
- `layer_observer`: each layer's output in one pass
- `layer_calls`: layer calls in one pass, and the outputs they lead to
- `channel_statistics`: scales and activations of output units
- `layer_products`: the matrix product behind a kernel
- `layer_inputs`: sums of products of a layer's inputs
- `input_statistics`: norms and Hessians of inputs
- `input_scale`: data that are scaled otherwise than a model expects
- `channel_importance`: importances of whole channels
"""
