"""What a model is made of: its layers and weights, its graph, its channels, its costs, its files.

- `records`: reports and sections as plain data
- `layers`: layer types, weights, targets
- `graph`: calls of layers, and symbolic passes
- `channels`: axes that must shrink together
- `cost`: multiply-accumulates, bytes, zeros
- `files`: model files and digests
"""
