"""Clusters: weights of few different values, shared by many entries.

- `kmeans`: the centroids of numbers
- `codebooks`: the centroids of a kernel
- `weight_clustering`: the weights of a layer on centroids
- `options`: the options of a clustering
- `cluster_report`: values, bytes and errors of each weight
- `after_training`: a trained model on centroids
- `learned_centroids`: centroids that are trained
- `training`: trains a model on centroids
- `cluster_callback`: does so in `fit`

Design

A number's nearest centroid follows from the sorted centroids, and a cluster is a run of the sorted values: nothing of
the size entries x clusters is formed, not even for the optimum, which dynamic programming finds. Zeros belong to no
centroid, so that masks and clusters need not know each other.

With data, `weight_clustering` is one more solver of `core/layerwise/layerwise.py`. GPTQ rounds one input after another
(`quantize/rounding/gptq.py`, `sparsity/reconstruction.py`) to the nearest centroid in the place of a step; then the
centroids are fitted to the layer's outputs by least squares, for the places that the weights took, and the weights take
their places anew, as long as the error falls.

In training, `core/runtime/substituted_values.py` gives the weights the values of their centroids in every call of the
model, so that a quantization in the same step, whose scope lies around, rounds these. The centroids of all weights are
one variable (`core/training/joined_variables.py`), which an optimizer of the kind of the model's trains.
"""
