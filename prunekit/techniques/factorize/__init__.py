"""Low rank: two or three layers in the place of one, which together have fewer weights.

- `low_rank`: matrices of low rank
- `forms`: forms of low rank: pairs, and those of convolutions
- `window_forms`: the fit of each form
- `ranks`: forms and ranks for a budget
- `layer_parts`: the layers of each form
- `form_costs`: what the layers of a form compute
- `options`: the options of a factorization
- `factorize_report`: ranks, sizes and errors
- `layer_factors`: the factors of each weight, on data
- `fitting`: the factors of a model, on data, synthetic inputs or none
- `optimizer_slots`: the optimizer's state of the factors
- `new_model`: the model with the new layers
- `rank_choice`: the form and ranks of each layer
- `factorizing`: the whole model
- `dimension`: one dimension of a tensor

Design

A matrix of rank r along the principal directions of a layer's outputs is a matrix of the layer's own shape until the
end: `layer_factors` is one more solver of `core/layerwise/layerwise.py`, so that each layer is fitted to its former
outputs from what the factorized layers before it compute, biases take over means, and batch normalizations follow. One
walk over the data gives the error of every rank of every layer. `layer_parts` then changes the graph of the model
(`techniques/shrink/graph`), and the new model is compared with the old one with the matrices of low rank.

Forms of convolutions. Curves hold the errors of some ranks of "separable" and "tucker" beside all of "channels", so
that one budget chooses forms and ranks; then each layer fits the best choice of each form that costs no more, and takes
the one of the least error. CP decompositions are left out: they diverge, and train badly.
"""
