"""Low rank: two layers in the place of one, which together have fewer weights.

- `low_rank`: matrices of low rank
- `ranks`: ranks for a budget
- `layer_pairs`: the two layers
- `options`: the options of a factorization
- `factorize_report`: ranks, sizes and errors
- `layer_factors`: the factors of each weight, on data
- `fitting`: the factors of a model, on data, synthetic inputs or none
- `optimizer_slots`: the optimizer's state of the factors
- `new_model`: the model with pairs of layers
- `rank_choice`: the rank of each layer
- `factorizing`: the whole model
- `dimension`: one dimension of a tensor

Design

A matrix of rank r along the principal directions of a layer's outputs is a matrix of the layer's own shape until the
end: `layer_factors` is one more solver of `core/layerwise/layerwise.py`, so that each layer is fitted to its former
outputs from what the factorized layers before it compute, biases take over means, and batch normalizations follow. One
walk over the data gives the error of every rank of every layer. `layer_pairs` then changes the graph of the model
(`techniques/shrink/graph`), and the new model is compared with the old one with the matrices of low rank.
"""
