"""Packed files: a LiteRT or Keras file in fewer bytes, from which it is restored.

- `decoder`: the decoder, which apps may copy, and the format's constants
- `coding`: symbols by a range coder, texts by mixed contexts
- `context_classes`: rows and columns with tables of probabilities of their own
- `tensor_forms`: a tensor as symbols
- `encoder`: a packed file from tensors
- `litert_tensors`: a LiteRT file as tensors
- `keras_tensors`: a Keras file as tensors, and back
- `pack_report`: bytes beside those of other compressors

Design

Each tensor becomes symbols of at most 256 kinds, and bytes that are not coded: integers as they are, floats of few
values as places in a table, floats on a grid as integers and scales, other floats as exponents. Zeros need no form of
their own: a table of probabilities makes them as cheap as they are frequent. Tables belong to classes of rows and of
columns, which differ in a pruned network as inputs and units do.

All symbols of a file are one sequence. It is cut into lanes of equal length, which one loop of NumPy operations
decodes side by side: 5 million weights in some 0.2 s, without compiled code. Probabilities are counted before, not
learned on the way: lanes that learn would have to wait for each other.

The rest of a file, such as the graph of a LiteRT file or the configuration of a Keras model, is one text. It is short,
and in a small file it weighs as much as the weights: it is coded bit by bit, with contexts that are mixed.
"""
