"""Changes a model layer by layer, each fitted to the outputs that it had.

- `calibration_walk`: a model twice over the data: as it was, and as it is
- `inner_inputs`: inputs of layers inside one call
- `layer_fit`: the fit of one layer
- `layerwise`: the walk over all layers
- `trials`: several ways tried, the nearest outputs taken
"""
