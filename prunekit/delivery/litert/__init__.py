"""LiteRT and Keras files: written, rewritten, run apart and timed.

- `gzip_size`: sizes after gzip
- `probe`: runs one file, in a process of its own
- `tensor_probe`: stores tensors from inside a file, likewise
- `stopwatch`: times files in turns, likewise
- `litert_model`: a file as a Keras model
- `xnnpack`: how XNNPACK computes a sparse file
- `litert`: converts models
- `litert_writing`: files that hold nothing twice
- `sparse_encoding`: LiteRT's sparse arrays
- `litert_graph`: a file as operations that can be rewritten
- `litert_reshapes`: reshapes that cancel out
- `litert_folding`: sums and products with constants
- `litert_merging`: equal constants
- `isolated_run`: runs files apart, and compares outputs
- `latency`: latency on this machine
- `model_measures`: bytes and latency as targets of `pk.shrink`
- `export_reference`: the outputs that every file must match
- `keras_file`: `.keras` files that hold their model
"""
