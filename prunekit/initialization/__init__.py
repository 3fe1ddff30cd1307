"""Initial weights, and how signals spread through a model.

- `signal_report`: outputs and gradients of each layer
- `sampling`: draws values, with fans of the kept weights
- `lsuv`: kernels scaled until outputs have unit variance
- `initializers`: initializers, and reinitialization under masks

Design

A fan is the number of weights that lead into one output unit (fan-in) or out of one input unit (fan-out)
(`anatomy/layers/fans.py`). Input and output axes alone do not determine the fans. The channels of a depthwise kernel,
the rows of an embedding and the batch labels of an EinsumDense index both input and output units, and the groups of a
grouped convolution share no inputs. The table of layers therefore also holds `parallel_axes` and `groups`. With these
every kernel is a batch of matrices, and variance scaling, orthogonal initialization and masks need one implementation
each (`sampling`).

`signal_report` and LSUV observe layer calls as `cost` does, at `Layer.__call__`, inside a `keras.StatelessScope`:
models are neither wrapped nor rebuilt, and batch statistics and random seeds do not change. Gradients are compared by
their norm per example, which fan-in scaling keeps, and not by their deviation, which pooling divides by the area.
"""
