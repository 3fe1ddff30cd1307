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
- `litert_folding`: sums and products with constants, and equal constants
- `isolated_run`: runs files apart, and compares outputs
- `latency`: latency on this machine
- `arena`: memory for activations on microcontrollers
- `model_measures`: bytes and latency as targets of `pk.shrink`
- `export_reference`: the outputs that every file must match
- `keras_file`: `.keras` files that hold their model

Design

The model is passed to LiteRT's converter on disk, as a SavedModel. Frozen into a graph's constants, the weights would
be in memory some thirty times instead of eight.

A conversion without an error does not show that the file is correct. Each LiteRT file is run in a separate process
(`probe`), compared with the Keras model, and renamed to its final name last. XNNPACK may decide to run a network
channels-first. On ARM64 and in WebAssembly this makes some sparse-encoded networks compute wrong numbers, which no run
on x86 can show. `xnnpack` therefore repeats XNNPACK's decision on the converted file.

Integer files are rewritten on the converter's flatbuffer (`litert_graph`). `litert_writing` packs it so that equal
vectors are stored once: every kernel and bias has as many zero points as scales, all of them zero, which were a quarter
of the file of a network with many narrow layers. Equal parameters of tensors and operations are one table, and
`merge_constants` merges equal biases, lengths and paddings. Names lose the scope that all have, and the metadata in
which the converter describes its own file is left out. `delivery/integers/integer_sparsity.py` encodes kernels of a
finished file, and `delivery/integers/integer_writing.py` runs both files.
"""
